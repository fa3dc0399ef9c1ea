"""The sections `[optimizer]` and `[schedule]` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from padfree.config.rules import need

OptimizerName = Literal["adamw", "muon"]
ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """Muon's own settings, for the hidden matrices of a run with `optimizer.name` "muon"."""

    lr: float | None = None  # None: optimizer.lr
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5  # of the Newton-Schulz iteration
    weight_decay: float | None = None  # None: optimizer.weight_decay
    update_rms: float = 0.2  # root mean square of an update before the learning rate; AdamW's is about 0.2

    def __post_init__(self) -> None:
        lr, decay = self.lr, self.weight_decay
        need(lr is None or 0 <= lr < math.inf, "optimizer.muon.lr", lr, "give 0 or more, or leave it out")
        need(0 <= self.momentum < 1, "optimizer.muon.momentum", self.momentum, "give a number in [0, 1)")
        need(1 <= self.steps < 100, "optimizer.muon.steps", self.steps, "give 1 up to 99")
        right = decay is None or 0 <= decay < math.inf
        need(right, "optimizer.muon.weight_decay", decay, "give 0 or more, or leave it out")
        need(0 < self.update_rms < math.inf, "optimizer.muon.update_rms", self.update_rms, "give more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW for all parameters, or Muon for hidden matrices and AdamW for the others.

    AdamW's weight decay applies to parameters of two dimensions and more, embeddings included, and not to norms and
    biases.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # None: no clipping
    muon: MuonSettings = field(default_factory=MuonSettings)

    def __post_init__(self) -> None:
        need(0 <= self.lr < math.inf, "optimizer.lr", self.lr, "give 0 or more")
        need(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "give two numbers in [0, 1)")
        need(0 < self.eps < math.inf, "optimizer.eps", self.eps, "give more than 0")
        decay = self.weight_decay
        need(0 <= decay < math.inf, "optimizer.weight_decay", decay, "give 0 or more")
        norm = self.max_grad_norm
        need(norm is None or norm > 0, "optimizer.max_grad_norm", norm, 'give more than 0, or "none"')

    @property
    def muon_lr(self) -> float:
        return self.lr if self.muon.lr is None else self.muon.lr

    @property
    def muon_weight_decay(self) -> float:
        return self.weight_decay if self.muon.weight_decay is None else self.muon.weight_decay

    @property
    def changes_nothing(self) -> bool:
        """Whether every learning rate is 0."""
        return self.lr == 0 and (self.name != "muon" or self.muon_lr == 0)

    def with_lr(self, lr: float | None) -> OptimizerConfig:
        """The same with this learning rate for all parameters; None: as it is."""
        return self if lr is None else replace(self, lr=lr, muon=replace(self.muon, lr=None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate's course: `warmup` steps up, then as `kind` says down to `final` of it at `run.steps`."""

    kind: ScheduleKind = "constant"
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        need(self.warmup >= 0, "schedule.warmup", self.warmup, "give 0 or more steps")
        need(0 <= self.final <= 1, "schedule.final", self.final, "give a share of the learning rate, 0 to 1")
