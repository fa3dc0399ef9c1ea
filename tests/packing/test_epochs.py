from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.packing.epochs import EpochOrder, SourcePart, shuffled
from padfree.packing.stream import EpochReader, FixedSizeBatcher, TokenBudgetBatcher


def read(source: EpochReader[str]) -> list[str]:
    samples = []
    while not source.ended:
        assert source.peek() == source.peek()
        samples.append(source.peek())
        source.advance()
    return samples


def make(source: Any, shuffle: bool = False, seed: int = 0, epochs: int | None = 1) -> EpochReader[str]:
    return EpochReader(source, shuffle=shuffle, seed=seed, epochs=epochs)


def test_reading_in_order() -> None:
    assert read(make("abc", epochs=2)) == list("abcabc")
    assert read(make(iter("abc"))) == list("abc")
    assert read(make("")) == read(make("", epochs=None)) == read(make(iter(""))) == []


def test_reading_shuffled() -> None:
    source = make("abcdefgh", shuffle=True, seed=3, epochs=2)
    order = [source.index(position) for position in range(16)]
    assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
    assert order[:8] != order[8:]
    assert read(source) == ["abcdefgh"[index] for index in order]


def test_end_of_epoch() -> None:
    for source in (make("ab", epochs=2), make(iter("ab"))):
        ends = []
        while not source.ended:
            source.advance()
            ends.append(source.at_epoch_end)
        assert ends in ([False, True, False, True], [False, True])


@pytest.mark.parametrize("kind", [list, iter])
def test_restore(kind: Any) -> None:
    source = make(kind("abcdef"))
    assert source.restore(4, [1, 3]) == [(1, "b"), (3, "d")]
    assert source.position == 4
    assert read(source) == ["e", "f"]


def test_restore_refuses_a_source_that_cannot_go_back() -> None:
    source = make(iter("abc"))
    read(source)
    with pytest.raises(ValueError, match="one-pass iterator that was already read"):
        source.restore(1, [])
    with pytest.raises(ValueError, match="ends after 3 samples, but the state is at 5"):
        make(iter("abc")).restore(5, [])


def test_order_never_changes_between_versions() -> None:
    """A checkpoint from another machine must see the same order, so the numbers themselves are fixed."""
    assert shuffled(8, 0, 0).tolist() == [6, 3, 2, 7, 0, 5, 4, 1]
    assert shuffled(8, 0, 1).tolist() != shuffled(8, 0, 0).tolist()
    for seed, epoch in ((0, 0), (7, 3), (2**64 - 1, 10)):
        order = shuffled(10_000, seed, epoch)
        assert np.array_equal(np.sort(order), np.arange(10_000))
        assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


# Parts with weights

WEIGHTS = [Fraction(text) for text in ("0.5", "2", "1", "0.3", "1.7", "0.125", "1/3", "0.05")]
PARTS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(WEIGHTS)), min_size=1, max_size=4)


def parts_of(found: list[tuple[int, Fraction]]) -> list[SourcePart]:
    return [SourcePart(size=size, weight=weight) for size, weight in found]


@given(found=PARTS, shuffle=st.booleans(), seed=st.integers(0, 5))
@settings(deadline=None)
def test_every_sample_is_shown_as_its_weight_says(found: list[tuple[int, Fraction]], shuffle: bool, seed: int) -> None:
    order = EpochOrder(parts_of(found), shuffle=shuffle, seed=seed)
    counts: Counter[int] = Counter()
    for epoch in range(24):
        shown = order(epoch).tolist()
        assert len(shown) == order.start(epoch + 1) - order.start(epoch)
        counts.update(shown)
        first = 0
        for size, weight in found:
            times = [counts[index] for index in range(first, first + size)]
            assert sum(times) == math.floor((epoch + 1) * weight * size)
            assert max(times) - min(times) <= 1  # so that after whole rounds each was shown the same number of times
            if (epoch + 1) * weight == int((epoch + 1) * weight):
                assert set(times) == {int((epoch + 1) * weight)}
            if weight <= 1:
                assert all(shown.count(index) <= 1 for index in range(first, first + size))
            first += size


def test_half_of_a_source_and_the_other_half_in_the_next_epoch() -> None:
    order = EpochOrder(
        [SourcePart(size=6, weight=Fraction(1, 2)), SourcePart(size=2, weight=Fraction(2))], shuffle=True, seed=1
    )
    first, second = order(0).tolist(), order(1).tolist()
    assert sorted(first + second) == [0, 1, 2, 3, 4, 5, *[6] * 4, *[7] * 4]
    assert len(first) == len(second) == 7
    assert first == EpochOrder(order.parts, shuffle=True, seed=1)(0).tolist()
    assert first != EpochOrder(order.parts, shuffle=True, seed=2)(0).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_of_one_are_the_order_without_parts(shuffle: bool) -> None:
    one = Fraction(1)
    plain = make("abcdefg", shuffle=shuffle, seed=4, epochs=3)
    parts = [SourcePart(size=3, weight=one), SourcePart(size=4, weight=one)]
    mixed = EpochReader("abcdefg", shuffle=shuffle, seed=4, epochs=3, parts=parts)
    assert mixed.settings() == plain.settings()
    assert read(mixed) == read(plain)


@given(found=PARTS, epochs=st.integers(1, 7), stop=st.integers(0, 40), fixed=st.booleans(), seed=st.integers(0, 3))
@settings(deadline=None)
def test_a_resumed_mixture_continues_exactly(
    found: list[tuple[int, Fraction]], epochs: int, stop: int, fixed: bool, seed: int
) -> None:
    parts = parts_of(found)
    lengths = [1 + (7 * index) % 5 for index in range(sum(part.size for part in parts))]

    def batcher() -> Any:
        options: dict[str, Any] = {"shuffle": True, "seed": seed, "epochs": epochs, "length": int, "parts": parts}
        if fixed:
            return FixedSizeBatcher(lengths, batch_size=3, **options)
        return TokenBudgetBatcher(lengths, budget=9, buffer_size=4, **options)

    def places(source: Any) -> list[list[int]]:
        return [list(source.indices) for _ in source]

    whole = places(batcher())
    begun = batcher()
    before = [list(begun.indices) for _, _ in zip(range(stop), begun, strict=False)]
    resumed = batcher()
    resumed.load_state_dict(begun.state_dict())
    assert before + places(resumed) == whole
    counts = Counter(index for batch in whole for index in batch)
    assert sum(counts.values()) == sum(part.shown(epochs) for part in parts)


def test_another_weight_is_another_stream() -> None:
    def batcher(weight: str) -> FixedSizeBatcher[str]:
        return FixedSizeBatcher("abcd", batch_size=2, parts=[SourcePart(size=4, weight=Fraction(weight))])

    state = batcher("2").state_dict()
    assert state["settings"]["parts"] == [[4, "2"]]
    for other in (batcher("3"), FixedSizeBatcher("abcd", batch_size=2)):
        with pytest.raises(ValueError, match=r"parts: is .*, but the state was saved with \[\[4, '2'\]\]"):
            other.load_state_dict(state)
