"""Balance the load of experts: with a loss over the whole global batch, or with a bias in each router.

As in transformers, the loss is `loss.load_balancing` · E · Σ_e f_e · p_e. E is the number of experts, f_e is how often
routers choose expert e per token and layer, and p_e is the mean router probability of e. If f of the whole batch is
known before backward, the gradients of micro-batches add up.

`loss.router_bias` instead raises the bias of an expert that was chosen less often than average, and lowers that of
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.losses import LossOutput
from padfree.model import hidden_states
from padfree.model.routers import RouterRecorder, routers_of
from padfree.sharding.parallelize import inside
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.train.microbatch import MicroBatch


class RouterBalance:
    """Balances the load of experts: counts how many times the routers choose each expert, and corrects the routers."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, *, coefficient: float, bias_rate: float) -> None:
        self.mesh, self.coefficient, self.bias_rate = mesh, coefficient, bias_rate
        self.routers = routers_of(model)
        name = type(model).__name__
        if not self.routers or len({router.num_experts for router in self.routers}) > 1:
            setting, value = ("load_balancing", coefficient) if coefficient else ("router_bias", bias_rate)
            raise UserError(
                f"loss.{setting}",
                f"{value}, but {name} has no routers, or routers with unequal numbers of experts",
                "leave it out",
            )
        if bias_rate and not all(router.bias for router in self.routers):
            raise UserError(
                "loss.router_bias",
                f"{bias_rate}, but the routers of {name} have no bias",
                "set loss.load_balancing=0.001 instead",
            )
        self.recorder = RouterRecorder(self.routers, own=True)
        self._counts: Tensor | None = None  # [R, E] choices in the global batch
        self._own = self._zeros()

    def begin(self, model: PreTrainedModel, packs: Sequence[tuple[MicroBatch, object]]) -> None:
        """Prepare a step. Call this before the micro-batches of the step.

        The load-balancing loss needs the routers' choices of the whole step. With several micro-batches per rank, an
        extra forward pass counts them here.
        """
        self._counts, self._own = None, self._zeros()
        if self.coefficient and len(packs) > 1:
            self.recorder.record(True)
            with torch.no_grad():
                for batch, _ in packs:
                    self.recorder.clear()
                    inside(model, _forward, batch.local)
                    self._own += self._choices(batch.local)
            self.recorder.record(False)
            self._counts = self._sum_over_ranks()

    def micro_batch_loss(self, inner: MicroBatchLoss, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        """Return the loss of a pack, which `inner` computes, plus the pack's part of the load-balancing loss."""
        self.recorder.clear()
        self.recorder.record(True)  # until `end`, so that recomputation in backward records too
        output = inner(model, batch)
        if self._counts is None:
            self._own += self._choices(batch)
        if not self.coefficient:
            return output
        if self._counts is None:  # one micro-batch per rank: no extra forward pass was needed
            self._counts = self._sum_over_ranks()
        part = self._part(batch)
        return LossOutput(
            loss=output.loss + self.coefficient * part.to(output.loss.dtype),
            token_losses=output.token_losses,
            # A statistic (sum, count) is reported as sum / count or, if count is 0, as the sum over all packs.
            statistics={**output.statistics, "router": (part.detach(), torch.zeros_like(part.detach()))},
            pair_statistics=output.pair_statistics,
        )

    def end(self) -> None:
        """Stop recording the routers' choices. Call this after the micro-batches of a step."""
        self.recorder.record(False)
        self.recorder.clear()

    def move_biases(self, finite: Tensor) -> None:
        """Change the biases with which routers select experts, towards an equal load. Call this after the update.

        `finite` is a bool tensor of shape []. If it is False, the optimizer skipped the update, and the biases do not
        change either.
        """
        if not self.bias_rate:
            return
        counts = self._sum_over_ranks() if self._counts is None else self._counts
        for router, own in zip(self.routers, counts, strict=True):
            assert router.owner is not None
            bias = router.owner._buffers[router.bias]
            assert bias is not None
            step = torch.sign(own.mean() - own) * self.bias_rate
            bias.add_(torch.where(finite, step, torch.zeros_like(step)).to(bias.dtype).view_as(bias))

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.routers), self.routers[0].num_experts, dtype=torch.float64, device=self.mesh.device)

    def _sum_over_ranks(self) -> Tensor:
        total = self._own.clone()
        dist.all_reduce(total, group=self.mesh.loss.group)
        return total

    @torch.no_grad()
    def _choices(self, batch: LocalBatch) -> Tensor:
        """Return how often each of R routers chose each of E experts for this rank's tokens (no padding): [R, E]."""
        found, real = self._zeros(), _real_tokens(batch)
        experts = torch.arange(self.routers[0].num_experts, device=found.device)
        for number, _, choices in self.recorder.calls:
            found[number] += ((choices[:, :, None] == experts) & real[:, None, None]).sum((0, 1))
        return found

    def _part(self, batch: LocalBatch) -> Tensor:
        """Return this micro-batch's term of the load-balancing loss, not yet multiplied by `loss.load_balancing`.

        The terms of all micro-batches and ranks add up to E · Σ_e f_e · p_e, as defined at the top of this file.
        """
        assert self._counts is not None
        real, counts = _real_tokens(batch), self._counts.sum(0)
        top = self.recorder.calls[0][2].shape[1]
        num_tokens = (counts.sum() / top).clamp(min=1.0)  # tokens of the global batch × layers
        shares = (counts / num_tokens).float()
        total = torch.zeros((), device=self.mesh.device)
        for number, logits, _ in self.recorder.calls:
            probabilities = self.routers[number].probabilities(logits)
            total = total + (probabilities.masked_fill(~real[:, None], 0.0) @ shares).sum()
        return total * (len(shares) / num_tokens).float()


def _forward(model: PreTrainedModel, batch: LocalBatch) -> Tensor:
    return hidden_states(model, batch)


def _real_tokens(batch: LocalBatch) -> Tensor:
    """Return a mask [T/cp] that is False for padding, and for all tokens of a filler (a pack without samples)."""
    context, segments = batch.context, batch.context.segments
    num_tokens = len(batch.input_ids)
    real = 0 if batch.is_filler else segments.num_tokens - segments.pad_length
    own = torch.arange(num_tokens, device=batch.input_ids.device) if context.plan is None else context.plan.own
    return own < real
