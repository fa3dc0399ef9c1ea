"""The value loss against a loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from padfree.losses import LossInputs, ValueSettings, value_loss
from tests.losses.cases import by_sample, random_inputs, with_grad
from tests.refused import refused


def slow(inputs: LossInputs, clip: float | None) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample in by_sample(inputs):
        for weight, v, old, r in zip(*(sample[n] for n in ("weights", "values", "old_values", "returns")), strict=True):
            error = (v - r) ** 2
            if clip is not None:
                error = torch.max(error, (old + (v - old).clamp(-clip, clip) - r) ** 2)
            total = total + weight * error / 2
    return total


@pytest.mark.parametrize("clip", [None, 0.2, 0.0])
def test_against_the_loop(clip: float | None, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    ours, (values,) = with_grad(inputs, "values")
    theirs, (expected_values,) = with_grad(inputs, "values")
    output, expected = value_loss(ours, ValueSettings(clip=clip)), slow(theirs, clip)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    expected.backward()
    torch.testing.assert_close(values.grad, expected_values.grad)
    mask = inputs.mask
    error = (inputs.values - inputs.returns)[mask].square()
    torch.testing.assert_close(output.statistics["value_error"][0], error.sum())
    assert ("value_clip_fraction" in output.statistics) == (clip is not None)
    if clip is not None:
        held = inputs.old_values + (inputs.values - inputs.old_values).clamp(-clip, clip)
        clipped = (held - inputs.returns)[mask].square() > error
        assert output.statistics["value_clip_fraction"][0] == clipped.sum()


def test_missing_fields_are_named(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    for name in ("values", "returns", "old_values"):
        with refused(name):
            value_loss(replace(inputs, **{name: None}), ValueSettings())
    value_loss(replace(inputs, old_values=None), ValueSettings(clip=None))
