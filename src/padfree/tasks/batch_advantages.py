"""Compute the advantages of tokens from the rewards of a rollout batch, on the host.

    group        a   a | b   b        four samples: two of group a, two of group b
    rewards      1   0 | 0   0
    grpo        .7 -.7 | 0   0        the advantage of every token of the sample

A group has no learning signal if all its rewards are equal (b above), or if it has only one sample. Rollout files in
which no group has a signal are refused.

An update may skip samples whose gradient is exactly 0 (`run_may_skip`). The weights of tokens in the loss are computed
before samples are skipped, so the sum of gradients does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.choices import Advantage
from padfree.config import LossConfig
from padfree.config.policy_settings import PolicySettings
from padfree.errors import UserError
from padfree.losses import (
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    spread,
    zero_without_advantage,
)
from padfree.sample import Sample


def with_advantages(samples: Sequence[Sample], kind: Advantage) -> list[Sample]:
    """Return the samples with advantages [n], computed as `kind` says. `samples` must contain whole groups.

    `kind`: a value of `loss.advantage`, such as "grpo".
    """
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
    """Return the samples with advantages for on-policy distillation: log t − log p for each scored token.

    t and p are the probabilities that the teacher and the policy give to the token. `teacher`, `policy`: the
    log-probabilities, [n] for each sample.
    """
    return [
        sample.with_numbers(advantages=np.where(sample.scored, theirs - own, 0.0).astype(np.float32))
        for sample, theirs, own in zip(samples, teacher, policy, strict=True)
    ]


def reverse_kl(samples: Sequence[Sample]) -> float:
    """Return an estimate of KL(policy ‖ teacher): minus the mean of `teacher_advantages` over all scored tokens."""
    total = sum(float(_given(sample).sum(dtype=np.float64)) for sample in samples)
    return -total / max(sum(sample.num_labels for sample in samples), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """Counts all rollout groups, and the groups without a learning signal, i.e. with advantages of 0 only."""

    groups: int
    alone: int  # groups of one sample
    equal: int  # groups of several samples with equal rewards, or samples whose advantages are all 0

    @property
    def without(self) -> int:
        return self.alone + self.equal

    def metrics(self) -> dict[str, int]:
        return {"groups": self.groups, "groups_without_signal": self.without}


def signal_of(samples: Sequence[Sample], kind: Advantage) -> Signal:
    """Count all groups, and the groups without a learning signal: groups with equal rewards or with a single sample.

    `samples` must contain whole groups. With `reinforce++`, all samples form one group. If `kind` does not compare
    rewards (`given`, `teacher`, `gae`), each sample counts as a group.
    """
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
    """Raise a `UserError` if no group has a learning signal. Return a note for the user if only some groups have one.

    In all other cases, return None. `path`: the file of the rollouts, for the message. `kind`: the value of
    `loss.advantage`.
    """
    if kind in ("teacher", "gae"):  # these advantages are not known yet
        return None
    signal = signal_of(samples, kind)
    if not signal.without:
        return None
    name = "samples" if kind == "given" else "groups"
    counts = f"{signal.alone:,} of one sample, {signal.equal:,} with equal rewards"
    why = "whose advantages are all 0" if kind == "given" else f"without a learning signal ({counts})"
    if signal.without < signal.groups:
        effect = "get advantages from whitening only" if kind == "reinforce++_baseline" else "do not change the weights"
        return f"data.path: {signal.without:,} of {signal.groups:,} {name} {why} {effect}"
    none = "the advantages of all samples are 0" if kind == "given" else f"no group has a learning signal ({counts})"
    differ = len({sample.reward for sample in samples}) > 1
    if kind == "given":
        cure = "give other rollouts, or set another loss.advantage"
    elif differ:
        cure = "give groups whose rewards differ, or set loss.advantage=reinforce++, which compares all samples"
    else:
        cure = "give rollouts whose rewards differ"
    raise UserError("data.path", f"nothing can be learned from {path}, because {none}", cure)


def may_skip(loss: object, *, has_router_term: bool) -> bool:
    """Return whether a sample whose advantages are all 0 adds nothing to the gradient, with these loss settings.

    `has_router_term`: whether a router loss is added, which has a gradient for every token.
    """
    return isinstance(loss, PolicySettings) and not has_router_term and zero_without_advantage(loss)


def run_may_skip(loss: LossConfig) -> bool:
    """Return whether the updates of a run with these loss settings leave out samples whose gradient is 0."""
    router = bool(loss.load_balancing or loss.router_bias)
    return loss.skip_zero_gradient == "auto" and may_skip(loss.settings(), has_router_term=router)


def has_advantage(samples: Sequence[Sample]) -> NDArray[np.bool_]:
    """Return bools [B]: for each of B samples, whether any of its scored tokens has an advantage other than 0.

    A sample without the array `advantages` counts as True, so that the loss reports the missing array.
    """
    return np.array(
        [sample.advantages is None or bool(sample.advantages[sample.scored].any()) for sample in samples], np.bool_
    )


def _given(sample: Sample) -> NDArray[Any]:
    if sample.advantages is None:
        raise UserError(
            "advantages",
            f"is missing in sample {sample.uid!r}",
            "give advantages, or set loss.advantage to another value",
        )
    return sample.advantages


def _reward(sample: Sample, kind: str) -> float:
    if sample.reward is None or not np.isfinite(sample.reward):
        raise UserError(
            "reward",
            f"is {sample.reward} in sample {sample.uid!r}, but loss.advantage {kind!r} needs a finite number",
            "give a reward for every sample",
        )
    return sample.reward


def _scored(samples: Sequence[Sample]) -> Tensor:
    """Return bools [Σn], concatenated over all samples, that are True for scored tokens (those that are trained on)."""
    return torch.from_numpy(np.concatenate([sample.scored for sample in samples]))


def _groups(samples: Sequence[Sample], kind: str) -> tuple[Tensor, int]:
    """Number the rollout groups in order of appearance. Return each sample's group number [B] and the group count."""
    numbers: dict[str | int, int] = {}
    for sample in samples:
        if sample.group is None:
            raise UserError(
                "group",
                f"is missing in sample {sample.uid!r}, but loss.advantage {kind!r} compares samples within groups",
                "give a group for every sample",
            )
        numbers.setdefault(sample.group, len(numbers))
    return torch.tensor([numbers[sample.group] for sample in samples if sample.group is not None]), len(numbers)
