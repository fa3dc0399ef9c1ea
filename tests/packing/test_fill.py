from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.packing.fill import Bins, fill


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """The free tokens of each bin, by the definition: one sample at a time."""
    free_tokens: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [free for free in free_tokens if free >= length]
        if fitting:
            free_tokens.remove(min(fitting))
            free_tokens.append(min(fitting) - length)
        else:
            free_tokens.append(capacity - length)
    return free_tokens


def check(bins: Bins, lengths: list[int], capacity: int) -> None:
    assert sorted(np.concatenate([*bins, []]).tolist()) == list(range(len(lengths)))
    for indices in bins:
        assert indices.size
        assert (np.diff(indices) > 0).all()
        assert sum(lengths[i] for i in indices) <= capacity


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_is_best_fit_decreasing(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 60))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = fill(lengths, capacity)
    check(bins, lengths, capacity)
    free_tokens = [capacity - sum(lengths[i] for i in indices) for indices in bins]
    assert sorted(free_tokens) == sorted(best_fit_decreasing(lengths, capacity))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_empty_samples_take_no_tokens(lengths: list[int]) -> None:
    bins = fill(lengths, 9)
    check(bins, lengths, 9)
    assert len(bins) == max(1, len(best_fit_decreasing([n for n in lengths if n], 9)))


def test_picture_of_the_docstring() -> None:
    bins = fill([5, 3, 5, 2, 2, 7], 8)
    assert [b.tolist() for b in bins] == [[5], [0, 1], [2, 3], [4]]


def test_log_normal_lengths_fill_bins() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.rint(490 * np.exp(rng.standard_normal(50_000))), 8192).astype(np.int64)
    bins = fill(lengths, 8192)
    assert np.array_equal(np.sort(bins.indices), np.arange(len(lengths)))
    assert bins.sums(lengths).max() <= 8192
    assert lengths.sum() / (len(bins) * 8192) > 0.998
    assert len(bins) - -(-lengths.sum() // 8192) <= 1


@pytest.mark.parametrize("scale", [1, 10**9])
def test_capacity_far_beyond_the_number_of_samples(scale: int) -> None:
    """Lengths too large for a histogram give the same bins by another code path."""
    lengths = np.random.default_rng(1).integers(0, 100, 300)
    bins = fill(lengths * scale, 100 * scale)
    assert [b.tolist() for b in bins] == [b.tolist() for b in fill(lengths, 100)]


def test_more_than_65536_distinct_lengths() -> None:
    lengths = np.random.default_rng(2).permutation(70_000) + 1
    bins = fill(lengths, 70_000)
    assert bins.sums(lengths).max() <= 70_000
    assert np.array_equal(np.sort(bins.indices), np.arange(70_000))
    assert len(bins) - -(-lengths.sum() // 70_000) <= 1


def test_same_result_every_time_and_input_untouched() -> None:
    lengths = np.random.default_rng(3).integers(0, 50, 500)
    before = lengths.copy()
    first, second = fill(lengths, 64), fill(lengths.tolist(), 64)
    assert np.array_equal(first.indices, second.indices)
    assert np.array_equal(first.offsets, second.offsets)
    assert np.array_equal(lengths, before)


def test_bins_are_a_sequence() -> None:
    bins = fill([4, 4, 2], 4)
    assert len(bins) == 3
    assert bins[-1].tolist() == bins[2].tolist() == [2]
    assert [b.tolist() for b in bins[:2]] == [[0], [1]]
    assert bins.sums(np.array([4, 4, 2])).tolist() == [4, 4, 2]
    with pytest.raises(IndexError):
        bins[3]
    assert len(fill([], 4)) == 0
    assert list(fill([], 4)) == []
    assert fill([], 4).sums(np.zeros(0)).size == 0


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 9, 2], 8, "sample 1 has 9 tokens, but capacity is 8"),
        ([3, -1], 8, "is -1 for sample 1"),
        ([3.5], 8, "lengths: got a float64"),
        ([[3]], 8, r"shape \(1, 1\)"),
        ([3], 0, "capacity: 0"),
    ],
)
def test_bad_input(lengths: list[int], capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(lengths, capacity)
