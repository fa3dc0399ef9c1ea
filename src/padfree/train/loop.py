"""The loop of a run: batches, updates, metrics, checkpoints. SFT and RL are the same loop.

    batcher -> global batch -> updates    SFT   one: the batch itself
                                          RL    advantages, reference and old log-probabilities of the whole rollout
                                                batch first; then `loss.epochs` passes over it in `loss.mini_batches`
                                                parts, every part an optimizer step
            -> engine.step -> metrics.jsonl
            -> after the last update of a batch: a checkpoint if it is due, the end if it is time

A checkpoint stands between two global batches. It holds weights, optimizer state, the place in the data and the random
state of every rank; the schedule follows from the step. So a resumed run sees the batches that an undisturbed one
would have seen, on any number of ranks. A signal is obeyed at the same place. When `run.steps` are done within a
rollout batch, the rest of its updates is not made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.batch import Sample
from padfree.config import Config
from padfree.dist import distributed, make_mesh
from padfree.losses import PolicySettings, ReinforceSettings
from padfree.model.export import export_model
from padfree.packing.source import shuffled
from padfree.train.checkpoint import Checkpointer
from padfree.train.credit import with_advantages
from padfree.train.engine import Engine, NonFiniteError
from padfree.train.metrics import MetricsFile, reward_metrics, step_metrics, write_samples
from padfree.train.microbatch import Floats
from padfree.train.schedule import learning_rate_factor
from padfree.train.scorer import Scorer
from padfree.train.setup import build_engine, build_reference
from padfree.train.signals import StopSignals, agreed
from padfree.train.sources import Batcher, load_source, load_tokenizer, make_batcher


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended."""

    step: int  # optimizer steps in all, those before a resume included
    stopped: bool  # by a signal
    checkpoint: Path | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """What one optimizer step is made with."""

    samples: Sequence[Sample]
    old_logprobs: Sequence[Floats] | None = None


MakeSamples = Callable[[Sequence[Any]], list[Sample]]
"""From the groups of a global batch to its samples, the same on every rank: sampling responses to prompts, say."""

OnStep = Callable[[Mapping[str, Any]], None]
"""Called with the metrics of each step after it is done, on every rank."""


def train(config: Config, *, on_step: OnStep | None = None) -> RunResult:
    """A whole run, as one of the processes that torchrun started, or alone."""
    with distributed(device=config.run.device, timeout=config.run.timeout) as device:
        mesh = make_mesh(
            device,
            context=config.parallel.context,
            replicate=config.parallel.replicate,
            timeout=config.run.timeout,
        )
        tokenizer = load_tokenizer(config)
        source = load_source(config, tokenizer)
        batcher = make_batcher(config, source.samples)
        engine, reference = build_engine(config, mesh), build_reference(config, mesh)
        loop = Loop(config, engine, batcher, reference=reference, on_step=on_step)
        if mesh.loss.rank == 0:
            source.report.write(loop.folder / "rows.jsonl")  # every row that was skipped, dropped or cut
        result = loop.run()
        if config.checkpoint.export and not result.stopped:
            export_model(loop.engine.model, loop.folder / "model", tokenizer)
        return result


class Loop:
    """One run of an engine over batches, from the newest checkpoint of the run folder if there is one."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batcher: Batcher,
        *,
        reference: Scorer | None = None,
        make_samples: MakeSamples | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.make_samples = make_samples or _flat
        self.config, self.engine, self.batcher, self.reference = config, engine, batcher, reference
        self.on_step = on_step
        self.mesh = engine.mesh
        self.folder = Path(config.run.folder)
        self.step = 0
        self._saved: Path | None = None
        self._saved_step = 0
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints",
            keep_last=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        torch.manual_seed(config.run.seed + self.mesh.loss.rank)
        newest = self.checkpointer.latest() if config.checkpoint.resume else None
        if newest is not None:
            self._resume(newest)
        self.metrics = MetricsFile(self.folder, rank=self.mesh.loss.rank, step=self.step)
        if self.mesh.loss.rank == 0:
            (self.folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")

    def finished(self) -> bool:
        return self.config.run.steps is not None and self.step >= self.config.run.steps

    def run(self) -> RunResult:
        """Until the steps are done, the data ends, or a signal comes."""
        stopped = False
        with StopSignals() as signals:
            while not self.finished() and not stopped:
                groups = next(self.batcher, None)
                if groups is None:
                    break
                batch = _distinct(self.make_samples(groups))
                for update, metrics in self._updates(batch):
                    self._update(update, metrics)
                    if self.finished():
                        break
                stopped = agreed(signals.received, self.mesh)
                every = self.config.checkpoint.every
                if every is not None and self.step - self._saved_step >= every:
                    self.save()
            if self.step == 0:
                raise ValueError("data.path: it gave no batch; give files with at least one sample")
            if self.step > self._saved_step:
                self.save()
            self.checkpointer.wait()
        return RunResult(step=self.step, stopped=stopped, checkpoint=self._saved)

    # Updates

    def _updates(self, batch: list[Sample]) -> Iterator[tuple[Update, dict[str, Any]]]:
        """The optimizer steps of a batch, each with what is to be written of it besides."""
        loss, settings = self.config.loss, self.engine.settings.loss
        if not isinstance(settings, PolicySettings):
            yield Update(samples=batch), {}
            return
        metrics = reward_metrics(batch)
        batch = with_advantages(batch, loss.advantage)
        if self.reference is not None:
            found = self.reference.logprobs(batch)
            batch = [replace(sample, ref_logprobs=values) for sample, values in zip(batch, found, strict=True)]
        unasked = isinstance(settings.objective, ReinforceSettings) and not settings.corrections
        old = self.engine.scorer.logprobs(batch) if settings.old_policy == "trainer" and not unasked else None
        for epoch in range(loss.epochs):
            order = np.arange(len(batch))
            if loss.mini_batches > 1:
                order = shuffled(len(batch), self.config.run.seed, self.batcher.step * loss.epochs + epoch)
            for part in np.array_split(order, min(loss.mini_batches, len(batch))):
                yield (
                    Update(
                        samples=[batch[i] for i in part],
                        old_logprobs=None if old is None else [old[i] for i in part],
                    ),
                    {**metrics, "epoch": epoch},
                )

    def _update(self, update: Update, metrics: dict[str, Any]) -> None:
        schedule = self.config.schedule
        lr = self.config.optimizer.lr * learning_rate_factor(
            self.step, kind=schedule.kind, warmup=schedule.warmup, steps=self.config.run.steps, final=schedule.final
        )
        begin = time.perf_counter()
        try:
            report = self.engine.step(update.samples, lr=lr, step=self.step, old_logprobs=update.old_logprobs)
        except NonFiniteError as error:
            path = self.folder / f"nonfinite-step-{self.step:08d}.jsonl"
            if self.mesh.loss.rank == 0:
                write_samples(path, error.samples)
            raise NonFiniteError(f"{error}; they are written to {path}", error.samples) from None
        seconds = time.perf_counter() - begin
        if self.mesh.device.type == "cuda":
            metrics = {**metrics, "memory_gib": torch.cuda.max_memory_allocated(self.mesh.device) / 2**30}
        written = {**step_metrics(self.step, report, lr=lr, seconds=seconds), **metrics}
        self.metrics.write(written)
        self.step += 1
        if self.on_step is not None:
            self.on_step(written)

    # Checkpoints

    def save(self) -> None:
        """A checkpoint of this moment, which must be between two batches."""
        self._saved = self.checkpointer.save(
            self.step,
            model=self.engine.model,
            optimizer=self.engine.optimizer,
            extra={"step": self.step, "batcher": self.batcher.state_dict()},
            rank_state=_random_state(),
        )
        self._saved_step = self.step

    def _resume(self, path: Path) -> None:
        extra, rank_state = self.checkpointer.load(path, model=self.engine.model, optimizer=self.engine.optimizer)
        self.batcher.load_state_dict(extra["batcher"])
        self.step = self._saved_step = int(extra["step"])
        self._saved = path
        if rank_state is None:  # another number of ranks: no rank's state is this one's
            torch.manual_seed(self.config.run.seed + self.step * self.mesh.loss.size + self.mesh.loss.rank)
        else:
            _restore_random_state(rank_state)


def _flat(groups: Sequence[Any]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def _distinct(samples: list[Sample]) -> list[Sample]:
    """The same samples; one that a batch has twice (small data, several epochs) gets a uid of its own."""
    seen: dict[str | int, int] = {}
    found = []
    for sample in samples:
        if sample.uid is not None:
            seen[sample.uid] = seen.get(sample.uid, 0) + 1
            if seen[sample.uid] > 1:
                sample = replace(sample, uid=f"{sample.uid} (time {seen[sample.uid]})")
        found.append(sample)
    return found


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
