"""The training loop: batches, updates, metrics, checkpoints. SFT and RL share it.

SFT makes one update per batch. RL computes the advantages and log-probabilities of a rollout batch once, and then
makes several updates with this batch.

On a GPU, an update may begin before the previous one is finished. A checkpoint waits for all updates that were begun.
It holds everything that a resumed run needs to make the same steps as an uninterrupted run, on any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.choices import LOWER_IS_BETTER, Better
from padfree.config import Config
from padfree.distributed import Mesh
from padfree.errors import UserError, shown_error
from padfree.estimate.flops import Flops
from padfree.garbage_collection import quiet_collector
from padfree.layers.compiler_watch import CompilerWatch
from padfree.model.parts import frozen_weights
from padfree.model.vision.tower_cost import tower_cost
from padfree.optim.schedule import learning_rate_factor
from padfree.record.run_files import RunFiles
from padfree.record.run_folder import writing
from padfree.stop_signals import StopSignals
from padfree.train.batch_preparer import BatchPreparer
from padfree.train.batch_times import BatchTimes, unmeasured
from padfree.train.determinism import deterministic, random_state
from padfree.train.engine import Engine
from padfree.train.evaluate import Evaluate
from padfree.train.finished import write_end
from padfree.train.finite_checks import NonFiniteError, check_weights
from padfree.train.float8_budget import Float8Budget
from padfree.train.global_batch import KEY as ROLLOUTS
from padfree.train.global_batch import GlobalBatch
from padfree.train.resolve_auto import with_asynchronous
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.rl.run_response_log import RunResponseLog
from padfree.train.step import PreparedStep
from padfree.train.step_pipeline import OnActivity, OnStep, StepPipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended: after which step, why, and with which checkpoint."""

    step: int  # number of optimizer steps of the run, including those before a resume
    stopped: bool  # whether a signal stopped the run
    checkpoint: Path | None
    was_finished: bool = False  # whether an earlier start had finished the run, so that this start did nothing


OnNote = Callable[[str], None]
"""Called with a one-line message for the user, e.g. about a resolved setting or about what the run is waiting for."""

AFTER_SIGNAL = "finishes its current step or evaluation, saves a checkpoint and ends"
COMPILING = "compiling the layers: up to a minute the first time, a few seconds if the compiler cache has them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far, by the metric that `checkpoint.best` names."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPosition:
    """The position at which a started or resumed run begins: step 0, or a checkpoint."""

    step: int = 0
    saved: Path | None = None  # the checkpoint
    evaluated: int | None = None  # step of the last evaluation
    best: Best | None = None
    batch: GlobalBatch | None = None  # the batch whose updates the checkpoint interrupted


class Trainer:
    """Trains the model of an engine on batches, from the newest checkpoint of the run folder if there is one."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batches: BatchPreparer,
        *,
        files: RunFiles,
        checkpointer: Checkpointer,
        made_with: Mapping[str, Any],
        position: RunPosition,
        response_log: RunResponseLog | None = None,
        evaluate: Evaluate | None = None,
        on_step: OnStep | None = None,
        on_note: OnNote | None = None,
        on_activity: OnActivity | None = None,
        signals: StopSignals | None = None,
        planned_steps: int | None = None,
        float8: Float8Budget | None = None,
    ) -> None:
        """Use `padfree.train.start_run.begin_run` to make a trainer; it prepares the arguments from a checkpoint.

        `made_with`: the record of settings, model and data for checkpoints. `signals`: handlers that are already
        installed. `planned_steps`: for display.
        """
        self._signals, self._planned_steps = signals, planned_steps
        self._on_activity, self.on_note, self._float8 = on_activity, on_note, float8
        self.config, self.engine, self.batches, self.evaluate = config, engine, batches, evaluate
        self.mesh, self.checkpointer, self.made_with, self.response_log = (
            engine.mesh,
            checkpointer,
            made_with,
            response_log,
        )
        self.folder, self.events, self.trackers, self._evaluations = (
            files.folder, files.events, files.trackers, files.evaluations
        )  # fmt: skip
        self.step = self._saved_step = position.step
        self._batch = position.batch  # the batch whose updates are being made
        self._next_batch: GlobalBatch | None = None  # the next batch, if it has been taken already
        self._cursor: dict[str, Any] | None = None  # the position in the data before `_next_batch`
        self._prepared: PreparedStep | None = None  # the next update, prepared while the device ran the last one
        self.prepares_next = self.mesh.device.type == "cuda"  # on a CPU, preparing ahead saves no time
        self._saved, self.best = position.saved, position.best
        self._evaluated = position.evaluated  # the step of the last evaluation
        self._background: bool | None = None  # whether the last checkpoint was written in the background, if chosen
        self._times = BatchTimes()  # phases since the last update began
        self._compiled_step: int | None = None  # step in which the user was last told about compilation
        flops = Flops.of(
            engine.model.config,
            devices=self.mesh.loss.size,
            device=self.mesh.device,
            dtype=getattr(torch, config.model.dtype),
            adapters=config.lora.rank > 0,
            **frozen_weights(engine.model),
            image=tower_cost(engine.model),
        )
        self.updates = StepPipeline(
            engine,
            files.folder,
            flops=flops,
            metrics=files.metrics,
            events=files.events,
            trackers=files.trackers,
            on_step=on_step,
            times=None if config.loss.task.in_rows else self._times,
        )

    def finished(self) -> bool:
        return self.config.run.steps is not None and self.step >= self.config.run.steps

    def run(self) -> RunResult:
        """Train until `run.steps` is reached, the data ends, or a signal arrives. Return how the run ended."""
        with nullcontext(self._signals) if self._signals is not None else StopSignals() as signals:
            try:
                if self._signals is not None:  # the caller defers signals already
                    return self._run(signals)
                with signals.deferred(AFTER_SIGNAL):
                    return self._run(signals)
            except NonFiniteError:
                raise  # it writes its own event
            except BaseException as error:
                with suppress(UserError):  # a full disk must not hide the original error
                    self.events.write("failed", step=self.step, error=shown_error(error))
                raise

    def _run(self, signals: StopSignals) -> RunResult:
        stopped = False
        with (
            deterministic(self.config.run.deterministic),
            closing(self.trackers),
            self.checkpointer.finishing(),
            CompilerWatch(self._note_compilation) as compiler,
            quiet_collector() if self.mesh.device.type == "cuda" else nullcontext(),
        ):
            if self.step == 0 and self.config.eval.start:
                self._run_evaluation()
            if self._batch is not None:  # restored from the checkpoint
                self.batches.resume(self.step, remaining=len(self._batch.parts) - self._batch.done)
            while not self.finished() and not stopped:
                self._report_activity("step", self.step + 1, self._planned_steps or 0)
                if self._batch is None:
                    self._batch = self._next_batch or self.batches.next(self.step)
                    self._next_batch = self._cursor = None
                    if self._batch is None:
                        break
                self._update(self._batch, wants_stop=signals.received)
                if compiler.count:
                    self.events.write("compile", step=self.step - 1, **compiler.take())
                if self._batch.finished:
                    self._batch = None
                    with nullcontext() if self.batches.reference is None else self._times.measure("reference"):
                        self.batches.after_updates()
                if self.config.eval.every is not None and self.step % self.config.eval.every == 0:
                    self._run_evaluation()
                # While an update is unfinished, use the votes that ranks cast when the last finished update began.
                stopped = (
                    self.updates.stop_votes > 0
                    if self.updates.last is not None
                    else any_rank_wants(signals.received, self.mesh)
                )
                every = self.config.checkpoint.every
                if every is not None and self.step - self._saved_step >= every:
                    self.save(last=stopped or self.finished())
            self.updates.finish()
            if self.step == 0:
                raise UserError("data.path", "gave no batch", "give files with at least one sample")
            if not stopped and self._evaluated != self.step:
                self._run_evaluation()
            if self.step > self._saved_step and (stopped or self.config.checkpoint.every is not None):
                self.save(last=True)
        is_saved = self.step == self._saved_step
        if self.response_log is not None:
            self.response_log.close(is_needed=is_saved)
        if self.on_note is not None and (line := self.batches.no_signal_note()) is not None:
            self.on_note(line)
        by = {} if signals.number is None else {"signal": Signals(signals.number).name}
        if not is_saved and self.mesh.loss.rank == 0:
            write_end(self.folder, self._end_record())
        self.events.write("stop" if stopped else "end", step=self.step, **by)
        return RunResult(step=self.step, stopped=stopped, checkpoint=self._saved)

    def _report_activity(self, what: str, done: int = 0, total: int = 0) -> None:
        if self._on_activity is not None:
            self._on_activity(what, done, total)

    def _note_compilation(self) -> None:
        """Tell the user that layers are being compiled: once per step, not once per graph."""
        self._report_activity("compiling the layers")
        if self.on_note is not None and self._compiled_step != self.step:
            self._compiled_step = self.step
            self.on_note(COMPILING if self.step == 0 else f"compiling the layers once more, in step {self.step + 1}")

    # Evaluations

    def _run_evaluation(self) -> None:
        """Evaluate the current weights and write the metrics. Keep a checkpoint of the best evaluation so far."""
        if self.evaluate is None:
            return
        self.updates.finish()
        self._report_activity("evaluating")
        with self._times.measure("evaluation"):
            begin = time.perf_counter()
            found = self.evaluate(self.step)
            self._evaluated = self.step
            line = {"step": self.step, **found, "seconds/evaluation": time.perf_counter() - begin}
            with writing(self.folder):
                self._evaluations.write(line)
                self.trackers.log(self.step, line)
            if self.on_note is not None:
                numbers = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
                self.on_note(f"evaluation after {self.step} steps: {numbers}")
        name = self.config.checkpoint.best
        if name is None or self.step == 0:  # the initial weights are never saved as the best ones
            return
        if name not in found:
            raise UserError(
                "checkpoint.best", "is not a metric of the evaluation", f"give one of {', '.join(found)}", value=name
            )
        if self.best is None or is_better(found[name], self.best.value, name, self.config.checkpoint.better):
            self.best = Best(metric=name, value=found[name], step=self.step)
            self.checkpointer.keep(None)  # the previous best may be deleted once this one is complete
            self.save()
            assert self._saved is not None
            self.checkpointer.keep(self._saved)

    # Updates

    def _prepare_next(self, batch: GlobalBatch) -> None:
        """Prepare the next update while the device runs the current update.

        Do nothing if the next update depends on the result of the current update. In RL, for example, the updated model
        may have to generate the responses of the next batch.
        """
        self._prepared = None
        if self.config.run.steps is not None and self.step + 1 >= self.config.run.steps:
            return
        next_batch, part = batch, batch.done + 1
        if part == len(batch.parts):
            if self.batches.waits_for_updates:
                return
            cursor = self.batches.cursor()
            self._next_batch = self.batches.next(self.step)
            if self._next_batch is None:
                return
            next_batch, part, self._cursor = self._next_batch, 0, cursor
        self._prepared = self.engine.prepare(next_batch.samples_of(part))

    def _update(self, batch: GlobalBatch, *, wants_stop: bool) -> None:
        """Make the next optimizer step of a batch. `wants_stop`: whether this rank wants the run to stop."""
        metrics = {**batch.metrics, "epoch": batch.epoch} if batch.metrics else {}
        if batch.done == 0:
            metrics = {**batch.times, **metrics}
        elapsed = self._times.take()
        if not self.config.loss.task.in_rows:
            for name, seconds in elapsed.items():
                metrics[name] = metrics.get(name, 0.0) + seconds
        begin = time.perf_counter()
        if not self.config.loss.task.in_rows and self.updates.last_end is not None and self.updates.last is None:
            metrics |= unmeasured(begin - self.updates.last_end, metrics)
        schedule = self.config.schedule
        factor = learning_rate_factor(
            self.step, kind=schedule.kind, warmup=schedule.warmup, steps=self.config.run.steps, final=schedule.final
        )
        apply = True
        critic = self.batches.critic
        if critic is not None:
            metrics |= critic.step(batch.samples_of(batch.done), lr_factor=factor, step=self.step)
            apply = self.step >= self.config.critic.warmup
        prepared = self._prepared or self.engine.prepare(batch.samples_of(batch.done), eager=False)
        self._choose_float8_layers(prepared)
        pending = self.engine.begin(
            prepared, lr_factor=factor, step=self.step, after=self.updates.last, wants_stop=wants_stop, apply=apply
        )
        self.updates.add(pending, step=self.step, metrics=metrics, begin=begin)
        self._prepare_next(batch)
        self.updates.finish(keep=1)
        self.step += 1
        batch.advance()
        if not self.prepares_next or self._prepared is None:
            self.updates.finish()

    def _choose_float8_layers(self, prepared: PreparedStep) -> None:
        if self._float8 is None or not self._float8.choose(prepared):
            return
        self.events.write(
            "float8", step=self.step, bfloat16_layers=self._float8.bfloat16_layers, **self._float8.state()["float8"]
        )
        if self.on_note is not None:
            self.on_note(self._float8.line())

    # Checkpoints

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint. Call this only between two updates. `last`: whether no update follows."""
        self.updates.finish()
        self._report_activity("saving a checkpoint")
        with self._times.measure("checkpoint"):
            self._save(last)

    def _save(self, last: bool) -> None:
        check_weights(self.engine.model, self.step)
        self.batches.check_weights(self.step)
        extra: dict[str, Any] = {
            "step": self.step,
            "batcher": self._cursor or self.batches.cursor(),
            "evaluated": self._evaluated,
            MADE_WITH: self.made_with,
        }
        if self.response_log is not None:
            self.response_log.start_part(
                self.step, after=extra["batcher"]["step"], last_batch=self.batches.last_batch_number
            )
        extra |= self.batches.state()
        if self._float8 is not None:
            extra |= self._float8.state()
        if self._batch is not None:
            extra |= self._batch.state()
        if self.best is not None:
            extra["best"] = asdict(self.best)
        self._saved = self.checkpointer.save(
            self.step,
            model=self.engine.model,
            optimizer=self.engine.optimizer,
            extra=extra,
            rank_state=random_state(),
            **self.batches.models_to_save(),
            last=last,
        )
        self._saved_step = self.step
        if self.response_log is not None:
            self.response_log.drop()
        self._report_write_choice()

    def _report_write_choice(self) -> None:
        """Record and show the value chosen for `checkpoint.asynchronous=auto`, if it has changed."""
        choice = self.checkpointer.choice
        if choice is None or choice.background == self._background:
            return
        self._background = choice.background
        resolved = with_asynchronous(self.config, choice)
        self.events.write("resolved_auto", step=self.step, **resolved.fields())
        if self.on_note is not None:
            for line in resolved.lines():
                self.on_note(line)

    def _end_record(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's `extra` dict that `end.json` stores (`padfree.train.finished`)."""
        cursor = self._cursor or self.batches.cursor()
        found: dict[str, Any] = {"step": self.step, "batcher": cursor, MADE_WITH: self.made_with}
        return found if self._batch is None else {**found, ROLLOUTS: {}}

    def load_best(self) -> None:
        """Load the weights of the best evaluation, to export them. Training cannot continue afterwards."""
        assert self.checkpointer.kept is not None
        self.checkpointer.load(self.checkpointer.kept, model=self.engine.model, optimizer=None)


def any_rank_wants(wanted: bool, mesh: Mesh) -> bool:
    """Return whether `wanted` is true on any rank. All ranks must call this.

    A signal reaches the ranks at different times. With this function, all ranks stop after the same step.
    """
    flag = torch.tensor(int(wanted), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    return bool(flag.item())


def is_better(value: float, than: float, metric: str, better: Better) -> bool:
    """Return whether `value` is better than `than`. NaN is never better.

    `better` says whether higher or lower values of `metric` are better.
    """
    lower = better == "lowest" or (better == "auto" and metric.rpartition("/")[2] in LOWER_IS_BETTER)
    return value < than if lower else value > than
