"""The settings of every loss: plain data, checked once, without torch.

    PolicySettings    objective      what is done with the ratio              ClipSettings | GSPOSettings | ...
                      corrections    sampler against trainer, in this order   TokenTISSettings | IcePopSettings | ...
                      kl, entropy    terms added to the loss

A training command (sft, dpo, ...) is a task, and the settings of its loss are a `TaskSettings`. The class variables of
a `TaskSettings` describe the command without torch: its help text, how many samples a row counts for, its evaluation
metrics, and the other models that it uses. The file of the same name in `padfree.tasks` implements the command.

A recipe holds these same objects (`padfree.config.loss`), so messages name the settings of a recipe: `loss.clip.low`.
The formula of an objective is in `padfree.losses.objectives`, in the file named after its `kind`. The other formulas
are in `padfree.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from padfree.choices import (
    DivergenceKind,
    KLEstimator,
    KLWeighting,
    ModelHead,
    OldPolicy,
    PreferenceLoss,
    SequenceStatistic,
)
from padfree.config.setting import check_table, need_of, setting
from padfree.errors import UserError, check_choice, need

# Tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    """The settings of a task's loss; the class variables describe the task."""

    command: ClassVar[str]  # `padfree COMMAND`, `padfree.COMMAND(...)`, and the file of `padfree.tasks`
    help: ClassVar[str]
    title: ClassVar[str]  # the name of the task in messages
    kind: ClassVar[str]  # the default of `loss.kind`
    eval_metrics: ClassVar[tuple[str, ...]]  # metrics on held-out data, written as `eval/NAME`
    head: ClassVar[ModelHead] = "tokens"  # the head of the trained model
    group_size: ClassVar[int] = 1  # number of samples in `batch.samples` that a row of the data counts for
    in_rows: ClassVar[bool] = True  # a batch consists of rows of the data, not of groups of rollouts
    turns: ClassVar[bool] = False  # a row may become several samples that count as one, and `data.loss_on` is read
    weighs_tokens: ClassVar[bool] = False  # the loss reads `loss.aggregation`; otherwise it weighs whole samples
    samples_responses: ClassVar[bool] = False  # the model may sample its training data itself (`[rollout]`)
    has_teacher: ClassVar[bool] = False
    has_reference: ClassVar[bool] = False  # the loss itself needs a reference, not only a KL term
    may_precompute: ClassVar[bool] = False  # `reference.precompute` is supported

    @property
    def needs_reference(self) -> bool:
        """Whether the loss with these settings uses a reference model."""
        return self.has_reference

    def check_run(self, config: Any) -> None:
        """Refuse settings of other sections that this task does not support; `config` is a `Config`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTSettings(TaskSettings):
    """Negative log-likelihood."""

    command: ClassVar[str] = "sft"
    help: ClassVar[str] = "fine-tune on chat, prompt/response or plain text"
    title: ClassVar[str] = "SFT"
    kind: ClassVar[str] = "sft"
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
        about="The teacher's share in the mixture of jsd.",
        fix="give a share above 0 and below 1",
        needs=need_of("divergence", "jsd", fix="leave it out, or set loss.distill.divergence=jsd"),
    )
    top_k: int | None = setting(
        None,
        least=1,
        about="Compare the teacher's k most probable tokens, and all other tokens as one outcome; none compares all "
        "tokens.",
        fix="give 1 or more, or leave it out",
    )

    def __post_init__(self) -> None:
        check_choice("loss.distill.divergence", self.divergence, DivergenceKind)
        check_table(self, "loss.distill.")


# Objectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The policy loss of a token as a function of its ratio and advantage. `kind` is its name in a recipe."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_table(self, f"loss.{self.kind}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings(Objective):
    """Clipped ratio (PPO, GRPO): the ratio is clipped to [1 - low, 1 + high]; `dual` bounds it where A < 0."""

    kind: ClassVar[str] = "clip"
    low: float = setting(0.2, least=0, most=1, about="The ratio is clipped to at least 1 - low.", fix="give 0 to 1")
    high: float = setting(
        0.2, least=0, most=math.inf, about="The ratio is clipped to at most 1 + high.", fix="give 0 or more"
    )
    dual: float | None = setting(
        None,
        above=1,
        most=math.inf,
        about="Dual clip: upper bound of the ratio for negative advantages; none does not bound it.",
        fix="give more than 1, or leave it out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOSettings(Objective):
    """Clipped sequence ratio (GSPO). The defaults are the paper's; a mean over tokens varies far less than a token."""

    kind: ClassVar[str] = "gspo"
    low: float = setting(
        3e-4, least=0, most=1, about="The sequence ratio is clipped to at least 1 - low.", fix="give 0 to 1"
    )
    high: float = setting(
        4e-4, least=0, most=math.inf, about="The sequence ratio is clipped to at most 1 + high.", fix="give 0 or more"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOSettings(Objective):
    """Clipped importance weight (CISPO), in [1 - low, 1 + high]."""

    kind: ClassVar[str] = "cispo"
    low: float | None = setting(
        None,
        least=0,
        most=1,
        about="The importance weight is clipped to at least 1 - low; none has no lower bound.",
        fix="give 0 to 1, or leave it out for no lower bound",
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
    """A factor on the objective of a token. `kind` is its name in a recipe."""

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
        need(right, f"loss.{self.kind}", bounds, "give 0 <= low <= 1 <= high, and low < high")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTISSettings(BandCorrection):
    """Truncated importance sampling per token: the weight is clamped to [low, high]."""

    kind: ClassVar[str] = "token_tis"
    low: float = setting(0.0, about="Lower bound of a token's importance weight.", allowed=LOW_BAND)
    high: float = setting(2.0, about="Upper bound of a token's importance weight.", allowed=HIGH_BAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISSettings(BandCorrection):
    """Truncated importance sampling per sequence: the weight is clamped to [low, high]."""

    kind: ClassVar[str] = "sequence_tis"
    low: float = setting(0.0, about="Lower bound of a sequence's importance weight.", allowed=LOW_BAND)
    high: float = setting(2.0, about="Upper bound of a sequence's importance weight.", allowed=HIGH_BAND)
    geometric: bool = setting(False, about="Use the geometric mean of the token weights instead of their product.")


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopSettings(BandCorrection):
    """IcePop: a token's importance weight if it is inside [low, high], else 0."""

    kind: ClassVar[str] = "icepop"
    low: float = setting(0.5, about="Tokens with a smaller importance weight are masked.", allowed=LOW_BAND)
    high: float = setting(5.0, about="Tokens with a larger importance weight are masked.", allowed=HIGH_BAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskSettings(BandCorrection):
    """Mask a sequence whose importance ratio is outside [low, high]; `losses.corrections` has the statistics."""

    kind: ClassVar[str] = "sequence_mask"
    low: float = setting(0.5, about="Sequences with a smaller importance ratio are masked.", allowed=LOW_BAND)
    high: float = setting(2.0, about="Sequences with a larger importance ratio are masked.", allowed=HIGH_BAND)
    statistic: SequenceStatistic = setting(
        "mean", about="How the ratio of a sequence is computed from its tokens; token masks if any token is outside."
    )

    def __post_init__(self) -> None:
        # `super()` without arguments fails here: `slots=True` creates a new class.
        BandCorrection.__post_init__(self)
        check_choice("loss.sequence_mask.statistic", self.statistic, SequenceStatistic)


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMSettings(Correction):
    """Off-policy sequence masking: mask a sequence with A < 0 if its mean log π_old - log π exceeds `delta`."""

    kind: ClassVar[str] = "opsm"
    compares_sampler: ClassVar[bool] = False
    delta: float = setting(
        1e-4,
        least=0,
        most=math.inf,
        about="Sequences with a negative advantage are masked if their mean log π_old - log π exceeds this.",
        fix="give 0 or more",
    )


TOKEN_CORRECTIONS = (TokenTISSettings, IcePopSettings)
"""Corrections whose factor for a token depends only on that token."""


# Policy losses


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings(TaskSettings):
    """A policy loss: the objective, its corrections, and the terms added to it.

    `old_policy` chooses the log-probabilities in the denominator of the ratio:

        trainer    the trainer's own before the update (`old_logprobs`)
        sampler    those that the sampler reported (`rollout_logprobs`)
        current    the current ones: every batch serves one step, the ratio is 1, its gradient is that of the
                   log-probability, and no forward pass is needed before the update

    With `kl_weighting` "ratio" the KL estimate of a token is multiplied by its ratio to the old policy. The ratio is
    differentiable, so it changes the gradient even where its value is 1.
    """

    command: ClassVar[str] = "rl"
    help: ClassVar[str] = "update a policy on rollout files, or on its own responses"
    title: ClassVar[str] = "RL"
    kind: ClassVar[str] = "clip"
    eval_metrics: ClassVar[tuple[str, ...]] = ("reward", "pass@1", "pass@k", "response_length")
    in_rows: ClassVar[bool] = False
    weighs_tokens: ClassVar[bool] = True
    samples_responses: ClassVar[bool] = True
    objective: Objective = ClipSettings()
    old_policy: OldPolicy = "trainer"
    corrections: tuple[Correction, ...] = ()
    kl_coefficient: float = setting(0.0, least=0, fix="give 0 or more")
    kl_estimator: KLEstimator = "k3"
    kl_weighting: KLWeighting = "none"
    entropy_coefficient: float = setting(0.0, least=-math.inf, fix="give a finite number")

    def __post_init__(self) -> None:
        check_choice("loss.old_policy", self.old_policy, OldPolicy)
        check_choice("loss.kl_estimator", self.kl_estimator, KLEstimator)
        check_choice("loss.kl_weighting", self.kl_weighting, KLWeighting)
        check_table(self, "loss.")
        objective, corrections = self._untyped()
        if not isinstance(objective, Objective):
            raise UserError("objective", "", "give an objective such as ClipSettings()", value=objective)
        if not isinstance(corrections, tuple) or not all(isinstance(given, Correction) for given in corrections):
            raise UserError("corrections", "", "give a tuple such as (TokenTISSettings(),)", value=corrections)
        kinds = [correction.kind for correction in self.corrections]
        need(len(set(kinds)) == len(kinds), "loss.corrections", kinds, "name each correction once")
        if self.old_policy == "sampler":
            alone = not any(correction.compares_sampler for correction in self.corrections)
            fix = "set loss.old_policy=trainer: with 'sampler' the corrections would compare the sampler with itself"
            need(alone, "loss.corrections", kinds, fix)
        if self.old_policy == "current":
            fix = "set loss.old_policy=trainer: with 'current' opsm never masks a sequence"
            need(OPSMSettings.kind not in kinds, "loss.corrections", kinds, fix)

    def check_run(self, config: Any) -> None:
        fix = "set batch.samples=64 and batch.tokens=none: RL takes whole groups of samples"
        need(config.batch.samples is not None, "batch.samples", None, fix)

    def _untyped(self) -> tuple[object, object]:
        """Objective and corrections with unknown types: a caller may have passed anything."""
        return self.objective, self.corrections

    @property
    def weighs_kl(self) -> bool:
        """Whether the KL term is multiplied by the ratio to the old policy."""
        return self.kl_coefficient > 0 and self.kl_weighting == "ratio"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the loss uses the log-probabilities that the sampler reported."""
        return self.old_policy == "sampler" or any(correction.compares_sampler for correction in self.corrections)


# Losses of pairs and of labelled answers, and of value and reward models

NO_SUCH = "leave it out: this loss.dpo.variant does not use it"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSettings:
    """Squared error of a value model. `clip` limits the change of a value (None: unlimited)."""

    clip: float | None = setting(0.2, least=0, most=math.inf, fix="give 0 or more, or None to switch it off")

    def __post_init__(self) -> None:
        check_table(self, "value ")


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOSettings(TaskSettings):
    """Direct preference optimisation (DPO) and its variants; `padfree.losses.preference` has the formulas."""

    command: ClassVar[str] = "dpo"
    help: ClassVar[str] = "train on pairs of answers: DPO, IPO, hinge, SimPO, ORPO"
    title: ClassVar[str] = "DPO"
    kind: ClassVar[str] = "dpo"
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
        about="Average log-probabilities over the tokens of an answer instead of summing them; none averages for ipo, "
        "simpo and orpo.",
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
        """The value of `normalise`, or the default of this loss if it is None."""
        return self.variant in ("ipo", "simpo", "orpo") if self.normalise is None else self.normalise


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOSettings(TaskSettings):
    """KTO on single answers that are desirable or undesirable; `padfree.tasks.kto` has the formula."""

    command: ClassVar[str] = "kto"
    help: ClassVar[str] = "train on single answers with a label, desirable or not: KTO"
    title: ClassVar[str] = "KTO"
    kind: ClassVar[str] = "kto"
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
    """Pairwise loss of a reward model: the chosen answer should score at least `margin` above the rejected one."""

    command: ClassVar[str] = "reward"
    help: ClassVar[str] = "train a reward model on pairs of answers"
    title: ClassVar[str] = "a reward model"
    kind: ClassVar[str] = "reward"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    head: ClassVar[ModelHead] = "scalar"
    group_size: ClassVar[int] = 2
    margin: float = setting(0.0, least=0, about="Margin that is added to the margins of the rows.")

    def __post_init__(self) -> None:
        check_table(self, "loss.reward.")

    def check_run(self, config: Any) -> None:
        check_pairs(config)
        temperature = config.loss.temperature
        need(temperature == 1.0, "loss.temperature", temperature, "leave it out: a reward model has no logits")
        alone = config.lora.rank > 0 and config.lora.export == "adapter"
        fix = "set lora.export=merged: an adapter folder would lack the trained head of the reward model"
        need(not alone, "lora.export", config.lora.export, fix)


def check_answers(config: Any) -> None:
    """Refuse settings that a loss on whole answers does not support."""
    aggregation = config.loss.aggregation
    need(aggregation == "token-mean", "loss.aggregation", aggregation, "leave it out: all answers have equal weight")


def check_pairs(config: Any) -> None:
    """Refuse settings that pairs of answers do not support."""
    fix = "give an even number: it counts answers, two per pair"
    for name, count in (("batch.samples", config.batch.samples), ("eval.samples", config.eval.samples)):
        need(count is None or count % 2 == 0, name, count, fix)
    check_answers(config)
