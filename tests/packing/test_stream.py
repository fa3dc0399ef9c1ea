from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.packing.stream import FixedSizeBatcher, TokenBudgetBatcher
from padfree.sample import Sample
from tests.refused import refused


class Document:
    """A sample with an identity."""

    def __init__(self, index: int, length: int) -> None:
        self.index, self.length = index, length

    def __len__(self) -> int:
        return self.length

    def truncated(self, length: int) -> Document:
        return Document(self.index, length)


def documents(lengths: list[int]) -> list[Document]:
    return [Document(index, length) for index, length in enumerate(lengths)]


def indices(batches: Iterator[list[Document]]) -> list[list[int]]:
    return [[sample.index for sample in batch] for batch in batches]


Batcher = TokenBudgetBatcher[Document] | FixedSizeBatcher[Document]


def check_resume(make: Callable[[], Batcher], limit: int = 1000) -> None:
    """A stream stopped after any batch and loaded into a new one continues with exactly the same batches and states."""
    whole = make()
    states, batches = [whole.state_dict()], []
    for batch in islice(whole, limit):
        batches.append([sample.index for sample in batch])
        states.append(whole.state_dict())
    for done, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        rest = []
        for batch in islice(resumed, limit - done):
            rest.append([sample.index for sample in batch])
            assert resumed.state_dict() == states[done + len(rest)]
        assert rest == batches[done:]


def test_growing_samples() -> None:
    source = (range(length) for length in count(1))
    batcher = TokenBudgetBatcher(source, budget=32, buffer_size=10)
    batches = [[len(sample) for sample in batch] for batch in islice(batcher, 5)]
    assert batches == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16]]


def test_worked_examples_of_the_design() -> None:
    samples = documents([4, 2, 3, 1])
    assert indices(TokenBudgetBatcher(samples, budget=10, buffer_size=4)) == [[0, 1, 2, 3]]
    assert indices(FixedSizeBatcher(samples, batch_size=2)) == [[0, 1], [2, 3]]


def test_real_samples() -> None:
    samples = [Sample(tokens=np.arange(n), uid=n) for n in (6, 9, 2, 7)]
    batcher = TokenBudgetBatcher(samples, budget=15)
    assert [[sample.uid for sample in batch] for batch in batcher] == [[6, 9], [2, 7]]
    ((cut,),) = TokenBudgetBatcher(samples[1:2], budget=4, overlong="truncate")
    assert (cut.uid, cut.tokens.tolist()) == (9, [0, 1, 2, 3])


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_token_budget_keeps_every_sample(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 30))
    lengths = data.draw(st.lists(st.integers(0, budget), max_size=40))
    buffer_size = data.draw(st.integers(1, 12))
    batcher = TokenBudgetBatcher(documents(lengths), budget=budget, buffer_size=buffer_size)
    seen: list[int] = []
    for batch in batcher:
        assert sum(map(len, batch)) <= budget
        assert batch[0].index == min(set(range(len(lengths))) - set(seen))  # the oldest is always taken
        assert [sample.index for sample in batch] == batcher.indices == sorted(batcher.indices)
        seen += batcher.indices
    assert sorted(seen) == list(range(len(lengths)))
    assert list(batcher) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_token_budget_resumes_at_every_position(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 20))
    overlong = data.draw(st.sampled_from(["error", "truncate", "drop", "alone"]))
    longest = budget if overlong == "error" else 2 * budget
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=25))
    samples = documents(lengths)
    options: dict[str, Any] = {"budget": budget, "buffer_size": data.draw(st.integers(1, 8)), "overlong": overlong}
    kind = data.draw(st.sampled_from(["sequence", "iterable", "shuffled"]))
    if kind == "iterable":
        check_resume(lambda: TokenBudgetBatcher(iter(samples), **options))
        return
    options |= {
        "shuffle": kind == "shuffled",
        "seed": data.draw(st.integers(0, 5)),
        "epochs": data.draw(st.integers(1, 3)),
    }
    check_resume(lambda: TokenBudgetBatcher(samples, **options))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=25),
    st.integers(1, 6),
    st.booleans(),
    st.integers(1, 3),
)
def test_fixed_size_resumes_at_every_position(lengths: list[int], batch_size: int, shuffle: bool, epochs: int) -> None:
    samples = documents(lengths)
    check_resume(
        lambda: FixedSizeBatcher(
            samples,
            batch_size=batch_size,
            shuffle=shuffle,
            epochs=epochs,
            max_length=6,
            overlong="truncate",
        )
    )
    check_resume(lambda: FixedSizeBatcher(iter(samples), batch_size=batch_size))


def test_resume_without_end() -> None:
    samples = documents([3, 1, 4, 1, 5, 9, 2, 6])
    check_resume(lambda: TokenBudgetBatcher(samples, budget=10, buffer_size=3, shuffle=True, epochs=None), limit=40)
    check_resume(lambda: FixedSizeBatcher(samples, batch_size=3, shuffle=True, epochs=None), limit=20)
    check_resume(lambda: TokenBudgetBatcher((Document(i, i % 7) for i in count()), budget=10, buffer_size=3), limit=40)


def test_each_epoch_has_every_sample_in_another_order() -> None:
    samples = documents([1] * 20)
    for batcher in (
        TokenBudgetBatcher(samples, budget=5, buffer_size=4, shuffle=True, seed=1, epochs=3),
        FixedSizeBatcher(samples, batch_size=5, shuffle=True, seed=1, epochs=3),
    ):
        order = [index for batch in batcher for index in batcher.indices if batch]
        epochs = [order[start : start + 20] for start in (0, 20, 40)]
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != list(range(20))


def test_small_samples_fill_the_budget_though_the_buffer_is_small() -> None:
    batches = indices(TokenBudgetBatcher(documents([1] * 100), budget=32, buffer_size=4))
    assert [len(batch) for batch in batches] == [32, 32, 32, 4]


def test_later_samples_fill_the_gap() -> None:
    batches = indices(TokenBudgetBatcher(documents([6, 7, 4, 3, 9]), budget=10, buffer_size=4))
    assert batches == [[0, 2], [1, 3], [4]]


def test_overlong_samples_are_counted() -> None:
    samples = documents([4, 15, 3, 11, 2])
    truncate = TokenBudgetBatcher(samples, budget=10, overlong="truncate")
    assert [[len(sample) for sample in batch] for batch in truncate] == [[4, 3, 2], [10], [10]]
    drop = TokenBudgetBatcher(samples, budget=10, overlong="drop")
    assert indices(drop) == [[0, 2, 4]]
    alone = TokenBudgetBatcher(samples, budget=10, overlong="alone")
    assert indices(alone) == [[0, 2, 4], [1], [3]]
    assert truncate.num_overlong == drop.num_overlong == alone.num_overlong == 2


def test_nothing_is_lost_by_an_error() -> None:
    """After an error the stream stays before the refused sample: the next call raises again, and no sample is lost."""
    samples = documents([4, 6, 99, 3])
    for source in (samples, iter(samples)):
        budget = TokenBudgetBatcher(source, budget=10, buffer_size=2)
        assert [sample.index for sample in next(budget)] == [0, 1]
        for _ in range(2):
            with refused("budget"):
                next(budget)
    for source in (samples, iter(samples)):
        fixed = FixedSizeBatcher(source, batch_size=4, max_length=10)
        for _ in range(2):
            with pytest.raises(ValueError, match="10 is less than the 99 tokens of sample 2 of the source"):
                next(fixed)
            assert fixed.state_dict()["position"] == 0


def test_last_batch() -> None:
    samples = documents([1] * 5)
    assert indices(FixedSizeBatcher(samples, batch_size=2, epochs=2)) == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]
    assert indices(FixedSizeBatcher(iter(samples), batch_size=2)) == [[0, 1], [2, 3], [4]]


def test_rows_of_a_data_set_need_a_length() -> None:
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (4, 2, 3, 1)]
    with refused("length"):
        next(TokenBudgetBatcher(rows, budget=10))
    assert list(TokenBudgetBatcher(rows, budget=10, length=lambda row: len(row["input_ids"]))) == [rows]


def test_empty_source() -> None:
    assert list(TokenBudgetBatcher([], budget=3, epochs=None)) == []
    assert list(FixedSizeBatcher([], batch_size=3, epochs=None)) == []
    assert list(TokenBudgetBatcher(iter([]), budget=3)) == []


def test_a_source_without_a_usable_sample_does_not_hang() -> None:
    for lengths, overlong in (([30, 40], "drop"), ([0, 0], "error")):
        batcher = TokenBudgetBatcher(documents(lengths), budget=10, epochs=None, overlong=overlong)
        with pytest.raises(ValueError, match="none of its 2 samples has a usable token"):
            next(batcher)


def other(settings: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    changed = {
        "budget": 11,
        "buffer_size": 5,
        "overlong": "drop",
        "shuffle": True,
        "seed": 1,
        "epochs": 2,
        "source_length": {"source": documents([1, 2, 3])},
    }
    return [(name, {**settings, **(new if isinstance(new, dict) else {name: new})}) for name, new in changed.items()]


@pytest.mark.parametrize(
    ("name", "options"), other({"source": documents([1, 2, 3, 4]), "budget": 10, "buffer_size": 4})
)
def test_state_of_another_configuration(name: str, options: dict[str, Any]) -> None:
    state = TokenBudgetBatcher(documents([1, 2, 3, 4]), budget=10, buffer_size=4).state_dict()
    with refused(name):
        TokenBudgetBatcher(**options).load_state_dict(state)


def test_a_state_may_have_settings_that_a_stream_does_not_have() -> None:
    samples = documents([1, 2, 3])
    for make in (lambda: TokenBudgetBatcher(samples, budget=3), lambda: FixedSizeBatcher(samples, batch_size=2)):
        begun = make()
        next(begun)
        state = begun.state_dict()
        state["settings"]["drop_last"] = False
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == begun.state_dict() | {"settings": resumed.state_dict()["settings"]}


def test_state_of_another_kind() -> None:
    samples = documents([1, 2])
    state = TokenBudgetBatcher(samples, budget=3).state_dict()
    with pytest.raises(ValueError, match=r"batcher: is .*, but the state was saved with 'TokenBudgetBatcher'"):
        FixedSizeBatcher(samples, batch_size=2).load_state_dict(state)
    with refused("state"):
        FixedSizeBatcher(samples, batch_size=2).load_state_dict({})


def test_state_of_an_iterable() -> None:
    samples = documents([2] * 6)
    used = TokenBudgetBatcher(iter(samples), budget=4, buffer_size=2)
    next(used)
    state = used.state_dict()
    with pytest.raises(ValueError, match="one-pass iterator that was already read"):
        used.load_state_dict(state)
    with pytest.raises(ValueError, match="ends after 1 samples, but the state is at 2"):
        TokenBudgetBatcher(iter(samples[:1]), budget=4, buffer_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBudgetBatcher([], budget=0), "budget: 0"),
        (lambda: TokenBudgetBatcher([], budget=1, buffer_size=0), "buffer_size: 0"),
        (lambda: TokenBudgetBatcher([], budget=1, overlong="cut"), "overlong: 'cut'"),
        (lambda: TokenBudgetBatcher([], budget=1, seed=-1), "seed: -1"),
        (lambda: TokenBudgetBatcher([], budget=1, epochs=0), "epochs: 0"),
        (lambda: TokenBudgetBatcher(iter([]), budget=1, shuffle=True), "source: is an iterable without len"),
        (lambda: TokenBudgetBatcher(iter([]), budget=1, epochs=None), "source: is an iterable without len"),
        (lambda: FixedSizeBatcher([], batch_size=0), "batch_size: 0"),
        (lambda: FixedSizeBatcher([], batch_size=1, overlong="drop"), "overlong: 'drop'"),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
