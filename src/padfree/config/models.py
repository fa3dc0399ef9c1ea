"""The sections that name models: the one that is trained, and those that it learns from, with or against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os.path import expanduser
from typing import Any

from padfree.config.choices import ComputeDtype, Init, LoraExport
from padfree.config.loss_settings import LARGEST, SMALLEST, ValueSettings, number
from padfree.config.rules import need

LARGEST_RANK = 1 << 16
"""Of adapters: more than any matrix that they stand beside."""


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

    path: str
    init: Init = "weights"  # random: whatever weights there are, the run begins without them
    tokenizer: str | None = None  # None: that of the model
    dtype: ComputeDtype = "float32"
    attention: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        expand_home(self, "path", "tokenizer")
        need(bool(self.path), "model.path", self.path, "give a folder, a Hub id or a config file")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (PEFT) instead of all weights: `rank` 0 is without them."""

    rank: int = 0
    alpha: float | None = None  # None: the rank, a scale of 1
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)  # or names of modules, such as q_proj
    export: LoraExport = "merged"

    def __post_init__(self) -> None:
        cure = f"give 0 (all weights are trained) or more, {LARGEST_RANK} at most"
        need(0 <= self.rank <= LARGEST_RANK, "lora.rank", self.rank, cure)
        need(self.alpha is None or 0 < self.alpha < math.inf, "lora.alpha", self.alpha, "give more than 0")
        need(0 <= self.dropout < 1, "lora.dropout", self.dropout, "give 0 up to, but not including, 1")
        need(len(self.targets) > 0, "lora.targets", list(self.targets), 'give names of modules, or "all-linear"')


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The model that the KL term compares with: `path` as in `model`, or none (rollouts may bring `ref_logprobs`)."""

    path: str | None = None
    offload: bool = False  # its weights wait on the CPU while it is not asked
    refresh: int | None = None  # after so many rollout batches it takes the trained model's weights; None: never
    precompute: bool = False  # DPO: score all samples once, keep that in the cache, and train without the reference

    def __post_init__(self) -> None:
        expand_home(self, "path")
        need(self.path != "", "reference.path", self.path, "give a folder, a Hub id, or leave it out")
        need(self.refresh is None or self.refresh >= 1, "reference.refresh", self.refresh, "give 1 or more")
        used = self.path is not None or not (self.offload or self.refresh)
        need(used, "reference.path", self.path, "give it, reference.offload and reference.refresh are about it")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The model that is learned from, as a loss or as an advantage: `path` as in `model`, with the same vocabulary."""

    path: str | None = None
    offload: bool = False  # its weights wait on the CPU while it is not asked

    def __post_init__(self) -> None:
        expand_home(self, "path")
        need(self.path != "", "teacher.path", self.path, "give a folder, a Hub id, or leave it out")
        used = self.path is not None or not self.offload
        need(used, "teacher.path", self.path, "give it, teacher.offload is about it")


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The value model of `loss.advantage` "gae": `path` as in `model`, with a scalar head of its own or a new one."""

    path: str | None = None  # None: a copy of the model that the run begins with
    lr: float | None = None  # None: optimizer.lr
    warmup: int = 0  # optimizer steps at the beginning in which the critic learns and the policy does not
    gamma: float = number(1.0, 0.0, 1.0, "give 0 up to 1")  # discount of a token
    lam: float = number(0.95, 0.0, 1.0, "give 0 up to 1")  # of GAE: 0 believes the critic, 1 the reward
    clip: float | None = number(0.2, SMALLEST, LARGEST, 'give more than 0, or "none"')  # a value's change in a batch
    whiten: bool = True  # advantages over all scored tokens of a rollout batch
    max_grad_norm: float | None = number(1.0, SMALLEST, LARGEST, 'give more than 0, or "none"')

    def __post_init__(self) -> None:
        expand_home(self, "path")
        need(self.path != "", "critic.path", self.path, "give a folder, a Hub id, or leave it out")
        need(self.lr is None or 0 < self.lr < math.inf, "critic.lr", self.lr, "give more than 0, or leave it out")
        need(self.warmup >= 0, "critic.warmup", self.warmup, "give 0 or more steps")
        for name in ("gamma", "lam", "clip", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None:
                self.__dataclass_fields__[name].metadata["range"].check(f"critic.{name}", value)

    def value_settings(self) -> ValueSettings:
        """The loss as `padfree.losses` computes it."""
        return ValueSettings(clip=self.clip)
