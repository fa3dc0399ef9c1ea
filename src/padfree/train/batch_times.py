"""Where the time of a rollout batch went: `seconds/...` of the metrics.

    collector                                   reference       scorer           engine
    |weight_sync|waiting|sampling|rewards|  |reference|     |old_logprobs|   |update|   |update|
    '------------ one call of it ------------'

All but `update` stand in the line of the batch's first update; every line has the `update` of its own. A function that
makes samples may know more than how long it took: its `timings`, seconds by name, are then those of its last call, and
what they leave of the call is sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from padfree.batch import Sample

Found = TypeVar("Found")

PARTS = (
    "sampling",
    "rewards",
    "old_logprobs",
    "reference",
    "teacher",
    "critic",
    "update",
    "weight_sync",
    "waiting",
)


class BatchTimes:
    """Seconds of the parts of one batch on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        assert part in PARTS, part
        begin = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin

    def measured(self, part: str, ask: Callable[[Sequence[Sample]], Found]) -> Callable[[Sequence[Sample]], Found]:
        """The same function, whose seconds are those of `part`."""

        def timed(samples: Sequence[Sample]) -> Found:
            with self.measure(part):
                return ask(samples)

        return timed

    def split_sampling(self, timings: Mapping[str, float]) -> None:
        """Divide what was measured as sampling into what its `timings` name, and the rest."""
        assert timings.keys() <= set(PARTS), timings
        rest = self.seconds["sampling"] - sum(timings.values())
        self.seconds |= {"sampling": max(rest, 0.0), **timings}

    def metrics(self, num_response_tokens: int) -> dict[str, float]:
        """By the names of the metrics; with the sampler's speed where there was sampling."""
        found = {f"seconds/{part}": seconds for part, seconds in self.seconds.items()}
        sampling = self.seconds.get("sampling", 0.0)
        return found | ({"sampler_tokens_per_second": num_response_tokens / sampling} if sampling > 0 else {})
