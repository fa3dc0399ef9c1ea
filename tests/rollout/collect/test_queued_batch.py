"""Which groups a batch samples and trains on, how ranks share its episodes, and the overlong penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from padfree.config.rollout import RolloutConfig
from padfree.rollout import Prompt
from padfree.rollout.collect.queued_batch import EpisodeOutcome, QueuedBatch, share_of_rank
from padfree.rollout.group import RolloutGroup, overlong_penalty
from tests.rollout.vllm.test_run import model_folder

__all__ = ["model_folder"]  # a fixture
HERE = "tests.rollout.collect.test_queued_batch"


def prompts(number: int) -> list[Prompt]:
    return [
        Prompt(tokens=np.array([index]), max_new_tokens=4, row={}, uid=f"p{index}", source="p")
        for index in range(number)
    ]


def make_batch(batch: int = 1, *, own: int = 4, there: int = 40, **settings: Any) -> QueuedBatch:
    found = prompts(there)
    groups = [RolloutGroup(prompt=prompt, size=2) for prompt in found[:own]]
    rollout = RolloutConfig(samples_per_prompt=2, **{"filter": "equal", **settings})
    return QueuedBatch(batch, groups, rollout, version=0, prompts=found, seed=3)


def played(queued: QueuedBatch, differs: Callable[[Prompt], bool]) -> dict[int, EpisodeOutcome]:
    """Request groups until the batch needs no more; return the outcomes of their episodes."""
    outcomes: dict[int, EpisodeOutcome] = {}
    new = queued.request_first()
    while new:
        for group in new:
            for index, number in enumerate(group.numbers):
                reward = float(index) if differs(group.prompt) else 0.5
                outcomes[number] = EpisodeOutcome((reward,), None, 1, True)
        new = queued.request_more(outcomes)
    return outcomes


def uids(groups: Iterable[RolloutGroup]) -> list[str]:
    return [group.prompt.uid for group in groups]


@pytest.mark.parametrize("oversample", [1.0, 1.5, 3.0])
def test_the_first_groups_that_differ_are_chosen_for_any_oversampling(oversample: float) -> None:
    def differs(prompt: Prompt) -> bool:
        return int(prompt.uid[1:]) % 3 != 1

    plain, queued = make_batch(), make_batch(oversample=oversample)
    outcomes = played(queued, differs)
    found = queued.chosen(outcomes)
    assert uids(found) == uids(plain.chosen(played(plain, differs)))
    assert len(found) == 4
    assert all(differs(group.prompt) for group in found)
    counted = queued.metrics(outcomes)
    assert counted["groups_requested"] == counted["groups_equal"] + 4 + counted["groups_surplus"]


def test_at_the_bound_the_batch_is_filled_up() -> None:
    queued = make_batch(filter_bound=2.0)
    outcomes = played(queued, lambda prompt: prompt.uid == "p2")
    assert queued.num_requested == 8
    assert uids(queued.chosen(outcomes)) == ["p0", "p1", "p2", "p3"]
    few = make_batch(there=5)
    assert len(few.chosen(played(few, lambda prompt: False))) == 4
    assert few.num_requested == 5, "there are no more prompts"


def test_spare_prompts_are_others_and_follow_from_seed_and_batch() -> None:
    def spare(batch: int) -> list[str]:
        queued = make_batch(batch)
        played(queued, lambda prompt: False)
        return uids(queued.groups[4:])

    assert spare(1) == spare(1) != spare(2)
    assert not {"p0", "p1", "p2", "p3"} & set(spare(1))
    assert len(set(spare(1))) == len(spare(1)) == 8


def test_without_a_filter_the_groups_are_those_of_the_batch() -> None:
    queued = make_batch(own=3, filter="none")
    outcomes = played(queued, lambda prompt: False)
    assert uids(queued.requested) == uids(queued.chosen(outcomes)) == ["p0", "p1", "p2"]
    assert queued.metrics(outcomes) == {}


def test_episodes_are_divided_over_ranks() -> None:
    def shares(lengths: Sequence[int], size: int, world: int) -> list[list[int]]:
        """The episode numbers of each rank. `lengths`: numbers of prompt tokens of groups of `size` episodes."""
        given = [
            replace(one, tokens=np.zeros(length, np.int64)) for one, length in zip(prompts(9), lengths, strict=False)
        ]
        groups = [RolloutGroup(prompt=one, size=size, first=size * index) for index, one in enumerate(given)]
        parts = [share_of_rank(groups, rank, world) for rank in range(world)]
        assert all(number in group.numbers for part in parts for number, group in part)
        return [[number for number, _ in part] for part in parts]

    assert shares((5, 6, 7), 2, 2) == [[0, 1, 4], [5, 2, 3]]
    for world in (1, 2, 4, 7, 20):
        found = shares((9, 2, 4, 4, 7), 3, world)
        assert sorted(number for share in found for number in share) == list(range(15))
        sizes = [len(share) for share in found]
        assert max(sizes) - min(sizes) <= 1
    assert shares((), 2, 2) == [[], []]


@pytest.mark.parametrize(("length", "lost"), [(1, 0.0), (4, 0.0), (5, 0.25), (6, 0.5), (8, 1.0)])
def test_the_overlong_penalty_grows_towards_max_new_tokens(length: int, lost: float) -> None:
    settings = RolloutConfig(max_new_tokens=8, overlong_buffer=4)
    assert overlong_penalty(length, 8, settings) == lost
    assert overlong_penalty(length, 8, RolloutConfig(max_new_tokens=8)) == 0.0
