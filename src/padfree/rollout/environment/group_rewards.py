"""Rewards that need all episodes of a prompt, e.g. a comparison of their answers.

In this example, the prompt has three episodes, and the last one to end computes the rewards of all:

    episode 0   ... ends, waits ------------------.
    episode 1   ... ends, waits -------.          |
    episode 2   ...................... ends: score([0, 1, 2]) -> reward and metrics of each

All functions run in the thread of the event loop. An episode that waits for others counts as ended, so that the next
one can start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padfree.errors import UserError

Scored = tuple[float, Mapping[str, float]]
"""The reward and the metrics of an episode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReward:
    """What an episode gives instead of a reward if its reward depends on all episodes of the prompt.

    When these episodes have ended, `score` receives the `result` of each and returns their rewards.
    """

    result: Any
    score: Callable[[Sequence[Any]], Awaitable[Sequence[Scored]]]


class PlayGroup:
    """The episodes of a prompt that this rank plays.

    `size`: the number of episodes of the prompt on all ranks. `members`: the number of them on this rank.
    """

    def __init__(self, size: int, members: int) -> None:
        self.size, self.members = size, members
        self._results: dict[int, Any] = {}
        self._waiting: dict[int, asyncio.Future[Scored]] = {}
        self._failed = False

    async def scored(self, number: int, given: GroupReward) -> Scored:
        """Wait until all episodes of the group have ended, and return the reward of episode `number`."""
        if self.members != self.size:
            raise UserError(
                "rollout.environment",
                f"its rewards compare all {self.size} episodes of a prompt, but only {self.members} of them are on one "
                "rank",
                "set batch.samples to rollout.samples_per_prompt times a multiple of the number of ranks",
            )
        if self._failed:
            raise RuntimeError("another episode of the same prompt failed")
        self._results[number] = given.result
        if len(self._results) < self.size:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            return await self._waiting[number]
        numbers = sorted(self._results)
        found = await given.score([self._results[one] for one in numbers])
        assert len(found) == len(numbers)
        scored = dict(zip(numbers, found, strict=True))
        for other, future in self._waiting.items():
            if not future.done():
                future.set_result(scored[other])
        self._waiting.clear()
        return scored[number]

    def fail(self) -> None:
        """Record that an episode of the group failed, so that no episode of the group can be scored."""
        self._failed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RuntimeError("another episode of the same prompt failed"))
        self._waiting.clear()
