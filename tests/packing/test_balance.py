from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from padfree.packing.balance import balance
from padfree.packing.fill import fill


def log_normal(count: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(490 * np.exp(rng.standard_normal(count))), 1, 8192).astype(np.int64)


def check(parts: list[NDArray[np.int64]], count: int, k: int) -> None:
    assert len(parts) == k
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert sum(len(part) > 0 for part in parts) == min(k, count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 12))
def test_every_sample_once_and_no_part_empty(costs: list[int], k: int) -> None:
    parts = balance(costs, k)
    check(parts, len(costs), k)
    # guaranteed by greedy: the costliest part is at most one sample above the mean
    if costs:
        assert max(sum(costs[i] for i in part) for part in parts) <= sum(costs) / k + max(costs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_equal_counts(costs: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(costs)))
    parts = balance(costs, k, equal_count=True)
    check(parts, len(costs), k)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cap_is_never_exceeded(data: st.DataObject) -> None:
    """Whatever the costs, parts are within the cap or the call is refused; never refused if `fill` succeeds."""
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=40))
    costs = data.draw(st.lists(st.floats(0, 100), min_size=len(lengths), max_size=len(lengths)))
    k = data.draw(st.integers(1, 12))
    equal_count = data.draw(st.booleans()) and k <= len(lengths)
    tight = max(max(lengths), -(-sum(lengths) // k), 1)
    cap = data.draw(st.integers(tight, 2 * tight))
    try:
        parts = balance(costs, k, lengths=lengths, cap=cap, equal_count=equal_count)
    except ValueError as error:
        assert "raise cap or k" in str(error)  # noqa: PT017
        assert equal_count or len(fill(lengths, cap)) > k
        return
    check(parts, len(lengths), k)
    assert all(sum(lengths[i] for i in part) <= cap for part in parts)
    if equal_count:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_picture_of_the_docstring() -> None:
    parts = balance([8, 7, 6, 5, 4, 2], 2)
    assert [part.tolist() for part in parts] == [[0, 2, 5], [1, 3, 4]]


@pytest.mark.parametrize("equal_count", [False, True])
def test_log_normal_lengths_are_balanced(equal_count: bool) -> None:
    lengths = log_normal(2048, 0)
    sums = [lengths[part].sum() for part in balance(lengths, 64, equal_count=equal_count)]
    assert max(sums) / np.mean(sums) <= 1.001


def test_costs_are_balanced_under_a_cap_on_lengths() -> None:
    lengths = log_normal(1024, 1)
    costs = lengths * (1 + lengths / 8192)
    cap = int(1.05 * lengths.sum() / 32)
    parts = balance(costs, 32, lengths=lengths, cap=cap)
    assert max(lengths[part].sum() for part in parts) <= cap
    sums = [costs[part].sum() for part in parts]
    assert max(sums) / np.mean(sums) <= 1.001


def test_tight_caps_without_one_overflow() -> None:
    """Exactly as many parts as the tokens need, filled to 99.9 %."""
    for seed in range(60):
        lengths = log_normal(256, seed)
        cap = int(np.ceil(lengths.sum() / 16 * 1.001))
        assert max(lengths[part].sum() for part in balance(lengths, 16, cap=cap)) <= cap


def test_fewer_parts_than_fill_needs() -> None:
    lengths = np.random.default_rng(0).integers(2200, 3300, 64)
    needed = len(fill(lengths, 8192))
    parts = balance(lengths, needed - 1, cap=8192)
    assert max(lengths[part].sum() for part in parts) <= 8192


def test_one_giant_does_not_end_the_work_on_the_others() -> None:
    costs = np.append(log_normal(512, 2), 10**6)
    parts = balance(costs, 16)
    assert [512] in [part.tolist() for part in parts]
    others = sorted(costs[part].sum() for part in parts)[:-1]
    assert others[-1] / np.mean(others) <= 1.001


def test_very_uneven_counts() -> None:
    """Hundreds of thousands of small samples and a few large ones: memory and time stay small."""
    costs = np.append(np.ones(200_000, np.int64), np.full(255, 10**6))
    parts = balance(costs, 256)
    check(parts, len(costs), 256)
    assert max(costs[part].sum() for part in parts) == 10**6


def test_same_result_every_time_and_input_untouched() -> None:
    lengths = log_normal(300, 3)
    before = lengths.copy()
    first, second = (balance(costs, 7, cap=40_000) for costs in (lengths, lengths.tolist()))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert np.array_equal(lengths, before)


def test_fewer_samples_than_parts() -> None:
    assert [part.tolist() for part in balance([5, 3], 4)] == [[0], [1], [], []]
    assert [part.tolist() for part in balance([], 2)] == [[], []]


def test_samples_of_no_cost_spread() -> None:
    assert [len(part) for part in balance([0] * 10, 4)] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("costs", "k", "options", "message"),
    [
        ([1, 2], 0, {}, "k: 0"),
        (
            [1, 2],
            3,
            {"equal_count": True},
            "k: 3 parts with equal numbers of samples need at least 3 samples, but there are 2",
        ),
        ([1, -2], 1, {}, "costs: is -2.0 for sample 1"),
        ([1, float("nan")], 1, {}, "costs: is nan for sample 1"),
        (["a"], 1, {}, "give a flat list of numbers"),
        ([1, 2], 1, {"lengths": [1]}, "lengths: has 1 entries for 2 costs"),
        ([1.5, 2], 1, {"cap": 9}, "costs: got a float64"),
        ([], 1, {"cap": 0}, "cap: 0; give 1 or more"),
        ([1, 9, 2], 3, {"cap": 8}, "cap: 8 is less than the 9 tokens of sample 1"),
        ([5, 5, 5], 2, {"cap": 7}, "2 parts of at most 7 tokens cannot hold 15 tokens; raise cap or k"),
        ([5, 5, 5], 2, {"cap": 8}, "3 samples with 15 tokens do not fit into 2 parts of 8 tokens; raise cap or k"),
    ],
)
def test_bad_input(costs: list[float], k: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(costs, k, **options)
