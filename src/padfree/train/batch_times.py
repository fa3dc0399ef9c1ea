"""Measure the seconds of each phase of an RL run: the metrics `seconds/...`.

The phases that form a batch are in the metrics of its first update. These phases generate rollouts (`weight_sync`,
`waiting`, `sampling`, `rewards`), score them (`reference`, `old_logprobs`, `teacher`, `critic`), or do the rest
(`preparing`).

`logging`, `evaluation` and `checkpoint` follow an update, so the metrics of the next update contain them. `other` is
the time between two updates that is in no other phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from padfree.sample import Sample

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
    "preparing",
    "logging",
    "evaluation",
    "checkpoint",
    "other",
)


def unmeasured(seconds: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metric `seconds/other`: `seconds` between two updates, minus the phases that `metrics` contains."""
    measured = sum(value for name, value in metrics.items() if name.startswith("seconds/"))
    return {"seconds/other": max(seconds - measured, 0.0)}


class BatchTimes:
    """Adds up the seconds of each phase on this rank, until `take` returns them and starts again at 0."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        assert part in PARTS, part
        begin = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin

    def timed(self, part: str, ask: Callable[[Sequence[Sample]], Found]) -> Callable[[Sequence[Sample]], Found]:
        """Return the function `ask`, wrapped so that the duration of each call is added to the phase named `part`."""

        def call(samples: Sequence[Sample]) -> Found:
            with self.measure(part):
                return ask(samples)

        return call

    @contextmanager
    def measure_rest(self, part: str) -> Iterator[None]:
        """Context manager that adds the seconds of its block to the phase named `part`.

        Seconds that are measured as another phase inside the block are not counted again.
        """
        begin, known = time.perf_counter(), sum(self.seconds.values())
        yield
        rest = time.perf_counter() - begin - (sum(self.seconds.values()) - known)
        self.seconds[part] = self.seconds.get(part, 0.0) + max(rest, 0.0)

    def take(self) -> dict[str, float]:
        """Return the seconds measured since the last call of `take`, by metric name."""
        found = {f"seconds/{part}": seconds for part, seconds in self.seconds.items()}
        self.seconds = {}
        return found

    def split_sampling(self, timings: Mapping[str, float]) -> None:
        """Move seconds from the phase "sampling" to other phases. `timings`: the seconds to move, by phase name."""
        assert timings.keys() <= set(PARTS), timings
        rest = self.seconds["sampling"] - sum(timings.values())
        self.seconds |= {"sampling": max(rest, 0.0), **timings}

    def metrics(self, num_response_tokens: int) -> dict[str, float]:
        """Return the seconds by metric name and, if anything was sampled, the number of sampled tokens per second."""
        found = {f"seconds/{part}": seconds for part, seconds in self.seconds.items()}
        sampling = self.seconds.get("sampling", 0.0)
        return found | ({"sampler_tokens_per_second": num_response_tokens / sampling} if sampling > 0 else {})
