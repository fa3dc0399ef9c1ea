"""Rewards of a rollout batch to the advantages of its tokens, on the host.

    rewards      1   0 | 0   0        groups a a | b b
    grpo        .7 -.7 | 0   0        on every token of the sample

`grpo`, `dr_grpo` (without the standard deviation) and `rloo` compare a sample with its group; `reinforce++` takes the
reward as the return of every scored token, `reinforce++_baseline` less the group's mean, both whitened over all scored
tokens of the rollout batch; `given` keeps what the samples have; `teacher` (`teacher_advantages`) and `gae`
(`padfree.train.critic`) ask another model.
Entry j of an array belongs to token j.

A group with nothing to compare (b above: one reward; or a single sample) has no signal: its advantages are 0 and it
teaches nothing. Such groups are counted in every step, and rollout files of nothing else are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.batch import Sample
from padfree.config.choices import Advantage
from padfree.errors import UserError
from padfree.losses import (
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    spread,
)


def with_advantages(samples: Sequence[Sample], kind: Advantage) -> list[Sample]:
    """The same samples with advantages [n] each. Groups must be whole in `samples`."""
    assert kind not in ("teacher", "gae"), "see teacher_advantages, and padfree.train.critic"
    if kind == "given":
        for sample in samples:
            _given(sample)
        return list(samples)
    rewards = torch.tensor([_reward(sample, kind) for sample in samples], dtype=torch.float64)
    lengths = np.array([len(sample) for sample in samples])
    sample_index = torch.from_numpy(np.repeat(np.arange(len(samples)), lengths))
    if kind == "reinforce++":
        mask = _scored(samples)
        advantages = reinforce_plus_plus(rewards, mask, sample_index)
    else:
        groups, num_groups = _groups(samples, kind)
        if kind == "reinforce++_baseline":
            mask = _scored(samples)
            advantages = reinforce_plus_plus_baseline(rewards, groups, num_groups, mask, sample_index)
        elif kind == "rloo":
            advantages = spread(rloo_advantages(rewards, groups, num_groups), sample_index)
        else:
            by_sample = grpo_advantages(rewards, groups, num_groups, std=kind == "grpo")
            advantages = spread(by_sample, sample_index)
    pieces = np.split(advantages.float().numpy(), np.cumsum(lengths)[:-1])
    return [sample.with_numbers(advantages=piece) for sample, piece in zip(samples, pieces, strict=True)]


def teacher_advantages(
    samples: Sequence[Sample], teacher: Sequence[NDArray[Any]], policy: Sequence[NDArray[Any]]
) -> list[Sample]:
    """The same samples with log t − log p of each scored token as its advantage: on-policy distillation.

    `teacher`, `policy` [n] each are log-probabilities. Where tokens are drawn from p, the advantage is on average minus
    the reverse KL of that position, and the gradient of the policy loss is that of the KL.
    """
    return [
        sample.with_numbers(advantages=np.where(sample.scored, theirs - own, 0.0).astype(np.float32))
        for sample, theirs, own in zip(samples, teacher, policy, strict=True)
    ]


def reverse_kl(samples: Sequence[Sample]) -> float:
    """The mean of minus the advantages of `teacher_advantages` over all scored tokens: an estimate of KL(p | t)."""
    total = sum(float(_given(sample).sum(dtype=np.float64)) for sample in samples)
    return -total / max(sum(sample.num_labels for sample in samples), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """How many groups there are, and how many of them have nothing to learn from."""

    groups: int
    alone: int  # groups of one sample
    equal: int  # groups of more with one reward, or with advantages of 0

    @property
    def without(self) -> int:
        return self.alone + self.equal

    def metrics(self) -> dict[str, int]:
        return {"groups": self.groups, "groups_without_signal": self.without}


def signal_of(samples: Sequence[Sample], kind: Advantage) -> Signal:
    """Of samples in whole groups. `reinforce++` compares all samples with each other: one group."""
    if kind in ("given", "teacher", "gae"):
        flat = sum(not _given(sample)[sample.mask].any() for sample in samples)
        return Signal(groups=len(samples), alone=0, equal=flat)
    rewards = [_reward(sample, kind) for sample in samples]
    numbers = [0] * len(samples) if kind == "reinforce++" else _groups(samples, kind)[0].tolist()
    grouped: dict[int, list[float]] = {}
    for number, reward in zip(numbers, rewards, strict=True):
        grouped.setdefault(number, []).append(reward)
    alone = sum(len(group) == 1 for group in grouped.values())
    equal = sum(len(group) > 1 and min(group) == max(group) for group in grouped.values())
    return Signal(groups=len(grouped), alone=alone, equal=equal)


def check_signal(samples: Sequence[Sample], kind: Advantage, path: str) -> str | None:
    """Refuse the rollouts of `path` if no group has a signal; a line to say if some have none."""
    if kind in ("teacher", "gae"):  # what they will say is not known yet
        return None
    signal = signal_of(samples, kind)
    if not signal.without:
        return None
    name = "samples" if kind == "given" else "groups"
    counts = f"{signal.alone:,} of one sample, {signal.equal:,} with equal rewards"
    why = "whose advantages are all 0" if kind == "given" else f"with nothing to compare ({counts})"
    if signal.without < signal.groups:
        return f"data.path: {signal.without:,} of {signal.groups:,} {name} {why} teach nothing"
    differ = len({sample.reward for sample in samples}) > 1
    if kind == "given":
        cure = "give others, or choose loss.advantage"
    elif differ:
        cure = "give each group samples with different rewards, or set loss.advantage=reinforce++, which compares all"
    else:
        cure = "give rollouts whose rewards differ"
    raise UserError("data.path", f"{path} has only {name} {why}, so that every advantage is 0", cure)


def _given(sample: Sample) -> NDArray[Any]:
    if sample.advantages is None:
        raise UserError("advantages", f"missing in sample {sample.uid!r}", "give them, or choose loss.advantage")
    return sample.advantages


def _reward(sample: Sample, kind: str) -> float:
    if sample.reward is None or not np.isfinite(sample.reward):
        raise UserError(
            "reward", f"{sample.reward} in sample {sample.uid!r}", f"loss.advantage {kind!r} needs a number"
        )
    return sample.reward


def _scored(samples: Sequence[Sample]) -> Tensor:
    """[Σn] which tokens of all samples are scored."""
    return torch.from_numpy(np.concatenate([sample.scored for sample in samples]))


def _groups(samples: Sequence[Sample], kind: str) -> tuple[Tensor, int]:
    """[B] groups numbered in the order they appear."""
    numbers: dict[str | int, int] = {}
    for sample in samples:
        if sample.group is None:
            raise UserError(
                "group", f"missing in sample {sample.uid!r}", f"loss.advantage {kind!r} compares within groups"
            )
        numbers.setdefault(sample.group, len(numbers))
    return torch.tensor([numbers[sample.group] for sample in samples if sample.group is not None]), len(numbers)
