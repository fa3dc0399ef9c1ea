"""Corrections on worked examples. `test_policy_loss.py` compares them with a loop, with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from padfree.losses import (
    IcePopSettings,
    LossInputs,
    OPSMSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
)
from padfree.losses.corrections import sequence_factor, token_factor

RATIOS = torch.tensor([0.25, 1.0, 4.0, 2.0, 1.0, 7.0], dtype=torch.float64)
"""Two samples: 0.25 1 4 (product 1, geometric mean 1) and 2 1 (product 2, mean √2); the last is not scored."""

INPUTS = LossInputs(
    mask=torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool),
    weights=torch.ones(6),
    sample_index=torch.tensor([0, 0, 0, 1, 1, 1]),
    num_samples=2,
    advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]),
)


def by_sequence(correction: Any, current: torch.Tensor | None = None) -> list[float]:
    zero = torch.zeros_like(RATIOS)
    factor = sequence_factor((correction,), INPUTS, trainer=RATIOS.log(), sampler=zero, current=current)
    return [round(float(x), 6) for x in factor[:5]]


def test_token_level() -> None:
    zero = torch.zeros_like(RATIOS)
    tis = token_factor((TokenTISSettings(low=0.5, high=2.0),), RATIOS.log(), zero)
    torch.testing.assert_close(tis, torch.tensor([0.5, 1, 2, 2, 1, 2], dtype=torch.float64))
    icepop = token_factor((IcePopSettings(low=0.5, high=5.0),), RATIOS.log(), zero)
    torch.testing.assert_close(icepop, torch.tensor([0.0, 1, 4, 2, 1, 0], dtype=torch.float64))
    both = token_factor((TokenTISSettings(low=0.5, high=2.0), IcePopSettings()), RATIOS.log(), zero)
    torch.testing.assert_close(both, tis * icepop)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (SequenceTISSettings(high=1.5), [1, 1, 1, 1.5, 1.5]),
        (SequenceTISSettings(high=5.0), [1, 1, 1, 2, 2]),
        (SequenceTISSettings(high=5.0, geometric=True), [1, 1, 1, round(math.sqrt(2), 6), round(math.sqrt(2), 6)]),
        (SequenceMaskSettings(low=0.9, high=1.1), [1, 1, 1, 0, 0]),
        (SequenceMaskSettings(low=0.9, high=1.9, statistic="sum"), [1, 1, 1, 0, 0]),
        (SequenceMaskSettings(low=0.9, high=1.9, statistic="mean"), [1, 1, 1, 1, 1]),
        (SequenceMaskSettings(low=0.5, high=3.0, statistic="token"), [0, 0, 0, 1, 1]),
    ],
)
def test_sequence_level(correction: Any, expected: list[float]) -> None:
    assert by_sequence(correction) == expected


def test_opsm_looks_at_sign_and_distance() -> None:
    """The first sample has not moved on average, the second by 0.3: its token of negative advantage goes."""
    moved = torch.tensor([0.2, -0.2, 0.0, 0.5, 0.1, 99.0], dtype=torch.float64)
    current = RATIOS.log() - moved
    assert by_sequence(OPSMSettings(delta=0.2), current) == [1, 1, 1, 0, 1]
    assert by_sequence(OPSMSettings(delta=0.31), current) == [1, 1, 1, 1, 1]
