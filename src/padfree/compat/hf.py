"""Packing for `transformers.Trainer`, TRL and anything else that takes a data collator.

The samples 1 2 3 and 7 8 give this batch, where - stands for the label -100:

    input_ids    [1, T]   1 2 3 7 8
    position_ids [1, T]   0 1 2 0 1
    labels       [1, T]   - 2 3 - 8

The labels are not shifted, because HF models shift them. The first token of a sample has no label, because the previous
sample would predict it.

Some models, such as OPT and Falcon, ignore the boundaries of samples. The collator tests a small copy of the model (few
layers, random weights), and raises an error for such models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from padfree.arrays import host_array, integer_array, number_array
from padfree.batch import IGNORE
from padfree.errors import UserError
from padfree.model.adapter import check_stock_packing
from padfree.model.interface import check_positions, position_limit
from padfree.packing.collate import collate
from padfree.sample import Sample

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Keys of a feature that hold a loss mask. A token is trained if all masks of its feature are 1."""
USED = ("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", *MASKS)
"""Keys of a feature that the collator uses.

Other keys are ignored if they hold no list or array of numbers (texts, messages, single numbers), and so are
`special_tokens_mask` and a `token_type_ids` of zeros. All other keys are refused.
"""


@runtime_checkable
class Wrapped(Protocol):
    """The interface of a PEFT model: `get_base_model` returns the Hugging Face model that it wraps."""

    def get_base_model(self) -> nn.Module: ...


class PackedCollator:
    """Data collator: joins the features of a batch into one pack, padded to `length` or to a multiple of `multiple_of`.

    A feature is a dict with `input_ids`, and optionally `labels` (not shifted) or loss masks. A feature with several
    sequences has their `seq_lengths`, or `position_ids` that restart at 0. `model` is the model to train.
    """

    def __init__(self, model: nn.Module, *, length: int | None = None, multiple_of: int = 1) -> None:
        settings: dict[str, Any] = {"length": length, "multiple_of": multiple_of}
        for name, value in settings.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(name, "is not a positive integer", "give an integer of 1 or more", value=value)
        if length is not None and length % multiple_of:
            raise UserError(
                "length", f"{length} is not a multiple of multiple_of={multiple_of}", "change length or multiple_of"
            )
        unwrapped: Any = model.get_base_model() if isinstance(model, Wrapped) else model
        check_stock_packing(unwrapped)
        self.length, self.multiple_of = length, multiple_of
        # Keep only the config and not the model, so that workers of a data loader can unpickle the collator.
        self._config = unwrapped.config
        self._implementation = unwrapped.config._attn_implementation
        self._limit = position_limit(unwrapped.config)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self._config._attn_implementation != self._implementation:
            raise UserError(
                "model",
                f"the attention implementation changed from {self._implementation} to "
                f"{self._config._attn_implementation} since the collator was created",
                "create a new PackedCollator(model)",
            )
        samples = [sample for index, feature in enumerate(features) for sample in _samples(feature, index)]
        if not samples:
            raise UserError("features", "is empty", "give at least one feature")
        batch = collate(samples)
        if self.length is not None:
            if batch.num_tokens > self.length:
                raise UserError(
                    "length",
                    f"{self.length} tokens per pack are too few for a batch of {batch.num_tokens} tokens",
                    "raise length, or use a smaller batch size",
                )
            batch = batch.padded_to(self.length)
        else:
            batch = batch.padded_to_multiple(self.multiple_of)
        check_positions(self._limit, batch.segments.max_seqlen)
        # Undo padfree's shift, because HF shifts again. The last position of a sample has no label, so nothing is lost.
        labels = torch.cat([batch.labels.new_full((1,), IGNORE), batch.labels[:-1]])
        return {**batch.model_inputs(), "labels": labels[None]}


def _samples(feature: Mapping[str, Any], index: int) -> list[Sample]:
    """Convert a feature (one example of the batch) to samples, one per sequence of the feature.

    `index`: the index of the feature in the batch, for error messages.
    """
    if "input_ids" not in feature:
        raise UserError(
            "features", f"example {index} has no input_ids (it has {sorted(feature)})", "tokenise the data first"
        )
    _check_keys(feature, index)
    tokens = integer_array(feature["input_ids"], f"input_ids of example {index}")
    attention = feature.get("attention_mask")
    if attention is not None and not host_array(attention, f"attention_mask of example {index}").all():
        raise UserError("attention_mask", f"has zeros in example {index}", "give examples without padding")
    mask = np.ones(len(tokens), dtype=np.bool_)
    for key in MASKS:
        if feature.get(key) is not None:
            given = _per_token(feature[key], key, tokens, index)
            if not np.isin(given, (0, 1)).all():
                raise UserError(f"{key}", f"has values other than 0 and 1 in example {index}", "give 0 or 1 per token")
            mask &= given.astype(np.bool_)
    if feature.get("labels") is not None:
        labels = _per_token(feature["labels"], "labels", tokens, index)
        trained = labels != IGNORE
        if (labels[trained] != tokens[trained]).any():
            raise UserError(
                "labels",
                f"the labels of example {index} differ from its input_ids",
                "give labels that are not shifted, and -100 for untrained tokens",
            )
        mask &= trained
    lengths = _lengths(feature, tokens, index)
    borders = np.cumsum(lengths)[:-1]
    return [
        Sample(tokens=part, loss_mask=part_mask)
        for part, part_mask in zip(np.split(tokens, borders), np.split(mask, borders), strict=True)
    ]


def _check_keys(feature: Mapping[str, Any], index: int) -> None:
    """Raise a `UserError` if a key of a feature may be neither used nor ignored (see `USED`)."""
    for key in feature.keys() - {*USED, "special_tokens_mask"}:
        value = feature[key]
        if key == "token_type_ids" and value is not None and not host_array(value, key).any():
            continue
        if _holds_numbers(value):
            raise UserError(
                key, f"is not used by PackedCollator, but example {index} has it", f"remove {key} from the features"
            )


def _holds_numbers(value: object) -> bool:
    """Return whether a value is a list or an array that holds numbers."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, (int, float)) or _holds_numbers(one) for one in value)
    array = value.ndim > 0 if isinstance(value, (torch.Tensor, np.ndarray)) else False
    return array and not (isinstance(value, np.ndarray) and value.dtype.kind not in "biuf")


def _lengths(feature: Mapping[str, Any], tokens: NDArray[Any], index: int) -> list[int]:
    """Return the lengths of the sequences of a feature, from `seq_lengths` or `position_ids`."""
    found = [len(tokens)]
    if feature.get("position_ids") is not None:
        positions = _per_token(feature["position_ids"], "position_ids", tokens, index)
        starts = np.flatnonzero(positions == 0)
        found = np.diff([*starts, len(tokens)]).tolist()
        if len(tokens) and not np.array_equal(positions, np.concatenate([np.arange(length) for length in [*found, 0]])):
            raise UserError(
                "position_ids",
                f"of example {index} do not count 0, 1, 2, ... in each sequence",
                "give the lengths of the sequences in seq_lengths instead",
            )
    if feature.get("seq_lengths") is None:
        return found
    lengths: list[int] = integer_array(feature["seq_lengths"], f"seq_lengths of example {index}").tolist()
    if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
        raise UserError(
            "seq_lengths",
            f"add up to {sum(lengths)}, but example {index} has {len(tokens)} tokens",
            "give lengths that add up to the number of tokens",
        )
    if feature.get("position_ids") is not None and [length for length in lengths if length] != found:
        raise UserError(
            "seq_lengths", f"and position_ids of example {index} give different sequences", "remove one of the two keys"
        )
    return lengths


def _per_token(values: Any, key: str, tokens: NDArray[Any], index: int) -> NDArray[Any]:
    array = number_array(values, f"{key} of example {index}")
    if array.shape != tokens.shape:
        raise UserError(
            f"{key}",
            f"has shape {array.shape}, but example {index} has {len(tokens)} tokens",
            "give one value per token",
        )
    return array
