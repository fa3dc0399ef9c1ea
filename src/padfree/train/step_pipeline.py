"""Finish the updates that were begun, and write one line of metrics to `metrics.jsonl` for each.

    host     begin 1 | begin 2 | finish 1 | begin 3 | finish 2 | ...
    written                      line 1              line 2

On a GPU, an update begins before the previous one is finished, so that the device never waits for the host. The metrics
of an update are therefore written only after the next update has begun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from padfree.estimate.flops import Flops, Shared
from padfree.packing import CostModel, StepPlan
from padfree.record.events import Events
from padfree.record.file_names import NONFINITE
from padfree.record.metrics_file import MetricsFile, write_samples
from padfree.record.run_folder import writing
from padfree.record.trackers import Trackers
from padfree.train.batch_times import BatchTimes
from padfree.train.engine import Engine
from padfree.train.finite_checks import NonFiniteError
from padfree.train.step import PendingStep, SkippedSamples, StepReport

OnStep = Callable[[Mapping[str, Any]], None]
"""Called with the metrics of each finished step, on every rank."""

OnActivity = Callable[[str, int, int], None]
"""Called with the name of the current activity, how much of it is done, and the total amount (0: not known).

During the activity "step", the amount done is the number of the step.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _UnfinishedStep:
    """An update that the engine has begun but not finished, and values that belong to its line of metrics."""

    pending: PendingStep
    step: int
    rates: Mapping[str, float]  # the learning rates of this update
    metrics: Mapping[str, Any]
    begin: float  # time.perf_counter()


class StepPipeline:
    """Holds the updates that an engine has begun, finishes them in order, and writes their metrics."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        flops: Flops,
        metrics: MetricsFile,
        events: Events,
        trackers: Trackers,
        on_step: OnStep | None,
        times: BatchTimes | None = None,
    ) -> None:
        """`times`: a timer of the phases of an RL run. This class adds the seconds of the phase "logging" to it.

        If `times` is None, `metrics.jsonl` has no `seconds/update`.
        """
        self._engine, self._folder, self._flops, self.on_step = engine, folder, flops, on_step
        self._metrics, self._events, self._trackers = metrics, events, trackers
        self._times = times
        self._unfinished: list[_UnfinishedStep] = []
        self.last_end: float | None = None  # when the last update was finished
        self.stop_votes = 0  # ranks that wanted to stop when the last finished update began

    @property
    def last(self) -> PendingStep | None:
        """The most recent update that has begun and is not finished; None if all updates are finished."""
        return self._unfinished[-1].pending if self._unfinished else None

    def add(self, pending: PendingStep, *, step: int, metrics: Mapping[str, Any], begin: float) -> None:
        """Add an update that the engine has begun, so that `finish` can wait for it and write its metrics.

        `begin`: the time at which the host started to work on the update. `metrics`: further metrics to write.
        """
        rates = self._engine.optimizer.rates
        self._unfinished.append(_UnfinishedStep(pending=pending, step=step, rates=rates, metrics=metrics, begin=begin))

    def finish(self, *, keep: int = 0) -> None:
        """Wait for all updates except the `keep` most recent ones, and write their metrics."""
        while len(self._unfinished) > keep:
            self._finish(self._unfinished.pop(0))

    def _finish(self, unfinished: _UnfinishedStep) -> None:
        try:
            report = unfinished.pending.finish()
        except NonFiniteError as error:
            path = self._folder / NONFINITE.format(step=f"{unfinished.step:08d}")
            if self._engine.mesh.loss.rank == 0:
                with suppress(OSError):  # a full disk must not hide the original error
                    write_samples(path, error.samples)
            self._events.write("nonfinite", step=unfinished.step, file=path.name)
            raise NonFiniteError(f"{error}; the samples are in {path}", error.samples) from None
        end = time.perf_counter()
        # Time of logging counts only if no other update is running on the device; otherwise it delays nothing.
        counted = self._times is not None and not self._unfinished
        with self._times.measure("logging") if counted and self._times is not None else nullcontext():
            self._log(unfinished, report, end)

    def _log(self, unfinished: _UnfinishedStep, report: StepReport, end: float) -> None:
        begin = unfinished.begin if self.last_end is None else max(unfinished.begin, self.last_end)
        numbers = step_metrics(
            unfinished.step,
            report,
            rates=unfinished.rates,
            seconds=unfinished.pending.device_seconds() or end - begin,
            flops=self._flops,
            compute_seconds=report.compute_seconds,
            memory_gib=peak_memory_gib(self._engine.mesh.device),
        )
        self.last_end, self.stop_votes = end, report.stop_votes
        if self._times is not None:
            numbers["seconds/update"] = end - begin  # includes the time in which the device waits for the host
        written = {**numbers, **unfinished.metrics}
        with writing(self._folder):
            self._metrics.write(written)
            self._trackers.log(unfinished.step, written)
        if self.on_step is not None:
            self.on_step(written)


# Metrics


def step_metrics(
    step: int,
    report: StepReport,
    *,
    rates: Mapping[str, float],
    seconds: float,
    flops: Flops | None = None,
    compute_seconds: Sequence[float] = (),
    memory_gib: float | None = None,
) -> dict[str, Any]:
    """Return the metrics of one step. `rates`: learning rates. `seconds`: duration of the step.

    `compute_seconds`: compute time of each data rank, without the time spent waiting for other ranks.
    """
    skipped = report.skipped or SkippedSamples()
    found = {
        "step": step,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        **rates,
        "samples": report.num_samples,
        **({} if report.num_rows is None else {"rows": report.num_rows}),
        "tokens": report.num_tokens,
        "scored_tokens": report.num_labels,
        **({} if report.skipped is None else {"skipped_samples": skipped.samples, "skipped_tokens": skipped.tokens}),
        "seconds": seconds,
        "tokens_per_second": (report.num_tokens - skipped.tokens) / seconds if seconds > 0 else 0.0,
        "computed_tokens": int(report.plan.computed_tokens.sum()),
        "micro_batches": report.plan.num_micro_batches,
        "fill": report.plan.fill,
        "imbalance": report.plan.imbalance,
        "padding_share": report.padding_share,
        **{f"loss/{name}": value for name, value in report.statistics.items()},
        **{f"source/{name}/loss": value for name, value in report.source_losses.items()},
    }
    if sum(compute_seconds) > 0:
        found["imbalance_measured"] = max(compute_seconds) * len(compute_seconds) / sum(compute_seconds)
    if flops is not None:
        found |= flops.metrics(
            report.plan.lengths, report.num_labels - skipped.labels, seconds, shared=_shared(report.plan),
            image_features=report.image_features,
        )  # fmt: skip
    if memory_gib is not None:
        found["memory_gib"] = memory_gib
    return found


def _shared(plan: StepPlan) -> Shared | None:
    """Return the number of tokens and of (query, key) pairs that sharing prefixes saves; None if none are shared."""
    if plan.prefixes is None:
        return None
    tokens = pairs = 0.0
    for packs, is_first in zip(plan.micro_batches, plan.is_first, strict=True):
        for indices in (samples for samples, counts in zip(packs, is_first, strict=True) if counts):
            tree, lengths = plan.prefixes.restricted(indices), plan.lengths[indices].astype(float)
            tokens += lengths.sum() - tree.num_tokens
            pairs += (lengths**2).sum() - tree.cost(CostModel(linear=0.0, quadratic=1.0))
    return Shared(tokens=tokens, pairs=pairs)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: GPU memory, or host memory if the device is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not available on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB elsewhere
