"""The learning-rate schedule: the factor by which the learning rate is multiplied in each step.

    warmup 4, steps 10, cosine      ¼ ½ ¾ 1 | .93 .75 .5 .25 .07 0        the factor in steps 0 to 9

The factor depends only on the number of the step, so a resumed run needs no other state.
"""

from __future__ import annotations

import math

from padfree.errors import UserError
from padfree.optim.optimizer_settings import ScheduleKind


def learning_rate_factor(
    step: int, *, kind: ScheduleKind, warmup: int = 0, steps: int | None = None, final: float = 0.0
) -> float:
    """Return the learning-rate factor in `step`, counted from 0.

    The factor rises linearly to 1 in the last of `warmup` steps. Then it stays constant, or falls to `final` in the
    last of `steps` steps.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if steps is None:
        raise UserError("steps", "is None", f"give the number of steps, which schedule {kind!r} needs")
    first = max(warmup - 1, 0)  # the last step with factor 1
    share = min((step - first) / max(steps - 1 - first, 1), 1.0)
    remaining = 1.0 - share if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return final + (1.0 - final) * remaining
