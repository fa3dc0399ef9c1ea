"""The settings of policy losses: dataclasses that check their values and do not import torch.

    PolicySettings    objective        how the loss uses the ratio π / π_old    ClipSettings | GSPOSettings | ...
                      corrections      factors for log-probabilities that       TokenTISSettings | IcePopSettings | ...
                                       differ between sampler and trainer
                      kl_*, entropy_*  terms that are added to the loss

The formulas are in `padfree.losses`. The formula of an objective such as `clip` is in
`padfree.losses.objectives.clip`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from padfree.choices import KLEstimator, KLWeighting, OldPolicy, SequenceStatistic
from padfree.config.loss_settings import TaskSettings, check_sampled_images
from padfree.config.setting import check_table, setting
from padfree.errors import UserError, check_choice, need

# Objectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """An objective: the loss of a token as a function of its ratio π / π_old and its advantage."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_table(self, f"loss.{self.kind}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings(Objective):
    """Ratio π / π_old clipped to [1 - low, 1 + high] (PPO, GRPO). `dual`: upper bound of the ratio for tokens with a
    negative advantage.
    """

    kind: ClassVar[str] = "clip"
    low: float = setting(0.2, least=0, most=1, about="The ratio is clipped to at least 1 - low.", fix="give 0 to 1")
    high: float = setting(
        0.2, least=0, most=math.inf, about="The ratio is clipped to at most 1 + high.", fix="give 0 or more"
    )
    dual: float | None = setting(
        None,
        above=1,
        most=math.inf,
        about="Dual clip: upper bound of the ratio for negative advantages; if none, there is no such bound.",
        fix="give more than 1 as the bound, or leave this setting out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOSettings(Objective):
    """Clipped ratio of a whole sequence (GSPO). The default bounds are those of the paper.

    The bounds are much tighter than those of PPO, because the mean log-ratio of a sequence varies less than that of a
    token.
    """

    kind: ClassVar[str] = "gspo"
    low: float = setting(
        3e-4, least=0, most=1, about="The sequence ratio is clipped to at least 1 - low.", fix="give 0 to 1"
    )
    high: float = setting(
        4e-4, least=0, most=math.inf, about="The sequence ratio is clipped to at most 1 + high.", fix="give 0 or more"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOSettings(Objective):
    """CISPO: the importance weight of a token is clipped to [1 - low, 1 + high]."""

    kind: ClassVar[str] = "cispo"
    low: float | None = setting(
        None,
        least=0,
        most=1,
        about="The importance weight is clipped to at least 1 - low. With the default, none, there is no lower bound.",
        fix="give 0 to 1, or none for no lower bound",
    )
    high: float = setting(
        4.0, least=0, most=math.inf, about="The importance weight is clipped to at most 1 + high.", fix="give 0 or more"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings(Objective):
    """Plain policy gradient, without a ratio and without clipping."""

    kind: ClassVar[str] = "reinforce"


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomObjective(Objective):
    """A user-defined objective, `module:function`; `padfree.losses.objectives` documents its arguments."""

    kind: ClassVar[str] = "module:function"
    path: str


# Corrections

LOW_BAND, HIGH_BAND = "0 to 1, less than high", "1 or more, more than low"


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A correction: a factor that multiplies the policy objective of a token. `kind`: the name of the correction in the
    setting `loss.corrections`.
    """

    kind: ClassVar[str]
    compares_sampler: ClassVar[bool] = True  # needs the sampler's log-probabilities

    def __post_init__(self) -> None:
        check_table(self, f"loss.{self.kind}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BandCorrection(Correction):
    """A correction with bounds on an importance weight. The interval [low, high] must contain 1."""

    low: float
    high: float

    def __post_init__(self) -> None:
        numbers = all(type(bound) in (int, float) for bound in (self.low, self.high))  # `isinstance` would accept bool
        right = numbers and 0 <= self.low <= 1 <= self.high and self.low < self.high
        bounds = [self.low, self.high]
        need(
            right,
            f"loss.{self.kind}",
            bounds,
            "the interval [low, high] must contain 1; give 0 <= low <= 1 <= high, and low < high",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTISSettings(BandCorrection):
    """Truncated importance sampling per token: the importance weight of a token is clamped to [low, high]."""

    kind: ClassVar[str] = "token_tis"
    low: float = setting(0.0, about="Lower bound of a token's importance weight.", allowed=LOW_BAND)
    high: float = setting(2.0, about="Upper bound of a token's importance weight.", allowed=HIGH_BAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISSettings(BandCorrection):
    """Truncated importance sampling per sequence: the importance weight of a sequence is clamped to [low, high]."""

    kind: ClassVar[str] = "sequence_tis"
    low: float = setting(0.0, about="Lower bound of a sequence's importance weight.", allowed=LOW_BAND)
    high: float = setting(2.0, about="Upper bound of a sequence's importance weight.", allowed=HIGH_BAND)
    geometric: bool = setting(False, about="Use the mean of the tokens' log importance weights, not the sum.")


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopSettings(BandCorrection):
    """IcePop: the factor of a token is its importance weight, or 0 if the weight is outside [low, high]."""

    kind: ClassVar[str] = "icepop"
    low: float = setting(0.5, about="Tokens with an importance weight below this value are masked.", allowed=LOW_BAND)
    high: float = setting(5.0, about="Tokens with an importance weight above this value are masked.", allowed=HIGH_BAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskSettings(BandCorrection):
    """The policy objective of a sequence is multiplied by 0 if its importance ratio is outside [low, high]."""

    kind: ClassVar[str] = "sequence_mask"
    low: float = setting(0.5, about="Sequences with an importance ratio below this value are masked.", allowed=LOW_BAND)
    high: float = setting(
        2.0, about="Sequences with an importance ratio above this value are masked.", allowed=HIGH_BAND
    )
    statistic: SequenceStatistic = setting(
        "mean",
        about="A sequence is masked if this ratio is outside [low, high]. mean or sum: the exponential of the mean or "
        "sum of its tokens' log-ratios. token: the ratio of any single token.",
    )

    def __post_init__(self) -> None:
        # `super()` without arguments fails here: `slots=True` creates a new class.
        BandCorrection.__post_init__(self)
        check_choice("loss.sequence_mask.statistic", self.statistic, SequenceStatistic)


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMSettings(Correction):
    """Off-policy sequence masking: leave out sequences with a negative advantage that the policy already avoids, i.e.
    whose mean log π_old - log π exceeds `delta`.
    """

    kind: ClassVar[str] = "opsm"
    compares_sampler: ClassVar[bool] = False
    delta: float = setting(
        1e-4,
        least=0,
        most=math.inf,
        about="Sequences with a negative advantage are masked if their mean log π_old - log π exceeds this value.",
        fix="give 0 or more",
    )


TOKEN_CORRECTIONS = (TokenTISSettings, IcePopSettings)
"""The corrections of the policy loss that act on single tokens."""


# Policy losses


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings(TaskSettings):
    """A policy loss: an objective, its corrections, and the KL and entropy terms.

    `old_policy` says where π_old in the ratio π / π_old comes from: a forward pass of the trainer before the update,
    the sampler, or the update itself. In the last case, the ratio is 1.
    """

    command: ClassVar[str] = "rl"
    help: ClassVar[str] = "update a policy on rollout files, or on its own responses"
    title: ClassVar[str] = "RL"
    kind: ClassVar[str] = "clip"
    data_format: ClassVar[str] = "rollouts"
    eval_metrics: ClassVar[tuple[str, ...]] = ("reward", "pass@1", "pass@k", "response_length")
    in_rows: ClassVar[bool] = False
    weighs_tokens: ClassVar[bool] = True
    samples_responses: ClassVar[bool] = True
    objective: Objective = ClipSettings()
    old_policy: OldPolicy = "trainer"
    corrections: tuple[Correction, ...] = ()
    kl_coefficient: float = setting(0.0, least=0, fix="give 0 or more")
    kl_estimator: KLEstimator = "k3"
    kl_weighting: KLWeighting = "none"  # ratio: the KL estimate is multiplied by π / π_old, with gradient
    entropy_coefficient: float = setting(0.0, least=-math.inf, fix="give a finite number")

    def __post_init__(self) -> None:
        check_choice("loss.old_policy", self.old_policy, OldPolicy)
        check_choice("loss.kl_estimator", self.kl_estimator, KLEstimator)
        check_choice("loss.kl_weighting", self.kl_weighting, KLWeighting)
        check_table(self, "loss.")
        objective, corrections = self._untyped()
        if not isinstance(objective, Objective):
            raise UserError("objective", "", "give an object such as ClipSettings()", value=objective)
        if not isinstance(corrections, tuple) or not all(isinstance(given, Correction) for given in corrections):
            raise UserError("corrections", "", "give a tuple of corrections: (TokenTISSettings(),)", value=corrections)
        kinds = [correction.kind for correction in self.corrections]
        need(len(set(kinds)) == len(kinds), "loss.corrections", kinds, "name no correction twice")
        if self.old_policy == "sampler":
            alone = not any(correction.compares_sampler for correction in self.corrections)
            fix = "set loss.old_policy=trainer: with 'sampler' the corrections would compare the sampler with itself"
            need(alone, "loss.corrections", kinds, fix)
        if self.old_policy == "current":
            fix = "set loss.old_policy=trainer: with 'current' opsm never masks a sequence"
            need(OPSMSettings.kind not in kinds, "loss.corrections", kinds, fix)

    def check_run(self, config: Any) -> None:
        fix = "set batch.samples=64 and batch.tokens=none: RL batches consist of whole groups of samples"
        need(config.batch.samples is not None, "batch.samples", None, fix)
        check_sampled_images(config)

    def _untyped(self) -> tuple[object, object]:
        """Return `objective` and `corrections`, typed as `object` for the checks of their types."""
        return self.objective, self.corrections

    @property
    def weighs_kl(self) -> bool:
        """Whether the KL estimate of each token is multiplied by the ratio π / π_old."""
        return self.kl_coefficient > 0 and self.kl_weighting == "ratio"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the loss uses the log-probabilities that the sampler reported."""
        return self.old_policy == "sampler" or any(correction.compares_sampler for correction in self.corrections)
