"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from padfree.optim.schedule import learning_rate_factor
from tests.refused import refused


def factors(steps: int, **settings: object) -> list[float]:
    return [learning_rate_factor(step, steps=steps, **settings) for step in range(steps)]  # type: ignore[arg-type]


def test_worked_examples() -> None:
    rising = [0.25, 0.5, 0.75, 1.0]
    assert factors(10, kind="cosine", warmup=4) == pytest.approx(
        [*rising, 0.9330, 0.75, 0.5, 0.25, 0.0670, 0.0], abs=1e-4
    )
    assert factors(8, kind="linear", warmup=4, final=0.2) == pytest.approx([*rising, 0.8, 0.6, 0.4, 0.2])
    assert factors(6, kind="constant", warmup=4) == [*rising, 1.0, 1.0]
    assert factors(5, kind="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_edges() -> None:
    assert factors(1, kind="cosine") == [1.0]
    assert factors(3, kind="cosine", warmup=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert learning_rate_factor(99, kind="linear", steps=10, final=0.1) == pytest.approx(0.1)
    assert learning_rate_factor(10**9, kind="constant") == 1.0
    with refused("steps"):
        learning_rate_factor(3, kind="cosine")
