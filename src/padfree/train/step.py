"""The states of one optimizer step: prepared, pending, reported.

    Engine.prepare -> PreparedStep   samples, plan and packs
    Engine.begin   -> PendingStep    the device may still compute; loss and gradient norm are on their way to the host
           finish  -> StepReport     numbers of the whole global batch, the same on every rank

Of these calls, only `PendingStep.finish` waits for the device. If the loss or the gradient norm is not finite, the step
has changed no weights, and `finish` raises an error that names the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from padfree.distributed import Mesh
from padfree.packing import StepPlan
from padfree.packing.fill import Indices
from padfree.rollout.collect.sample_exchange import whole
from padfree.sample import Sample
from padfree.train.finite_checks import NonFiniteError, nonfinite_cause
from padfree.train.microbatch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSamples:
    """How many samples a step skips because their gradient is 0, and how many tokens these samples have."""

    samples: int = 0
    tokens: int = 0  # all tokens of the skipped samples
    labels: int = 0  # only the tokens that would enter the loss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReport:
    """Results of one step over the whole global batch, the same on every rank.

    The numbers of samples, tokens and labels include the samples that were skipped because their gradient is 0
    (`SkippedSamples`). `plan`, which says which samples form each pack, does not include them.
    """

    loss: float
    gradient_norm: float  # the norm before clipping
    statistics: dict[str, float]  # means over the scored tokens that are not skipped; for `advantage`, over all of them
    num_samples: int
    num_tokens: int  # number of tokens of the samples, without padding
    num_labels: int
    padding_share: float  # padding tokens / all computed tokens
    plan: StepPlan
    stop_votes: int  # ranks that passed `wants_stop=True` to `Engine.begin`
    source_losses: Mapping[str, float] = field(default_factory=dict)  # weighted mean loss over the tokens of a source
    num_rows: int | None = None  # number of data rows; None: a row never gives several samples
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
    source_weights: Mapping[str, float] = field(default_factory=dict)  # sum of the token weights of each source
    num_rows: int | None = None  # see `StepReport`
    skipped: SkippedSamples | None = None  # see `StepReport`


def encoded_images(samples: Sequence[Sample], plan: StepPlan) -> tuple[int, ...]:
    """Return the images that a step encodes, each as its number of features.

    An image that occurs several times in a pack is encoded once for this pack.
    """
    if not any(sample.images for sample in samples):
        return ()
    found: list[int] = []
    for packs, is_first in zip(plan.micro_batches, plan.is_first, strict=True):
        for indices in (chosen for chosen, counts in zip(packs, is_first, strict=True) if counts):
            distinct = {image.digest: len(image.positions) for i in indices for image in samples[i].images}
            found += distinct.values()
    return tuple(found)


class PendingStep:
    """An optimizer step that has begun, and that the device may still be executing. `finish` returns its results."""

    def __init__(
        self,
        prepared: PreparedStep,
        numbers: Tensor,
        finite: Tensor,
        *,
        token_losses: Sequence[Tensor],
        statistics: Sequence[str],
        model: PreTrainedModel,
        mesh: Mesh,
        step: int,
        after: PendingStep | None,
        compute_seconds: Callable[[], tuple[float, ...]] | None,
    ) -> None:
        """`numbers`: the loss, counts and statistics of the step, summed over all ranks, and the gradient norm.

        `statistics`: the names of the statistics. `token_losses`: the token losses of each pack of this rank.
        `compute_seconds`: returns the forward seconds of each data rank; None: not measured.
        """
        self._prepared, self._token_losses, self._statistics = prepared, token_losses, statistics
        self._model, self._mesh, self._step = model, mesh, step
        self._compute_seconds = compute_seconds
        self.finite = finite  # [] True: the optimizer made the update
        # Start the copy to the host now, because a copy started in `finish` would wait for steps begun meanwhile.
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
        prepared, plan, skipped = self._prepared, self._prepared.plan, self._prepared.skipped or SkippedSamples()
        weights = prepared.source_weights
        by_source, rest = rest[: len(weights)], rest[len(weights) :]
        num_tokens, computed = int(plan.tokens.sum()), plan.padded_tokens(self._mesh.context.size)
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            statistics={name: rest[2 * i] / max(rest[2 * i + 1], 1.0) for i, name in enumerate(self._statistics)},
            num_samples=len(prepared.samples) + skipped.samples,
            num_rows=prepared.num_rows,
            source_losses={
                name: total / weight
                for (name, weight), total in zip(weights.items(), by_source, strict=True)
                if weight > 0
            },
            num_tokens=num_tokens + skipped.tokens,
            num_labels=int(num_labels) + skipped.labels,
            padding_share=1.0 - int(plan.computed_tokens.sum()) / computed if computed else 0.0,
            plan=plan,
            stop_votes=int(stop_votes),
            compute_seconds=() if self._compute_seconds is None else self._compute_seconds(),
            skipped=prepared.skipped,
            image_features=encoded_images(prepared.samples, plan),
        )

    def device_seconds(self) -> float | None:
        """Return the device's seconds from the end of the previous step to the end of this step; None if unknown.

        Call this after `finish`.
        """
        # Events measure the time: the host sees the end of a step only after it has begun the next step.
        if self._arrived is None or self._before is None:
            return None
        return float(self._before.elapsed_time(self._arrived)) / 1e3

    def _nonfinite_error(self, loss: float, norm: float) -> NonFiniteError:
        """Return an error that names the samples with a non-finite token loss.

        If only the gradient norm is not finite, the error names all samples.
        """
        samples, mesh, step = self._prepared.samples, self._mesh, self._step
        found = torch.zeros(len(samples), dtype=torch.int64)
        for (batch, indices), token_losses in zip(self._prepared.packs, self._token_losses, strict=True):
            if batch.is_filler:
                continue
            bad = batch.local.sample_index[~torch.isfinite(token_losses)].long().cpu()
            found[torch.from_numpy(indices)[bad]] = mesh.loss.rank + 1
        found = found.to(mesh.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.loss.group)
        where = {index: rank - 1 for index, rank in enumerate(found.tolist()) if rank}
        cause = nonfinite_cause(self._model, step)
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


def _uid(samples: Sequence[Sample], index: int) -> str | int:
    uid = samples[index].uid
    return f"at index {index} of the batch" if uid is None else uid


def _listed(entries: Sequence[str | int], most: int = 16) -> str:
    shown = ", ".join(str(entry) for entry in entries[:most])
    return shown if len(entries) <= most else f"{shown} and {len(entries) - most} more"
