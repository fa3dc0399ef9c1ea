"""The settings of the loss.

    [loss]                   [loss.clip]        [loss.gspo]       a table for each kind of loss and each correction:
    kind = "clip"            high = 0.28        low = 1e-4        the losses' own settings (`loss_settings`)
    settings() -> PolicySettings(objective=ClipSettings(high=0.28), ...)

Bounds belong to a kind of loss: `[loss.clip]` is not used by gspo, so that `loss.kind=gspo` alone is a whole change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from padfree.config.choices import (
    Advantage,
    KLEstimator,
    KLWeighting,
    ModelHead,
    OldPolicy,
    OldPolicySetting,
    WeightMode,
)
from padfree.config.functions import is_path
from padfree.config.loss_settings import (
    TOKEN_CORRECTIONS,
    CISPOSettings,
    ClipSettings,
    Correction,
    CustomObjective,
    DistillSettings,
    DPOSettings,
    GSPOSettings,
    IcePopSettings,
    KTOSettings,
    Objective,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    RewardModelSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    SFTSettings,
    TaskSettings,
    TokenTISSettings,
)
from padfree.config.setting import BETWEEN, STAYS, check_bounds, check_table, need_of, setting
from padfree.errors import closest, need

OF_RL = need_of("command", "rl", fix="leave it out, only policy losses have such a term")
EPOCHS_OF_RL = need_of("command", "rl", fix="leave it out, other losses than those of RL have data.epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised. Everything below `router_bias` is for RL.

    The fields that are an `Objective` are the kinds of policy loss, and those that are a `Correction` the corrections:
    a line here adds one. Those that are `TaskSettings` are the tasks besides SFT and RL. `low`, `high` and `dual` are
    for the kind that is chosen, whatever its table says.
    """

    kind: str = setting(
        "sft", resume="may change within RL"
    )  # or one of the objectives below, or the user's own as module:function
    aggregation: WeightMode = setting("token-mean", formerly="weights")
    constant: float | None = setting(None, above=0)  # the divisor of aggregation = "constant"
    temperature: float = setting(1.0, least=1e-6, most=1e6, fix="give more than 0, 1e-6 to 1e6", resume=BETWEEN)
    load_balancing: float = setting(
        0.0, least=0, formerly="router"
    )  # coefficient of the experts' load-balancing loss, over all tokens of a step
    router_bias: float = setting(
        0.0, least=0
    )  # what the bias by which experts are chosen moves in a step, as in DeepSeek-V3
    advantage: Advantage = setting("grpo", needs=OF_RL, resume=STAYS)
    low: float | None = None
    high: float | None = None
    dual: float | None = None
    clip: ClipSettings = field(default_factory=ClipSettings)
    gspo: GSPOSettings = field(default_factory=GSPOSettings)
    cispo: CISPOSettings = field(default_factory=CISPOSettings)
    dpo: DPOSettings = field(default_factory=DPOSettings)
    kto: KTOSettings = field(default_factory=KTOSettings)
    reinforce: ReinforceSettings = field(default_factory=ReinforceSettings)
    old_policy: OldPolicySetting = setting("auto", needs=OF_RL, resume=BETWEEN)
    corrections: tuple[str, ...] = setting((), needs=OF_RL, resume=BETWEEN)  # names of those below
    token_tis: TokenTISSettings = field(default_factory=TokenTISSettings)
    sequence_tis: SequenceTISSettings = field(default_factory=SequenceTISSettings)
    icepop: IcePopSettings = field(default_factory=IcePopSettings)
    sequence_mask: SequenceMaskSettings = field(default_factory=SequenceMaskSettings)
    opsm: OPSMSettings = field(default_factory=OPSMSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    reward: RewardModelSettings = field(default_factory=RewardModelSettings)
    kl_coefficient: float = setting(0.0, least=0, needs=OF_RL, resume=BETWEEN)
    kl_estimator: KLEstimator = "k3"
    kl_weighting: KLWeighting = "none"  # ratio: the estimate times π / π_old, with its gradient
    entropy_coefficient: float = setting(0.0, least=-math.inf, fix="give a finite number", needs=OF_RL)
    epochs: int = setting(1, least=1, needs=EPOCHS_OF_RL, resume=BETWEEN)  # passes over a rollout batch
    mini_batches: int = setting(1, least=1, needs=EPOCHS_OF_RL, resume=BETWEEN)  # optimizer steps in a pass

    @property
    def command(self) -> str:
        """The command that runs this kind of loss, which decides what its data are."""
        return self.task.command

    @property
    def task(self) -> type[TaskSettings]:
        """What the command is."""
        return TASKS.get(self.kind, PolicySettings)

    @property
    def head(self) -> ModelHead:
        """Of the model that is trained."""
        return self.task.head

    def settings(self) -> TaskSettings:
        """The loss as `padfree.tasks` computes it."""
        if self.kind in TASK_TABLES:
            chosen: TaskSettings = getattr(self, self.kind)
            return chosen
        if self.kind in TASKS:
            return TASKS[self.kind]()
        return self.policy()

    def policy(self) -> PolicySettings:
        """The loss of `padfree rl`."""
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
        """`auto`: the current policy where every batch serves one update, for it is the trainer's from before then.

        That saves a pass over the batch. Corrections of whole sequences need the log-probabilities beforehand.
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
        """Whether the log-probabilities that the sampler reported are part of the loss."""
        return self.task is PolicySettings and self.policy().needs_sampler_logprobs

    def __post_init__(self) -> None:
        self._check_kind()
        check_table(self, "loss.")
        self._check_weights()
        self._check_bounds()
        self._check_corrections()
        if self.task is not PolicySettings:
            fix = f"choose another, {self.task.title} has no groups"
            need(self.aggregation != "group-mean", "loss.aggregation", self.aggregation, fix)
        for name, table in TASK_TABLES.items():
            for entry in fields(table) if self.kind != name else ():
                value = getattr(getattr(self, name), entry.name)
                cure = f"leave it out, or set loss.kind={name}"
                need(value == entry.default, f"loss.{name}.{entry.name}", value, cure)
        self.settings()  # has rules of its own

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
            need(constant is not None, "loss.constant", None, "give it, as in loss.constant=4096: weights 'constant'")
        else:
            cure = f"set loss.constant=none, loss.aggregation {self.aggregation!r} has no divisor of its own"
            need(constant is None, "loss.constant", constant, cure)

    def _check_bounds(self) -> None:
        kind = OBJECTIVES.get(self.kind)
        own = () if kind is None else tuple(entry.name for entry in fields(kind))
        for name in BOUNDS:
            value = getattr(self, name)
            cure = f"set loss.{name}=none, loss.kind {self.kind!r} has no such bound"
            need(value is None or name in own, f"loss.{name}", value, cure)
            if kind is not None and value is not None:
                check_bounds(kind, name, value, f"loss.{name}")

    def _check_corrections(self) -> None:
        names = list(self.corrections)
        cure = f"give a list, each one of {', '.join(CORRECTIONS)}"
        need(set(names) <= CORRECTIONS.keys(), "loss.corrections", names, cure)
        for name, kind in CORRECTIONS.items():
            for entry in fields(kind):
                value = getattr(getattr(self, name), entry.name)
                asked = value == entry.default or name in names
                need(asked, f"loss.{name}.{entry.name}", value, f"leave it out, or add {name!r} to loss.corrections")


Table = TypeVar("Table", Objective, Correction, TaskSettings)


def _tables(kind: type[Table]) -> dict[str, type[Table]]:
    """The fields of `LossConfig` that hold settings of this kind, by name."""
    factories: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(LossConfig)}
    return {name: made for name, made in factories.items() if isinstance(made, type) and issubclass(made, kind)}


BOUNDS = ("low", "high", "dual")
OBJECTIVES = _tables(Objective)
CORRECTIONS = _tables(Correction)
TASK_TABLES = _tables(TaskSettings)
TASKS: dict[str, type[TaskSettings]] = {"sft": SFTSettings, **TASK_TABLES, "rl": PolicySettings}
"""Every command of training."""
