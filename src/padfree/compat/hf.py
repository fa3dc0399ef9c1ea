"""Packing for `transformers.Trainer`, TRL and anything else that takes a data collator.

    features  [{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8]}]
    batch     input_ids    [1, T]   1 2 3 7 8
              position_ids [1, T]   0 1 2 0 1
              labels       [1, T]   - 2 3 - 8      not shifted: HF models shift them themselves
              cu_seq_lens_q/k, max_length_q/k      for HF's flash attention

The first token of every sample has label -100: HF's own shift would otherwise score it from the last token of the
sample before. HF models keep packed samples apart by the restarting position ids (sdpa, eager, flex) or by the
cumulative lengths (flash attention); no attention mask is given.

Some do not: OPT, Bloom, Falcon and whatever has convolutions or a recurrent state train on a wrong loss without a word.
Therefore the collator wants to see the model. A small copy of it is tried with the attention implementation that it
has: packed against one sample at a time, forward and every gradient (`padfree.model.probe`). One that fails is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from padfree.arrays import host_array, integer_array, number_array
from padfree.batch import IGNORE, Sample
from padfree.errors import UserError
from padfree.model.adapter import check_stock_packing
from padfree.model.interface import check_positions, position_limit
from padfree.packing.collate import collate

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Feature keys that say which tokens are trained on; where several are given, all must agree."""


@runtime_checkable
class Wrapped(Protocol):
    """A PEFT model."""

    def get_base_model(self) -> nn.Module: ...


class PackedCollator:
    """Feature dicts in, one packed row out. `length` pads to a fixed length, `multiple_of` to a multiple.

    A feature has `input_ids`, and optionally `labels` (not shifted, -100 where untrained) or one of `MASKS`. A feature
    that already holds several sequences names them in `seq_lengths`, as TRL's packing does.

    `model` is the transformers model that is trained, alone or in a PEFT model. Only its config is kept, so that the
    collator can be sent to the workers of a data loader.
    """

    def __init__(self, model: nn.Module, *, length: int | None = None, multiple_of: int = 1) -> None:
        settings: dict[str, Any] = {"length": length, "multiple_of": multiple_of}
        for name, value in settings.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(name, "", "give a whole number of 1 or more", value=value)
        if length is not None and length % multiple_of:
            raise UserError("length", f"{length} is not a multiple of multiple_of={multiple_of}", "make it one")
        unwrapped: Any = model.get_base_model() if isinstance(model, Wrapped) else model
        check_stock_packing(unwrapped)
        self.length, self.multiple_of = length, multiple_of
        self._config = unwrapped.config
        self._implementation = unwrapped.config._attn_implementation
        self._limit = position_limit(unwrapped.config)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self._config._attn_implementation != self._implementation:
            raise UserError(
                "model",
                f"its attention was {self._implementation} when the collator was made and is "
                f"{self._config._attn_implementation} now",
                "make another PackedCollator(model)",
            )
        samples = [sample for index, feature in enumerate(features) for sample in _samples(feature, index)]
        if not samples:
            raise UserError("features", "empty list", "give at least one")
        batch = collate(samples)
        if self.length is not None:
            if batch.num_tokens > self.length:
                raise UserError(
                    "length",
                    f"{self.length} for {batch.num_tokens} tokens",
                    "raise it or give fewer features per batch",
                )
            batch = batch.padded_to(self.length)
        else:
            batch = batch.padded_to_multiple(self.multiple_of)
        check_positions(self._limit, batch.segments.max_seqlen)
        # Undo the shift: position t is scored by t - 1, and no sample's last position has a label to hand on.
        labels = torch.cat([batch.labels.new_full((1,), IGNORE), batch.labels[:-1]])
        return {**batch.model_inputs(), "labels": labels[None]}


def _samples(feature: Mapping[str, Any], index: int) -> list[Sample]:
    """The sequences of one feature."""
    if "input_ids" not in feature:
        raise UserError(
            "features", f"no input_ids in feature {index} (it has {sorted(feature)})", "tokenise the data first"
        )
    tokens = integer_array(feature["input_ids"], f"input_ids of feature {index}")
    attention = feature.get("attention_mask")
    if attention is not None and not host_array(attention, f"attention_mask of feature {index}").all():
        raise UserError("attention_mask", f"zeros in feature {index}", "give it without padding, packing needs none")
    mask = np.ones(len(tokens), dtype=np.bool_)
    for key in MASKS:
        if feature.get(key) is not None:
            given = _per_token(feature[key], key, tokens, index)
            if not np.isin(given, (0, 1)).all():
                raise UserError(f"{key}", f"values other than 0 and 1 in feature {index}", "give one of them per token")
            mask &= given.astype(np.bool_)
    if feature.get("labels") is not None:
        labels = _per_token(feature["labels"], "labels", tokens, index)
        trained = labels != IGNORE
        if (labels[trained] != tokens[trained]).any():
            raise UserError(
                "labels", f"feature {index} differs from its input_ids", "give them unshifted, -100 if untrained"
            )
        mask &= trained
    lengths = feature.get("seq_lengths")
    lengths = [len(tokens)] if lengths is None else integer_array(lengths, f"seq_lengths of feature {index}").tolist()
    if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
        raise UserError(
            "seq_lengths", f"{sum(lengths)} in all for {len(tokens)} tokens in feature {index}", "make them agree"
        )
    borders = np.cumsum(lengths)[:-1]
    return [
        Sample(tokens=part, loss_mask=part_mask)
        for part, part_mask in zip(np.split(tokens, borders), np.split(mask, borders), strict=True)
    ]


def _per_token(values: Any, key: str, tokens: NDArray[Any], index: int) -> NDArray[Any]:
    array = number_array(values, f"{key} of feature {index}")
    if array.shape != tokens.shape:
        raise UserError(
            f"{key}", f"shape {array.shape} for {len(tokens)} tokens in feature {index}", "give one per token"
        )
    return array
