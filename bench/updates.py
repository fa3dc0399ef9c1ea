"""Consecutive updates as in a run: the next batch is packed while the device computes this one."""

from __future__ import annotations

from collections.abc import Sequence

from timer import synchronize

from padfree.sample import Sample
from padfree.train.engine import Engine
from padfree.train.step import PendingStep, StepReport


def make_updates(engine: Engine, steps: Sequence[list[Sample]]) -> StepReport:
    """Run one update for each list of samples. Return the report of the last update."""
    earlier: PendingStep | None = None
    following = engine.prepare(steps[0])
    for number in range(len(steps)):
        pending = engine.begin(following, after=earlier)
        if number + 1 < len(steps):
            following = engine.prepare(steps[number + 1])
        if earlier is not None:
            earlier.finish()
        earlier = pending
    assert earlier is not None
    report = earlier.finish()
    synchronize(engine.mesh.device)
    return report
