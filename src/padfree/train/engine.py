"""One optimizer step over a global batch of samples. SFT and policy losses share this code.

    samples (every rank knows all samples; it holds the tokens of sampled responses only if it trains on them)
      prepare -> plan            assigns samples to micro-batches and micro-batches to data ranks
              -> token weights   computed from the masks of the whole global batch, so that micro-batch losses add up
                                 to the batch loss
              -> packs           this rank's micro-batches on the device
      begin   -> for each pack: hidden states -> loss -> backward
              -> sums over ranks, gradient norm -> clip -> optimizer (skips the update if a number is not finite)
      finish  -> loss, gradient norm and statistics on the host

The division into micro-batches changes only the order of additions. `MicroBatchLoss` computes the loss of a pack.

On a GPU only `finish` synchronises: the host can prepare and begin the next step while the device runs this one.
Therefore a flag on the device tells whether the loss and the gradient norm are finite. If they are not, the optimizer
skips this step and every step begun after it, and `finish` raises an error that names the samples.

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
from torch import Tensor, nn

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
from padfree.sample import TOKEN_ARRAYS, Sample
from padfree.sharding.norm import gradient_norm
from padfree.sharding.parallelize import inside
from padfree.tasks import task_of
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.tasks.zero_gradient import has_advantage, may_skip
from padfree.train.finite_checks import NonFiniteError, nonfinite_cause
from padfree.train.microbatch import Floats, MicroBatch
from padfree.train.rank_imbalance_timer import RankImbalanceTimer
from padfree.train.router_balance import RouterBalance
from padfree.train.scorer import Scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Settings of a step: the loss, its token weights, gradient clipping, and the balancing of expert routers."""

    loss: TaskSettings | ValueSettings
    aggregation: WeightMode = "token-mean"
    constant: float | None = None  # the divisor of aggregation "constant"
    groups_are_rows: bool = False  # a `group` is a data row, whose samples count as one sample in the token weights
    sources: tuple[str, ...] = ()  # sources of a data mixture; the loss of each is reported
    max_grad_norm: float | None = 1.0  # None: no clipping
    head_memory: Memory = "speed"  # "low": the head uses about 1 GiB at most and recomputes part of its work
    load_balancing: float = 0.0  # coefficient of the load-balancing loss of expert routers
    router_bias: float = 0.0  # how far one step moves a router's expert-selection bias
    skip_zero_gradient: bool = True  # leave out samples whose gradient is 0 (`padfree.tasks.zero_gradient`)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSamples:
    """Samples that a step leaves out because their gradient is 0: their number, tokens and scored tokens."""

    samples: int = 0
    tokens: int = 0
    labels: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """Results of one step over the whole global batch, identical on every rank.

    Numbers of samples, tokens and labels include the samples that the step skipped; `plan` does not.
    """

    loss: float
    gradient_norm: float  # the norm before clipping
    statistics: dict[str, float]  # means over the scored tokens that are computed; for `advantage`, over all tokens
    num_samples: int
    num_tokens: int  # number of tokens of the samples, without padding
    num_labels: int
    padding_share: float  # padding tokens / all computed tokens
    plan: StepPlan
    stop_votes: int  # ranks that passed `wants_stop=True` to `Engine.begin`
    source_losses: Mapping[str, float] = field(default_factory=dict)  # weighted mean loss over the tokens of a source
    num_rows: int | None = None  # number of data rows, if several samples can come from one row; None: not known
    compute_seconds: tuple[float, ...] = ()  # forward time of the layers on each data rank; empty: not measured
    skipped: SkippedSamples | None = None  # None: the loss does not allow skipping samples
    image_features: tuple[int, ...] = ()  # number of features of each image that the step encodes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedStep:
    """A global batch that is planned and packed: the input of one optimizer step."""

    samples: Sequence[Sample]  # the samples that are computed, without the skipped ones
    plan: StepPlan
    packs: Sequence[tuple[MicroBatch, Indices]]  # this rank's packs, each with the indices of its samples
    source: Indices | None = None  # [B] index of each sample's source, if the data is a mixture
    source_weights: tuple[float, ...] = ()  # sum of the token weights of each source
    num_rows: int | None = None  # see `StepReport`
    skipped: SkippedSamples | None = None  # see `StepReport`


def encoded_images(samples: Sequence[Sample], plan: StepPlan) -> tuple[int, ...]:
    """The number of features of each image that a step encodes. A pack encodes each of its distinct images once."""
    if not any(sample.images for sample in samples):
        return ()
    found: list[int] = []
    for packs, is_first in zip(plan.micro_batches, plan.is_first, strict=True):
        for indices in (chosen for chosen, counts in zip(packs, is_first, strict=True) if counts):
            distinct = {image.digest: len(image.positions) for i in indices for image in samples[i].images}
            found += distinct.values()
    return tuple(found)


UNSCORED = Sample(tokens=np.zeros(1, np.int64), loss_mask=np.zeros(1, np.bool_)).with_numbers(
    **{name: np.zeros(1, np.float32) for name in TOKEN_ARRAYS}
)
"""A sample of one token without a loss: its gradient is 0."""


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums of losses, labels and statistics over the micro-batches of this rank."""

    loss: Tensor
    statistics: Statistics
    token_losses: list[Tensor]
    source_losses: Tensor  # [sources] weighted sums


class Engine:
    """Makes the optimizer steps of a training. The scorer holds the model."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: Optimizer,
        settings: LossSettings,
        micro_batch_loss: MicroBatchLoss | None = None,
    ) -> None:
        """`micro_batch_loss`: the loss to minimise. If it is None, the loss of the task in `settings` is minimised."""
        self.scorer, self.optimizer, self.settings = scorer, optimizer, settings
        if micro_batch_loss is None:
            assert isinstance(settings.loss, TaskSettings)
            micro_batch_loss = task_of(settings.loss.command).micro_batch_loss(
                settings.loss, temperature=scorer.temperature, memory=settings.head_memory
            )
        self.micro_batch_loss: MicroBatchLoss = micro_batch_loss
        self.model, self.mesh, self.packer = scorer.model, scorer.mesh, scorer.packer
        self.timer = RankImbalanceTimer.of(scorer.model, scorer.mesh)
        self.router: RouterBalance | None = None
        if settings.load_balancing or settings.router_bias:
            self.router = RouterBalance(
                scorer.model, scorer.mesh, coefficient=settings.load_balancing, bias_rate=settings.router_bias
            )
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._with_gradients: list[nn.Parameter] | None = None  # parameters that got a gradient in the last pass
        self._may_skip = settings.skip_zero_gradient and may_skip(
            settings.loss, has_router_term=self.router is not None
        )

    def step(
        self,
        samples: Sequence[Sample],
        *,
        lr_factor: float = 1.0,
        step: int = 0,
    ) -> StepReport:
        """Update the weights once. All ranks must pass the same samples in the same order.

        `lr_factor`: the schedule's factor, by which every base learning rate is multiplied. `step`: the number of the
        step, for error messages only.
        """
        return self.begin(self.prepare(samples), lr_factor=lr_factor, step=step).finish()

    def prepare(self, samples: Sequence[Sample], *, eager: bool = True) -> PreparedStep:
        """Plan and pack a global batch. With `eager=False`, each pack is built when the step reaches it."""
        settings = self.settings
        grouped = settings.aggregation == "group-mean"
        groups = [sample.group for sample in samples]
        weights: Sequence[Floats] = token_weights(
            settings.aggregation,
            [sample.mask for sample in samples],
            groups=groups if grouped else None,
            constant=settings.constant,
            units=groups if settings.groups_are_rows else None,
        )
        num_rows = None
        if settings.groups_are_rows:
            num_rows = len({group or index for index, group in enumerate(groups)})
        skipped = None
        if self._may_skip:  # the weights above count all samples
            samples, weights, skipped = _computed(samples, weights)
        plan = self.packer.plan(samples, keep_groups=self.micro_batch_loss.keeps_groups)
        packs = self.packer.lay_out(samples, plan, weights)
        source, totals = None, [0.0] * len(settings.sources)
        if settings.sources:
            source = np.array([settings.sources.index(str(sample.source)) for sample in samples])
            for number, weight in zip(source.tolist(), weights, strict=True):
                totals[number] += float(weight.sum(dtype=np.float64))
        return PreparedStep(
            samples=samples,
            plan=plan,
            packs=packs[:] if eager else packs,
            source=source,
            source_weights=tuple(totals),
            num_rows=num_rows,
            skipped=skipped,
        )

    def begin(
        self,
        prepared: PreparedStep,
        *,
        lr_factor: float = 1.0,
        step: int = 0,
        after: PendingStep | None = None,
        wants_stop: bool = False,
        apply: bool = True,
    ) -> PendingStep:
        """Start one optimizer step, and return it while the device may still run it. Its `finish` returns the report.

        `after`: the previous step, if it is unfinished. If the loss or gradient norm of the previous step turns out not
        to be finite, this step changes no weight either. `wants_stop`: whether this rank votes for the run to stop
        (`StepReport.stop_votes`). With `apply=False`, gradients are computed, but the optimizer does nothing.
        """
        sums = self.gradients(prepared)
        norm = gradient_norm(self.parameters, self.mesh.device)
        numbers = torch.cat([self._sum_over_ranks(prepared, sums, wants_stop), norm[None]])
        finite = torch.isfinite(numbers[0]) & torch.isfinite(norm)
        if after is not None:
            finite &= after.finite
        max_norm = self.settings.max_grad_norm
        self.optimizer.set_rates(lr_factor)
        if apply:
            self.optimizer.step(finite, None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0))
            if self.router is not None:
                self.router.move_biases(finite)
        self.optimizer.zero_grad(set_to_none=True)
        marks = None if self.timer is None else self.timer.cut()
        return PendingStep(self, prepared, sums, numbers, finite, marks, step, after)

    def gradients(self, prepared: PreparedStep) -> _Sums:
        """Accumulate the gradients of the whole batch in the parameters; return this rank's sums."""
        self.optimizer.zero_grad(set_to_none=True)
        if not len(prepared.packs):
            return self._zero_gradients(prepared)
        zeros = torch.zeros(1 + len(self.settings.sources), dtype=torch.float64, device=self.mesh.device)
        sums = _Sums(zeros[0], {}, [], zeros[1:])
        micro_batch_loss: Callable[..., LossOutput] = self.micro_batch_loss
        if self.router is not None:
            micro_batch_loss = partial(self.router.micro_batch_loss, self.micro_batch_loss)
        with compute_copies(self.model) as master_weights:
            if self.router is not None:
                self.router.begin(self.model, prepared.packs)
            for batch, indices in prepared.packs:
                output = inside(self.model, micro_batch_loss, batch.local)
                assert output.token_losses is not None
                # Run backward on this thread: handing the GIL to an autograd thread costs more time than it saves.
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
        self._with_gradients = [parameter for parameter in self.parameters if parameter.grad is not None]
        if prepared.skipped is not None and "advantage" in sums.statistics and self.mesh.loss.rank == 0:
            total, count = sums.statistics["advantage"]  # the advantages of skipped samples are known to be 0
            sums.statistics["advantage"] = total, count + prepared.skipped.labels
        return sums

    def _zero_gradients(self, prepared: PreparedStep) -> _Sums:
        """Set the gradients of a batch whose samples are all skipped to 0, without a pass over the model.

        The optimizer decays the moments and the weights only of parameters that have a gradient. Therefore exactly the
        parameters that get a gradient in a pass are set to 0 here. If there has
        been no pass yet, a pass over a single unscored token shows which parameters these are.
        """
        assert prepared.skipped is not None
        zeros = torch.zeros(1 + len(self.settings.sources), dtype=torch.float64, device=self.mesh.device)
        if self._with_gradients is None:
            plan = self.packer.plan([UNSCORED])
            packs = self.packer.lay_out([UNSCORED], plan, [np.zeros(1, np.float32)])
            self.gradients(PreparedStep(samples=[UNSCORED], plan=plan, packs=packs))
        assert self._with_gradients is not None
        for parameter in self._with_gradients:
            parameter.grad = torch.zeros_like(parameter)
        labels = torch.full_like(zeros[0], prepared.skipped.labels if self.mesh.loss.rank == 0 else 0)
        return _Sums(zeros[0], {"advantage": (torch.zeros_like(labels), labels)}, [], zeros[1:])

    def _sum_over_ranks(self, prepared: PreparedStep, sums: _Sums, wants_stop: bool) -> Tensor:
        """Return one tensor of sums over the global batch.

        In order: loss, number of labels, stop votes, loss of each source, then (sum, count) of each statistic.
        """
        num_labels = sum(batch.num_labels for batch, _ in prepared.packs)
        numbers = torch.stack(
            [
                sums.loss,
                torch.full_like(sums.loss, num_labels),
                torch.full_like(sums.loss, int(wants_stop)),
                *sums.source_losses,
                *(number.to(sums.loss) for name in sorted(sums.statistics) for number in sums.statistics[name]),
            ]
        )
        dist.all_reduce(numbers, group=self.mesh.loss.group)
        return numbers


class PendingStep:
    """An optimizer step that the device may still be executing."""

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
        self.finite = finite  # [] True: the optimizer made the update
        # Start the copy to the host now. A copy started in `finish` would wait for later steps on the same stream.
        self._numbers, self._arrived = numbers, cast(Any, None)
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._arrived.record()
        self._before: Any = None if after is None else after._arrived  # event at the end of the previous step

    def finish(self) -> StepReport:
        """Wait for the device and return the report. Raise `NonFiniteError` if loss or gradient norm is not finite."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, num_labels, stop_votes, *rest, norm = self._numbers.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._nonfinite_error(loss, norm)
        sources = self._engine.settings.sources
        by_source, rest = rest[: len(sources)], rest[len(sources) :]
        names = sorted(self._sums.statistics)
        plan, skipped = self._prepared.plan, self._prepared.skipped or SkippedSamples()
        num_tokens, computed = int(plan.tokens.sum()), plan.padded_tokens(self._engine.mesh.context.size)
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            statistics={name: rest[2 * i] / max(rest[2 * i + 1], 1.0) for i, name in enumerate(names)},
            num_samples=len(self._prepared.samples) + skipped.samples,
            num_rows=self._prepared.num_rows,
            source_losses={
                name: total / weight
                for name, total, weight in zip(sources, by_source, self._prepared.source_weights, strict=True)
                if weight > 0
            },
            num_tokens=num_tokens + skipped.tokens,
            num_labels=int(num_labels) + skipped.labels,
            padding_share=1.0 - int(plan.computed_tokens.sum()) / computed if computed else 0.0,
            plan=plan,
            stop_votes=int(stop_votes),
            compute_seconds=() if self._marks is None else self._seconds(self._marks),
            skipped=self._prepared.skipped,
            image_features=encoded_images(self._prepared.samples, plan),
        )

    def device_seconds(self) -> float | None:
        """Return the device time from the end of the previous step to the end of this one; None if it is not known.

        Call this after `finish`. Host timers cannot measure this time, because the host sees the end of a step only
        after it has begun the next one.
        """
        if self._arrived is None or self._before is None:
            return None
        return float(self._before.elapsed_time(self._arrived)) / 1e3

    def _seconds(self, marks: list[Any]) -> tuple[float, ...]:
        timer = self._engine.timer
        assert timer is not None
        return timer.seconds(marks)

    def _nonfinite_error(self, loss: float, norm: float) -> NonFiniteError:
        """Return an error that names the samples with a non-finite token loss.

        If every token loss is finite, i.e. only the gradient norm is not, the error names all samples.
        """
        samples, mesh, step = self._prepared.samples, self._engine.mesh, self._step
        found = torch.zeros(len(samples), dtype=torch.int64)
        for (batch, indices), token_losses in zip(self._prepared.packs, self._sums.token_losses, strict=True):
            if batch.is_filler:
                continue
            bad = batch.local.sample_index[~torch.isfinite(token_losses)].long().cpu()
            found[torch.from_numpy(indices)[bad]] = mesh.loss.rank + 1
        found = found.to(mesh.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.loss.group)
        where = {index: rank - 1 for index, rank in enumerate(found.tolist()) if rank}
        cause = nonfinite_cause(self._engine.model, step)
        if not where:
            listed = _listed([_uid(samples, index) for index in range(len(samples))])
            return NonFiniteError(
                f"step {step}: the gradient norm is {norm} before the update, with a finite loss of {loss:.6g}; "
                f"inspect the {len(samples)} samples of the step ({listed}){cause}",
                whole(samples),
            )
        ranks = sorted(set(where.values()))
        return NonFiniteError(
            f"step {step}: the loss is {loss} on rank {_listed(ranks)} before the update; inspect sample "
            f"{_listed([_uid(samples, index) for index in where])}{cause}",
            whole([samples[index] for index in where]),
        )


def _computed(
    samples: Sequence[Sample], weights: Sequence[Floats]
) -> tuple[Sequence[Sample], Sequence[Floats], SkippedSamples]:
    """Return the samples of a batch that have a gradient, their token weights, and the counts of the other samples."""
    computed = has_advantage(samples)
    if computed.all():
        return samples, weights, SkippedSamples()
    left_out = [samples[index] for index in np.flatnonzero(~computed).tolist()]
    chosen = np.flatnonzero(computed).tolist()
    skipped = SkippedSamples(
        samples=len(left_out),
        tokens=sum(map(len, left_out)),
        labels=sum(sample.num_labels for sample in left_out),
    )
    return [samples[index] for index in chosen], [weights[index] for index in chosen], skipped


def _uid(samples: Sequence[Sample], index: int) -> str | int:
    uid = samples[index].uid
    return f"at index {index} of the batch" if uid is None else uid


def _listed(entries: Sequence[str | int], most: int = 16) -> str:
    shown = ", ".join(str(entry) for entry in entries[:most])
    return shown if len(entries) <= most else f"{shown} and {len(entries) - most} more"
