"""With real weights, packed loss and gradients equal those of transformers with one sample at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from padfree.sample import Sample
from tests.real.cases import (
    Found,
    assert_as_close,
    config_of,
    conversations,
    gradients_in,
    load,
    needs_smollm2,
    ours,
)

pytestmark = [needs_smollm2, pytest.mark.slow]


def one_at_a_time(samples: list[Sample], dtype: torch.dtype) -> Found:
    """Transformers' own forward, one call per sample, and the mean over all labels."""
    model, total = load(dtype=dtype), 0.0
    count = sum(int(sample.mask[1:].sum()) for sample in samples)
    for sample in samples:
        tokens = torch.tensor(sample.tokens, dtype=torch.int64)
        logits = model(tokens[None]).logits[0, :-1]
        scored = torch.tensor(sample.mask[1:])
        loss = cross_entropy(logits[scored], tokens[1:][scored], reduction="sum") / count
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return Found(loss=total, gradients=gradients_in(model))


def test_packed_gradients_are_those_of_one_sample_at_a_time(tmp_path: Path) -> None:
    found = ours(config_of(tmp_path, conversations()))
    samples = list(found.samples)
    assert len(samples) == 3
    other, wide = (one_at_a_time(samples, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_close(found, other, wide)
