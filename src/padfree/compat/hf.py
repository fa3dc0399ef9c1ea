"""Packing for `transformers.Trainer`, TRL and anything else that takes a data collator.

    features  [{"input_ids": [1, 2, 3]}, {"input_ids": [7, 8]}]
    batch     input_ids    [1, T]   1 2 3 7 8
              position_ids [1, T]   0 1 2 0 1
              labels       [1, T]   - 2 3 - 8      not shifted: HF models shift them themselves
              cu_seq_lens_q/k, max_length_q/k      for HF's flash attention

The first token of every sample has label -100: HF's own shift would otherwise score it from the last token of the
sample before. HF models keep packed samples apart by the restarting position ids (sdpa, eager, flex) or by the
cumulative lengths (flash attention); no attention mask is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.batch import IGNORE, Sample
from padfree.packing.collate import collate

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Feature keys that say which tokens are trained on; where several are given, all must agree."""


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Feature dicts in, one packed row out. `length` pads to a fixed length, `multiple_of` to a multiple.

    A feature has `input_ids`, and optionally `labels` (not shifted, -100 where untrained) or one of `MASKS`. A feature
    that already holds several sequences names them in `seq_lengths`, as TRL's packing does.
    """

    length: int | None = None
    multiple_of: int = 1

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [sample for index, feature in enumerate(features) for sample in _samples(feature, index)]
        if not samples:
            raise ValueError("features: empty list; give at least one")
        batch = collate(samples)
        if self.length is not None:
            if batch.num_tokens > self.length:
                raise ValueError(
                    f"length: {self.length} for {batch.num_tokens} tokens; raise it or give fewer features per batch"
                )
            batch = batch.padded_to(self.length)
        if self.multiple_of != 1 and self.length is None:
            batch = batch.padded_to_multiple(self.multiple_of)
        elif batch.num_tokens % self.multiple_of:
            raise ValueError(f"length: {self.length} is not a multiple of multiple_of={self.multiple_of}; make it one")
        # Undo the shift: position t is scored by t - 1, and no sample's last position has a label to hand on.
        labels = torch.cat([batch.labels.new_full((1,), IGNORE), batch.labels[:-1]])
        return {**batch.model_inputs(), "labels": labels[None]}


def _samples(feature: Mapping[str, Any], index: int) -> list[Sample]:
    """The sequences of one feature."""
    if "input_ids" not in feature:
        raise ValueError(
            f"features: no input_ids in feature {index} (it has {sorted(feature)}); tokenise the data first"
        )
    tokens = np.asarray(feature["input_ids"])
    if (attention := feature.get("attention_mask")) is not None and not np.asarray(attention).all():
        raise ValueError(f"attention_mask: zeros in feature {index}; give it without padding, packing needs none")
    mask = np.ones(len(tokens), dtype=np.bool_)
    for key in MASKS:
        if feature.get(key) is not None:
            mask &= _per_token(feature[key], key, tokens, index).astype(np.bool_)
    if feature.get("labels") is not None:
        labels = _per_token(feature["labels"], "labels", tokens, index)
        trained = labels != IGNORE
        if (labels[trained] != tokens[trained]).any():
            raise ValueError(
                f"labels: feature {index} differs from its input_ids; give them unshifted, -100 if untrained"
            )
        mask &= trained
    lengths = feature.get("seq_lengths")
    lengths = [len(tokens)] if lengths is None else [int(n) for n in lengths]
    if sum(lengths) != len(tokens):
        raise ValueError(
            f"seq_lengths: {sum(lengths)} in all for {len(tokens)} tokens in feature {index}; make them agree"
        )
    borders = np.cumsum(lengths)[:-1]
    return [
        Sample(tokens=part, loss_mask=part_mask)
        for part, part_mask in zip(np.split(tokens, borders), np.split(mask, borders), strict=True)
    ]


def _per_token(values: Any, key: str, tokens: NDArray[Any], index: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != tokens.shape:
        raise ValueError(f"{key}: shape {array.shape} for {len(tokens)} tokens in feature {index}; give one per token")
    return array
