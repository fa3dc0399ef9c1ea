"""The sections `[optimizer]` and `[schedule]` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from padfree.config.setting import STAYS, check_table, setting
from padfree.errors import UserError, need

OptimizerName = Literal["adamw", "muon"]
StateFormat = Literal["float32", "bfloat16", "int8"]
ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """The settings of Muon for hidden matrices, used with `optimizer.name=muon`."""

    lr: float | None = setting(
        None,
        least=0,
        about="Base learning rate of the matrices that Muon trains; if it is none, optimizer.lr applies.",
        fix="give 0 or more, or leave it out",
    )
    momentum: float = setting(0.95, least=0, below=1, about="Momentum of Muon.")
    nesterov: bool = setting(True, about="Use Nesterov momentum.")
    steps: int = setting(5, least=1, most=99, about="Number of Newton-Schulz iterations.")
    weight_decay: float | None = setting(
        None,
        least=0,
        about="Weight decay of the matrices that Muon trains; if it is none, optimizer.weight_decay applies.",
        fix="give 0 or more, or leave it out",
    )
    update_rms: float = setting(
        0.2, above=0, about="Root mean square of an update at learning rate 1; AdamW's updates have about 0.2."
    )

    def __post_init__(self) -> None:
        check_table(self, "optimizer.muon.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """One table of `[[optimizer.groups]]`: it selects parameters and gives them their own learning rate and weight
    decay.
    """

    match: str = setting(
        about="Which parameters form the group: tower, projector, language_model, or a pattern of parameter names such "
        "as model.visual.*.",
        filled="give tower, projector, language_model, or a pattern of parameter names",
        resume=STAYS,
    )
    lr_scale: float = setting(
        1.0, least=0, about="Factor by which the base learning rate of the group's parameters is multiplied."
    )
    weight_decay: float | None = setting(
        None,
        least=0,
        about="Weight decay of the group's matrices; if it is none, the weight decay set outside the groups applies.",
        fix="give 0 or more, or leave it out",
    )

    def __post_init__(self) -> None:
        check_table(self, "optimizer.groups.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW for all parameters, or Muon for hidden matrices and AdamW for the other parameters.

    AdamW's weight decay applies to parameters with two or more dimensions, embeddings included.
    """

    name: OptimizerName = setting(
        "adamw", about="The optimizer: AdamW, or Muon for hidden matrices and AdamW for the rest.", resume=STAYS
    )
    lr: float = setting(1e-5, least=0, about="Base learning rate, which the schedule multiplies.")
    betas: tuple[float, float] = setting(
        (0.9, 0.95), about="Decay rates of AdamW's two moments.", allowed="two numbers of at least 0 and less than 1"
    )
    eps: float = setting(1e-8, least=1e-30, about="AdamW's epsilon.")  # smaller ones are 0 in float32
    weight_decay: float = setting(0.0, least=0, about="Weight decay of matrices; norms and biases have none.")
    state: StateFormat = setting(
        "float32",
        about="Format of AdamW's two moments of matrices: float32, bfloat16 and int8 take 8, 4 and about 2 bytes per "
        "weight. Vectors keep float32.",
        resume=STAYS,
    )
    max_grad_norm: float | None = setting(
        1.0,
        above=0,
        most=math.inf,
        about="Maximum gradient norm: larger gradients are scaled down to it. With none, gradients are not clipped.",
        fix='give more than 0, or "none"',
    )
    muon: MuonSettings = field(default_factory=MuonSettings)
    groups: tuple[ParameterGroup, ...] = setting(
        (),
        about="Groups of parameters with their own learning rate and weight decay; the first matching group applies.",
        resume=STAYS,
    )

    def __post_init__(self) -> None:
        check_table(self, "optimizer.")
        need(all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "give two numbers in [0, 1)")
        if self.name == "muon" and self.state != "float32":
            raise UserError(
                "optimizer.state",
                "does not work with Muon, whose orthogonalisation amplifies the rounding errors of its momentum",
                "use float32, or optimizer.name=adamw",
                value=self.state,
            )

    @property
    def muon_lr(self) -> float:
        return self.lr if self.muon.lr is None else self.muon.lr

    @property
    def muon_weight_decay(self) -> float:
        return self.weight_decay if self.muon.weight_decay is None else self.muon.weight_decay

    @property
    def changes_nothing(self) -> bool:
        """Return whether every learning rate is 0."""
        return self.lr == 0 and (self.name != "muon" or self.muon_lr == 0)

    def of_group(self, group: ParameterGroup) -> OptimizerConfig:
        """Return the settings for the parameters of one group: learning rates are scaled, and weight decay may be
        replaced.
        """
        decay = group.weight_decay
        muon = replace(
            self.muon,
            lr=self.muon_lr * group.lr_scale,
            weight_decay=self.muon_weight_decay if decay is None else decay,
        )
        weight_decay = self.weight_decay if decay is None else decay
        return replace(self, lr=self.lr * group.lr_scale, weight_decay=weight_decay, muon=muon, groups=())

    def without_groups(self) -> OptimizerConfig:
        """Return these settings for a critic, without the parameter groups (which apply to the policy only)."""
        return replace(self, groups=())

    def with_lr(self, lr: float | None) -> OptimizerConfig:
        """Return a copy of the settings with the learning rate `lr` for all parameters.

        If `lr` is None, the settings are unchanged.
        """
        return self if lr is None else replace(self, lr=lr, muon=replace(self.muon, lr=None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning-rate schedule: a linear rise over `warmup` steps, then a constant rate or a decay to `final`."""

    kind: ScheduleKind = setting(
        "constant", about="How the learning rate changes after the warmup; linear and cosine need run.steps."
    )
    warmup: int = setting(
        0, least=0, about="Number of steps over which the learning rate rises linearly.", fix="give 0 or more steps"
    )
    final: float = setting(
        0.0,
        least=0,
        most=1,
        about="The learning rate at the last step (run.steps), as a fraction of the base learning rate.",
        fix="give a fraction of the learning rate, from 0 to 1",
    )

    def __post_init__(self) -> None:
        check_table(self, "schedule.")
