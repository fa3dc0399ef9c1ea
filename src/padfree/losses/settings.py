"""The settings of every loss: plain data, checked once, importing nothing.

    PolicySettings    objective      what is done with the ratio          ClipSettings | GSPOSettings | ...
                      corrections    sampler against trainer, in a row    TokenTISSettings | IcePopSettings | ...
                      kl, entropy    added to the loss

Each file of this folder documents the formula that its settings belong to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
OldPolicy = Literal["trainer", "sampler", "current"]
SequenceStatistic = Literal["mean", "sum", "token"]


SMALLEST, LARGEST = math.nextafter(0.0, 1.0), math.nextafter(math.inf, 0.0)


def _in_range(name: str, value: object, low: float, high: float, cure: str) -> None:
    """low <= value <= high, and a number at all."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r}; {cure}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {value!r}; use one of {', '.join(choices)}")


def _band(name: str, low: float, high: float) -> None:
    numbers = all(isinstance(bound, (int, float)) for bound in (low, high))
    if not numbers or not 0.0 <= low <= 1.0 <= high or not low < high:
        raise ValueError(f"{name}: low {low}, high {high}; give 0 <= low <= 1 <= high and low < high")


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTSettings:
    """Negative log-likelihood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """Clipped ratio (PPO, GRPO): the ratio is kept in [1 - low, 1 + high]; `dual` bounds it where A < 0."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        _in_range("clip low", self.low, 0.0, 1.0, "give 0 up to 1")
        _in_range("clip high", self.high, 0.0, math.inf, "give 0 or more")
        if self.dual is not None:
            _in_range("clip dual", self.dual, math.nextafter(1.0, 2.0), math.inf, "give more than 1, or None for none")


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOSettings:
    """Clipped sequence ratio. The defaults are the paper's: a mean over tokens moves far less than one token."""

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        _in_range("gspo low", self.low, 0.0, 1.0, "give 0 up to 1")
        _in_range("gspo high", self.high, 0.0, math.inf, "give 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOSettings:
    """Clipped importance weight: in [1 - low, 1 + high], without a lower bound where `low` is None."""

    low: float | None = None
    high: float = 4.0

    def __post_init__(self) -> None:
        if self.low is not None:
            _in_range("cispo low", self.low, 0.0, 1.0, "give 0 up to 1, or None for no lower bound")
        _in_range("cispo high", self.high, 0.0, math.inf, "give 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings:
    """Plain policy gradient: no ratio, no clip."""


Objective: TypeAlias = ClipSettings | GSPOSettings | CISPOSettings | ReinforceSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTISSettings:
    """Truncated importance sampling, token by token: the weight is kept in [low, high]."""

    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        _band("token TIS", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISSettings:
    """Truncated importance sampling by sequence. `geometric`: of the mean over tokens instead of the product."""

    low: float = 0.0
    high: float = 2.0
    geometric: bool = False

    def __post_init__(self) -> None:
        _band("sequence TIS", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopSettings:
    """The importance weight of a token inside [low, high], and 0 outside."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _band("icepop", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskSettings:
    """Leave a sequence out whose importance ratio is outside [low, high]; see `corrections.py` for `statistic`."""

    low: float = 0.5
    high: float = 2.0
    statistic: SequenceStatistic = "mean"

    def __post_init__(self) -> None:
        _band("sequence mask", self.low, self.high)
        _one_of("sequence mask statistic", self.statistic, get_args(SequenceStatistic))


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMSettings:
    """Leave a sequence out where A < 0 and the policy has moved further than `delta` from it."""

    delta: float = 1e-4

    def __post_init__(self) -> None:
        _in_range("opsm delta", self.delta, 0.0, math.inf, "give 0 or more")


Correction: TypeAlias = TokenTISSettings | SequenceTISSettings | IcePopSettings | SequenceMaskSettings | OPSMSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """A policy loss: the objective, corrections of it, and what is added to it.

    `old_policy` names the denominator of the ratio: the `trainer`'s own log-probabilities before the update
    (`old_logprobs`), those the `sampler` reported (`rollout_logprobs`), or the `current` ones (each batch serves one
    step, the ratio is 1 and its gradient is that of the log-probability; nothing needs to be computed beforehand).
    """

    objective: Objective = ClipSettings()
    old_policy: OldPolicy = "trainer"
    corrections: tuple[Correction, ...] = ()
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        _one_of("old_policy", self.old_policy, get_args(OldPolicy))
        _one_of("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _in_range("kl_coefficient", self.kl_coefficient, 0.0, LARGEST, "give 0 or more")
        _in_range("entropy_coefficient", self.entropy_coefficient, -LARGEST, LARGEST, "give a finite number")
        corrections: object = self.corrections
        if not isinstance(self.objective, Objective):
            raise ValueError(f"objective: {self.objective!r}; give ClipSettings(), GSPOSettings() or another of them")
        if not isinstance(corrections, tuple) or not all(isinstance(given, Correction) for given in corrections):
            raise ValueError(f"corrections: {corrections!r}; give a tuple such as (TokenTISSettings(),)")
        kinds = [type(correction) for correction in self.corrections]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"corrections: {kind.__name__} given twice; give each kind once")
            if self.old_policy == "sampler" and kind is not OPSMSettings:
                raise ValueError(
                    f"corrections: {kind.__name__} with old_policy 'sampler' compares the sampler with itself; "
                    "use old_policy 'trainer' or 'current'"
                )
        if self.old_policy == "current" and OPSMSettings in kinds:
            raise ValueError(
                "corrections: OPSMSettings with old_policy 'current' never masks; use 'trainer' or 'sampler'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSettings:
    """Squared error of a value model, its change limited to `clip` (None: unlimited)."""

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None:
            _in_range("value clip", self.clip, 0.0, math.inf, "give 0 or more, or None to switch it off")


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOSettings:
    """Direct preference optimisation; `label_smoothing` is the assumed share of wrong labels."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _in_range("beta", self.beta, SMALLEST, LARGEST, "give a positive number")
        below_half = math.nextafter(0.5, 0.0)
        _in_range("label_smoothing", self.label_smoothing, 0.0, below_half, "give 0 up to, but not including, 0.5")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings:
    """Pairwise loss of a reward model: the chosen answer should score `margin` more than the rejected one."""

    margin: float = 0.0

    def __post_init__(self) -> None:
        _in_range("margin", self.margin, 0.0, math.inf, "give 0 or more")
