"""Compute advantages from rewards.

B is the number of samples and T the number of tokens of a pack. `mask` [T] marks the scored tokens, which are the
actions. Other tokens, such as a tool's answer, are skipped and get 0. The scored tokens before and after them count as
neighbours.

All functions run without gradients, in float64. They return the dtype of the rewards or values (float32 for integers
and bools). The optional `max_length`, the length of the longest sample, makes them faster.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from padfree.arrays import need_number, need_whole
from padfree.losses import checks
from padfree.losses.segment_sums import Reduce, continues, no_reduce, scan_back, segment_sum, spread

LARGEST = sys.float_info.max


@torch.no_grad()
def grpo_advantages(rewards: Tensor, groups: Tensor, num_groups: int, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return the GRPO advantages [B]: (reward - mean of the prompt group) / (standard deviation of the group + `eps`).

    `groups` [B] holds the group of each sample, from 0 to num_groups - 1. Without `std`, nothing is divided (Dr. GRPO).
    """
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
    """Return the leave-one-out advantages [B]: each reward minus the mean of the other rewards of its prompt group.

    `groups` [B] holds the group of each sample, from 0 to num_groups - 1.
    """
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
    """Turn rewards [B] of samples into rewards [T] of tokens.

    The last scored token (True in `mask`) of a sample gets the sample's reward; other tokens get 0. If `kl` [T] is
    given, kl_coefficient · kl is subtracted at every scored token.
    """
    pack = _PackTokens(mask, sample_index, max_length)
    return _token_rewards(rewards, pack, kl, kl_coefficient).to(checks.result_type(rewards))


@torch.no_grad()
def discounted_returns(
    rewards: Tensor, mask: Tensor, sample_index: Tensor, *, gamma: float = 1.0, max_length: int | None = None
) -> Tensor:
    """Return, for each token, the discounted sum of the rewards from this token to the end of its sample: [T].

    `rewards` [T] has one reward per token, and `gamma` is the discount per scored token.
    """
    pack = _PackTokens(mask, sample_index, max_length)
    _need_finite(gamma=gamma)
    return pack.discounted(pack.scored("rewards", rewards), gamma).to(checks.result_type(rewards))


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
    """Return the generalised advantage estimates [T], and the returns [T], which are advantage + value.

    `rewards` and `values` are [T]. The value after the end of a sample is 0.
    """
    pack = _PackTokens(mask, sample_index, max_length)
    _need_finite(gamma=gamma, gae_lambda=gae_lambda)
    given, seen = pack.scored("rewards", rewards), pack.scored("values", values)
    # The value of the next scored token of the same sample.
    arriving = scan_back(seen, pack.goes_on & ~pack.mask, max_length)
    following = torch.zeros_like(arriving)
    following[:-1] = torch.where(pack.goes_on[:-1], arriving[1:], 0.0)
    errors = torch.where(pack.mask, given + gamma * following - seen, 0.0)
    advantages = pack.discounted(errors, gamma * gae_lambda)
    dtype = checks.result_type(rewards, values)
    return advantages.to(dtype), (advantages + seen).to(dtype)


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, reduce: Reduce = no_reduce
) -> Tensor:
    """Scale the values [T] to standard deviation 1 over all scored tokens of the global batch.

    If `shift_mean` is True, also shift them to mean 0. `reduce` sums over all ranks. With fewer than two scored tokens,
    values are not scaled.
    """
    mask = checks.mask("mask", mask)
    checks.same_length("tokens in mask", len(mask), values=checks.quantity("values", values))
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
    """Return the REINFORCE++ advantages [T] of the tokens, computed from the rewards [B] of the samples.

    The KL penalty is subtracted from the token rewards. The discounted returns of these token rewards are whitened over
    the global batch.
    """
    pack = _PackTokens(mask, sample_index, max_length)
    _need_finite(gamma=gamma)
    returns = pack.discounted(_token_rewards(rewards, pack, kl, kl_coefficient), gamma)
    return _whiten(returns, pack.mask, reduce=reduce).to(checks.result_type(rewards))


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
    """Return the REINFORCE++ advantages with a baseline, [T].

    Each scored token gets its sample's reward minus the prompt group's mean reward, minus its KL penalty, whitened over
    the global batch. Each rank must hold whole groups.
    """
    pack = _PackTokens(mask, sample_index, None)
    groups = _checked_groups(rewards, groups, num_groups)
    advantages = spread(_centred(rewards, groups, num_groups)[0], pack.sample_index)
    if kl is not None:
        _need_finite(kl_coefficient=kl_coefficient)
        advantages = advantages - kl_coefficient * pack.scored("kl", kl)
    return _whiten(advantages, pack.mask, reduce=reduce).to(checks.result_type(rewards))


class _PackTokens:
    """The T tokens of a pack: which of them are actions (scored tokens), and where samples end."""

    def __init__(self, mask: Tensor, sample_index: Tensor, max_length: int | None) -> None:
        self.mask = checks.mask("mask", mask)
        self.sample_index = checks.index("sample_index", sample_index)
        checks.same_length("tokens in mask", len(mask), sample_index=sample_index)
        if max_length is not None:
            need_whole("max_length", max_length, 0, "give the length of the longest sample, or None")
        self.goes_on = continues(self.sample_index)
        self.max_length = max_length

    def scored(self, name: str, values: Tensor) -> Tensor:
        """Return the values [T] in float64, with 0 for tokens that are not scored."""
        values = checks.wide(name, values)
        checks.same_length("tokens in mask", len(self.mask), **{name: values})
        return torch.where(self.mask, values, 0.0)

    def discounted(self, values: Tensor, factor: float) -> Tensor:
        """Return, for each action (scored token), the discounted sum of the values from there to the end of its sample:
        [T].

        `factor` is the discount per action. Other tokens do not discount, and get 0.
        """
        steps = torch.where(self.mask, self.mask.new_full((), factor, dtype=torch.float64), 1.0)
        return torch.where(self.mask, scan_back(values, steps * self.goes_on, self.max_length), 0.0)


def _token_rewards(rewards: Tensor, pack: _PackTokens, kl: Tensor | None, kl_coefficient: float) -> Tensor:
    """Compute `token_rewards` in float64."""
    _need_finite(kl_coefficient=kl_coefficient)
    # number of scored tokens from here to the sample's end
    follows = scan_back(pack.mask, pack.goes_on, pack.max_length)
    out = torch.where(pack.mask & (follows == 1.0), spread(checks.wide("rewards", rewards), pack.sample_index), 0.0)
    return out if kl is None else out - kl_coefficient * pack.scored("kl", kl)


def _whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, reduce: Reduce = no_reduce
) -> Tensor:
    """Compute `whiten` in float64."""
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
    need_whole("num_groups", num_groups, 0, "give the number of groups")
    groups = checks.index("groups", groups, num_groups)
    checks.same_length("rewards", len(checks.quantity("rewards", rewards)), groups=groups)
    return groups


def _centred(rewards: Tensor, groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the rewards [B], each minus the mean of its prompt group, and the group sizes [num_groups]."""
    wide = checks.wide("rewards", rewards)
    counts = segment_sum(torch.ones_like(wide), groups, num_groups)
    mean = segment_sum(wide, groups, num_groups) / counts.clamp(min=1.0)
    # If all rewards of a group are equal, make the difference exactly 0. A rounding error divided by a standard
    # deviation near 0 could be large.
    index = groups.long()
    lowest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amin", include_self=False)
    highest = wide.new_zeros(num_groups).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where((lowest == highest)[groups], 0.0, wide - mean[groups]), counts
