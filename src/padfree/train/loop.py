"""The loop of a run: batches, updates, metrics, checkpoints. SFT and RL are the same loop.

    batcher -> global batch -> updates    SFT   one: the batch itself
                                          RL    advantages, reference and old log-probabilities of the whole rollout
                                                batch first; then `loss.epochs` passes over it in `loss.mini_batches`
                                                parts, every part an optimizer step. With `rollout.staleness` the
                                                batches behind it are sampled meanwhile (`padfree.train.rl.ahead`)
            -> engine.begin -> engine.finish -> metrics.jsonl
            -> after every update: the end if a signal asks for it, a checkpoint if it is due

On a GPU an update whose samples are known already is begun before the one before it is finished
(`padfree.train.updates`). A checkpoint first waits for all updates that were begun.

A checkpoint stands between two optimizer steps. It holds weights, optimizer state, the place in the data, the random
state of every rank and, inside a rollout batch, that batch as its further updates need it (see
`padfree.train.rl.update_batch`), and responses that were sampled ahead; the schedule follows from the step. So a
resumed run makes the steps that an undisturbed one would have made, on any number of ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from padfree.checkpoint.checkpointer import Checkpointer, complete_in, step_of
from padfree.checkpoint.manifest import Trained
from padfree.collector import quiet_collector
from padfree.config import Config
from padfree.config.choices import LOWER_IS_BETTER, Better
from padfree.distributed import raise_together
from padfree.errors import UserError, shown_error
from padfree.estimate.flops import Flops
from padfree.layers.compiler_watch import CompilerWatch
from padfree.model.load import named_tensors
from padfree.record.events import Events, environment
from padfree.record.files import CHECKPOINTS, CONFIG, EVALUATION
from padfree.record.metrics import MetricsFile
from padfree.record.run_folder import mark_run_folder, writing
from padfree.record.trackers import Trackers
from padfree.rollout.environment.ahead import KEY as EPISODES
from padfree.rollout.journal import Journal
from padfree.rollout.queue import KEY as RESPONSES
from padfree.stop_signals import StopSignals
from padfree.train.batches import Batches, MakeSamples
from padfree.train.critic import Critic
from padfree.train.determinism import deterministic, random_state, restore_random_state
from padfree.train.distillation import DistillationRowLoss
from padfree.train.engine import Engine, PreparedStep
from padfree.train.evaluate import Evaluate
from padfree.train.finite import NonFiniteError, check_weights
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.resume import (
    change_line,
    check_made_with,
    check_ranks_agree,
    made_with,
    model_fields,
)
from padfree.train.rl.ahead import BatchesAhead
from padfree.train.rl.journal import RunJournal
from padfree.train.rl.reference_model import ModelReference, Reference
from padfree.train.rl.update_batch import KEY, RolloutBatch
from padfree.train.schedule import learning_rate_factor
from padfree.train.scorer import Scorer
from padfree.train.signals import agreed
from padfree.train.training_data import Batcher
from padfree.train.updates import OnActivity, OnStep, Updates

CHANGEABLE = ("betas", "eps", "weight_decay")
"""Options of the optimizer that are settings; the learning rate is set anew in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    step: int  # optimizer steps in all, those before a resume included
    stopped: bool  # by a signal
    checkpoint: Path | None
    was_finished: bool = False  # by an earlier start: nothing was done


OnNote = Callable[[str], None]
"""Called with a line for the user: what was decided for them, or what the run waits for."""

AFTER_SIGNAL = "stops after the step or evaluation that it is in, saves a checkpoint and ends"
COMPILING = "compiling the layers: up to a minute at the first time, a few seconds where the compiler's cache has them"


class Loop:
    """One run of an engine over batches, from the newest checkpoint of the run folder if there is one."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batcher: Batcher,
        *,
        reference: Reference | None = None,
        teacher: Scorer | None = None,
        critic: Critic | None = None,
        make_samples: MakeSamples | None = None,
        ahead: BatchesAhead | None = None,
        on_step: OnStep | None = None,
        on_note: OnNote | None = None,
        on_activity: OnActivity | None = None,
        evaluate: Evaluate | None = None,
        data: Mapping[str, Any] | None = None,
        journal: Journal | None = None,
        signals: StopSignals | None = None,
        planned_steps: int | None = None,
    ) -> None:
        """`data` is the `data_record` of what the batcher gives; without it a resume does not compare the data.

        `teacher` gives the advantages where `loss.advantage` is `teacher`, and `critic` where it is `gae`. `ahead`
        makes the samples in place of `make_samples`, from the same batcher. `journal` is where sampled
        responses are kept until a checkpoint is made. `signals` are those of the command, already listened to;
        `planned_steps` are shown.
        """
        self._signals, self._planned_steps = signals, planned_steps
        self._on_activity = on_activity
        self.config, self.engine, self.evaluate = config, engine, evaluate
        self.batches = Batches(
            config,
            engine,
            batcher,
            reference=reference,
            teacher=teacher,
            critic=critic,
            make_samples=make_samples,
            ahead=ahead,
        )
        self.on_note = on_note
        self.mesh = engine.mesh
        self.folder = Path(config.run.folder)
        raise_together(refusal(mark_run_folder, config) if self.mesh.loss.rank == 0 else None)
        self.step = 0
        self._batch: RolloutBatch | None = None  # the batch whose updates are being made
        self._following: RolloutBatch | None = None  # the batch behind it, if it has been taken already,
        self._cursor: dict[str, Any] | None = None  # and the place in the data before that one
        self._ahead: PreparedStep | None = None  # the next update, laid out while the device was busy with the last
        self.begins_ahead = self.mesh.device.type == "cuda"  # elsewhere there is nothing to gain
        self._saved: Path | None = None
        self._saved_step = 0
        self._evaluated: int | None = None  # the step of the last evaluation
        self.best: Best | None = None
        self.checkpointer = Checkpointer(
            self.folder / CHECKPOINTS,
            keep_last=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        self.made_with = made_with(
            config,
            engine.model.config,
            data=data,
            reference=self._reference_record(),
            teacher=self._teacher_fingerprint(),
        )
        check_ranks_agree(self.made_with, self.mesh.loss.group)
        torch.manual_seed(config.run.seed + self.mesh.loss.rank)
        newest = self.checkpointer.agreed_latest() if config.checkpoint.resume else None
        changed: dict[str, tuple[Any, Any]] = {}
        evaluated = False  # whether the evaluation after this step has been made, too
        if newest is not None:
            changed = self._compared(newest, on_note or (lambda line: None))
            evaluated = self._resume(newest)
            if not any(name.startswith("eval.") for name in changed):
                self._evaluated = self.step if evaluated else None
        self.journal: RunJournal | None = None
        if journal is not None:
            self.journal = RunJournal(journal, self.checkpointer, engine.model, self.made_with, self.mesh.loss)
            line = self.journal.begin(self.step, after=batcher.step, resume=config.checkpoint.resume)
            if line is not None and on_note is not None:
                on_note(line)
        with writing(self.folder):
            self.metrics = MetricsFile(self.folder, rank=self.mesh.loss.rank, step=self.step)
            self.evaluations = MetricsFile(
                self.folder,
                rank=self.mesh.loss.rank,
                step=self.step + evaluated,
                name=EVALUATION,
            )
            if self.mesh.loss.rank == 0:
                (self.folder / CONFIG).write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
            self.events = Events(self.folder, rank=self.mesh.loss.rank)
            self.events.write("start", step=self.step, **environment(self.mesh, replicate=config.parallel.replicate))
            if newest is not None:
                differs = {name: {"was": before, "is": now} for name, (before, now) in changed.items()}
                self.events.write("resume", step=self.step, checkpoint=newest.name, **differs)
            self.trackers = Trackers(
                config.track, self.folder, config.to_dict(), rank=self.mesh.loss.rank, step=self.step
            )
        self._compiled_step: int | None = None  # for which it was said that the compiler is at work
        flops = Flops.of(
            engine.model.config,
            devices=self.mesh.loss.size,
            device=self.mesh.device,
            dtype=getattr(torch, config.model.dtype),
            adapters=config.lora.rank > 0,
        )
        self.updates = Updates(
            engine,
            self.folder,
            flops=flops,
            metrics=self.metrics,
            events=self.events,
            trackers=self.trackers,
            on_step=on_step,
        )

    def finished(self) -> bool:
        return self.config.run.steps is not None and self.step >= self.config.run.steps

    def run(self) -> RunResult:
        """Until the steps are done, the data ends, or a signal comes."""
        with nullcontext(self._signals) if self._signals is not None else StopSignals() as signals:
            try:
                if self._signals is not None:  # the command has deferred them
                    return self._run(signals)
                with signals.deferred(AFTER_SIGNAL):
                    return self._run(signals)
            except NonFiniteError:
                raise  # it has an event of its own
            except BaseException as error:
                with suppress(UserError):  # a full disk must not hide what went wrong
                    self.events.write("failed", step=self.step, error=shown_error(error))
                raise

    def _run(self, signals: StopSignals) -> RunResult:
        stopped = False
        with (
            deterministic(self.config.run.deterministic),
            closing(self.trackers),
            self.checkpointer.finishing(),
            CompilerWatch(self._compiling) as compiler,
            quiet_collector() if self.mesh.device.type == "cuda" else nullcontext(),
        ):
            if self.step == 0 and self.config.eval.start:
                self._evaluation()
            if self.batches.ahead is not None and self._batch is not None:  # of the checkpoint
                self.batches.ahead.fill(self.step, remaining=len(self._batch.parts) - self._batch.done)
            while not self.finished() and not stopped:
                self._doing("step", self.step + 1, self._planned_steps or 0)
                if self._batch is None:
                    self._batch = self._following or self.batches.next(self.step)
                    self._following = self._cursor = None
                    if self._batch is None:
                        break
                self._update(self._batch, vote=signals.received)
                if compiler.count:
                    self.events.write("compile", step=self.step - 1, **compiler.take())
                if self._batch.finished:
                    self._batch = None
                    if self.batches.reference is not None:
                        self.batches.reference.after_batch(self.engine.model)
                # While the device is at work on an update, what the ranks said when the one before it began must do.
                if self.config.eval.every is not None and self.step % self.config.eval.every == 0:
                    self._evaluation()
                stopped = self.updates.votes > 0 if self.updates.pending else agreed(signals.received, self.mesh)
                every = self.config.checkpoint.every
                if every is not None and self.step - self._saved_step >= every:
                    self.save()
            self.updates.finish()
            if self.step == 0:
                raise UserError("data.path", "it gave no batch", "give files with at least one sample")
            if not stopped and self._evaluated != self.step:
                self._evaluation()
            if self.step > self._saved_step:
                self.save()
        if self.journal is not None:
            self.journal.close()
        if self.on_note is not None and (line := self.batches.without_signal()) is not None:
            self.on_note(line)
        by = {} if signals.number is None else {"signal": Signals(signals.number).name}
        self.events.write("stop" if stopped else "end", step=self.step, **by)
        return RunResult(step=self.step, stopped=stopped, checkpoint=self._saved)

    def _doing(self, what: str, done: int = 0, total: int = 0) -> None:
        if self._on_activity is not None:
            self._on_activity(what, done, total)

    def _compiling(self) -> None:
        """Said once for all graphs of a step."""
        self._doing("compiling the layers")
        if self.on_note is not None and self._compiled_step != self.step:
            self._compiled_step = self.step
            self.on_note(COMPILING if self.step == 0 else f"compiling the layers once more, in step {self.step + 1}")

    # Evaluations

    def _evaluation(self) -> None:
        """Measure the present weights, write the numbers, and keep a checkpoint of them if they are the best so far."""
        if self.evaluate is None:
            return
        self.updates.finish()
        self._doing("evaluating")
        begin = time.perf_counter()
        found = self.evaluate(self.step)
        self._evaluated = self.step
        line = {"step": self.step, **found, "seconds/evaluation": time.perf_counter() - begin}
        with writing(self.folder):
            self.evaluations.write(line)
            self.trackers.log(self.step, line)
        if self.on_note is not None:
            numbers = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
            self.on_note(f"evaluation after {self.step} steps: {numbers}")
        name = self.config.checkpoint.best
        if name is None or self.step == 0:  # what the run began with is there already
            return
        if name not in found:
            raise UserError("checkpoint.best", "is not measured", f"give one of {', '.join(found)}", value=name)
        if self.best is None or is_better(found[name], self.best.value, name, self.config.checkpoint.better):
            self.best = Best(metric=name, value=found[name], step=self.step)
            self.checkpointer.kept = None  # the one before may go, once this one is complete
            self.save()
            assert self._saved is not None
            self.checkpointer.kept = self._saved

    # Updates

    def _look_ahead(self, batch: RolloutBatch) -> None:
        """Lay the next update out, if it needs nothing that the present one may change.

        The next batch of RL may do: its responses, or their old log-probabilities, come from the updated model.
        """
        self._ahead = None
        if self.config.run.steps is not None and self.step + 1 >= self.config.run.steps:
            return
        following, part = batch, batch.done + 1
        if part == len(batch.parts):
            if self.batches.waits_for_updates:
                return
            cursor = self.batches.batcher.state_dict()
            self._following = self.batches.next(self.step)
            if self._following is None:
                return
            following, part, self._cursor = self._following, 0, cursor
        self._ahead = self.engine.prepare(*following.samples_of(part))

    def _update(self, batch: RolloutBatch, *, vote: bool) -> None:
        """The next optimizer step of a batch; `vote`: whether this rank wants the run to end."""
        metrics = {**batch.metrics, "epoch": batch.epoch} if batch.metrics else {}
        if batch.done == 0:
            metrics = {**batch.times, **metrics}
        schedule = self.config.schedule
        factor = learning_rate_factor(
            self.step, kind=schedule.kind, warmup=schedule.warmup, steps=self.config.run.steps, final=schedule.final
        )
        lr = self.config.optimizer.lr * factor
        begin = time.perf_counter()
        apply = True
        if self.batches.critic is not None:
            settings = self.config.critic
            own = (settings.lr or self.config.optimizer.lr) * factor
            metrics |= self.batches.critic.step(batch.samples_of(batch.done)[0], lr=own, step=self.step)
            apply = self.step >= settings.warmup
        prepared = self._ahead or self.engine.prepare(*batch.samples_of(batch.done), whole=False)
        self.updates.begin(prepared, step=self.step, lr=lr, metrics=metrics, begin=begin, vote=vote, apply=apply)
        self._look_ahead(batch)
        self.updates.finish(keep=1)
        self.step += 1
        batch.done += 1
        if not self.begins_ahead or self._ahead is None:
            self.updates.finish()

    # Checkpoints

    def save(self) -> None:
        """A checkpoint of this moment, which must be between two updates."""
        self.updates.finish()
        self._doing("saving a checkpoint")
        check_weights(self.engine.model, self.step)
        if self.batches.critic is not None:
            check_weights(self.batches.critic.engine.model, self.step, "the critic", "critic.lr")
        extra: dict[str, Any] = {
            "step": self.step,
            "batcher": self._cursor or self.batches.cursor(),
            "evaluated": self._evaluated,
            MADE_WITH: self.made_with,
        }
        if self.journal is not None:
            self.journal.turn(self.step, after=extra["batcher"]["step"], highest=self.batches.batcher.step)
        if self.batches.ahead is not None:
            extra |= self.batches.ahead.state()
        if self._batch is not None:
            extra |= self._batch.state()
        if self.best is not None:
            extra["best"] = asdict(self.best)
        if self.batches.reference is not None:
            extra["reference"] = self.batches.reference.state_dict()
        self._saved = self.checkpointer.save(
            self.step,
            model=self.engine.model,
            optimizer=self.engine.optimizer,
            extra=extra,
            rank_state=random_state(),
            reference=None if self.batches.reference is None else self.batches.reference.saved(),
            critic=self._trained_critic(),
        )
        self._saved_step = self.step
        if self.journal is not None:
            self.journal.drop()

    def _trained_critic(self) -> Trained | None:
        critic = self.batches.critic
        return None if critic is None else Trained(critic.engine.model, critic.engine.optimizer)

    def _reference_record(self) -> dict[str, Any] | None:
        """Of a reference model with weights of its own, unless they change in the run: then checkpoints hold them."""
        reference = self.batches.reference
        if not isinstance(reference, ModelReference):
            return None
        stays = reference.every is None
        return {
            "model": model_fields(reference.scorer.model.config),
            "weights": self.checkpointer.fingerprint(reference.tensors()) if stays else None,
        }

    def _teacher_fingerprint(self) -> str | None:
        """Of the weights that distillation learns from, as a loss or as an advantage."""
        row_loss = self.engine.row_loss
        found = None if self.batches.teacher is None else self.batches.teacher.model
        if isinstance(row_loss, DistillationRowLoss):
            found = row_loss.teacher
        return None if found is None else self.checkpointer.fingerprint(named_tensors(found))

    def _compared(self, path: Path, note: OnNote) -> dict[str, tuple[Any, Any]]:
        """Settings that are not those of the checkpoint, which is refused where they must be."""
        extra = self.checkpointer.extra(path)
        if MADE_WITH not in extra:
            note(f"{path} is of a version that did not note data, model and settings; they are not compared")
            return {}
        changed = check_made_with(path, extra[MADE_WITH], self.made_with, self.config, inside=KEY in extra)
        if changed:
            note(change_line(path, changed))
        for key in (RESPONSES, EPISODES):
            if extra.get(key) and (self.batches.ahead is None or self.batches.ahead.key != key):
                why = "rollout.staleness is 0 now" if self.batches.ahead is None else "rollout.environment has changed"
                note(f"{len(extra[key])} responses that {path} has ahead are dropped: {why}")
        return changed

    def _resume(self, path: Path) -> bool:
        """Go on from a checkpoint; whether it was saved after the evaluation of its step, if there was one."""
        engines = [self.engine, *([] if self.batches.critic is None else [self.batches.critic.engine])]
        groups = [group for engine in engines for group in engine.optimizer.param_groups]
        options = [{name: group[name] for name in CHANGEABLE} for group in groups]
        extra, rank_state = self.checkpointer.load(
            path,
            model=self.engine.model,
            optimizer=self.engine.optimizer,
            reference=None if self.batches.reference is None else self.batches.reference.tensors(),
            critic=self._trained_critic(),
        )
        groups = [group for engine in engines for group in engine.optimizer.param_groups]
        for group, own in zip(groups, options, strict=True):
            group.update(own)  # the settings of this start, not those of the checkpoint
        self.batches.batcher.load_state_dict(extra["batcher"])
        if self.batches.reference is not None and "reference" in extra:
            self.batches.reference.load_state_dict(extra["reference"])
        if KEY in extra:
            self._batch = RolloutBatch.restored(extra, **self.batches.minibatch_settings(self.batches.batcher.step))
        if self.batches.ahead is not None:
            self.batches.ahead.restore(extra)
        self.step = self._saved_step = int(extra["step"])
        self._saved = path
        self._restore_best(extra.get("best"))
        if rank_state is None:  # another number of ranks: no rank's state is this one's
            torch.manual_seed(self.config.run.seed + self.step * self.mesh.loss.size + self.mesh.loss.rank)
        else:
            restore_random_state(rank_state)
        return bool(extra.get("evaluated", self.step) == self.step)

    def load_best(self) -> None:
        """The weights of the best evaluation, in the place of the last ones. Nothing can be trained from there."""
        assert self.checkpointer.kept is not None
        self.checkpointer.load(self.checkpointer.kept, model=self.engine.model, optimizer=None)

    def _restore_best(self, told: Mapping[str, Any] | None) -> None:
        """The best evaluation so far, if it is of this metric and its checkpoint is still there."""
        if told is None or told["metric"] != self.config.checkpoint.best:
            return
        best = Best(**told)
        kept = [path for path in complete_in(self.checkpointer.folder) if step_of(path) == best.step]
        if kept:
            self.best, self.checkpointer.kept = best, kept[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far, by `checkpoint.best`."""

    metric: str
    value: float
    step: int


def is_better(value: float, than: float, metric: str, better: Better) -> bool:
    """Whether a value of a metric is better than another. What is no number is never better."""
    lower = better == "lowest" or (better == "auto" and metric.rpartition("/")[2] in LOWER_IS_BETTER)
    return value < than if lower else value > than


def refusal(function: Callable[[Config], object], config: Config) -> UserError | None:
    """What a function raises for a user; None: nothing."""
    try:
        function(config)
    except UserError as error:
        return error
    return None
