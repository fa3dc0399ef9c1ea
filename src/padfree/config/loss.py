"""The section `loss` of a recipe.

    [loss]                   [loss.clip]        [loss.gspo]
    kind = "clip"            high = 0.28        low = 1e-4

Each kind of loss and each correction has a table of its own. In this example, `LossConfig.settings()` returns
`PolicySettings(objective=ClipSettings(high=0.28), ...)` and ignores `[loss.gspo]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from padfree.choices import (
    Advantage,
    KLEstimator,
    KLWeighting,
    ModelHead,
    OldPolicy,
    OldPolicySetting,
    SkipZeroGradient,
    WeightMode,
)
from padfree.config.functions import is_path
from padfree.config.loss_settings import (
    DistillSettings,
    DPOSettings,
    KTOSettings,
    RewardModelSettings,
    SFTSettings,
    TaskSettings,
)
from padfree.config.policy_settings import (
    TOKEN_CORRECTIONS,
    CISPOSettings,
    ClipSettings,
    Correction,
    CustomObjective,
    GSPOSettings,
    IcePopSettings,
    Objective,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
)
from padfree.config.setting import BETWEEN, STAYS, check_bounds, check_table, need_of, setting
from padfree.errors import closest, need

RL_KIND = "an RL loss.kind"
OF_RL = need_of("command", "rl", fix="leave it out: only RL losses use this setting", about=RL_KIND)
EPOCHS_OF_RL = need_of("command", "rl", fix="leave it out: only RL uses a batch several times", about=RL_KIND)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The loss that is minimised. Most of these settings apply only to RL.

    A table such as `clip` or `icepop` applies only if `kind` or `corrections` names it. `low`, `high` and `dual`
    override the clip bounds of the policy loss that `kind` names.
    """

    kind: str = setting(
        "sft",
        about="The loss: sft, dpo, kto, reward, distill, a policy loss (clip, gspo, cispo, reinforce), or a policy "
        "loss of your own as module:function.",
        resume="may change within RL",
    )
    aggregation: WeightMode = setting(
        "token-mean", about="How token losses are averaged over the global batch.", formerly="weights"
    )
    constant: float | None = setting(None, above=0, about="The divisor of the loss if loss.aggregation is constant.")
    temperature: float = setting(
        1.0,
        least=1e-6,
        most=1e6,
        about="Temperature of the log-probabilities and of the sampler.",
        fix="give a value from 1e-6 to 1e6",
        resume=BETWEEN,
    )
    load_balancing: float = setting(
        0.0,
        least=0,
        about="Mixture of experts: coefficient of the load-balancing loss over all tokens of a step.",
        formerly="router",
    )
    router_bias: float = setting(
        0.0,
        least=0,
        about="Mixture of experts: how much the router bias changes per step to balance the experts (DeepSeek-V3).",
    )
    advantage: Advantage = setting(
        "grpo",
        about="How advantages are computed: from the rewards of a group, by a critic (gae), by a teacher, or given "
        "in the data.",
        needs=OF_RL,
        resume=STAYS,
    )
    low: float | None = setting(
        None,
        about="Overrides the lower clip bound of the policy loss in use, e.g. loss.clip.low with loss.kind=clip. With "
        "the default, none, nothing is overridden.",
    )
    high: float | None = setting(
        None,
        about="Overrides the upper clip bound of the policy loss in use, e.g. loss.clip.high with loss.kind=clip. With "
        "the default, none, nothing is overridden.",
    )
    dual: float | None = setting(None, about="Overrides loss.clip.dual. With the default, none, nothing is overridden.")
    clip: ClipSettings = field(default_factory=ClipSettings)
    gspo: GSPOSettings = field(default_factory=GSPOSettings)
    cispo: CISPOSettings = field(default_factory=CISPOSettings)
    dpo: DPOSettings = field(default_factory=DPOSettings)
    kto: KTOSettings = field(default_factory=KTOSettings)
    reinforce: ReinforceSettings = field(default_factory=ReinforceSettings)
    old_policy: OldPolicySetting = setting(
        "auto",
        about="Where π_old in the ratio π / π_old comes from. trainer: an extra forward pass. sampler: the sampler. "
        "current: the update itself. auto: current with one update per batch and only token corrections, otherwise "
        "trainer.",
        needs=OF_RL,
        resume=BETWEEN,
    )
    corrections: tuple[str, ...] = setting(
        (),
        about="Corrections of the policy loss for log-probabilities that differ between sampler and trainer.",
        allowed="token_tis, sequence_tis, icepop, sequence_mask, opsm",
        needs=OF_RL,
        resume=BETWEEN,
    )
    token_tis: TokenTISSettings = field(default_factory=TokenTISSettings)
    sequence_tis: SequenceTISSettings = field(default_factory=SequenceTISSettings)
    icepop: IcePopSettings = field(default_factory=IcePopSettings)
    sequence_mask: SequenceMaskSettings = field(default_factory=SequenceMaskSettings)
    opsm: OPSMSettings = field(default_factory=OPSMSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    reward: RewardModelSettings = field(default_factory=RewardModelSettings)
    kl_coefficient: float = setting(
        0.0, least=0, about="Coefficient of the KL term against the reference.", needs=OF_RL, resume=BETWEEN
    )
    kl_estimator: KLEstimator = setting("k3", about="Estimator of the KL divergence.")
    kl_weighting: KLWeighting = setting(
        "none",
        about="The factor of each token's KL estimate. With the value none, the factor is 1. With the value ratio, it "
        "is π / π_old, and the gradient also flows through this factor.",
    )
    entropy_coefficient: float = setting(
        0.0,
        least=-math.inf,
        about="Coefficient of the entropy bonus.",
        fix="give a finite number",
        needs=OF_RL,
    )
    epochs: int = setting(
        1, least=1, most=1000, about="Number of passes over a rollout batch.", needs=EPOCHS_OF_RL, resume=BETWEEN
    )
    mini_batches: int = setting(
        1, least=1, about="Number of optimizer steps per pass over a rollout batch.", needs=EPOCHS_OF_RL, resume=BETWEEN
    )

    skip_zero_gradient: SkipZeroGradient = setting(
        "auto",
        about="auto leaves out samples that cannot change the gradient: all their advantages are 0, and the loss has "
        "no KL, entropy or router term. loss.aggregation still counts them. false computes all samples.",
        allowed="auto, false",
        needs=OF_RL,
        resume=BETWEEN,
    )

    @property
    def command(self) -> str:
        """The training command of this loss, such as `rl`."""
        return self.task.command

    @property
    def task(self) -> type[TaskSettings]:
        """The settings class of the task that the chosen loss belongs to."""
        return TASKS.get(self.kind, PolicySettings)

    @property
    def head(self) -> ModelHead:
        """The kind of output head of the trained model: a language model head, or one scalar for a reward model."""
        return self.task.head

    def settings(self) -> TaskSettings:
        """Return the settings of the loss that `kind` names."""
        if self.kind in TASK_TABLES:
            chosen: TaskSettings = getattr(self, self.kind)
            return chosen
        if self.kind in TASKS:
            return TASKS[self.kind]()
        return self.policy()

    def policy(self) -> PolicySettings:
        """Return the settings of the policy loss of `padfree rl`."""
        return PolicySettings(
            objective=self._objective(),
            old_policy=self._old_policy(),
            corrections=tuple(getattr(self, name) for name in self.corrections),
            kl_coefficient=self.kl_coefficient,
            kl_estimator=self.kl_estimator,
            kl_weighting=self.kl_weighting,
            entropy_coefficient=self.entropy_coefficient,
        )

    def _old_policy(self) -> OldPolicy:
        """Return `loss.old_policy`, with `auto` replaced by `current` or `trainer`.

        `current` avoids the additional forward pass of `trainer`. It is chosen if each batch is used for a single
        update, and all corrections apply to single tokens.
        """
        if self.old_policy != "auto":
            return self.old_policy
        by_token = all(isinstance(getattr(self, name), TOKEN_CORRECTIONS) for name in self.corrections)
        return "current" if self.epochs == self.mini_batches == 1 and by_token else "trainer"

    def _objective(self) -> Objective:
        if is_path(self.kind):
            return CustomObjective(path=self.kind)
        chosen: Objective = getattr(self, self.kind)
        given = {name: value for name in BOUNDS if (value := getattr(self, name)) is not None}
        return replace(chosen, **given)

    def needs_sampler_logprobs(self) -> bool:
        """Whether the loss uses the log-probabilities that the sampler reported."""
        return self.task is PolicySettings and self.policy().needs_sampler_logprobs

    def __post_init__(self) -> None:
        self._check_kind()
        check_table(self, "loss.")
        self._check_weights()
        self._check_bounds()
        self._check_corrections()
        fix = "give auto, which leaves out samples whose gradient is 0, or false"
        need(self.skip_zero_gradient is not True, "loss.skip_zero_gradient", True, fix)
        if self.task is not PolicySettings:
            fix = f"choose another value: {self.task.title} has no groups of samples"
            need(self.aggregation != "group-mean", "loss.aggregation", self.aggregation, fix)
        for name, table in TASK_TABLES.items():
            for entry in fields(table) if self.kind != name else ():
                value = getattr(getattr(self, name), entry.name)
                fix = f"leave it out, or set loss.kind={name}"
                need(value == entry.default, f"loss.{name}.{entry.name}", value, fix)
        self.settings()  # checks its own rules

    def _check_kind(self) -> None:
        known = (*(name for name in TASKS if name != "rl"), *OBJECTIVES)
        if self.kind in known or is_path(self.kind):
            return
        near = closest(self.kind, known)
        meant = "" if near is None else f"did you mean {near!r}? "
        need(False, "loss.kind", self.kind, f"{meant}give one of {', '.join(known)}, or 'module:function'")

    def _check_weights(self) -> None:
        constant = self.constant
        if self.aggregation == "constant":
            fix = "set the number that divides the loss, as in loss.constant=4096"
            need(constant is not None, "loss.constant", None, fix)
        else:
            fix = f"set loss.constant=none: loss.aggregation {self.aggregation!r} does not use it"
            need(constant is None, "loss.constant", constant, fix)

    def _check_bounds(self) -> None:
        kind = OBJECTIVES.get(self.kind)
        own = () if kind is None else tuple(entry.name for entry in fields(kind))
        for name in BOUNDS:
            value = getattr(self, name)
            fix = f"set loss.{name}=none: loss.kind {self.kind!r} does not have this bound"
            need(value is None or name in own, f"loss.{name}", value, fix)
            if kind is not None and value is not None:
                check_bounds(kind, name, value, f"loss.{name}")

    def _check_corrections(self) -> None:
        names = list(self.corrections)
        fix = f"give a list of names among {', '.join(CORRECTIONS)}"
        need(set(names) <= CORRECTIONS.keys(), "loss.corrections", names, fix)
        for name, kind in CORRECTIONS.items():
            for entry in fields(kind):
                value = getattr(getattr(self, name), entry.name)
                asked = value == entry.default or name in names
                need(asked, f"loss.{name}.{entry.name}", value, f"leave it out, or add {name!r} to loss.corrections")


Table = TypeVar("Table", Objective, Correction, TaskSettings)


def _tables(kind: type[Table]) -> dict[str, type[Table]]:
    """Return the fields of `LossConfig` whose type is a subclass of `kind`, as {name of the field: its type}."""
    factories: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(LossConfig)}
    return {name: made for name, made in factories.items() if isinstance(made, type) and issubclass(made, kind)}


BOUNDS = ("low", "high", "dual")
OBJECTIVES = _tables(Objective)
CORRECTIONS = _tables(Correction)
TASK_TABLES = _tables(TaskSettings)
TASKS: dict[str, type[TaskSettings]] = {"sft": SFTSettings, **TASK_TABLES, "rl": PolicySettings}
"""The settings class of every task, by the name of its training command."""
