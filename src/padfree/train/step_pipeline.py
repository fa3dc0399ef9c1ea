"""Run the updates of a training, and write one line to `metrics.jsonl` for each.

    host     begin 1 | begin 2 | finish 1 | begin 3 | finish 2 | ...
    written                      line 1              line 2

On a GPU an update begins before the previous one is finished, so that the device never waits for the host. The metrics
of an update are therefore known one update later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padfree.estimate.flops import Flops
from padfree.record.events import Events
from padfree.record.file_names import NONFINITE
from padfree.record.metrics_file import MetricsFile, write_samples
from padfree.record.run_folder import writing
from padfree.record.trackers import Trackers
from padfree.train.batch_times import BatchTimes
from padfree.train.engine import Engine, PendingStep, PreparedStep, StepReport
from padfree.train.finite_checks import NonFiniteError
from padfree.train.step_metrics import peak_memory_gib, step_metrics

OnStep = Callable[[Mapping[str, Any]], None]
"""Called with the metrics of each finished step, on every rank."""

OnActivity = Callable[[str, int, int], None]
"""Called with the name of the current activity, the amount done, and the total (0: not known). For the activity "step",
the amount is the number of the step.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _UnfinishedStep:
    """An unfinished update, and the values that its line of metrics also contains."""

    pending: PendingStep
    step: int
    rates: Mapping[str, float]
    metrics: Mapping[str, Any]
    begin: float  # time.perf_counter()


class StepPipeline:
    """Begins updates of an engine, finishes them in order, and writes their metrics."""

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
        """If `times` is given, `seconds/update` is written too, and the time of logging is added to `times`."""
        self._engine, self._folder, self._flops, self.on_step = engine, folder, flops, on_step
        self._metrics, self._events, self._trackers = metrics, events, trackers
        self._times = times
        self._unfinished: list[_UnfinishedStep] = []
        self.last_end: float | None = None  # when the last update was finished
        self.stop_votes = 0  # ranks that wanted to stop when the last finished update began

    @property
    def pending(self) -> bool:
        """Whether any update is unfinished."""
        return bool(self._unfinished)

    def begin(
        self,
        prepared: PreparedStep,
        *,
        step: int,
        lr_factor: float,
        metrics: Mapping[str, Any],
        begin: float,
        wants_stop: bool,
        apply: bool = True,
    ) -> None:
        """Begin an update. `begin`: the time at which the host started to work on the update.

        `metrics` are written together with the metrics of the update. With `apply=False`, the metrics are computed, but
        no weight changes. Other arguments: see `Engine.begin`.
        """
        after = self._unfinished[-1].pending if self._unfinished else None
        pending = self._engine.begin(
            prepared, lr_factor=lr_factor, step=step, after=after, wants_stop=wants_stop, apply=apply
        )
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
        # Logging is not counted while the device runs another update, because then it does not delay the run.
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
            numbers["seconds/update"] = end - begin  # with the time in which the device waits for the host
        written = {**numbers, **unfinished.metrics}
        with writing(self._folder):
            self._metrics.write(written)
            self._trackers.log(unfinished.step, written)
        if self.on_step is not None:
            self.on_step(written)
