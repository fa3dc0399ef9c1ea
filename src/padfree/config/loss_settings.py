"""The settings of every loss: plain data, checked once, without torch.

    PolicySettings    objective      what is done with the ratio          ClipSettings | GSPOSettings | ...
                      corrections    sampler against trainer, in a row    TokenTISSettings | IcePopSettings | ...
                      kl, entropy    added to the loss

A command of training (sft, dpo, ...) is a task. The settings of its loss are a `TaskSettings`. Its class variables say
what the rest of padfree must know of the command without torch: its help line, how its rows are counted, what its
evaluation measures, which other models it asks. What the command does is in the file of `padfree.tasks` of that name.

A recipe holds these same objects (`padfree.config.loss`), so messages name what stands in a recipe: `loss.clip.low`.
The formula of an objective is in the file of `padfree.losses.objectives` that has its `kind` for a name; those of the
others are in `padfree.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from padfree.config.choices import (
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
    """The settings of a task's loss, and what the task is."""

    command: ClassVar[str]  # `padfree COMMAND`, `padfree.COMMAND(...)`, and the file of `padfree.tasks`
    help: ClassVar[str]
    title: ClassVar[str]  # its name in messages
    kind: ClassVar[str]  # `loss.kind` where nobody gives one
    eval_metrics: ClassVar[tuple[str, ...]]  # what held-out data measures, as `eval/NAME`
    head: ClassVar[ModelHead] = "tokens"  # of the model that is trained
    group_size: ClassVar[int] = 1  # how many samples of `batch.samples` a row of the data counts for
    in_rows: ClassVar[bool] = True  # a batch takes rows of the data, not groups of rollouts
    turns: ClassVar[bool] = False  # a row may become several samples that count as one, and `data.loss_on` is read
    weighs_tokens: ClassVar[bool] = False  # `loss.aggregation` is read; else the loss weighs whole samples
    samples_responses: ClassVar[bool] = False  # the model may write what it is trained on (`[rollout]`)
    has_teacher: ClassVar[bool] = False
    has_reference: ClassVar[bool] = False  # by itself, and not for a KL term
    may_precompute: ClassVar[bool] = False  # `reference.precompute`

    @property
    def needs_reference(self) -> bool:
        """Whether these settings compare with a reference model."""
        return self.has_reference

    def check_run(self, config: Any) -> None:
        """Refuse settings of other sections (`config` is a `Config`) that this task cannot have."""


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
    """The divergence of the student's distribution from the teacher's; `padfree.head.divergence` has the formulas."""

    command: ClassVar[str] = "distill"
    help: ClassVar[str] = "learn the distributions of a teacher"
    title: ClassVar[str] = "distillation"
    kind: ClassVar[str] = "distill"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    turns: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True
    samples_responses: ClassVar[bool] = True
    has_teacher: ClassVar[bool] = True

    divergence: DivergenceKind = "forward-kl"
    beta: float = setting(
        0.5,
        above=0,
        below=1,
        fix="give a share above 0 and below 1",
        needs=need_of("divergence", "jsd", fix="leave it out, or set loss.distill.divergence=jsd"),
    )  # of jsd
    top_k: int | None = setting(
        None, least=1, fix="give 1 or more, or leave it out"
    )  # over the teacher's most probable tokens and all others as one; None: over all tokens

    def __post_init__(self) -> None:
        check_choice("loss.distill.divergence", self.divergence, DivergenceKind)
        check_table(self, "loss.distill.")


# Objectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a policy loss does with a token's ratio and advantage. `kind` is its name in a recipe."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_table(self, f"loss.{self.kind}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings(Objective):
    """Clipped ratio (PPO, GRPO): the ratio is kept in [1 - low, 1 + high]; `dual` bounds it where A < 0."""

    kind: ClassVar[str] = "clip"
    low: float = setting(0.2, least=0, most=1, fix="give 0 up to 1")
    high: float = setting(0.2, least=0, most=math.inf, fix="give 0 or more")
    dual: float | None = setting(None, above=1, most=math.inf, fix="give more than 1, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOSettings(Objective):
    """Clipped sequence ratio. The defaults are the paper's: a mean over tokens moves far less than one token."""

    kind: ClassVar[str] = "gspo"
    low: float = setting(3e-4, least=0, most=1, fix="give 0 up to 1")
    high: float = setting(4e-4, least=0, most=math.inf, fix="give 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOSettings(Objective):
    """Clipped importance weight: in [1 - low, 1 + high], without a lower bound where `low` is None."""

    kind: ClassVar[str] = "cispo"
    low: float | None = setting(None, least=0, most=1, fix="give 0 up to 1, or leave it out for no lower bound")
    high: float = setting(4.0, least=0, most=math.inf, fix="give 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforceSettings(Objective):
    """Plain policy gradient: no ratio, no clip."""

    kind: ClassVar[str] = "reinforce"


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomObjective(Objective):
    """The user's own function, `module:function`; see `padfree.losses.objectives` for what it is given."""

    kind: ClassVar[str] = "module:function"
    path: str


# Corrections


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A factor on the objective. `kind` is its name in a recipe; `compares_sampler`: it needs the sampler's numbers."""

    kind: ClassVar[str]
    compares_sampler: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_table(self, f"loss.{self.kind}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BandCorrection(Correction):
    """Bounds of an importance weight, 1 among what they allow."""

    low: float
    high: float

    def __post_init__(self) -> None:
        numbers = all(type(bound) in (int, float) for bound in (self.low, self.high))  # no bool
        right = numbers and 0 <= self.low <= 1 <= self.high and self.low < self.high
        bounds = [self.low, self.high]
        need(right, f"loss.{self.kind}", bounds, "give 0 <= low <= 1 <= high, and low < high")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTISSettings(BandCorrection):
    """Truncated importance sampling, token by token: the weight is kept in [low, high]."""

    kind: ClassVar[str] = "token_tis"
    low: float = 0.0
    high: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTISSettings(BandCorrection):
    """Truncated importance sampling by sequence. `geometric`: of the mean over tokens instead of the product."""

    kind: ClassVar[str] = "sequence_tis"
    low: float = 0.0
    high: float = 2.0
    geometric: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopSettings(BandCorrection):
    """The importance weight of a token inside [low, high], and 0 outside."""

    kind: ClassVar[str] = "icepop"
    low: float = 0.5
    high: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskSettings(BandCorrection):
    """Leave a sequence out whose importance ratio is outside [low, high]; `losses.corrections` has the statistics."""

    kind: ClassVar[str] = "sequence_mask"
    low: float = 0.5
    high: float = 2.0
    statistic: SequenceStatistic = "mean"

    def __post_init__(self) -> None:
        # `super()` without arguments does not see the class that `slots` makes anew.
        BandCorrection.__post_init__(self)
        check_choice("loss.sequence_mask.statistic", self.statistic, SequenceStatistic)


@dataclass(frozen=True, kw_only=True, slots=True)
class OPSMSettings(Correction):
    """Leave a sequence out where A < 0 and the policy has moved further than `delta` from it."""

    kind: ClassVar[str] = "opsm"
    compares_sampler: ClassVar[bool] = False
    delta: float = setting(1e-4, least=0, most=math.inf, fix="give 0 or more")


TOKEN_CORRECTIONS = (TokenTISSettings, IcePopSettings)
"""The factor of a token depends on that token alone."""


# Policy losses


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings(TaskSettings):
    """A policy loss: the objective, corrections of it, and what is added to it.

    `old_policy` names the denominator of the ratio: the `trainer`'s own log-probabilities before the update
    (`old_logprobs`), those the `sampler` reported (`rollout_logprobs`), or the `current` ones (each batch serves one
    step, the ratio is 1 and its gradient is that of the log-probability; nothing needs to be computed beforehand).

    With `kl_weighting` "ratio" the KL estimate of a token is multiplied by its ratio to the old policy. The ratio is
    differentiable, so it changes the gradient even where it is 1.
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
            raise UserError("objective", "", "give ClipSettings(), GSPOSettings() or another of them", value=objective)
        if not isinstance(corrections, tuple) or not all(isinstance(given, Correction) for given in corrections):
            raise UserError("corrections", "", "give a tuple such as (TokenTISSettings(),)", value=corrections)
        kinds = [correction.kind for correction in self.corrections]
        need(len(set(kinds)) == len(kinds), "loss.corrections", kinds, "give each of them once")
        if self.old_policy == "sampler":
            alone = not any(correction.compares_sampler for correction in self.corrections)
            cure = "set loss.old_policy=trainer, with 'sampler' the sampler is compared with itself"
            need(alone, "loss.corrections", kinds, cure)
        if self.old_policy == "current":
            cure = "set loss.old_policy=trainer, with 'current' opsm never masks"
            need(OPSMSettings.kind not in kinds, "loss.corrections", kinds, cure)

    def check_run(self, config: Any) -> None:
        cure = "set batch.samples=64 and batch.tokens=none, RL takes whole groups of samples"
        need(config.batch.samples is not None, "batch.samples", None, cure)

    def _untyped(self) -> tuple[object, object]:
        """Objective and corrections as they were given, whatever they are."""
        return self.objective, self.corrections

    @property
    def weighs_kl(self) -> bool:
        """Whether the KL term is multiplied by the ratio to the old policy."""
        return self.kl_coefficient > 0 and self.kl_weighting == "ratio"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the log-probabilities that the sampler reported are part of the loss."""
        return self.old_policy == "sampler" or any(correction.compares_sampler for correction in self.corrections)


# Losses of pairs, and of other models

NO_SUCH = "leave it out, this loss.dpo.variant has none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSettings:
    """Squared error of a value model, its change limited to `clip` (None: unlimited)."""

    clip: float | None = setting(0.2, least=0, most=math.inf, fix="give 0 or more, or None to switch it off")

    def __post_init__(self) -> None:
        check_table(self, "value ")


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOSettings(TaskSettings):
    """Direct preference optimisation and its relatives; `padfree.losses.preference` has the formulas.

    `label_smoothing` is the assumed share of wrong labels, `gamma` the margin that SimPO asks for. `normalise`: means
    over the tokens of an answer instead of sums; None: as each loss was made, means for ipo, simpo and orpo.
    """

    command: ClassVar[str] = "dpo"
    help: ClassVar[str] = "train on pairs of answers: DPO, IPO, hinge, SimPO, ORPO"
    title: ClassVar[str] = "DPO"
    kind: ClassVar[str] = "dpo"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    group_size: ClassVar[int] = 2
    has_reference: ClassVar[bool] = True
    may_precompute: ClassVar[bool] = True
    variant: PreferenceLoss = "sigmoid"
    beta: float = setting(0.1, above=0, fix="give a positive number")
    label_smoothing: float = setting(0.0, least=0, below=0.5, needs=need_of("variant", "sigmoid", "simpo", fix=NO_SUCH))
    gamma: float = setting(0.0, least=0, needs=need_of("variant", "simpo", fix=NO_SUCH))
    normalise: bool | None = None

    def __post_init__(self) -> None:
        check_choice("loss.dpo.variant", self.variant, PreferenceLoss)
        check_table(self, "loss.dpo.")

    @property
    def needs_reference(self) -> bool:
        return self.variant in ("sigmoid", "hinge", "ipo")

    def check_run(self, config: Any) -> None:
        check_pairs(config)
        if not self.needs_reference:
            cure = f"leave it out, loss.dpo.variant {self.variant!r} has no reference"
            need(config.reference.path is None, "reference.path", config.reference.path, cure)
            need(not config.reference.precompute, "reference.precompute", True, cure)

    @property
    def means(self) -> bool:
        """`normalise`, decided."""
        return self.variant in ("ipo", "simpo", "orpo") if self.normalise is None else self.normalise


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOSettings(TaskSettings):
    """Single answers that are desirable or not; `padfree.tasks.kto` has the formula.

    The weights balance labels of which there are more of one kind.
    """

    command: ClassVar[str] = "kto"
    help: ClassVar[str] = "train on single answers with a label, desirable or not: KTO"
    title: ClassVar[str] = "KTO"
    kind: ClassVar[str] = "kto"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "kl", "margin")
    has_reference: ClassVar[bool] = True
    beta: float = setting(0.1, above=0, fix="give a positive number")
    desirable_weight: float = setting(1.0, least=0)
    undesirable_weight: float = setting(1.0, least=0)

    def __post_init__(self) -> None:
        check_table(self, "loss.kto.")

    def check_run(self, config: Any) -> None:
        check_answers(config)
        samples = config.batch.samples
        cure = "give 2 or more, the KL term pairs a prompt with the answer of another row"
        need(samples is None or samples >= 2, "batch.samples", samples, cure)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings(TaskSettings):
    """Pairwise loss of a reward model: the chosen answer should score `margin` more than the rejected one."""

    command: ClassVar[str] = "reward"
    help: ClassVar[str] = "train a reward model on pairs of answers"
    title: ClassVar[str] = "a reward model"
    kind: ClassVar[str] = "reward"
    eval_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    head: ClassVar[ModelHead] = "scalar"
    group_size: ClassVar[int] = 2
    margin: float = setting(0.0, least=0)  # beside the margins that rows may have

    def __post_init__(self) -> None:
        check_table(self, "loss.reward.")

    def check_run(self, config: Any) -> None:
        check_pairs(config)
        temperature = config.loss.temperature
        need(temperature == 1.0, "loss.temperature", temperature, "leave it out, a reward model has no logits")
        alone = config.lora.rank > 0 and config.lora.export == "adapter"
        cure = "set lora.export=merged, a reward model's head is trained beside the adapters and not among them"
        need(not alone, "lora.export", config.lora.export, cure)


def check_answers(config: Any) -> None:
    """Of tasks whose loss weighs whole answers."""
    weights = config.loss.aggregation
    need(weights == "token-mean", "loss.aggregation", weights, "leave it out, all of them weigh the same")


def check_pairs(config: Any) -> None:
    """Of data in pairs."""
    cure = "give an even number, it counts answers, two of a pair"
    for name, count in (("batch.samples", config.batch.samples), ("eval.samples", config.eval.samples)):
        need(count is None or count % 2 == 0, name, count, cure)
    check_answers(config)
