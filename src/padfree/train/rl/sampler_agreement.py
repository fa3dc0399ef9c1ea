"""Compare, in a run with `rollout.exact`, the sampler's log-probabilities with the trainer's, and tell the user."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from padfree.train.step_pipeline import OnStep
from padfree.warning import PadfreeWarning

DIFFERENCE = "loss/sampler_difference"
FIRST_UPDATE = "seconds/sampling"
"""A metric that only the first update of a batch has. In later updates, the trainer has other weights than the sampler.
"""

AGREED = "sampler and trainer agree to the bit"


class SamplerAgreement:
    """Compares the log-probabilities of sampler and trainer in each batch, and reports the first batch in which they
    agree and the first in which they differ.
    """

    def __init__(self, on_step: OnStep | None, on_note: Callable[[str], None] | None) -> None:
        self._on_step, self._on_note = on_step, on_note
        self._agreed = self._differed = False

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        difference = metrics.get(DIFFERENCE)
        if difference is not None and FIRST_UPDATE in metrics:
            self._compare(float(difference), metrics["step"])
        if self._on_step is not None:
            self._on_step(metrics)

    def _compare(self, difference: float, step: int) -> None:
        if difference == 0.0 and not self._agreed:
            self._agreed = True
            if self._on_note is not None:
                self._on_note(AGREED)
        elif difference != 0.0 and not self._differed:
            self._differed = True
            if self._on_note is not None:
                warnings.warn(
                    f"rollout.exact: true, but log-probabilities of sampler and trainer differ by {difference:.3g} on "
                    f"average in step {step}; run padfree check --sampler to find the operator that differs",
                    PadfreeWarning,
                    stacklevel=2,
                )
