"""Small model folders, samples, and planted mistakes that a check must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padfree.batch import PackedBatch
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.segments import Segments
from padfree.testing.models import build
from padfree.tools.check import CheckReport, CheckResult

VOCABULARY = 40
LENGTHS = (7, 12, 1, 5, 9)
SIZES = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCABULARY}


def save_model(folder: Path, name: str, **changes: Any) -> Path:
    """A folder without a tokenizer."""
    build(name, **{**SIZES, **changes}).save_pretrained(folder)
    return folder


def make_samples(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[Sample]:
    """The first third of each is not trained. The first two begin with the same two tokens."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCABULARY, length) for length in lengths]
    tokens[1][:2] = tokens[0][:2]
    return [
        Sample(tokens=each, loss_mask=np.arange(len(each)) >= len(each) // 3, uid=f"s{index}")
        for index, each in enumerate(tokens)
    ]


def failures(report: CheckReport) -> set[tuple[str, str]]:
    return {(row.check, row.quantity) for row in report.failed}


def packs_of(report: CheckReport, check: str) -> list[CheckResult]:
    found = [row for row in report.rows if row.check == check]
    assert found, f"{check} is none of {[row.check for row in report.rows]}"
    return found


# Mistakes: each replaces one function of the packed path


def no_position_reset(samples: Sequence[Sample], **options: Any) -> PackedBatch:
    """Replaces `collate`: positions do not restart in each sample."""
    batch = collate(samples, **options)
    return replace(batch, position_ids=torch.arange(batch.num_tokens))


def boundary_off_by_one(samples: Sequence[Sample], **options: Any) -> PackedBatch:
    """Replaces `collate`: each sample starts one token late, so that the previous one has its first token."""
    batch = collate(samples, **options)
    offsets = batch.segments.offsets.copy()
    offsets[1:-1] += 1
    return replace(batch, segments=Segments.from_lengths(np.diff(offsets)))


def mean_of_each_row(samples: Sequence[Sample], **options: Any) -> PackedBatch:
    """Replaces `collate`: every pack is divided by its own count of trained tokens."""
    batch = collate(samples, **options)
    total = batch.weights.sum()
    return batch.with_weights(batch.weights / total) if total else batch


def prompt_counted(mode: str, masks: Sequence[Any], **_: Any) -> list[Any]:
    """Replaces `token_weights`: divides by the number of all tokens, trained or not."""
    count = sum(len(mask) - 1 for mask in masks)
    return [np.full(len(mask), 1.0 / count, dtype=np.float32) for mask in masks]


def rounded_weights(samples: Sequence[Sample], **options: Any) -> PackedBatch:
    """Replaces `collate`: loss weights in the dtype of the model."""
    batch = collate(samples, **options)
    return batch.with_weights(batch.weights.bfloat16().float())


def pad_in_the_last_sample(padded_to: Callable[[PackedBatch, int], PackedBatch]) -> Callable[..., PackedBatch]:
    """Replaces `PackedBatch.padded_to`: the pad extends the last sample, whose last token predicts it."""

    def broken(batch: PackedBatch, length: int) -> PackedBatch:
        padded = padded_to(batch, length)
        if not padded.pad_length or padded is batch:
            return padded
        offsets = np.delete(padded.segments.offsets, -2)
        segments = replace(Segments.from_lengths(np.diff(offsets)), pad_length=padded.pad_length)
        real = length - padded.pad_length
        labels, weights = padded.labels.clone(), padded.weights.clone()
        labels[real - 1], weights[real - 1] = 0, weights.max()
        return replace(padded, segments=segments, labels=labels, weights=weights)

    return broken
