"""The inputs that a model accepts, and a check that samples are within these limits.

Qwen3   vocabulary 151936   any number of positions: rotary embeddings have no limit
GPT-2   vocabulary 50257    1024 positions: a table of position embeddings
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from padfree.data import StoredSamples
from padfree.errors import UserError
from padfree.model.vision.families import language_part
from padfree.tasks.reading import Samples
from padfree.train.data_rows import lengths_of

TABLE_MARGIN = 8
"""A position table may have up to this many entries more than the config says (OPT has two more)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """A model accepts token ids below `vocabulary` and samples of up to `positions` tokens (None: no limit)."""

    vocabulary: int
    positions: int | None
    trained_positions: int | None  # max_position_embeddings; rotary models also accept longer samples

    @staticmethod
    def of(model: PreTrainedModel) -> ModelLimits:
        """Find the limits of a model from its modules.

        An embedding or buffer with about one entry per position is taken for a table of position embeddings.
        """
        embeddings = model.get_input_embeddings()
        language = language_part(model)
        vocabulary = getattr(embeddings, "num_embeddings", None) or language.config.vocab_size
        trained = getattr(language.config, "max_position_embeddings", None)
        trained = trained if isinstance(trained, int) and trained > 0 else None
        positions = None
        if trained is not None:
            others = (part for part in language.modules() if isinstance(part, nn.Embedding) and part is not embeddings)
            table_sizes = {part.num_embeddings for part in others}
            table_sizes |= {int(buffer.shape[0]) for buffer in language.buffers() if buffer.ndim > 1}
            is_table = any(trained <= count <= trained + TABLE_MARGIN for count in table_sizes)
            positions = trained if is_table else None
        return ModelLimits(vocabulary=int(vocabulary), positions=positions, trained_positions=trained)

    def within(self, other: ModelLimits) -> ModelLimits:
        """Return the limits for samples that both this model and the other must accept."""
        limits = [limit for limit in (self.positions, other.positions) if limit is not None]
        return replace(
            self, vocabulary=min(self.vocabulary, other.vocabulary), positions=min(limits) if limits else None
        )


def check_fits(
    samples: Samples,
    limits: ModelLimits,
    *,
    place: Callable[[int], Any],
    setting: str,
    look_at_tokens: bool = True,
    vocabulary_cure: str,
    positions_cure: str,
) -> None:
    """Raise a `UserError` for a token id outside the vocabulary, or a sample with more tokens than positions.

    `place(i)` says where sample i comes from. `setting` and the two `cure` texts appear in the message.
    """
    if limits.positions is not None:
        lengths = lengths_of(samples)
        over = np.flatnonzero(lengths > limits.positions)
        if len(over):
            raise UserError(
                setting,
                f"{place(int(over[0]))} has {lengths[over[0]]} tokens, but the model has {limits.positions} positions",
                positions_cure,
            )
    found = _first_token_from(samples, limits.vocabulary) if look_at_tokens else None
    if found is not None:
        raise UserError(
            setting,
            f"{place(found[0])} has token id {found[1]}, but the model's vocabulary has {limits.vocabulary} entries",
            vocabulary_cure,
        )


def _first_token_from(samples: Samples, least: int) -> tuple[int, int] | None:
    if isinstance(samples, StoredSamples):
        return samples.first_token_from(least)
    largest = ((index, int(sample.tokens.max(initial=0))) for index, sample in enumerate(samples))
    return next(((index, token) for index, token in largest if token >= least), None)
