"""The sections that name models: the one that is trained, and those that it learns from, with or against."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser
from typing import Any

from padfree.config.choices import ComputeDtype, Init, LoraExport
from padfree.config.loss_settings import ValueSettings
from padfree.config.setting import BETWEEN, SAMPLES, STAYS, check_table, need_of, setting
from padfree.errors import need

LARGEST_RANK = 1 << 16
"""Of adapters: more than any matrix that they stand beside."""

RANK_FIX = f"give 0 (all weights are trained) or more, {LARGEST_RANK} at most"
NAMED = "give a folder, a Hub id, or leave it out"
GAE = need_of("loss.advantage", "gae", fix="leave it out, or set loss.advantage=gae")


def expand_home(section: Any, *names: str) -> None:
    """Put the user's home folder in the place of `~` in paths; a shell does that only where a word begins with it."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, str):
            object.__setattr__(section, name, expanduser(value))
        elif isinstance(value, tuple):
            object.__setattr__(section, name, tuple(expanduser(entry) for entry in value))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`path`: a folder, a Hub id, or a config file (random weights). `dtype` is what is computed in."""

    path: str = setting(filled="give a folder, a Hub id or a config file", resume=SAMPLES)
    init: Init = "weights"  # random: whatever weights there are, the run begins without them
    tokenizer: str | None = setting(None, resume=SAMPLES)  # None: that of the model
    dtype: ComputeDtype = "float32"
    attention: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        expand_home(self, "path", "tokenizer")
        check_table(self, "model.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (PEFT) instead of all weights: `rank` 0 is without them."""

    rank: int = setting(0, least=0, most=LARGEST_RANK, fix=RANK_FIX, resume=STAYS)
    alpha: float | None = setting(None, above=0, resume=STAYS)  # None: the rank, a scale of 1
    dropout: float = setting(0.0, least=0, below=1)
    targets: tuple[str, ...] = setting(("all-linear",), resume=STAYS)  # or names of modules, such as q_proj
    export: LoraExport = "merged"

    def __post_init__(self) -> None:
        check_table(self, "lora.")
        need(len(self.targets) > 0, "lora.targets", list(self.targets), 'give names of modules, or "all-linear"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The model that the KL term compares with: `path` as in `model`, or none (rollouts may bring `ref_logprobs`)."""

    path: str | None = setting(None, filled=NAMED, resume=BETWEEN)
    offload: bool = setting(False, needs=need_of("path", fix="set reference.path, or leave it out"))  # waits on the CPU
    refresh: int | None = setting(
        None, least=1, needs=need_of("path", fix="set reference.path, or leave it out")
    )  # after so many rollout batches it takes the trained model's weights; None: never
    precompute: bool = setting(
        False, needs=need_of("loss.task.may_precompute", fix="leave it out, it is for padfree dpo")
    )  # DPO: score all samples once, keep that in the cache, and train without the reference

    def __post_init__(self) -> None:
        expand_home(self, "path")
        check_table(self, "reference.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The model that is learned from, as a loss or as an advantage: `path` as in `model`, with the same vocabulary."""

    path: str | None = setting(None, filled=NAMED, resume=STAYS)
    offload: bool = setting(False, needs=need_of("path", fix="set teacher.path, or leave it out"))  # waits on the CPU

    def __post_init__(self) -> None:
        expand_home(self, "path")
        check_table(self, "teacher.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model of `loss.advantage` "gae": `path` as in `model`, with a scalar head of its own or a new one."""

    path: str | None = setting(None, filled=NAMED, needs=GAE, resume=STAYS)  # None: a copy of the model of the start
    lr: float | None = setting(None, above=0, fix="give more than 0, or leave it out", needs=GAE)  # None: optimizer.lr
    warmup: int = setting(
        0, least=0, fix="give 0 or more steps", needs=GAE
    )  # optimizer steps at the beginning in which the critic learns and the policy does not
    gamma: float = setting(1.0, least=0, most=1, fix="give 0 up to 1", needs=GAE, resume=BETWEEN)  # discount of a token
    gae_lambda: float = setting(
        0.95, least=0, most=1, fix="give 0 up to 1", needs=GAE, resume=BETWEEN, formerly="lam"
    )  # of GAE: 0 believes the critic, 1 the reward
    clip: float | None = setting(
        0.2, above=0, fix='give more than 0, or "none"', needs=GAE
    )  # a value's change in a batch
    whiten: bool = setting(True, needs=GAE, resume=BETWEEN)  # advantages over all scored tokens of a rollout batch
    max_grad_norm: float | None = setting(1.0, above=0, fix='give more than 0, or "none"', needs=GAE)

    def __post_init__(self) -> None:
        expand_home(self, "path")
        check_table(self, "critic.")

    def value_settings(self) -> ValueSettings:
        """The loss as `padfree.losses` computes it."""
        return ValueSettings(clip=self.clip)
