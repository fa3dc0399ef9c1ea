"""The sections that name models: the trained model, its adapters, the reference, the teacher and the critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from padfree.choices import ComputeDtype, Init, LoraExport
from padfree.config.inputs import user_path
from padfree.config.loss_settings import ValueSettings
from padfree.config.setting import BETWEEN, SAMPLES, STAYS, check_table, need_of, setting
from padfree.errors import need

LARGEST_RANK = 1 << 16
"""The largest value that `lora.rank` accepts."""

RANK_FIX = f"give 0 to {LARGEST_RANK}, where 0 trains all weights"
NAMED = "give a folder or a Hub id, or leave it out"
GAE = need_of("loss.advantage", "gae", fix="leave it out, or set loss.advantage=gae")


def expand_home(section: Any, prefix: str, *names: str) -> None:
    """Expand `~` in the fields `names` of `section`, because a shell does not expand `~` in `model.path=~/model`.

    `prefix`: the start of the names of the settings, such as "model.". Other rules refuse empty strings.
    """
    for name in names:
        value = getattr(section, name)
        if isinstance(value, str) and value:
            object.__setattr__(section, name, user_path(value, f"{prefix}{name}"))
        elif isinstance(value, tuple):
            found = tuple(user_path(entry, f"{prefix}{name}") if entry else entry for entry in value)
            object.__setattr__(section, name, found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained."""

    path: str = setting(
        about="The model: a folder, a Hub id, or a config file, which gives a model with random weights.",
        filled="give a folder, a Hub id or a config file",
        resume=SAMPLES,
    )
    init: Init = setting(
        "weights", about="Start from the weights of model.path, or from random weights drawn with run.seed."
    )
    tokenizer: str | None = setting(
        None,
        about="A folder or Hub id of a tokenizer; if none, the tokenizer of the model.",
        filled=NAMED,
        resume=SAMPLES,
    )
    dtype: ComputeDtype = setting(
        "float32",
        about="The dtype of the computation. With bfloat16, weights, gradients and optimizer state stay in float32.",
    )
    attention: str = setting(
        "auto",
        about="The attention backend; auto takes the fastest one that supports the model on this device.",
    )
    freeze: tuple[str, ...] = setting(
        (),
        about="Parts that are not trained: tower, projector, language_model, or patterns of parameter names such as "
        "model.embed_tokens.*.",
        needs=need_of("lora.rank", 0, fix="leave it out: lora.rank freezes all weights of the model already"),
        resume=STAYS,
    )
    trust_remote_code: bool = setting(False, about="Run Python code that comes with the model.")
    vision: bool = setting(
        False,
        about="Train a whole vision-language model on rows with images; false trains its language model on text.",
        resume=STAYS,
    )

    def __post_init__(self) -> None:
        expand_home(self, "model.", "path", "tokenizer")
        check_table(self, "model.")
        fix = "give names of model parts, or patterns of parameter names"
        need(all(self.freeze), "model.freeze", list(self.freeze), fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (LoRA) that are trained instead of all weights."""

    rank: int = setting(
        0,
        least=0,
        most=LARGEST_RANK,
        about="Rank of the adapters; 0 trains all weights.",
        fix=RANK_FIX,
        resume=STAYS,
    )
    alpha: float | None = setting(
        None,
        above=0,
        about="The output of the adapters is multiplied by alpha / rank. With the default, none, the factor is 1.",
        resume=STAYS,
    )
    dropout: float = setting(0.0, least=0, below=1, about="Dropout probability of the adapter inputs.")
    targets: tuple[str, ...] = setting(
        ("all-linear",),
        about="Modules that get adapters: all-linear, or names such as q_proj. Experts and routers are not part of "
        "all-linear; name them as well.",
        resume=STAYS,
    )
    export: LoraExport = setting(
        "merged",
        about="Export the model with the adapters merged into its weights, or only the adapters as a PEFT folder.",
    )

    def __post_init__(self) -> None:
        check_table(self, "lora.")
        need(len(self.targets) > 0, "lora.targets", list(self.targets), 'give names of modules, or "all-linear"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The reference model of the KL term and of preference losses."""

    path: str | None = setting(
        None,
        about="Folder or Hub id of the reference; if none, model.path (DPO, KTO) or the ref_logprobs of the data (RL).",
        filled=NAMED,
        resume=BETWEEN,
    )
    offload: bool = setting(
        False,
        about="Keep the weights in CPU memory while the reference is not used.",
        needs=need_of("path", fix="leave it out, or set reference.path"),
    )
    refresh: int | None = setting(
        None,
        least=1,
        about="Interval, in rollout batches, at which the reference takes over the policy's weights. The default, "
        "none, means never.",
        needs=need_of("path", fix="leave it out, or set reference.path"),
    )
    precompute: bool = setting(
        False,
        about="DPO: score all samples once, cache the scores, and train without the reference in memory.",
        needs=need_of(
            "loss.task.may_precompute", fix="leave it out: only padfree dpo can precompute", about="loss.kind=dpo"
        ),
    )

    def __post_init__(self) -> None:
        expand_home(self, "reference.", "path")
        check_table(self, "reference.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The teacher of `padfree distill` and of `loss.advantage=teacher`. It shares the vocabulary of the model."""

    path: str | None = setting(
        None,
        about="Folder or Hub id of the teacher. Each token must have the same id in the teacher's tokenizer as in the "
        "tokenizer of the trained model.",
        filled=NAMED,
        resume=STAYS,
    )
    offload: bool = setting(
        False,
        about="Keep the weights in CPU memory while the teacher is not used.",
        needs=need_of("path", fix="leave it out, or set teacher.path"),
    )

    def __post_init__(self) -> None:
        expand_home(self, "teacher.", "path")
        check_table(self, "teacher.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model of `loss.advantage=gae` (PPO), with a scalar head."""

    path: str | None = setting(
        None,
        about="Folder or Hub id of the critic. A causal language model gets a new scalar head, and a reward model "
        "keeps its head. If none, the critic is a copy of model.path with a new head.",
        filled=NAMED,
        needs=GAE,
        resume=STAYS,
    )
    lr: float | None = setting(
        None,
        above=0,
        about="Base learning rate of the critic; if none, optimizer.lr.",
        fix='give more than 0, or "none"',
        needs=GAE,
    )
    warmup: int = setting(
        0,
        least=0,
        about="Number of optimizer steps at the start that train the critic only.",
        fix="give 0 or more steps",
        needs=GAE,
    )
    gamma: float = setting(
        1.0,
        least=0,
        most=1,
        about="Discount factor per token.",
        fix="give 0 to 1",
        needs=GAE,
        resume=BETWEEN,
    )
    gae_lambda: float = setting(
        0.95,
        least=0,
        most=1,
        about="λ of GAE: 0 relies on the critic's values, 1 on the rewards.",
        fix="give 0 to 1",
        needs=GAE,
        resume=BETWEEN,
        formerly="lam",
    )
    clip: float | None = setting(
        0.2,
        above=0,
        about="Value clipping of PPO: how much the critic's value of a token may change during the updates of one "
        "batch. If this setting is none, there is no limit.",
        fix='give more than 0, or "none"',
        needs=GAE,
    )
    whiten: bool = setting(
        True,
        about="Normalise advantages to mean 0 and standard deviation 1 over a rollout batch.",
        needs=GAE,
        resume=BETWEEN,
    )
    max_grad_norm: float | None = setting(
        1.0,
        above=0,
        about="Maximum gradient norm of the critic; if none, gradients are not clipped.",
        fix='give more than 0, or "none"',
        needs=GAE,
    )

    def __post_init__(self) -> None:
        expand_home(self, "critic.", "path")
        check_table(self, "critic.")

    def value_settings(self) -> ValueSettings:
        """Return the settings of the critic's loss."""
        return ValueSettings(clip=self.clip)
