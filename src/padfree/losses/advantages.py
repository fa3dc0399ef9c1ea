"""Rewards to advantages.

    by group, [B] rewards to [B] advantages; m, s mean and standard deviation (n - 1 below) over the n of the group
        grpo_advantages              (r - m) / (s + eps), or r - m without std (Dr. GRPO)
        rloo_advantages              r - mean of the others = (r - m) · n / (n - 1)
    by token, [T] rewards to [T] advantages
        gae                          δₜ + γλ δₜ₊₁ + (γλ)² δₜ₊₂ + ...    δₜ = rₜ + γ Vₜ₊₁ - Vₜ
        discounted_returns           rₜ + γ rₜ₊₁ + γ² rₜ₊₂ + ...
        reinforce_plus_plus          discounted returns of the rewards less the KL penalty, whitened
        reinforce_plus_plus_baseline r - m on every token, less the KL penalty, whitened
    whiten                           (x - mean) / standard deviation, over the scored tokens of the whole global batch;
                                     without `shift_mean` the mean is added again

A group of one has nothing to be compared with and a group of equal rewards nothing to tell apart: exactly 0 in both.

Per-token arrays are on a packed row in its own order. `mask` says which positions are actions (scored tokens); the
others (a prompt, the answer of a tool between two turns) are skipped as if they were not there: the token after a gap
is the successor of the token before it, one discount further on. It does not matter whether entry t belongs to token t
or to the prediction made at position t, as long as all arrays agree. The result is 0 outside the mask.

All of this runs without gradient, in float64 inside, and is rounded once, to the type of the rewards (or values);
integers and bools give float32. `max_length`, the longest sample where the host knows it, saves rounds of a scan.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from padfree.arrays import need_number, need_whole
from padfree.losses import checks
from padfree.losses.segments import Reduce, continues, no_reduce, scan_back, segment_sum, spread

LARGEST = sys.float_info.max


@torch.no_grad()
def grpo_advantages(rewards: Tensor, groups: Tensor, num_groups: int, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """[B] rewards relative to their group; `groups` [B] int in 0..num_groups - 1."""
    groups = _checked_groups(rewards, groups, num_groups)
    need_number("eps", eps, 0.0, LARGEST, "give 0 or a small positive number")
    centred, counts = _centred(rewards, groups, num_groups)
    if std:
        squares = segment_sum(centred.square(), groups, num_groups)
        deviation = (squares / (counts - 1.0).clamp(min=1.0)).sqrt()
        centred = centred / (deviation[groups] + eps)
    return centred.to(checks.result_type(rewards))


@torch.no_grad()
def rloo_advantages(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """[B] rewards, each less the mean of the others of its group (leave one out)."""
    groups = _checked_groups(rewards, groups, num_groups)
    centred, counts = _centred(rewards, groups, num_groups)
    advantages = centred * (counts / (counts - 1.0).clamp(min=1.0))[groups]
    return advantages.to(checks.result_type(rewards))


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
    row = _SampleRow(mask, sample_index, max_length)
    return _token_rewards(rewards, row, kl, kl_coefficient).to(checks.result_type(rewards))


@torch.no_grad()
def discounted_returns(
    rewards: Tensor, mask: Tensor, sample_index: Tensor, *, gamma: float = 1.0, max_length: int | None = None
) -> Tensor:
    """[T] sum of the rewards [T] from here to the sample's end, each token further on counting `gamma` times less."""
    row = _SampleRow(mask, sample_index, max_length)
    _need_finite(gamma=gamma)
    return row.discounted(row.scored("rewards", rewards), gamma).to(checks.result_type(rewards))


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    max_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[T] generalised advantage estimates, and returns (advantage + value); the value after the last token is 0."""
    row = _SampleRow(mask, sample_index, max_length)
    _need_finite(gamma=gamma, gae_lambda=gae_lambda)
    given, seen = row.scored("rewards", rewards), row.scored("values", values)
    # The value of the next scored token of the sample: passed on across gaps, stopped by a scored token.
    arriving = scan_back(seen, row.goes_on & ~row.mask, max_length)
    following = torch.zeros_like(arriving)
    following[:-1] = torch.where(row.goes_on[:-1], arriving[1:], 0.0)
    errors = torch.where(row.mask, given + gamma * following - seen, 0.0)
    advantages = row.discounted(errors, gamma * gae_lambda)
    dtype = checks.result_type(rewards, values)
    return advantages.to(dtype), (advantages + seen).to(dtype)


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, reduce: Reduce = no_reduce
) -> Tensor:
    """[T] values brought to standard deviation 1 over all scored tokens, and to mean 0; or with their mean as it was.

    `reduce` sums over all ranks, so that the mean and the deviation (n - 1 below) are those of the global batch. A rank
    may have no tokens. Fewer than two scored tokens in all have no deviation: they are only shifted.
    """
    mask = checks.mask("mask", mask)
    checks.same_length("values", len(mask), values=checks.quantity("values", values))
    whitened = _whiten(checks.wide("values", values), mask, shift_mean=shift_mean, eps=eps, reduce=reduce)
    return whitened.to(checks.result_type(values))


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
    row = _SampleRow(mask, sample_index, max_length)
    _need_finite(gamma=gamma)
    returns = row.discounted(_token_rewards(rewards, row, kl, kl_coefficient), gamma)
    return _whiten(returns, row.mask, reduce=reduce).to(checks.result_type(rewards))


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
    row = _SampleRow(mask, sample_index, None)
    groups = _checked_groups(rewards, groups, num_groups)
    advantages = spread(_centred(rewards, groups, num_groups)[0], row.sample_index)
    if kl is not None:
        _need_finite(kl_coefficient=kl_coefficient)
        advantages = advantages - kl_coefficient * row.scored("kl", kl)
    return _whiten(advantages, row.mask, reduce=reduce).to(checks.result_type(rewards))


class _SampleRow:
    """The tokens of a packed row: which of them are actions, and where samples end."""

    def __init__(self, mask: Tensor, sample_index: Tensor, max_length: int | None) -> None:
        self.mask = checks.mask("mask", mask)
        self.sample_index = checks.index("sample_index", sample_index)
        checks.same_length("tokens in mask", len(mask), sample_index=sample_index)
        if max_length is not None:
            need_whole("max_length", max_length, 0, "give the tokens of the longest sample, or None")
        self.goes_on = continues(self.sample_index)
        self.max_length = max_length

    def scored(self, name: str, values: Tensor) -> Tensor:
        """[T] float64 values, 0 outside the mask."""
        values = checks.wide(name, values)
        checks.same_length("tokens in mask", len(self.mask), **{name: values})
        return torch.where(self.mask, values, 0.0)

    def discounted(self, values: Tensor, factor: float) -> Tensor:
        """[T] the sum of the values from here to the sample's end, `factor` times less with each action; 0 elsewhere.

        A gap discounts nothing, and nothing goes from one sample to the one before it.
        """
        steps = torch.where(self.mask, self.mask.new_full((), factor, dtype=torch.float64), 1.0)
        return torch.where(self.mask, scan_back(values, steps * self.goes_on, self.max_length), 0.0)


def _token_rewards(rewards: Tensor, row: _SampleRow, kl: Tensor | None, kl_coefficient: float) -> Tensor:
    """[T] float64."""
    _need_finite(kl_coefficient=kl_coefficient)
    follows = scan_back(row.mask, row.goes_on, row.max_length)  # scored tokens from here to the sample's end
    out = torch.where(row.mask & (follows == 1.0), spread(checks.wide("rewards", rewards), row.sample_index), 0.0)
    return out if kl is None else out - kl_coefficient * row.scored("kl", kl)


def _whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, reduce: Reduce = no_reduce
) -> Tensor:
    """[T] float64."""
    need_number("eps", eps, 0.0, LARGEST, "give 0 or a small positive number")
    total, count = reduce(torch.stack([torch.where(mask, values, 0.0).sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1.0)
    centred = torch.where(mask, values - mean, 0.0)
    variance = reduce(centred.square().sum()) / (count - 1.0).clamp(min=1.0)
    whitened = centred * torch.where(count > 1.0, torch.rsqrt(variance + eps), 1.0)
    return whitened if shift_mean else torch.where(mask, whitened + mean, 0.0)


def _need_finite(**settings: float) -> None:
    for name, value in settings.items():
        need_number(name, value, -LARGEST, LARGEST, "give a finite number")


def _checked_groups(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    need_whole("num_groups", num_groups, 0, "give how many groups there are")
    groups = checks.index("groups", groups, num_groups)
    checks.same_length("rewards", len(checks.quantity("rewards", rewards)), groups=groups)
    return groups


def _centred(rewards: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """[B] float64 rewards less their group's mean, and [G] group sizes. Exactly 0 where all of a group are equal."""
    wide = checks.wide("rewards", rewards)
    counts = segment_sum(torch.ones_like(wide), groups, num_groups)
    mean = segment_sum(wide, groups, num_groups) / counts.clamp(min=1.0)
    # Rounding of the mean must not become an advantage once it is divided by a deviation that is rounding, too.
    index = groups.long()
    lowest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amin", include_self=False)
    highest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where((lowest == highest)[groups], 0.0, wide - mean[groups]), counts
