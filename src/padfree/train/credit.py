"""Rewards of a rollout batch to the advantages of its tokens, on the host.

    rewards      1   0 | 0   0        groups a a | b b
    grpo        .7 -.7 | 0   0        on every token of the sample

`grpo`, `dr_grpo` (without the standard deviation) and `rloo` compare a sample with its group; `reinforce++` takes the
reward as the return of every scored token, `reinforce++_baseline` less the group's mean, both whitened over all scored
tokens of the rollout batch; `given` keeps what the samples have. Entry j of an array belongs to token j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from padfree.batch import Sample
from padfree.losses import (
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    spread,
)

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "given"]


def with_advantages(samples: Sequence[Sample], kind: Advantage) -> list[Sample]:
    """The same samples with advantages [n] each. Groups must be whole in `samples`."""
    if kind == "given":
        for sample in samples:
            if sample.advantages is None:
                raise ValueError(f"advantages: missing in sample {sample.uid!r}; give them, or choose loss.advantage")
        return list(samples)
    rewards = torch.tensor([_reward(sample, kind) for sample in samples], dtype=torch.float64)
    lengths = torch.tensor([len(sample) for sample in samples])
    sample_index = torch.repeat_interleave(torch.arange(len(samples)), lengths)
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
    pieces = torch.split(advantages.float(), lengths.tolist())
    return [replace(sample, advantages=piece.numpy()) for sample, piece in zip(samples, pieces, strict=True)]


def _reward(sample: Sample, kind: str) -> float:
    if sample.reward is None or not np.isfinite(sample.reward):
        raise ValueError(f"reward: {sample.reward} in sample {sample.uid!r}; loss.advantage {kind!r} needs a number")
    return sample.reward


def _scored(samples: Sequence[Sample]) -> Tensor:
    """[Σn] the trained tokens, except the first of each sample, which nothing predicts."""
    return torch.from_numpy(np.concatenate([sample.mask & (np.arange(len(sample)) > 0) for sample in samples]))


def _groups(samples: Sequence[Sample], kind: str) -> tuple[Tensor, int]:
    """[B] groups numbered in the order they appear."""
    numbers: dict[str | int, int] = {}
    for sample in samples:
        if sample.group is None:
            raise ValueError(f"group: missing in sample {sample.uid!r}; loss.advantage {kind!r} compares within groups")
        numbers.setdefault(sample.group, len(numbers))
    return torch.tensor([numbers[sample.group] for sample in samples if sample.group is not None]), len(numbers)
