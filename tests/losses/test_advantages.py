"""Advantages against loops; groups of one, equal groups, gaps, and ranks without tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from padfree.losses import (
    discounted_returns,
    gae,
    grpo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    token_rewards,
    whiten,
)

Array = np.ndarray[Any, Any]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.1, 0.7, 1.0, 1e3])), max_size=20))
def test_groups_against_the_loop(batch: list[tuple[int, float]]) -> None:
    groups = torch.tensor([group for group, _ in batch], dtype=torch.long)
    rewards = torch.tensor([reward for _, reward in batch], dtype=torch.float64)
    found = {
        "std": grpo_advantages(rewards, groups, 5),
        "mean": grpo_advantages(rewards, groups, 5, std=False),
        "rloo": rloo_advantages(rewards, groups, 5),
    }
    for i, (group, reward) in enumerate(batch):
        members = [r for g, r in batch if g == group]
        others = [r for j, (g, r) in enumerate(batch) if g == group and j != i]
        if len(set(members)) == 1:
            assert all(values[i] == 0 for values in found.values())
            continue
        mean, deviation = np.mean(members), np.std(members, ddof=1)
        assert float(found["std"][i]) == pytest.approx((reward - mean) / (deviation + 1e-6), rel=1e-9, abs=1e-12)
        assert float(found["mean"][i]) == pytest.approx(reward - mean, rel=1e-9, abs=1e-12)
        assert float(found["rloo"][i]) == pytest.approx(reward - np.mean(others), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("reward", [0.1, 1.0 / 3.0, 1e6, -7.3])
def test_equal_rewards_are_exactly_zero_in_float32(reward: float) -> None:
    """The mean of three times 0.1 is not 0.1; divided by a deviation of rounding errors, it looks like a signal."""
    rewards, groups = torch.full((7,), reward), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert not grpo_advantages(rewards, groups, 3).any()
    assert not grpo_advantages(rewards, groups, 3, std=False).any()
    assert not rloo_advantages(rewards, groups, 3).any()


def test_grpo_worked() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(
        grpo_advantages(rewards, torch.zeros(4, dtype=torch.long), 1),
        torch.tensor([0.5, -0.5, -0.5, 0.5]) / (1 / 3) ** 0.5,
        rtol=1e-5,
        atol=0,
    )
    torch.testing.assert_close(
        rloo_advantages(rewards, torch.zeros(4, dtype=torch.long), 1), torch.tensor([2.0, -2.0, -2.0, 2.0]) / 3
    )


@st.composite
def packed(draw: st.DrawFn) -> tuple[Array, Array, np.random.Generator]:
    """sample_index (pad = last), mask, and a random generator."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    pad = draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    index = np.repeat(np.arange(len(lengths) + 1), (*lengths, pad))
    mask = (rng.random(len(index)) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))) & (index < len(lengths))
    return index, mask, rng


def torches(*arrays: Array) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def actions(index: Array, mask: Array) -> list[Array]:
    """The scored positions of each sample, in order."""
    return [np.flatnonzero((index == i) & mask) for i in range(index.max(initial=0) + 1)]


@given(packed(), st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)]), st.booleans())
def test_gae_against_the_loop(
    batch: tuple[Array, Array, np.random.Generator], factors: tuple[float, float], tell_length: bool
) -> None:
    index, mask, rng = batch
    gamma, lam = factors
    rewards, values = rng.normal(size=len(index)), rng.normal(size=len(index))
    rewards[~mask] = values[~mask] = np.nan
    expected, returns = np.zeros(len(index)), np.zeros(len(index))
    for places in actions(index, mask):
        carried, next_value = 0.0, 0.0
        for t in places[::-1]:
            carried = rewards[t] + gamma * next_value - values[t] + gamma * lam * carried
            next_value = values[t]
            expected[t], returns[t] = carried, carried + values[t]
    longest = int(np.bincount(index).max(initial=0)) if tell_length and len(index) else None
    found, found_returns = gae(*torches(rewards, values, mask, index), gamma=gamma, gae_lambda=lam, max_length=longest)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found_returns.numpy(), returns, rtol=1e-11, atol=1e-12)


@given(packed(), st.sampled_from([1.0, 0.9, 0.0]))
def test_returns_and_token_rewards_against_the_loop(
    batch: tuple[Array, Array, np.random.Generator], gamma: float
) -> None:
    index, mask, rng = batch
    num_samples = int(index.max(initial=0)) + 1
    rewards, kl = rng.normal(size=num_samples), rng.normal(size=len(index))
    kl[~mask] = np.nan
    by_token, returns = np.zeros(len(index)), np.zeros(len(index))
    for sample, places in enumerate(actions(index, mask)):
        by_token[places] = -0.3 * kl[places]
        if len(places):
            by_token[places[-1]] += rewards[sample]
        carried = 0.0
        for t in places[::-1]:
            carried = by_token[t] + gamma * carried
            returns[t] = carried
    found = token_rewards(*torches(rewards, mask, index), kl=torch.from_numpy(kl), kl_coefficient=0.3)
    np.testing.assert_allclose(found.numpy(), by_token, rtol=1e-11, atol=1e-12)
    found = discounted_returns(found, *torches(mask, index), gamma=gamma)
    np.testing.assert_allclose(found.numpy(), returns, rtol=1e-11, atol=1e-12)

    scored = returns[mask]
    whitened = reinforce_plus_plus(
        *torches(rewards, mask, index), kl=torch.from_numpy(kl), kl_coefficient=0.3, gamma=gamma
    )
    assert not whitened[~torch.from_numpy(mask)].any()
    if len(scored) > 1:
        expected = (scored - scored.mean()) / np.sqrt(scored.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(whitened.numpy()[mask], expected, rtol=1e-9, atol=1e-9)


def test_gae_of_a_long_pack_is_float64_accurate() -> None:
    num_tokens = 20_000
    rewards, values = torch.randn(2, num_tokens)
    mask, index = torch.ones(num_tokens, dtype=torch.bool), torch.zeros(num_tokens, dtype=torch.int32)
    found, _ = gae(rewards.double(), values.double(), mask, index, gamma=0.999, gae_lambda=0.99)
    expected, carried, next_value = np.zeros(num_tokens), 0.0, 0.0
    for t in range(num_tokens - 1, -1, -1):
        carried = float(rewards[t]) + 0.999 * next_value - float(values[t]) + 0.999 * 0.99 * carried
        next_value = float(values[t])
        expected[t] = carried
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert gae(rewards, values, mask, index)[0].dtype == torch.float32


def test_reinforce_plus_plus_baseline() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    kl = torch.randn(8, dtype=torch.float64)
    found = reinforce_plus_plus_baseline(rewards, groups, 2, mask, index, kl=kl, kl_coefficient=0.1)
    plain = np.array([0.5, 0.5, -0.5, 0.0]) - 0.1 * kl[mask].numpy()
    expected = (plain - plain.mean()) / np.sqrt(plain.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found[mask].numpy(), expected, rtol=1e-12)
    assert not found[~mask].any()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_over_ranks_of_which_one_has_no_tokens(shift_mean: bool) -> None:
    values, mask = torch.randn(30, dtype=torch.float64) * 3 + 5, torch.rand(30) < 0.7
    whole = whiten(values, mask, shift_mean=shift_mean)
    parts = [(values[:10], mask[:10]), (values[10:10], mask[10:10]), (values[10:], mask[10:])]
    wide = values[mask]
    first = torch.stack([wide.sum(), mask.sum().double()])
    second = (wide - wide.mean()).square().sum()
    for (part, part_mask), begin in zip(parts, (0, 10, 10), strict=True):
        answers = iter([first, second])
        found = whiten(part, part_mask, shift_mean=shift_mean, reduce=lambda _, answers=answers: next(answers))
        torch.testing.assert_close(found, whole[begin : begin + len(part)])
    torch.testing.assert_close(whole[mask].std(), torch.tensor(1.0, dtype=torch.float64))
    kept = 0.0 if shift_mean else wide.mean()
    torch.testing.assert_close(whole[mask], (wide - wide.mean()) / (wide.var() + 1e-8).sqrt() + kept)


def test_whitening_can_leave_the_mean_where_it_was() -> None:
    """PPO's whitening, by its formula, on the responses of a batch: (x - mean) / deviation + mean."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(64, 48), (100, 90), (40, 12), (75, 1), (9, 0)]  # of the whole sequence, of its response
    mask = torch.cat([torch.arange(total) >= total - response for total, response in lengths])
    values = 2.0 * torch.randn(len(mask), generator=generator, dtype=torch.float64) + 1.0
    scored = values[mask]
    mean, deviation = scored.mean(), (scored - scored.mean()).square().sum().div(len(scored) - 1).add(1e-8).sqrt()
    found = whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(found[mask], (scored - mean) / deviation + mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[mask].mean(), mean)
    assert not found[~mask].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_rewards_of_right_and_wrong_answers_need_not_be_floats(dtype: torch.dtype) -> None:
    rewards, groups = torch.tensor([1, 0, 0, 1], dtype=dtype), torch.tensor([0, 0, 1, 1])
    half = 0.5**0.5
    torch.testing.assert_close(
        grpo_advantages(rewards, groups, 2), torch.tensor([half, -half, -half, half]), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(rloo_advantages(rewards, groups, 2), torch.tensor([1.0, -1.0, -1.0, 1.0]))


def test_large_integers_are_not_rounded_on_the_way() -> None:
    rewards = torch.tensor([2**24 + 1, 2**24, 0], dtype=torch.int64)
    mask, index = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    assert discounted_returns(rewards, mask, index)[0] == torch.tensor(2**25 + 1).float()
    assert grpo_advantages(rewards[:2], index[:2], 1, std=False).tolist() == [0.5, -0.5]


def test_whitening_of_nothing_one_and_equal_tokens() -> None:
    nothing = whiten(torch.randn(4), torch.zeros(4, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros(4))
    one = whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False]))
    assert torch.equal(one, torch.zeros(2))
    equal = whiten(torch.full((9,), 0.1), torch.ones(9, dtype=torch.bool))
    torch.testing.assert_close(equal, torch.zeros(9), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        whiten(torch.tensor([3.0, 5.0]), torch.tensor([True, False]), shift_mean=False), torch.tensor([3.0, 0.0])
    )


def test_gradients_do_not_flow() -> None:
    rewards = torch.randn(3, requires_grad=True)
    assert not grpo_advantages(rewards, torch.tensor([0, 0, 1]), 2).requires_grad
