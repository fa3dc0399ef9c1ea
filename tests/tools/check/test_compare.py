"""Differences follow the definitions of the module, and non-finite values are infinitely far off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from padfree.sample import Sample
from padfree.testing.models import build
from padfree.tools.check.compare import (
    Extent,
    Gap,
    extent,
    gradient_gaps,
    logprob_gap,
    loss_gap,
    normaliser_gap,
    parts_of,
)

SAMPLES = [Sample(tokens=[1, 2, 3], uid="a"), Sample(tokens=[]), Sample(tokens=[4, 5], loss_mask=[0, 1])]


def values(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float32) for row in rows]


def test_the_largest_difference_of_log_probabilities_has_a_place() -> None:
    gap = logprob_gap(values([0, -1, -2], [], [0, -3]), values([0, -1, -2.5], [], [0, -3.25]), SAMPLES)
    assert gap == Gap(0.5, "token 2 of sample a")
    gap = logprob_gap(values([0, -1, -2], [], [0, math.nan]), values([0, -1, -2], [], [0, -3]), SAMPLES)
    assert gap == Gap(math.inf, "token 1 of sample 2")
    same = values([0, -1, -2], [], [0, -3])
    assert logprob_gap(same, same, SAMPLES).difference == 0


def test_losses_are_compared_and_set_beside_the_mean_of_log_probabilities() -> None:
    assert loss_gap(2.0, 1.5) == Gap(0.5, "2.000000, HF 1.500000")
    assert loss_gap(math.nan, 1.0).difference == math.inf
    logprobs = values([0, -1, -2], [], [0, -3])
    assert normaliser_gap(2.0, logprobs, SAMPLES).difference == 0
    assert normaliser_gap(1.5, logprobs, SAMPLES).difference == pytest.approx(0.25)
    assert normaliser_gap(math.inf, logprobs, SAMPLES).difference == math.inf


def test_a_gradient_that_is_missing_is_zero() -> None:
    tensor = torch.tensor([1.0, -3.0])
    assert extent(tensor, tensor + torch.tensor([0.0, 0.5])) == Extent(0.5, 2.5)
    assert extent(None, tensor) == Extent(3.0, 3.0)
    assert extent(tensor, None) == Extent(3.0, 0.0)
    assert extent(None, None) == Extent(0.0, 0.0)
    assert math.isnan(extent(torch.tensor([math.nan, 0.0]), tensor).difference)


def test_gradients_are_relative_to_their_parameter_and_never_to_rounding_alone() -> None:
    parts = {"a": "layer 0", "b": "layer 0", "c": "layer 1", "d": "norm", "e": "head"}
    extents = {
        "a": Extent(0.5, 10.0),
        "b": Extent(0.001, 1e-9),  # divided by a hundredth of 10, the entry of a
        "c": Extent(0.0, 0.0),
        "d": Extent(1e-9, 0.0),  # a gradient where the reference has none
        "e": Extent(math.nan, 1.0),
    }
    assert gradient_gaps(extents, parts) == {
        "layer 0": Gap(0.05, "a"),
        "layer 1": Gap(0.0, "c"),
        "norm": Gap(math.inf, "d"),
        "head": Gap(math.inf, "e"),
    }


def test_every_parameter_belongs_to_a_part() -> None:
    parts = parts_of(build("qwen3"))
    assert list(dict.fromkeys(parts.values())) == ["embeddings", "layer 0", "layer 1", "norm", "head"]
    assert parts["model.layers.1.mlp.up_proj.weight"] == "layer 1"
    tied = parts_of(build("gpt2"))
    assert list(dict.fromkeys(tied.values())) == ["embeddings and head", "wpe", "layer 0", "layer 1", "ln_f"]
