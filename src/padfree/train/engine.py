"""One optimizer step over a global batch of samples, for SFT and for policy losses alike.

    samples (every rank knows of all; tokens that were written in the run come to the rank that trains on them)
      prepare -> plan            which sample is in which micro-batch of which data rank
              -> token weights   from the masks of the whole global batch: losses of parts add up to that of the whole
              -> rows            this rank's micro-batches on the device
      begin   -> for each row: hidden states -> loss -> backward
              -> sums over ranks, gradient norm -> clip -> optimizer, which does nothing if a number is not finite
      finish  -> the numbers on the host

How the samples are divided changes the order of additions and nothing else. `MicroBatchLoss` computes its loss.

On a GPU only `finish` waits for the device: the host can prepare and begin the next step while this one runs. Whether
loss and gradient norm are finite is therefore a flag on the device. If they are not, the optimizer changes nothing in
this step and in those that were begun after it, and `finish` raises with the samples to blame.

    host      begin 1 | prepare 2 | begin 2 | finish 1 | prepare 3 | begin 3 | finish 2 ...
    device            1 1 1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 2 2 2 3 3 3 3 ...        never waits for the host
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from padfree.batch import Sample
from padfree.config.loss_settings import TaskSettings, ValueSettings
from padfree.cp.ranges import to_device
from padfree.head.budget import Memory
from padfree.losses import (
    LossOutput,
    Statistics,
    WeightMode,
    merge_statistics,
    segment_sum,
    token_weights,
)
from padfree.optim.master_weights import compute_copies
from padfree.optim.optimizer import Optimizer
from padfree.packing import StepPlan
from padfree.packing.fill import Indices
from padfree.rollout.collect.sample_exchange import whole
from padfree.sharding.norm import gradient_norm
from padfree.sharding.parallelize import inside
from padfree.tasks import task_of
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.train.finite_checks import NonFiniteError, weights_line
from padfree.train.microbatch import MicroBatch
from padfree.train.rank_imbalance_timer import RankImbalanceTimer
from padfree.train.router_balance import RouterBalance
from padfree.train.scorer import Scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The loss, and how its tokens are weighed."""

    loss: TaskSettings | ValueSettings
    aggregation: WeightMode = "token-mean"
    constant: float | None = None  # the divisor of aggregation "constant"
    groups_are_rows: bool = False  # samples of one `group` are one row of the data, and weigh as one sample
    sources: tuple[str, ...] = ()  # of a mixture: the loss of each is reported
    max_grad_norm: float | None = 1.0  # None: no clipping
    head_memory: Memory = "speed"  # or "low": at most about 1 GiB for the head, some of it computed twice
    load_balancing: float = 0.0  # coefficient of the load-balancing loss of experts
    router_bias: float = 0.0  # what the bias for choosing experts moves in a step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """Numbers of a step over the whole global batch, the same on every rank."""

    loss: float
    gradient_norm: float  # before clipping
    statistics: dict[str, float]  # means over scored tokens
    num_samples: int
    num_tokens: int  # of samples, pads not counted
    num_labels: int
    padding_share: float  # pads over all tokens that were computed
    plan: StepPlan
    votes: int  # ranks whose `vote` was true when the step began
    source_losses: Mapping[str, float] = field(default_factory=dict)  # by source: weighted means over its tokens
    num_rows: int | None = None  # of the data, where several samples may be of one; None: not known
    compute_seconds: tuple[float, ...] = ()  # of each data rank's layers going forward; empty where it is not measured


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedStep:
    """A global batch, planned and laid out: all that a step needs besides the weights."""

    samples: Sequence[Sample]
    plan: StepPlan
    rows: Sequence[tuple[MicroBatch, Indices]]  # this rank's, with the samples in each
    source: Indices | None = None  # [B] of a mixture: which of the sources each sample is from
    source_weights: tuple[float, ...] = ()  # what the tokens of each source weigh together


@dataclass(slots=True, eq=False)
class _Sums:
    """What the micro-batches of this rank add up to."""

    loss: Tensor
    statistics: Statistics
    token_losses: list[Tensor]
    source_losses: Tensor  # [sources] weighted sums


class Engine:
    """A scorer's model, its optimizer, and the loss."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: Optimizer,
        settings: LossSettings,
        micro_batch_loss: MicroBatchLoss | None = None,
    ) -> None:
        """`micro_batch_loss` is what is minimised; without one it is the loss of the task that the settings name."""
        self.scorer, self.optimizer, self.settings = scorer, optimizer, settings
        if micro_batch_loss is None:
            assert isinstance(settings.loss, TaskSettings)
            micro_batch_loss = task_of(settings.loss.command).micro_batch_loss(
                settings.loss, temperature=scorer.temperature, memory=settings.head_memory
            )
        self.micro_batch_loss: MicroBatchLoss = micro_batch_loss
        self.model, self.mesh, self.packer = scorer.model, scorer.mesh, scorer.packer
        self.clock = RankImbalanceTimer.of(scorer.model, scorer.mesh)
        self.router: RouterBalance | None = None
        if settings.load_balancing or settings.router_bias:
            self.router = RouterBalance(
                scorer.model, scorer.mesh, coefficient=settings.load_balancing, bias_rate=settings.router_bias
            )
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(
        self,
        samples: Sequence[Sample],
        *,
        lr_factor: float = 1.0,
        step: int = 0,
    ) -> StepReport:
        """One update with the samples of a global batch; every rank is given the same ones, in the same order.

        `lr_factor`: what the schedule multiplies all base learning rates by. `step` is only for messages.
        """
        return self.begin(self.prepare(samples), lr_factor=lr_factor, step=step).finish()

    def prepare(self, samples: Sequence[Sample], *, whole: bool = True) -> PreparedStep:
        """The part of a step that needs no weights; without `whole`, rows are laid out when their turn comes."""
        plan = self.packer.plan(samples, keep_groups=self.micro_batch_loss.keeps_groups)
        settings = self.settings
        grouped = settings.aggregation == "group-mean"
        groups = [sample.group for sample in samples]
        weights = token_weights(
            settings.aggregation,
            [sample.mask for sample in samples],
            groups=groups if grouped else None,
            constant=settings.constant,
            units=groups if settings.groups_are_rows else None,
        )
        rows = self.packer.lay_out(samples, plan, weights)
        source, totals = None, [0.0] * len(settings.sources)
        if settings.sources:
            source = np.array([settings.sources.index(str(sample.source)) for sample in samples])
            for number, weight in zip(source.tolist(), weights, strict=True):
                totals[number] += float(weight.sum(dtype=np.float64))
        return PreparedStep(
            samples=samples,
            plan=plan,
            rows=rows[:] if whole else rows,
            source=source,
            source_weights=tuple(totals),
        )

    def begin(
        self,
        prepared: PreparedStep,
        *,
        lr_factor: float = 1.0,
        step: int = 0,
        after: PendingStep | None = None,
        vote: bool = False,
        apply: bool = True,
    ) -> PendingStep:
        """The update itself; its numbers come with `finish`. Without `apply` the optimizer does nothing.

        `after` is the step before this one, if it is not finished yet. Should it turn out not to be finite, this one
        changes nothing either. `vote`: see `StepReport.votes`.
        """
        sums = self.gradients(prepared)
        norm = gradient_norm(self.parameters, self.mesh.device)
        numbers = torch.cat([self._summed(prepared, sums, vote), norm[None]])
        finite = torch.isfinite(numbers[0]) & torch.isfinite(norm)
        if after is not None:
            finite &= after.finite
        most = self.settings.max_grad_norm
        self.optimizer.set_rates(lr_factor)
        if apply:
            self.optimizer.step(finite, None if most is None else (most / (norm + 1e-6)).clamp(max=1.0))
            if self.router is not None:
                self.router.move_biases(finite)
        self.optimizer.zero_grad(set_to_none=True)
        marks = None if self.clock is None else self.clock.cut()
        return PendingStep(self, prepared, sums, numbers, finite, marks, step, after)

    def gradients(self, prepared: PreparedStep) -> _Sums:
        """Gradients of the whole batch in the parameters, and this rank's part of the sums."""
        self.optimizer.zero_grad(set_to_none=True)
        zeros = torch.zeros(1 + len(self.settings.sources), dtype=torch.float64, device=self.mesh.device)
        sums = _Sums(zeros[0], {}, [], zeros[1:])
        micro_batch_loss: Callable[..., LossOutput] = self.micro_batch_loss
        if self.router is not None:
            micro_batch_loss = partial(self.router.micro_batch_loss, self.micro_batch_loss)
        with compute_copies(self.model) as master_weights:
            if self.router is not None:
                self.router.begin(self.model, prepared.rows)
            for batch, indices in prepared.rows:
                output = inside(self.model, micro_batch_loss, batch.local)
                assert output.token_losses is not None
                # On this thread: handing Python's lock to a thread of autograd's own costs the host more than the work.
                with torch.autograd.set_multithreading_enabled(False):
                    output.loss.backward()  # type: ignore[no-untyped-call]
                if master_weights is not None:
                    master_weights.collect_gradients()
                sums.loss += output.loss.detach()
                sums.statistics = merge_statistics(sums.statistics, output.statistics)
                sums.token_losses.append(output.token_losses)
                if prepared.source is not None and not batch.is_filler:
                    local = batch.local
                    by_sample = segment_sum(output.token_losses.double(), local.sample_index, local.num_samples)
                    sums.source_losses.index_add_(0, to_device(prepared.source[indices], self.mesh.device), by_sample)
        if self.router is not None:
            self.router.end()
        return sums

    def _summed(self, prepared: PreparedStep, sums: _Sums, vote: bool) -> Tensor:
        """Of the global batch: loss, number of labels, votes, the losses of sources, (sum, count) of each statistic."""
        num_labels = sum(batch.num_labels for batch, _ in prepared.rows)
        numbers = torch.stack(
            [
                sums.loss,
                torch.full_like(sums.loss, num_labels),
                torch.full_like(sums.loss, int(vote)),
                *sums.source_losses,
                *(number.to(sums.loss) for name in sorted(sums.statistics) for number in sums.statistics[name]),
            ]
        )
        dist.all_reduce(numbers, group=self.mesh.loss.group)
        return numbers


class PendingStep:
    """An update that the device may still be busy with."""

    def __init__(
        self,
        engine: Engine,
        prepared: PreparedStep,
        sums: _Sums,
        numbers: Tensor,
        finite: Tensor,
        marks: list[Any] | None,
        step: int,
        after: PendingStep | None,
    ) -> None:
        self._engine, self._prepared, self._sums, self._step = engine, prepared, sums, step
        self._marks = marks
        self.finite = finite  # [] whether the optimizer has done it
        # The copy to the host begins now, so that `finish` does not wait for steps that were begun after this one.
        self._numbers, self._arrived = numbers, cast(Any, None)
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._arrived.record()
        self._before: Any = None if after is None else after._arrived  # the end of that step on the device

    def finish(self) -> StepReport:
        """Wait, and report. Raises `NonFiniteError` if the loss or the gradient norm was not finite."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, num_labels, votes, *rest, norm = self._numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._nonfinite_error(loss, norm)
        sources = self._engine.settings.sources
        by_source, rest = rest[: len(sources)], rest[len(sources) :]
        names = sorted(self._sums.statistics)
        plan = self._prepared.plan
        num_tokens, computed = int(plan.tokens.sum()), plan.padded_tokens(self._engine.mesh.context.size)
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            statistics={name: rest[2 * i] / max(rest[2 * i + 1], 1.0) for i, name in enumerate(names)},
            num_samples=len(self._prepared.samples),
            num_rows=self._num_rows(),
            source_losses={
                name: total / weight
                for name, total, weight in zip(sources, by_source, self._prepared.source_weights, strict=True)
                if weight > 0
            },
            num_tokens=num_tokens,
            num_labels=int(num_labels),
            padding_share=1.0 - int(plan.computed_tokens.sum()) / computed,
            plan=plan,
            votes=int(votes),
            compute_seconds=() if self._marks is None else self._seconds(self._marks),
        )

    def _num_rows(self) -> int | None:
        if not self._engine.settings.groups_are_rows:
            return None
        return len({sample.group or index for index, sample in enumerate(self._prepared.samples)})

    def device_seconds(self) -> float | None:
        """From the end of the step before to the end of this one, on the device; None where that is not known.

        After `finish`. The host cannot tell: it learns of the end of a step when it has begun the next.
        """
        if self._arrived is None or self._before is None:
            return None
        return float(self._before.elapsed_time(self._arrived)) / 1e3

    def _seconds(self, marks: list[Any]) -> tuple[float, ...]:
        clock = self._engine.clock
        assert clock is not None
        return clock.seconds(marks)

    def _nonfinite_error(self, loss: float, norm: float) -> NonFiniteError:
        """Names the samples with a token loss that is not finite, or, where all are finite, all samples."""
        samples, mesh, step = self._prepared.samples, self._engine.mesh, self._step
        found = torch.zeros(len(samples), dtype=torch.int64)
        for (batch, indices), token_losses in zip(self._prepared.rows, self._sums.token_losses, strict=True):
            if batch.is_filler:
                continue
            bad = batch.local.sample_index[~torch.isfinite(token_losses)].long().cpu()
            found[torch.from_numpy(indices)[bad]] = mesh.loss.rank + 1
        found = found.to(mesh.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.loss.group)
        where = {index: rank - 1 for index, rank in enumerate(found.tolist()) if rank}
        cause = weights_line(self._engine.model, step)
        if not where:
            listed = _listed([_uid(samples, index) for index in range(len(samples))])
            return NonFiniteError(
                f"step {step}: gradient norm {norm} with a finite loss of {loss:.6g}, before the update; look at its "
                f"{len(samples)} samples ({listed}){cause}",
                whole(samples),
            )
        ranks = sorted(set(where.values()))
        return NonFiniteError(
            f"step {step}: loss {loss} on rank {_listed(ranks)}, before the update; look at sample "
            f"{_listed([_uid(samples, index) for index in where])}{cause}",
            whole([samples[index] for index in where]),
        )


def _uid(samples: Sequence[Sample], index: int) -> str | int:
    uid = samples[index].uid
    return f"number {index} of the batch" if uid is None else uid


def _listed(entries: Sequence[str | int], most: int = 16) -> str:
    shown = ", ".join(str(entry) for entry in entries[:most])
    return shown if len(entries) <= most else f"{shown} and {len(entries) - most} more"
