"""The learning rate as a function of the step, with nothing to remember.

    warmup 4, steps 10, cosine      ¼ ½ ¾ 1 | .93 .75 .5 .25 .07 0        of the learning rate, steps 0 to 9

A resumed run needs the step alone.
"""

from __future__ import annotations

import math

from padfree.errors import UserError
from padfree.optim.optimizer_settings import ScheduleKind


def learning_rate_factor(
    step: int, *, kind: ScheduleKind, warmup: int = 0, steps: int | None = None, final: float = 0.0
) -> float:
    """What the learning rate is multiplied by in `step`, counted from 0.

    The first `warmup` steps lead up in a line, the last of them having the full rate. From there it falls to `final`
    of it in the last of `steps` steps, or stays.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if steps is None:
        raise UserError("steps", "None", f"give the number of steps, kind {kind!r} ends with them")
    first = max(warmup - 1, 0)  # the last step with the full rate
    share = min((step - first) / max(steps - 1 - first, 1), 1.0)
    remaining = 1.0 - share if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return final + (1.0 - final) * remaining
