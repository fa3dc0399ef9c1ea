"""Episodes: branches, order, random keys, rounds, timeouts and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from padfree.rollout import Prompt, Response, SamplingRequest
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.group import Watcher
from padfree.rollout.sampling_rng import GREEDY, turn_key
from tests.refused import refused
from tests.rollout.environment.environment_cases import Scripted, ids, play, prompt, text


async def one_turn(task: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    return policy.trajectory()


async def branching(task: Prompt, policy: Policy) -> Trajectory:
    """A first turn, then two branches, one of which branches again; one branch stays empty."""
    await policy.generate()
    first, second = policy.branch(), policy.branch()
    policy.branch().add("never")
    first.add("x")
    second.add("yy")
    await asyncio.gather(first.generate(), second.generate())
    third = second.branch()
    second.add("?")
    await second.generate(max_tokens=1)
    third.add("!")
    await third.generate()
    first.reward, second.reward = 0.25, 0.75
    return policy.trajectory(reward=-1.0)


SCRIPT = {
    "p": "ab$",
    "pab$x": "c$",
    "pab$yy": "d$",
    "pab$yyd$?": "ef$",
    "pab$yyd$!": "g$",
}


def test_a_tree_becomes_its_leaves() -> None:
    (played,) = play(branching, SCRIPT, prompt("p"))
    shown = [(text(leaf.tokens.tolist()), leaf.sampled.astype(int).tolist(), leaf.reward) for leaf in played.leaves]
    assert shown == [
        ("pab$xc$", [0, 1, 1, 1, 0, 1, 1], 0.25),
        ("pab$yyd$?e", [0, 1, 1, 1, 0, 0, 1, 1, 0, 1], 0.75),
        ("pab$yyd$!g$", [0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1], -1.0),
    ]
    assert [(leaf.turns, leaf.ended) for leaf in played.leaves] == [(2, True), (3, False), (3, True)]
    assert played.rewards == (0.25, 0.75, -1.0)


def test_a_parent_that_continues_is_a_leaf() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        other = policy.branch()
        await policy.generate()
        await other.generate()
        return policy.trajectory(1.0)

    draws = iter(["a$", "b$", "c$"])
    (played,) = play(episode, lambda context, key: next(draws), prompt("p"))
    assert [text(leaf.tokens.tolist()) for leaf in played.leaves] == ["pa$b$", "pa$c$"]


def test_a_sequence_that_a_branch_of_its_branch_continues_is_no_leaf() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        policy.add("t")
        unused = policy.branch()
        await unused.branch().generate()
        await policy.branch().branch().generate()
        return policy.trajectory(1.0)

    draws = iter(["a$", "b$", "c$"])
    (played,) = play(episode, lambda context, key: next(draws), prompt("p"))
    assert [text(leaf.tokens.tolist()) for leaf in played.leaves] == ["pa$tb$", "pa$tc$"]


def shown_leaves(episode: Any, script: dict[str, str], task: Prompt) -> list[tuple[str, float | None]]:
    (played,) = play(episode, script, task)
    return [(text(leaf.tokens.tolist()), leaf.reward) for leaf in played.leaves]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (9, [("pab$xc$", 1.0), ("pab$yyd$", 2.0)]),
        (6, [("pab$xc$", 1.0), ("pab$yyd", 2.0)]),
        (5, [("pab$xc", 1.0), ("pab$yy", 2.0)]),  # there is room for the text of the second way, but not for a turn
        (4, [("pab$x", 1.0), ("pab$", 2.0)]),
        (3, [("pab$", 1.0), ("pab$", 2.0)]),  # the first turn is as long as allowed
    ],
)
def test_no_reward_of_a_branch_is_lost(limit: int, expected: list[tuple[str, float]]) -> None:
    async def two_ways(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        ways = [policy.branch(), policy.branch()]
        for way, hint in zip(ways, ("x", "yy"), strict=True):
            way.add(hint)
        await asyncio.gather(*(way.generate() for way in ways))
        for way, reward in zip(ways, (1.0, 2.0), strict=True):
            way.reward = reward
        return policy.trajectory()

    assert shown_leaves(two_ways, SCRIPT, prompt("p", max_new_tokens=limit)) == expected


def test_a_continued_branch_with_a_reward_is_a_leaf() -> None:
    async def check(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        policy.reward = 0.5
        critic = policy.branch()
        critic.add("x")
        await critic.generate()
        return policy.trajectory(reward=0.25)

    assert shown_leaves(check, SCRIPT, prompt("p")) == [("pab$", 0.5), ("pab$xc$", 0.25)]


def test_a_reward_needs_sampled_tokens() -> None:
    async def never_asked(task: Prompt, policy: Policy) -> Trajectory:
        other = policy.branch()
        other.reward = 1.0
        await policy.generate()
        return policy.trajectory(reward=0.0)

    with refused("rollout.environment", "set the reward of a branch without sampled tokens for 'rows.jsonl:p'"):
        play(never_asked, SCRIPT, prompt("p"))
    (played,) = play(never_asked, SCRIPT, prompt("p"), skip_failures=True)
    assert "branch without sampled tokens" in (played.failure or "")


def test_random_keys_depend_on_the_tree_and_not_on_speed() -> None:
    def episode(slow: str) -> Any:
        async def run(task: Prompt, policy: Policy) -> Trajectory:
            async def go_on(name: str, branch: Policy) -> None:
                await asyncio.sleep(0.05 if name == slow else 0.0)
                branch.add(name)
                await branch.generate()
                await branch.generate()

            first, second = policy.branch(), policy.branch()
            await asyncio.gather(go_on("a", first), go_on("b", second))
            return policy.trajectory(0.0)

        return run

    found = []
    for slow in ("a", "b"):
        sampler = Scripted(lambda context, key: f"{key % 10}$")
        play(episode(slow), None, prompt("p"), prompt("q"), sampler=sampler)
        found.append(sampler.keys)
    assert found[0] == found[1]
    keys = [key for several in found[0].values() for key in several]
    assert len(set(keys)) == len(keys) == 8


def test_keys_of_turns() -> None:
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (-1, 0), (2**63 - 1, 1)]
    assert turn_key(77, (0,)) == 77, "the first turn has the key of a rollout without an environment"
    assert len({turn_key(77, path) for path in paths}) == len(paths)
    assert {turn_key(GREEDY, path) for path in paths} == {GREEDY}
    assert turn_key(-5, (1, 2)) != turn_key(5, (1, 2))


def test_a_round_waits_for_all_episodes_and_keeps_their_order() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        for turn in range(int(task.row["prompt"])):
            await asyncio.sleep(0.03 if task.row["prompt"] == "3" and turn else 0.0)
            await policy.generate()
        return policy.trajectory(0.0)

    sampler = Scripted(lambda context, key: "a$")
    play(episode, None, *map(prompt, "3122"), sampler=sampler, max_concurrent=3)
    assert sampler.rounds == [["3", "1", "2"], ["3a$", "2a$", "2"], ["3a$a$", "2a$"]], (
        "the last episode starts in round two"
    )


def test_progress_counts_finished_episodes() -> None:
    seen: list[int] = []
    play(
        one_turn,
        {"p": "a$", "q": "b$", "x": "c$"},
        *map(prompt, "pqx"),
        watch=Watcher(on_progress=seen.append),
        reward=lambda answer, row: 0.0,
    )
    assert seen == [1, 2, 3]


def test_requests_of_one_prompt_hold_one_array() -> None:
    seen: list[Sequence[SamplingRequest]] = []

    class Watching(Scripted):
        def sample(self, requests: Sequence[SamplingRequest], *, on_progress: Any = None) -> list[Response]:
            seen.append(requests)
            return super().sample(requests)

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        await asyncio.gather(policy.branch().generate(), policy.branch().generate())
        return policy.trajectory(0.0)

    task = prompt("p")
    play(episode, None, task, task, sampler=Watching(lambda context, key: "a$"))
    first, second = seen
    assert first[0].tokens is first[1].tokens is task.tokens
    assert second[0].tokens is second[1].tokens
    assert second[2].tokens is second[3].tokens


def test_properties_of_a_policy() -> None:
    seen: dict[str, Any] = {}

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        turn = await policy.generate()
        seen["turn"] = turn.text, turn.ended, turn.tokens.tolist()
        assert policy.add("x")
        assert policy.add(ids("yz"))
        seen["tokens"], seen["mask"] = text(policy.tokens.tolist()), policy.loss_mask.tolist()
        seen["text"], seen["max_new_tokens"] = policy.text, policy.max_new_tokens
        assert not policy.add("too long")
        seen["full"] = policy.max_new_tokens, (await policy.generate()).tokens.tolist(), policy.branch().max_new_tokens
        return policy.trajectory(0.0)

    play(episode, {"p": "ab$"}, prompt("p", max_new_tokens=8))
    assert seen["turn"] == ("ab", True, ids("ab$"))
    assert (seen["tokens"], seen["mask"]) == ("pab$xyz", [False, True, True, True, False, False, False])
    assert (seen["text"], seen["max_new_tokens"]) == ("ab<eos>xyz", 2)
    assert seen["full"] == (0, [], 0)


# Failures

LIMIT = 0.7
"""Seconds: a busy machine gets the episodes that do not hang through."""


async def fails(task: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    match task.row["prompt"]:
        case "r":
            raise KeyError("no tool")
        case "h":
            await asyncio.sleep(100)
        case "t":
            await asyncio.to_thread(time.sleep, 100)
        case "n":
            return None  # type: ignore[return-value]
        case "i":
            return policy.trajectory(float("nan"))
        case "e":
            return policy.trajectory()
        case "c":
            policy.reward = 0.5
            await asyncio.gather(policy.generate(), policy.generate())
        case "z":
            await policy.generate(max_tokens=0)
    return policy.trajectory(1.0)


FAILURES = {
    "r": "raised KeyError: 'no tool'",
    "h": rf"took more than {LIMIT:g} s \(rollout.episode_timeout\)",
    "t": f"took more than {LIMIT:g} s",
    "n": "returned null for 'rows.jsonl:n'; return policy.trajectory",
    "i": "returned the reward nan for 'rows.jsonl:i'; return a finite number",
    "e": "rollout.reward: is not set, and tests:episode returned no reward for 'rows.jsonl:e'; set rollout.reward",
    "c": "makes two concurrent calls of generate on one branch; call generate on a separate policy.branch",
    "z": "calls generate with max_tokens=0; give 1 or more",
}


@pytest.mark.parametrize("which", FAILURES)
def test_failures(which: str) -> None:
    with pytest.raises(ValueError, match=FAILURES[which]) as caught:
        play(fails, lambda context, key: "a$", prompt("p"), prompt(which), prompt("q"), timeout=LIMIT)
    line = str(caught.value)
    assert line.startswith("rollout.")
    assert ";" in line
    assert "\n" not in line


def test_failures_are_recorded_if_they_are_skipped() -> None:
    names = "p" + "".join(FAILURES) + "q"
    played = play(
        fails, lambda context, key: "a$", *map(prompt, names), timeout=LIMIT, skip_failures=True, max_concurrent=3
    )
    assert [one.failure is None for one in played] == [name not in FAILURES for name in names]
    assert [bool(one.leaves) for one in played] == [name not in FAILURES for name in names]
    assert (played[1].reward, played[1].num_tokens, played[1].ended) == (0.0, 0, False)


def test_an_episode_that_samples_nothing() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        return policy.trajectory(1.0)

    with pytest.raises(ValueError, match=r"sampled no tokens for 'rows.jsonl:p'; await policy.generate"):
        play(episode, {}, prompt("p"))


def test_a_reward_of_the_episode_and_of_the_settings() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        return policy.trajectory(1.0)

    with refused("rollout.reward", "'tests:reward' is set, but tests:episode returned a reward for .*; remove roll"):
        play(episode, {"p": "a$"}, prompt("p"), reward=lambda answer, row: 1.0)
    (played,) = play(one_turn, {"p": "ab$"}, prompt("p"), reward=lambda answer, row: float(answer == "ab"))
    assert played.rewards == (1.0,)


def test_rewards_and_tools_run_at_the_same_time() -> None:
    both = threading.Barrier(3, timeout=30)  # fails unless three wait at the same time

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        await asyncio.to_thread(both.wait)
        return policy.trajectory()

    def reward(answer: str, row: Any) -> float:
        both.wait()
        return 1.0

    played = play(episode, lambda context, key: "a$", *map(prompt, "pqr"), reward=reward)
    assert [one.reward for one in played] == [1.0] * 3


def test_the_clock_of_an_episode_stops_while_it_waits_for_tokens() -> None:
    class Slow(Scripted):
        def sample(self, requests: Sequence[SamplingRequest], *, on_progress: Any = None) -> list[Response]:
            time.sleep(0.4)
            return super().sample(requests)

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        for _ in range(3):
            await policy.generate()
        return policy.trajectory(1.0)

    (played,) = play(episode, None, prompt("p"), sampler=Slow(lambda context, key: "a$"), timeout=1.0)
    assert played.leaves[0].turns == 1
    assert text(played.leaves[0].tokens.tolist()) == "pa$a$a$"


def test_an_episode_that_blocks_the_event_loop_ends_the_run() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        time.sleep(3)
        return policy.trajectory(1.0)

    with pytest.raises(ValueError, match=r"has blocked the event loop for more than 0.5 s; await long"):
        play(episode, {"p": "a$"}, prompt("p"), timeout=0.5, skip_failures=True)


def test_tokens_after_the_end() -> None:
    late: list[asyncio.Task[Any]] = []

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        if not late:
            late.append(asyncio.create_task(_later(policy)))
            return policy.trajectory(1.0)
        await asyncio.sleep(0.1)
        await policy.generate()
        return policy.trajectory(1.0)

    async def _later(policy: Policy) -> None:
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="requests tokens after its end; await all tasks"):
            await policy.generate()

    played = play(episode, lambda context, key: "a$", prompt("p"), prompt("q"))
    assert [text(one.leaves[0].tokens.tolist()) for one in played] == ["pa$", "qa$a$"]


# An async sampler


class Streaming:
    """Answers each request in a thread; later requests are answered sooner."""

    def __init__(self, fails: bool = False) -> None:
        self._threads = ThreadPoolExecutor(4)
        self.fails, self.asked, self.renewed = fails, 0, 0
        self.failure: ValueError | None = None
        self.stuck = False
        self._held: list[Any] = []

    def begin(self, requests: Sequence[SamplingRequest], on_response: Any) -> None:
        for index, request in enumerate(requests):
            self.asked += 1
            if self.fails:
                self.failure = ValueError("rollout.servers: all are gone; check that a server is running")
            elif self.asked == 2:
                self.stuck = True
                self._held.append((index, request, on_response))
            else:
                self._threads.submit(self._answer, index, request, on_response)

    def renew(self) -> None:
        self.renewed += 1
        self.stuck = False
        for held in self._held:
            self._threads.submit(self._answer, *held)

    def _answer(self, index: int, request: SamplingRequest, on_response: Any) -> None:
        tokens = np.array(ids(f"{len(request.tokens)}$"))
        part = Response(tokens=tokens[:1], logprobs=np.zeros(1, np.float32), ended=False, version=0)
        on_response(index, part)  # partial, as if a weight sync had interrupted it
        on_response(index, Response(tokens=tokens, logprobs=np.zeros(2, np.float32), ended=True, version=0))


async def two_turns(task: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    policy.add("x")
    await policy.generate()
    return policy.trajectory(1.0)


def test_requests_go_to_an_async_sampler_at_once() -> None:
    sampler = Streaming()
    played = play(two_turns, None, *map(prompt, ("p", "qq", "rrr")), sampler=sampler)
    shown = [text(one.leaves[0].tokens.tolist()) for one in played]
    assert shown == ["p1$x4$", "qq2$x5$", "rrr3$x6$"]
    assert sampler.renewed == 1, "weights were lost once"


def test_a_sampler_that_fails() -> None:
    with refused("rollout.servers", "all are gone"):
        play(two_turns, None, prompt("p"), sampler=Streaming(fails=True))
