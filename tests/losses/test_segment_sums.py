"""Segment sums and scans against loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padfree.losses.segment_sums import continues, scan_back, segment_mean, segment_sum, spread

INDEX = torch.tensor([0, 0, 0, 1, 1, 3, 3, 4, 4], dtype=torch.int32)  # sample 2 is empty, 4 is the pad


def test_sums_drop_the_pad_and_give_zero_for_an_empty_sample() -> None:
    values = torch.tensor([0.5, 0.3, 0.2, 0.8, 0.1, 1.0, 2.0, 9.0, 9.0])
    torch.testing.assert_close(
        segment_sum(values, INDEX, 4), torch.tensor([1.0, 0.9, 0.0, 3.0], dtype=torch.float64), atol=1e-6, rtol=0
    )
    columns = segment_sum(torch.stack([values, 2 * values], 1), INDEX, 4)
    torch.testing.assert_close(columns[:, 1], 2 * columns[:, 0])


def test_index_in_any_order() -> None:
    values = torch.randn(9)
    order = torch.randperm(9)
    torch.testing.assert_close(segment_sum(values[order], INDEX[order], 4), segment_sum(values, INDEX, 4))


def test_spread_gives_the_pad_zero() -> None:
    assert torch.equal(spread(torch.tensor([1.0, 2.0, 3.0, 4.0]), INDEX), torch.tensor([1.0, 1, 1, 2, 2, 4, 4, 0, 0]))


def test_mean_ignores_what_the_mask_leaves_out() -> None:
    values = torch.tensor([1.0, 3.0, float("nan"), 5.0, 7.0, float("inf"), 1.0, 9.0, 9.0])
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    assert torch.equal(segment_mean(values, mask, INDEX, 4), torch.tensor([2.0, 7.0, 0.0, 0.0], dtype=torch.float64))


def test_mean_over_two_ranks_that_share_a_pack() -> None:
    values, mask = torch.randn(9), torch.rand(9) < 0.8
    first, second = torch.tensor([0, 3, 5, 8]), torch.tensor([1, 2, 4, 6, 7])
    other = torch.stack([torch.where(mask, values, 0.0), mask.float()], 1)[second]
    other_sums = segment_sum(other, INDEX[second], 4)
    mean = segment_mean(values[first], mask[first], INDEX[first], 4, reduce=lambda sums: sums + other_sums)
    torch.testing.assert_close(mean, segment_mean(values, mask, INDEX, 4))


def test_gradient_of_a_sum_is_a_gather() -> None:
    values = torch.randn(9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, INDEX, 4), (values,))


@given(st.lists(st.integers(0, 6), min_size=0, max_size=8), st.integers(0, 2**32 - 1), st.booleans())
def test_scan_against_the_loop(lengths: list[int], seed: int, tell_length: bool) -> None:
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(len(lengths)), lengths)
    values, factors = rng.normal(size=len(index)), rng.random(len(index)) * 1.2
    factors[np.append(index[1:] != index[:-1], True)[: len(index)]] = 0.0
    expected = values.copy()
    for t in range(len(values) - 2, -1, -1):
        expected[t] += factors[t] * expected[t + 1]
    out = scan_back(
        torch.from_numpy(values), torch.from_numpy(factors), max(lengths, default=0) if tell_length else None
    )
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_scan_of_a_long_pack_in_float32_input_is_float64_accurate() -> None:
    num_tokens = 50_000
    values = torch.rand(num_tokens)
    out = scan_back(values, torch.ones(num_tokens))
    expected = values.double().flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("index", [[], [0], [0, 0, 1, 1, 1, 2]])
def test_continues(index: list[int]) -> None:
    expected = [a == b for a, b in pairwise(index)] + [False] * bool(index)
    assert continues(torch.tensor(index, dtype=torch.int32)).tolist() == expected
