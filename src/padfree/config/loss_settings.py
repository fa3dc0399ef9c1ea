"""The settings of every loss except policy losses: plain data, without torch.

Each training command (sft, dpo, ...) is a task and has a subclass of `TaskSettings`. The fields of the subclass are the
settings of the loss, e.g. `DPOSettings.beta` for `loss.dpo.beta`. The class variables hold the help text of the
command, its metrics and so on. The module `padfree.tasks.COMMAND` implements the command. The formulas are in
`padfree.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from padfree.choices import SAMPLING_ENGINES, DivergenceKind, ModelHead, PreferenceLoss
from padfree.config.functions import model_of
from padfree.config.packaged import is_packaged
from padfree.config.setting import check_table, need_of, setting
from padfree.errors import check_choice, need


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """The settings of the loss of a task (a training command). The class variables describe the task."""

    command: ClassVar[str]  # `padfree COMMAND`, `padfree.COMMAND(...)`, and the file of `padfree.tasks`
    help: ClassVar[str]
    title: ClassVar[str]  # the name of the task in messages
    kind: ClassVar[str]  # the default of `loss.kind`
    eval_metrics: ClassVar[tuple[str, ...]]  # metrics on held-out data, written as `eval/NAME`
    data_format: ClassVar[str]  # the name of the schema in `padfree.data.formats.SCHEMAS` that data files must have
    head: ClassVar[ModelHead] = "tokens"  # the head of the trained model
    group_size: ClassVar[int] = 1  # how many samples of `batch.samples` one row of the data counts as
    in_rows: ClassVar[bool] = True  # a batch consists of rows of the data, not of groups of rollouts
    turns: ClassVar[bool] = False  # a row may give several samples that count as one; `data.loss_on` applies
    weighs_tokens: ClassVar[bool] = False  # `loss.aggregation` weighs tokens; otherwise the loss weighs whole samples
    samples_responses: ClassVar[bool] = False  # the model may sample its training data itself (`[rollout]`)
    has_teacher: ClassVar[bool] = False
    has_reference: ClassVar[bool] = False  # the loss compares with a reference model even without a KL term
    may_precompute: ClassVar[bool] = False  # `reference.precompute` is supported

    @property
    def needs_reference(self) -> bool:
        """Whether the loss with these settings compares the model with a reference model."""
        return self.has_reference

    def check_run(self, config: Any) -> None:
        """Raise a `UserError` if `config` (the recipe) has settings that this loss does not support."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTSettings(TaskSettings):
    """The settings of SFT, whose loss is the negative log-likelihood."""

    command: ClassVar[str] = "sft"
    help: ClassVar[str] = "fine-tune on chat, prompt/response or plain text"
    title: ClassVar[str] = "SFT"
    kind: ClassVar[str] = "sft"
    data_format: ClassVar[str] = "sft"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    turns: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillSettings(TaskSettings):
    """Distillation: divergence between teacher and student; `padfree.head.divergence` has the formulas."""

    command: ClassVar[str] = "distill"
    help: ClassVar[str] = "learn the distributions of a teacher"
    title: ClassVar[str] = "distillation"
    kind: ClassVar[str] = "distill"
    data_format: ClassVar[str] = "sft"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    turns: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True
    samples_responses: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = True

    divergence: DivergenceKind = setting("forward-kl", about="The divergence between teacher and student.")
    beta: float = setting(
        0.5,
        above=0,
        below=1,
        about="With divergence jsd: the share of the teacher in the mixture of teacher and student.",
        fix="give a number above 0 and below 1",
        needs=need_of("divergence", "jsd", fix="leave it out, or set loss.distill.divergence=jsd"),
    )
    top_k: int | None = setting(
        None,
        least=1,
        about="Number of the teacher's most probable tokens that are compared one by one; all other tokens count as "
        "one outcome. With the default, none, all tokens are compared one by one.",
        fix="give a number of tokens, 1 or more, or leave this setting out",
    )

    def __post_init__(self) -> None:
        check_choice("loss.distill.divergence", self.divergence, DivergenceKind)
        check_table(self, "loss.distill.")

    def check_run(self, config: Any) -> None:
        if config.rollout.source is not None:
            check_sampled_images(config)


# Losses on preference pairs and on labelled answers, and the losses of value models and reward models

NO_SUCH = "leave it out: this loss.dpo.variant does not use it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSettings:
    """The squared error of a value model. `clip`: the maximum change of a value in one update; None: no limit."""

    clip: float | None = setting(0.2, least=0, most=math.inf, fix="give 0 or more, or None for no clipping")

    def __post_init__(self) -> None:
        check_table(self, "value ")


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOSettings(TaskSettings):
    """Direct preference optimisation (DPO) and its variants; `padfree.losses.preference` has the formulas."""

    command: ClassVar[str] = "dpo"
    help: ClassVar[str] = "train on pairs of answers: DPO, IPO, hinge, SimPO, ORPO"
    title: ClassVar[str] = "DPO"
    kind: ClassVar[str] = "dpo"
    data_format: ClassVar[str] = "pairs"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    group_size: ClassVar[int] = 2
    has_reference: ClassVar[bool] = True
    may_precompute: ClassVar[bool] = True
    variant: PreferenceLoss = setting("sigmoid", about="The preference loss; sigmoid is DPO.")
    beta: float = setting(
        0.1, above=0, about="Scale of the log-ratio; SimPO needs about 2.", fix="give a positive number"
    )
    label_smoothing: float = setting(
        0.0,
        least=0,
        below=0.5,
        about="The assumed share of wrong preference labels.",
        needs=need_of("variant", "sigmoid", "simpo", fix=NO_SUCH),
    )
    gamma: float = setting(
        0.0, least=0, about="The target margin of SimPO.", needs=need_of("variant", "simpo", fix=NO_SUCH)
    )
    normalise: bool | None = setting(
        None,
        about="Divide the log-probability of an answer by its number of tokens. The default, none, divides only for "
        "ipo, simpo and orpo.",
    )

    def __post_init__(self) -> None:
        check_choice("loss.dpo.variant", self.variant, PreferenceLoss)
        check_table(self, "loss.dpo.")

    @property
    def needs_reference(self) -> bool:
        return self.variant in ("sigmoid", "hinge", "ipo")

    def check_run(self, config: Any) -> None:
        check_pairs(config)
        if not self.needs_reference:
            fix = f"leave it out: loss.dpo.variant {self.variant!r} does not use a reference"
            need(config.reference.path is None, "reference.path", config.reference.path, fix)
            need(not config.reference.precompute, "reference.precompute", True, fix)

    @property
    def means(self) -> bool:
        """Whether the log-probability of an answer is the mean over its tokens (the sum otherwise).

        The setting `normalise` decides. If `normalise` is None, the variant of the loss decides.
        """
        return self.variant in ("ipo", "simpo", "orpo") if self.normalise is None else self.normalise


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOSettings(TaskSettings):
    """KTO: single answers that are desirable or undesirable."""

    command: ClassVar[str] = "kto"
    help: ClassVar[str] = "train on single answers with a label, desirable or not: KTO"
    title: ClassVar[str] = "KTO"
    kind: ClassVar[str] = "kto"
    data_format: ClassVar[str] = "labelled"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "kl", "margin")
    has_reference: ClassVar[bool] = True
    beta: float = setting(0.1, above=0, about="Scale of the log-ratio.", fix="give a positive number")
    desirable_weight: float = setting(
        1.0, least=0, about="Weight of desirable answers; raise it if they are the minority."
    )
    undesirable_weight: float = setting(
        1.0, least=0, about="Weight of undesirable answers; raise it if they are the minority."
    )

    def __post_init__(self) -> None:
        check_table(self, "loss.kto.")

    def check_run(self, config: Any) -> None:
        check_answers(config)
        samples = config.batch.samples
        fix = "give 2 or more: the KL term pairs each prompt with the answer of another row"
        need(samples is None or samples >= 2, "batch.samples", samples, fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings(TaskSettings):
    """Loss of a reward model: the chosen answer should score at least `margin` above the rejected one."""

    command: ClassVar[str] = "reward"
    help: ClassVar[str] = "train a reward model on pairs of answers"
    title: ClassVar[str] = "a reward model"
    kind: ClassVar[str] = "reward"
    data_format: ClassVar[str] = "rewards"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    head: ClassVar[ModelHead] = "scalar"
    group_size: ClassVar[int] = 2
    margin: float = setting(
        0.0,
        least=0,
        about="Margin by which the score of the chosen answer should exceed that of the rejected answer. If a data row "
        "has a margin, the two margins are added.",
    )

    def __post_init__(self) -> None:
        check_table(self, "loss.reward.")

    def check_run(self, config: Any) -> None:
        check_pairs(config)
        temperature = config.loss.temperature
        fix = "leave it out: a reward model has no logits to divide by a temperature"
        need(temperature == 1.0, "loss.temperature", temperature, fix)
        alone = config.lora.rank > 0 and config.lora.export == "adapter"
        fix = "set lora.export=merged: an adapter folder would lack the trained head of the reward model"
        need(not alone, "lora.export", config.lora.export, fix)


def check_sampled_images(config: Any) -> None:
    """Raise a `UserError` if the run samples responses to images, but other settings make this impossible."""
    rollout = config.rollout
    if not config.model.vision or rollout.source is None:
        return
    fix = (
        "set model.vision=false, or rollout.environment to your own function: agents and packaged environments get "
        "text only"
    )
    own = rollout.environment is None or not is_packaged(rollout.environment)
    need(own and not rollout.agent, "model.vision", True, fix)
    fix = "set rollout.engine=in_process or vllm, the engines that sample responses to images, or model.vision=false"
    need(rollout.engine in SAMPLING_ENGINES, "rollout.engine", rollout.engine, fix)
    fix = "set model.vision=false, or a function as rollout.reward: in RL, reward models read text"
    need(model_of(rollout.reward) is None, "rollout.reward", rollout.reward, fix)


def check_answers(config: Any) -> None:
    """Raise a `UserError` for settings that a loss on whole answers, such as KTO, does not support."""
    aggregation = config.loss.aggregation
    fix = "leave it out: this loss gives all answers equal weight"
    need(aggregation == "token-mean", "loss.aggregation", aggregation, fix)


def check_pairs(config: Any) -> None:
    """Raise a `UserError` for settings that a loss on pairs of answers, such as DPO, does not support."""
    fix = "give an even number: it counts answers, two per pair"
    for name, count in (("batch.samples", config.batch.samples), ("eval.samples", config.eval.samples)):
        need(count is None or count % 2 == 0, name, count, fix)
    check_answers(config)
