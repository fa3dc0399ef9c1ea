"""The settings of the loss.

Bounds belong to a kind of loss: `[loss.clip]` is not used by gspo, so that `loss.kind=gspo` alone is a whole change.

The rules are those of `padfree.losses.settings`, and a test compares the two. They stand here once more because a
recipe is judged where torch need not be imported.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from padfree.config.rules import need


@dataclass(frozen=True, kw_only=True, slots=True)
class BandConfig:
    """Bounds of an importance weight; None: those of `padfree.losses`."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISConfig(BandConfig):
    geometric: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskConfig(BandConfig):
    statistic: Literal["mean", "sum", "token"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMConfig:
    delta: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioConfig:
    """Bounds of the ratio in `gspo` and `cispo`; None: those of `padfree.losses`."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig(RatioConfig):
    dual: float | None = None


BOUNDS = {"clip": ("low", "high", "dual"), "gspo": ("low", "high"), "cispo": ("low", "high")}
"""Which bounds a kind of loss has."""

BANDS = {"token_tis": (0.0, 2.0), "sequence_tis": (0.0, 2.0), "icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0)}
"""Low and high of the corrections where a recipe says neither."""


def _check_bounds(prefix: str, bounds: dict[str, Any]) -> None:
    """Bounds of a ratio: it is kept in [1 - low, 1 + high]."""
    low, high, dual = (bounds.get(name) for name in ("low", "high", "dual"))
    need(low is None or 0 <= low <= 1, f"{prefix}low", low, "give 0 up to 1")
    need(high is None or high >= 0, f"{prefix}high", high, "give 0 or more")
    need(dual is None or dual > 1, f"{prefix}dual", dual, "give more than 1, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised. Everything below `temperature` is for RL; `None` bounds are those of `padfree.losses`.

    `clip`, `gspo` and `cispo` are the bounds of each kind: those of the others wait. `low`, `high` and `dual` are for
    the kind that is chosen, whatever its table says.
    """

    kind: Literal["sft", "clip", "gspo", "cispo", "reinforce"] = "sft"
    weights: Literal["token-mean", "sample-mean", "sum-of-sample-mean", "sample-sum", "constant", "group-mean"] = (
        "token-mean"
    )
    constant: float | None = None  # the divisor of weights = "constant"
    temperature: float = 1.0
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "given"] = "grpo"
    low: float | None = None
    high: float | None = None
    dual: float | None = None
    clip: ClipConfig = ClipConfig()
    gspo: RatioConfig = RatioConfig()
    cispo: RatioConfig = RatioConfig()
    old_policy: Literal["trainer", "sampler", "current"] = "trainer"
    corrections: tuple[Literal["token_tis", "sequence_tis", "icepop", "sequence_mask", "opsm"], ...] = ()
    token_tis: BandConfig = BandConfig()  # settings of the corrections that are named
    sequence_tis: SequenceTISConfig = SequenceTISConfig()
    icepop: BandConfig = BandConfig()
    sequence_mask: SequenceMaskConfig = SequenceMaskConfig()
    opsm: OPSMConfig = OPSMConfig()
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coefficient: float = 0.0
    epochs: int = 1  # passes over a rollout batch
    mini_batches: int = 1  # optimizer steps in a pass

    def bounds(self) -> dict[str, float]:
        """The bounds of the chosen kind that are given, by name."""
        found = {}
        for name in BOUNDS.get(self.kind, ()):
            value = getattr(self, name)
            value = getattr(getattr(self, self.kind), name) if value is None else value
            if value is not None:
                found[name] = value
        return found

    def needs_sampler_logprobs(self) -> bool:
        """Whether the log-probabilities that the sampler reported are part of the loss."""
        return self.kind != "sft" and (self.old_policy == "sampler" or bool({*self.corrections} - {"opsm"}))

    def __post_init__(self) -> None:
        need(0 < self.temperature < math.inf, "loss.temperature", self.temperature, "give more than 0")
        for name in ("epochs", "mini_batches"):
            need(getattr(self, name) >= 1, f"loss.{name}", getattr(self, name), "give 1 or more")
        self._check_weights()
        for name in ("low", "high", "dual"):
            value = getattr(self, name)
            fits = value is None or name in BOUNDS.get(self.kind, ())
            need(fits, f"loss.{name}", value, f"set loss.{name}=none, loss.kind {self.kind!r} has no such bound")
        _check_bounds("loss.", {name: getattr(self, name) for name in ("low", "high", "dual")})
        for kind in BOUNDS:
            _check_bounds(f"loss.{kind}.", asdict(getattr(self, kind)))
        self._check_corrections()
        fits = 0 <= self.kl_coefficient < math.inf
        need(fits, "loss.kl_coefficient", self.kl_coefficient, "give 0 or more")
        fits = math.isfinite(self.entropy_coefficient)
        need(fits, "loss.entropy_coefficient", self.entropy_coefficient, "give a finite number")
        if self.kind == "sft":
            self._check_sft()

    def _check_weights(self) -> None:
        constant = self.constant
        need(constant is None or 0 < constant < math.inf, "loss.constant", constant, "give more than 0")
        if self.weights == "constant":
            need(constant is not None, "loss.constant", None, "give it, as in loss.constant=4096: weights 'constant'")
        else:
            cure = f"set loss.constant=none, loss.weights {self.weights!r} has no divisor of its own"
            need(constant is None, "loss.constant", constant, cure)

    def _check_corrections(self) -> None:
        for name in ("token_tis", "sequence_tis", "icepop", "sequence_mask", "opsm"):
            for setting, value in asdict(getattr(self, name)).items():
                asked = value is None or name in self.corrections
                need(asked, f"loss.{name}.{setting}", value, f"leave it out, or add {name!r} to loss.corrections")
        for name, (low, high) in BANDS.items():
            band = getattr(self, name)
            low, high = low if band.low is None else band.low, high if band.high is None else band.high
            right = 0 <= low <= 1 <= high and low < high
            need(right, f"loss.{name}", [low, high], "give 0 <= low <= 1 <= high, and low < high")
        delta = self.opsm.delta
        need(delta is None or delta >= 0, "loss.opsm.delta", delta, "give 0 or more")
        names = list(self.corrections)
        need(len(set(names)) == len(names), "loss.corrections", names, "give each of them once")
        if self.old_policy == "sampler":
            alone = set(names) <= {"opsm"}
            cure = "set loss.old_policy=trainer, with 'sampler' the sampler is compared with itself"
            need(alone, "loss.corrections", names, cure)
        if self.old_policy == "current":
            cure = "set loss.old_policy=trainer, with 'current' opsm never masks"
            need("opsm" not in names, "loss.corrections", names, cure)

    def _check_sft(self) -> None:
        """Nothing of RL may be set and then not be used."""
        for name, unset in (
            ("advantage", "grpo"),
            ("old_policy", "trainer"),
            ("corrections", ()),
            ("kl_coefficient", 0.0),
            ("entropy_coefficient", 0.0),
        ):
            value = getattr(self, name)
            need(value == unset, f"loss.{name}", value, "leave it out, SFT has no such term")
        need(self.weights != "group-mean", "loss.weights", self.weights, "choose another, SFT has no groups")
        need(self.epochs == self.mini_batches == 1, "loss.epochs", self.epochs, "leave it out, SFT has data.epochs")
