"""Updates one after the other, as a run makes them: the next batch is laid out while the device works on this one."""

from __future__ import annotations

from collections.abc import Sequence

from timer import synchronize

from padfree.batch import Sample
from padfree.train.engine import Engine, PendingStep, StepReport


def make_updates(engine: Engine, steps: Sequence[list[Sample]]) -> StepReport:
    """The numbers of the last one."""
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
