"""Samples that an update may leave out, because the loss proves that their gradient is exactly 0.

    groups        a a a a | b b b b | c c c c       advantages of GRPO
    rewards       1 0 0 1 | 1 1 1 1 | 0 0 0 0
    computed      a a a a                           b and c: every advantage is 0

A sample is left out if two conditions hold. The advantages of all its scored tokens are 0, and the objective declares
`zero_without_advantage`: if a token's advantage is 0, its loss is 0 too. Corrections multiply this loss only by finite
factors, so it stays 0. A KL, entropy or router term has a gradient for every token, so with such a term no sample is
left out.

The token weights are computed from all samples of the update. Leaving out samples therefore only removes zeros from the
sum that is the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from padfree.config import LossConfig
from padfree.config.policy_settings import PolicySettings
from padfree.losses import zero_without_advantage
from padfree.sample import Sample


def may_skip(loss: object, *, has_router_term: bool) -> bool:
    """Whether, with the loss settings `loss`, samples whose advantages are 0 add nothing to the gradient."""
    return isinstance(loss, PolicySettings) and not has_router_term and zero_without_advantage(loss)


def run_may_skip(loss: LossConfig) -> bool:
    """Whether a run with these settings leaves samples out of its updates."""
    router = bool(loss.load_balancing or loss.router_bias)
    return loss.skip_zero_gradient == "auto" and may_skip(loss.settings(), has_router_term=router)


def has_advantage(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """For each of B samples, whether any of its scored tokens has an advantage other than 0, as bools [B].

    True for a sample without the array `advantages`, so that the loss sees this sample and reports the error.
    """
    return np.array(
        [sample.advantages is None or bool(sample.advantages[sample.scored].any()) for sample in samples], np.bool_
    )
