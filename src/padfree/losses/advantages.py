"""Rewards to advantages.

    by group, [B] rewards to [B] advantages; m, s mean and standard deviation (n - 1 below) over the n of the group
        grpo_advantages              (r - m) / (s + eps), or r - m without std (Dr. GRPO)
        rloo_advantages              r - mean of the others = (r - m) · n / (n - 1)
    by token, [T] rewards to [T] advantages
        gae                          δₜ + γλ δₜ₊₁ + (γλ)² δₜ₊₂ + ...    δₜ = rₜ + γ Vₜ₊₁ - Vₜ
        discounted_returns           rₜ + γ rₜ₊₁ + γ² rₜ₊₂ + ...
        reinforce_plus_plus          discounted returns of the rewards less the KL penalty, whitened
        reinforce_plus_plus_baseline r - m on every token, less the KL penalty, whitened
    whiten                           (x - mean) / standard deviation, over the scored tokens of the whole global batch

A group of one has nothing to be compared with and a group of equal rewards nothing to tell apart: exactly 0 in both.

Per-token arrays are on a packed row in its own order. `mask` says which positions are actions (scored tokens); the
others (a prompt, the answer of a tool between two turns) are skipped as if they were not there: the token after a gap
is the successor of the token before it, one discount further on. It does not matter whether entry t belongs to token t
or to the prediction made at position t, as long as all arrays agree. The result is 0 outside the mask.

All of this runs without gradient, in float64 inside, and returns the type it was given. `max_length`, the longest
sample where the host knows it, saves rounds of a scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.losses.segments import Reduce, continues, no_reduce, scan_back, segment_sum, spread


@torch.no_grad()
def grpo_advantages(rewards: Tensor, groups: Tensor, num_groups: int, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """[B] rewards relative to their group; `groups` [B] int in 0..num_groups - 1."""
    centred, counts = _centred(rewards, groups, num_groups)
    if std:
        squares = segment_sum(centred.square(), groups, num_groups)
        deviation = (squares / (counts - 1.0).clamp(min=1.0)).sqrt()
        centred = centred / (deviation[groups] + eps)
    return centred.to(rewards.dtype)


@torch.no_grad()
def rloo_advantages(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[B] rewards, each less the mean of the others of its group (leave one out)."""
    centred, counts = _centred(rewards, groups, num_groups)
    return (centred * (counts / (counts - 1.0).clamp(min=1.0))[groups]).to(rewards.dtype)


@torch.no_grad()
def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
    max_length: int | None = None,
) -> Tensor:
    """[T]: each sample's reward [B] on its last scored token, less kl_coefficient · kl on every scored token.

    A sample without scored tokens has no place for its reward.
    """
    follows = scan_back(mask, continues(sample_index), max_length)  # scored tokens from here to the sample's end
    out = torch.where(mask & (follows == 1.0), spread(rewards, sample_index), 0.0)
    return out if kl is None else torch.where(mask, out - kl_coefficient * kl, 0.0).to(rewards.dtype)


@torch.no_grad()
def discounted_returns(
    rewards: Tensor, mask: Tensor, sample_index: Tensor, *, gamma: float = 1.0, max_length: int | None = None
) -> Tensor:
    """[T] sum of the rewards [T] from here to the sample's end, each token further on counting `gamma` times less."""
    values = torch.where(mask, rewards, 0.0)
    returns = scan_back(values, _decay(mask, sample_index, gamma), max_length)
    return torch.where(mask, returns, 0.0).to(rewards.dtype)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    max_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[T] generalised advantage estimates, and returns (advantage + value); the value after the last token is 0."""
    rewards, seen = torch.where(mask, rewards, 0.0).double(), torch.where(mask, values, 0.0).double()
    # The value of the next scored token of the sample: passed on across gaps, stopped by a scored token.
    goes_on = continues(sample_index)
    arriving = scan_back(seen, goes_on & ~mask, max_length)
    following = torch.zeros_like(arriving)
    following[:-1] = torch.where(goes_on[:-1], arriving[1:], 0.0)
    errors = torch.where(mask, rewards + gamma * following - seen, 0.0)
    advantages = scan_back(errors, _decay(mask, sample_index, gamma * lam), max_length)
    advantages = torch.where(mask, advantages, 0.0)
    return advantages.to(values.dtype), (advantages + seen).to(values.dtype)


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, reduce: Reduce = no_reduce
) -> Tensor:
    """[T] values brought to mean 0 (or kept where they are) and standard deviation 1 over all scored tokens.

    `reduce` sums over all ranks, so that the mean and the deviation (n - 1 below) are those of the global batch. A rank
    may have no tokens. Fewer than two scored tokens in all have no deviation: they are only shifted.
    """
    wide = torch.where(mask, values, 0.0).double()
    total, count = reduce(torch.stack([wide.sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1.0)
    centred = torch.where(mask, wide - mean, 0.0)
    variance = reduce(centred.square().sum()) / (count - 1.0).clamp(min=1.0)
    scale = torch.where(count > 1.0, torch.rsqrt(variance + eps), 1.0)
    return torch.where(mask, (centred if shift_mean else wide) * scale, 0.0).to(values.dtype)


@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
    gamma: float = 1.0,
    max_length: int | None = None,
    reduce: Reduce = no_reduce,
) -> Tensor:
    """[T] advantages from [B] rewards: discounted returns with the KL penalty in the reward, whitened globally."""
    by_token = token_rewards(rewards, mask, sample_index, kl=kl, kl_coefficient=kl_coefficient, max_length=max_length)
    returns = discounted_returns(by_token, mask, sample_index, gamma=gamma, max_length=max_length)
    return whiten(returns, mask, reduce=reduce)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    rewards: Tensor,
    groups: Tensor,
    num_groups: int,
    mask: Tensor,
    sample_index: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
    reduce: Reduce = no_reduce,
) -> Tensor:
    """[T] advantages from [B] rewards: less the group's mean, the KL penalty per token, whitened globally.

    Groups must be whole here; the ranks that `reduce` joins may hold different groups.
    """
    advantages = spread(grpo_advantages(rewards, groups, num_groups, std=False), sample_index)
    if kl is not None:
        advantages = advantages - kl_coefficient * kl
    return whiten(advantages, mask, reduce=reduce)


def _centred(rewards: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """[B] float64 rewards less their group's mean, and [G] group sizes. Exactly 0 where all of a group are equal."""
    wide = rewards.double()
    counts = segment_sum(torch.ones_like(wide), groups, num_groups)
    mean = segment_sum(wide, groups, num_groups) / counts.clamp(min=1.0)
    # Rounding of the mean must not become an advantage once it is divided by a deviation that is rounding, too.
    index = groups.long()
    lowest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amin", include_self=False)
    highest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where((lowest == highest)[groups], 0.0, wide - mean[groups]), counts


def _decay(mask: Tensor, sample_index: Tensor, factor: float) -> Tensor:
    """[T] what a scan multiplies by from one position to the next: 1 inside a gap, 0 at the end of a sample."""
    steps = torch.where(mask, mask.new_full((), factor, dtype=torch.float64), 1.0)
    return steps * continues(sample_index)
