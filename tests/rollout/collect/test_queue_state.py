"""The queue in a checkpoint is restored, or dropped if it cannot be used."""

from __future__ import annotations

import numpy as np

from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response
from padfree.rollout.collect.queue_state import dropped_reason, queue_state, stored_in
from padfree.rollout.group import Leaf, Played


def leaf(reward: float | None, kept: KeptSets | None = None) -> Leaf:
    return Leaf(
        kept=kept,
        num_kept=0 if kept is None else len(kept.ids),
        tokens=np.array([5, 6, 7]),
        sampled=np.array([False, True, False]),
        logprobs=np.array([0.0, -1.5, 0.0], np.float32),
        versions=np.array([0, 4, 0]),
        ended=True,
        turns=1,
        text="six",
        reward=reward,
        answer="6",
    )


def test_episodes_and_parts_of_responses_come_back() -> None:
    whole = Played(number=1, leaves=(leaf(0.5), leaf(None)), metrics={"calls": 2.0}, counts={"cuts": 1.0})
    part = Response(
        tokens=np.array([5, 6]),
        logprobs=np.array([-1.0, -2.0], np.float32),
        ended=False,
        version=1,
        versions=np.array([1, 2]),
    )
    failed = Played(number=0, failure="raised")
    found = stored_in(queue_state([(3, 0, failed), (2, 1, whole), (2, 0, part)], "mine:one"))
    assert [(batch, number) for batch, number, _ in found] == [(2, 0), (2, 1), (3, 0)]
    begun, back, lost = (one for _, _, one in found)
    assert isinstance(begun, Response)
    assert (begun.tokens.tolist(), begun.token_versions.tolist(), begun.ended) == ([5, 6], [1, 2], False)
    assert begun.logprobs.tolist() == [-1.0, -2.0]
    assert isinstance(back, Played)
    assert isinstance(lost, Played)
    assert (lost.failure, lost.leaves) == ("raised", ())
    assert (back.metrics, back.counts, back.rewards) == ({"calls": 2.0}, {"cuts": 1.0}, (0.5,))
    for one, other in zip(back.leaves, whole.leaves, strict=True):
        for name in Leaf.__slots__:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert stored_in(queue_state([], "mine:one")) == []
    assert stored_in({}) == []


def test_kept_sets_come_back() -> None:
    sets = KeptSets.of_lists([[], [6, 9], [-1, -4]], "kept")
    played = Played(number=1, leaves=(leaf(0.5), leaf(1.0, sets)))
    part = Response(tokens=np.array([5, 6]), logprobs=np.zeros(2, np.float32), ended=False, version=1, kept=sets[1:])
    (_, _, begun), (_, _, back) = stored_in(queue_state([(2, 1, played), (2, 0, part)], "mine:one"))
    assert isinstance(begun, Response)
    assert isinstance(back, Played)
    assert begun.kept_sets.lists() == [[6, 9], [-1, -4]]
    without, found = back.leaves
    assert (without.kept, without.num_kept) == (None, 0)
    assert found.kept is not None
    assert (found.kept.lists(), found.num_kept) == (sets.lists(), 4)


def test_an_unusable_queue_is_dropped_for_a_reason() -> None:
    there = queue_state([(3, 0, Played(number=0, failure="raised"))], "mine:one")
    assert dropped_reason(there, "mine:one", 1) is None
    assert dropped_reason({}, "mine:one", 0) is None
    assert dropped_reason(there, "mine:one", 0) == "rollout.staleness is 0 now"
    assert "another environment" in str(dropped_reason(there, "mine:other", 2))
    assert dropped_reason({"episodes": [{}]}, "mine:one", 2) is not None
