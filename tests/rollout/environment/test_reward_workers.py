"""Rewards in processes: results, and processes that end or hang."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from padfree.data import load_reward
from padfree.rollout.environment.trajectory import Branch, leaf_of
from padfree.rollout.group import Played
from padfree.rollout.reward_workers import RewardWorkers, score_by_model
from tests.refused import refused
from tests.rollout.environment.environment_cases import prompt

HERE = "tests.rollout.environment.rewards"


def test_processes_compute_rewards_and_are_replaced() -> None:
    async def rewarded() -> list[float]:
        reward_workers = RewardWorkers(load_reward(f"{HERE}:sometimes_ends"), processes=1)
        try:
            with refused("reward", ".*:sometimes_ends ended its worker process while it graded sample 'a'"):
                await reward_workers("1", {"answer": "2"}, "a")
            return [await reward_workers(text, {"answer": "1"}, "b") for text in ("12", "x")]
        finally:
            await reward_workers.close()

    assert asyncio.run(rewarded()) == [0.25, 0.0]


@pytest.mark.parametrize(("answer", "scored"), [(None, "text"), ("", ""), ("7", "7")])
def test_a_reward_model_scores_the_answer(answer: str | None, scored: str) -> None:
    branch = Branch(np.array([1, 2]))
    played = {0: Played(number=0, leaves=(leaf_of(branch, "text", None, answer),))}
    texts = []

    def model(pairs: Any) -> list[float | str]:
        texts.extend(text for _, text in pairs)
        return [0.5] * len(pairs)

    score_by_model(model, played, {0: prompt("p")}, lambda own: [own], skip_failures=False)
    assert (texts, played[0].rewards) == ([scored], (0.5,))


def test_a_process_that_hangs_is_ended() -> None:
    async def rewarded() -> float:
        reward_workers = RewardWorkers(load_reward(f"{HERE}:hangs"), processes=1)
        try:
            assert await reward_workers("1", {"answer": "1"}, "a") == 0.125
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reward_workers("1", {"answer": "2"}, "a")
            return await reward_workers("12", {"answer": "1"}, "a")
        finally:
            await reward_workers.close()

    assert asyncio.run(rewarded()) == 0.25


def test_an_exception_of_a_reward_is_raised() -> None:
    async def rewarded() -> None:
        reward_workers = RewardWorkers(load_reward("exact_match"), processes=1)
        try:
            with refused("reward", "exact_match raised UserError: answer: .* for sample 'a'"):
                await reward_workers("1", {}, "a")
        finally:
            await reward_workers.close()

    asyncio.run(rewarded())
