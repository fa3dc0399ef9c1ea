"""Padded batches, and their loss by plain transformers code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padfree.batch import IGNORE
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.tools.check.padded import padded_loss, padded_rows


def test_rows() -> None:
    samples = [Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1]), Sample(tokens=[4, 5], loss_mask=[0, 1])]
    rows = padded_rows(samples, length=4)
    assert rows.input_ids.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert rows.labels.tolist() == [[IGNORE, 2, 3, IGNORE], [IGNORE, 5, IGNORE, IGNORE]]


def test_padded_loss_is_the_mean_over_scored_tokens() -> None:
    model: Any = build("qwen3").eval()
    samples = [Sample(tokens=[5, 6, 7], loss_mask=[0, 0, 1]), Sample(tokens=[8, 9, 10, 11])]
    count = sum(sample.num_labels for sample in samples)
    together = padded_loss(model, [samples], count)
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    apart = padded_loss(model, [[sample] for sample in samples], count)
    assert together == pytest.approx(apart, abs=1e-5)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, atol=1e-5, rtol=1e-4)
