"""Check the token ids and lengths of a run's samples, and the columns that its loss needs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from padfree.config import BatchConfig, LossConfig, ModelConfig, ReferenceConfig, RolloutConfig
from padfree.data import StoredSamples
from padfree.data.rewards import BUILT_IN, load_reward
from padfree.errors import UserError
from padfree.model.vision.families import language_part
from padfree.packing.fill import Indices
from padfree.rollout import Prompt
from padfree.rollout.environment import check_episode_rows
from padfree.sample import TOKEN_ARRAYS, Sample
from padfree.tasks.reading import Samples, TrainingData
from padfree.train.batcher import lengths_of, row_starts

TABLE_MARGIN = 8
"""The maximum number of extra rows in a table of position embeddings, beyond `max_position_embeddings` (OPT: 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """The inputs that a model accepts: token ids below `vocabulary`, and samples of up to `positions` tokens.

    If `positions` is None, the length of samples is not limited."""

    vocabulary: int
    positions: int | None
    trained_positions: int | None  # max_position_embeddings; rotary models also accept longer samples

    @staticmethod
    def of(model: PreTrainedModel) -> ModelLimits:
        """Read the limits from the modules of a model.

        An embedding or a buffer with about `max_position_embeddings` entries, besides the embedding of token ids,
        counts as a table of position embeddings. Only such a table limits the length of a sample.
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
        """Return the limits for samples that two models read: the smaller vocabulary and number of positions."""
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
    """Raise a `UserError` for token ids outside the vocabulary, and for samples longer than the model supports.

    `place(i)`: the file and line of sample i. `look_at_tokens`: whether to check token ids.
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


# The data of a run


def check_source(
    source: TrainingData,
    limits: ModelLimits,
    tokenizer: Any,
    *,
    model: ModelConfig,
    reference: ReferenceConfig,
    loss: LossConfig,
    rollout: RolloutConfig,
    setting: str = "data.path",
) -> None:
    """Raise a `UserError` if the model cannot process the data, or if the data lacks what the loss needs."""
    sampled = rollout.source is not None
    limit = limits.positions
    shorter = "a lower rollout.max_new_tokens, or " if sampled else ""
    # The tokenizer makes the token ids of text. Scan them only if the tokenizer has ids that the model lacks.
    text = isinstance(source.samples, StoredSamples) and not source.given_ids
    looked_at = not text or _largest_id(tokenizer) >= limits.vocabulary
    check_fits(
        source.samples,
        limits,
        place=source.place,
        setting=setting,
        look_at_tokens=looked_at,
        vocabulary_cure="set model.tokenizer to the tokenizer of this model, or give rollouts in its token ids",
        positions_cure=f"set {shorter}data.max_length={limit} and data.overlong=truncate (or drop)",
    )
    if not loss.task.in_rows and not sampled:
        _check_columns(source, model, reference, loss)
        _check_routes(source, rollout)
        untrained = untrained_samples(source)
        if len(untrained) == len(source.samples):
            raise UserError(
                setting,
                f"none of {len(untrained):,} samples has a token to train (the first is {source.place(untrained[0])})",
                "give a response_length of 1 or more, or a loss_mask with a 1 after the first token",
            )
    if sampled:
        _check_rows(source, rollout.reward)
        check_episode_rows(rollout, [one for one in source.samples if isinstance(one, Prompt)])


def untrained_samples(source: TrainingData) -> list[int]:
    """Return the indices of the rollouts without trained tokens. Return an empty list if the data is not rollouts.

    Text needs no check here, because rows without trained tokens are refused or dropped when they are read.
    """
    if isinstance(source.samples, StoredSamples):
        return []
    return [index for index, one in enumerate(source.samples) if isinstance(one, Sample) and not one.num_labels]


def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


def check_lengths(
    source: TrainingData,
    *,
    batch: BatchConfig,
    loss: LossConfig,
    rollout: RolloutConfig,
    context: int,
    budget: bool = True,
) -> None:
    """Raise a `UserError` if `batch.overlong` is "error" and a sample is too long for a micro-batch or a step.

    `context`: the maximum number of ranks that share a micro-batch. `budget`: whether to compare with `batch.tokens`.
    """
    if batch.overlong != "error":
        return
    alone = np.arange(len(source.samples) + 1)
    rows = row_starts(loss, rollout, source.samples)
    pairs = loss.task.group_size > 1
    # Both answers of a pair are in one micro-batch; all samples of a data row are in one step.
    _check_cap("batch.max_tokens", batch.max_tokens, context, rows if pairs else alone, source)
    if budget and batch.tokens is not None:
        _check_cap("batch.tokens", batch.tokens, 1, rows, source)


def _check_cap(setting: str, cap: int, context: int, starts: Indices, source: TrainingData) -> None:
    """Raise a `UserError` if a unit (sample, preference pair or data row) has more than `cap` × `context` tokens.

    `starts` [units+1]: the index of each unit's first sample, then the number of samples. `setting`: the setting
    that gives `cap`.
    """
    lengths = np.diff(np.concatenate([[0], np.cumsum(lengths_of(source.samples))])[starts])
    over = np.flatnonzero(lengths > cap * context)
    if not len(over):
        return
    first, needed = int(over[0]), -(-int(lengths.max()) // context)
    size, sample = int(starts[first + 1] - starts[first]), source.samples[int(starts[first])]
    with_response = " with its response" if isinstance(sample, Prompt) else ""
    if size > 1:
        paired = isinstance(sample, Sample) and sample.reward is not None
        with_response = " in its two answers" if paired else f" in its {size} samples"
    shared = f" on each of {context} context ranks" if context > 1 else ""
    more = f", and {len(over) - 1} more are too long" if len(over) > 1 else ""
    place, limit = source.place(int(starts[first])), cap * context // size
    raise UserError(
        setting,
        f"{cap} tokens{shared}, but {place} has {lengths[first]} tokens{with_response}{more}",
        f"set {setting}={needed}, or batch.overlong=alone (long samples are computed alone), or "
        f"data.max_length={limit} and data.overlong=truncate",
    )


def _check_columns(source: TrainingData, model: ModelConfig, reference: ReferenceConfig, loss: LossConfig) -> None:
    """Raise a `UserError` if rollout files lack a column that the loss needs, or if only some rows have a column."""
    needs: dict[str, tuple[str, object, str]] = {}
    if loss.old_policy == "sampler":
        needs["logprobs"] = ("loss.old_policy", "sampler", "loss.old_policy=trainer")
    elif loss.needs_sampler_logprobs():
        needs["logprobs"] = ("loss.corrections", list(loss.corrections), "loss.corrections=[]")
    if loss.kl_coefficient > 0 and reference.path is None:
        needs["ref_logprobs"] = (
            "loss.kl_coefficient",
            loss.kl_coefficient,
            f"reference.path={shlex.quote(model.path)}",
        )
    if loss.advantage == "given":
        needs["advantages"] = ("loss.advantage", "given", "loss.advantage=grpo")
    replaced = {"advantages"} if loss.advantage != "given" else set()
    replaced |= {"values", "returns"} if loss.advantage == "gae" else set()
    replaced |= {"ref_logprobs"} if reference.path is not None else set()
    for field in TOKEN_ARRAYS:
        missing = [index for index, sample in enumerate(source.samples) if getattr(sample, field) is None]
        if field in needs and missing:
            setting, value, cure = needs[field]
            raise UserError(
                setting,
                f", but {source.place(missing[0])} has no {field!r}",
                f"set {cure}, or give that column in every row",
                value,
            )
        if field not in replaced and 0 < len(missing) < len(source.samples):
            raise UserError(
                "data.path",
                f"{source.place(missing[0])} has no {field!r}, but other rows have it",
                "give that column in every row, or in none",
            )


def _check_routes(source: TrainingData, rollout: RolloutConfig) -> None:
    """If `rollout.routing` is "replay", raise a `UserError` unless every rollout records the experts of its tokens."""
    if rollout.routing != "replay":
        return
    missing = [index for index, sample in enumerate(source.samples) if getattr(sample, "routes", None) is None]
    if missing:
        raise UserError(
            "rollout.routing",
            f", but {source.place(missing[0])} has no 'routes'",
            "set rollout.routing=recompute, or give that column in every row",
            "replay",
        )


def _check_rows(source: TrainingData, name: str | None) -> None:
    """If `name` is one of padfree's own reward functions, call it on every row.

    A row that the reward function cannot grade raises an error.
    """
    if name not in BUILT_IN:
        return
    reward = load_reward(name)
    for prompt in source.samples:
        assert isinstance(prompt, Prompt)
        reward("", prompt.row, prompt.uid)
