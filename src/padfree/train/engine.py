"""One optimizer step over a global batch of samples. SFT and policy losses share this code.

    prepare    assign samples to micro-batches and ranks, compute token weights, build this rank's packs
    begin      forward and backward of each pack, sum over ranks, clip the gradient, update the weights
    finish     wait for the device, return loss, gradient norm and statistics

Only `finish` waits for the device, so the host can begin the next step while the device runs the current one. If the
loss or the gradient norm is not finite, this step and all steps begun after it change no weights, and `finish` raises
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from padfree.config.loss_settings import TaskSettings, ValueSettings
from padfree.cp.ranges import to_device
from padfree.head.budget import Memory
from padfree.losses import LossOutput, Statistics, WeightMode, merge_statistics, segment_sum, token_weights
from padfree.optim.master_weights import compute_copies
from padfree.optim.optimizer import Optimizer
from padfree.sample import TOKEN_ARRAYS, Sample
from padfree.sharding.norm import gradient_norm
from padfree.sharding.parallelize import inside
from padfree.tasks import task_of
from padfree.tasks.batch_advantages import has_advantage, may_skip
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.train.microbatch import Floats
from padfree.train.rank_imbalance_timer import RankImbalanceTimer
from padfree.train.router_balance import RouterBalance
from padfree.train.scorer import Scorer
from padfree.train.step import PendingStep, PreparedStep, SkippedSamples, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Settings of a step: the loss, its token weights, gradient clipping, and the balancing of expert routers."""

    loss: TaskSettings | ValueSettings
    aggregation: WeightMode = "token-mean"
    constant: float | None = None  # the divisor of aggregation "constant"
    groups_are_rows: bool = False  # a `group` is a data row, whose samples count as one sample in the token weights
    sources: tuple[str, ...] = ()  # names of the sources of a data mixture; the loss of each is reported
    max_grad_norm: float | None = 1.0  # None: no clipping
    head_memory: Memory = "speed"  # "low": the head uses about 1 GiB at most and recomputes part of its work
    load_balancing: float = 0.0  # coefficient of the load-balancing loss of expert routers
    router_bias: float = 0.0  # how far one step moves a router's expert-selection bias
    skip_zero_gradient: bool = True  # do not compute samples whose gradient is 0 (`padfree.tasks.batch_advantages`)


UNSCORED = Sample(tokens=np.zeros(1, np.int64), loss_mask=np.zeros(1, np.bool_)).with_numbers(
    **{name: np.zeros(1, np.float32) for name in TOKEN_ARRAYS}
)
"""A sample of one token that is not scored, so its gradient is 0."""


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums over the micro-batches of this rank: the loss, the statistics, and the loss of each data source."""

    loss: Tensor
    statistics: Statistics
    token_losses: list[Tensor]
    source_losses: Tensor  # [sources] weighted sums


class Engine:
    """Makes the optimizer steps of a training run. The trained model is `scorer.model`."""

    def __init__(
        self,
        scorer: Scorer,
        optimizer: Optimizer,
        settings: LossSettings,
        micro_batch_loss: MicroBatchLoss | None = None,
    ) -> None:
        """`micro_batch_loss`: the loss to minimise. If it is None, the task in `settings` chooses the loss."""
        self.scorer, self.optimizer, self.settings = scorer, optimizer, settings
        if micro_batch_loss is None:
            assert isinstance(settings.loss, TaskSettings)
            micro_batch_loss = task_of(settings.loss.command).loss(
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
        self._with_gradients: list[nn.Parameter] | None = None  # parameters that got a gradient in the last backward
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

        `lr_factor`: the factor of the learning-rate schedule. `step`: the number of the step, for error messages only.
        """
        return self.begin(self.prepare(samples), lr_factor=lr_factor, step=step).finish()

    def prepare(self, samples: Sequence[Sample], *, eager: bool = True) -> PreparedStep:
        """Plan and pack a global batch, which is the input of one step.

        With `eager=False`, each pack (micro-batch) is built only when the step reaches it.
        """
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
        if self._may_skip:  # the token weights above are computed from all samples, also from those skipped here
            samples, weights, skipped = _computed(samples, weights)
        plan = self.packer.plan(samples, keep_groups=self.micro_batch_loss.keeps_groups)
        packs = self.packer.lay_out(samples, plan, weights)
        source, totals = None, dict.fromkeys(settings.sources, 0.0)
        if settings.sources:
            source = np.array([settings.sources.index(str(sample.source)) for sample in samples])
            for sample, weight in zip(samples, weights, strict=True):
                totals[str(sample.source)] += float(weight.sum(dtype=np.float64))
        return PreparedStep(
            samples=samples,
            plan=plan,
            packs=packs[:] if eager else packs,
            source=source,
            source_weights=totals,
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
        """Start one optimizer step. The device may still run the step when this method returns.

        If the loss or gradient norm of `after` (the unfinished previous step) is not finite, the new step changes no
        weights. `wants_stop`: this rank wants to stop the run after this step. `apply=False`: compute gradients only.
        """
        sums = self.gradients(prepared)
        norm = gradient_norm(self.parameters, self.mesh.device)
        numbers = torch.cat([self._sum_over_ranks(prepared, sums, wants_stop), norm[None]])
        finite = torch.isfinite(numbers[0]) & torch.isfinite(norm)  # a flag on the device, which the host does not read
        if after is not None:
            finite &= after.finite
        max_norm = self.settings.max_grad_norm
        self.optimizer.set_rates(lr_factor)
        if apply:
            self.optimizer.step(finite, None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0))
            if self.router is not None:
                self.router.move_biases(finite)
        self.optimizer.zero_grad(set_to_none=True)
        return PendingStep(
            prepared,
            numbers,
            finite,
            token_losses=sums.token_losses,
            statistics=sorted(sums.statistics),
            model=self.model,
            mesh=self.mesh,
            step=step,
            after=after,
            compute_seconds=None if self.timer is None else self.timer.cut(),
        )

    def gradients(self, prepared: PreparedStep) -> _Sums:
        """Run forward and backward over this rank's packs, so that gradients add up in the parameters.

        Return this rank's sums of losses and statistics.
        """
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
        """Set gradients to 0 without a backward pass, because all samples of the batch are skipped.

        Parameters that no backward pass reaches keep `grad=None`, so that the optimizer does not decay their weights.
        """
        assert prepared.skipped is not None
        zeros = torch.zeros(1 + len(self.settings.sources), dtype=torch.float64, device=self.mesh.device)
        if self._with_gradients is None:  # no backward pass yet: one over an unscored token finds the parameters
            plan = self.packer.plan([UNSCORED])
            packs = self.packer.lay_out([UNSCORED], plan, [np.zeros(1, np.float32)])
            self.gradients(PreparedStep(samples=[UNSCORED], plan=plan, packs=packs))
        assert self._with_gradients is not None
        for parameter in self._with_gradients:
            parameter.grad = torch.zeros_like(parameter)
        labels = torch.full_like(zeros[0], prepared.skipped.labels if self.mesh.loss.rank == 0 else 0)
        return _Sums(zeros[0], {"advantage": (torch.zeros_like(labels), labels)}, [], zeros[1:])

    def _sum_over_ranks(self, prepared: PreparedStep, sums: _Sums, wants_stop: bool) -> Tensor:
        """Return the sums over all ranks as one tensor.

        It holds the loss, the number of labels, the number of ranks that want to stop, the loss of each data source,
        and the sum and count of each statistic.
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


def _computed(
    samples: Sequence[Sample], weights: Sequence[Floats]
) -> tuple[Sequence[Sample], Sequence[Floats], SkippedSamples]:
    """Leave out the samples whose gradient is 0, because all of their advantages are 0.

    Return the remaining samples, their token weights, and the counts of the skipped samples.
    """
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
