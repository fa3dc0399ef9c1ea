"""The loop of `fused_loss` over chunks of tokens. The loop records no autograd graph. The steps for a chunk of C tokens
are:

    1. logits and their softmax: log-probabilities and entropies [C]
    2. gradient of the loss with respect to the log-probabilities and entropies [C]
    3. gradient of the logits, in the memory of the logits
    4. gradient of the hidden states, and a term of the weight gradient

Logits are stored only for the vocabulary columns [0, kept). `tiles.tiled_gradients` computes the gradients of the other
columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from padfree.head.budget import FUSED_TWICE_BYTES, TWICE_BYTES, FusedPlan, plan_fused, rounded_up
from padfree.head.elementwise import BlockSums, Softmax, Upstream
from padfree.head.tiles import (
    ROW_NUMBERS,
    ScoringTask,
    matmul,
    parts_of,
    restore_rows,
    rounded_matmul,
    tiled_gradients,
)

ScoreGradient = Callable[[Softmax, int], Upstream]
"""A function that returns the gradient of the loss with respect to the log-probabilities and entropies of a chunk of
tokens. Its arguments are the softmax of these tokens and the index of the first token.
"""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients with respect to hidden [N, D], weight [V, D] and bias [V]. A gradient that is not wanted is None."""


def chunked_gradients(
    task: ScoringTask, score_gradient: ScoreGradient, wanted: tuple[bool, bool, bool]
) -> tuple[Softmax, Gradients]:
    """Compute the softmax of all M > 0 labelled tokens, and the gradients of hidden states, weight and bias.

    `wanted` has a bool for each of these three gradients: whether to compute it.
    """
    wants_hidden, wants_weight, wants_bias = wanted
    weight, operand = task.head.weight, task.operand_dtype
    plan = _plan(task, wants_weight)
    is_whole = plan.kept == len(weight)
    grad_weight = weight.new_empty(weight.shape) if wants_weight else None
    grad_bias = weight.new_empty(len(weight)) if wants_bias else None
    weight_sums = None if grad_weight is None else WeightSums(grad_weight, plan, task)
    bias_sums = task.new_sums(plan.kept).zero_()
    # grad_hidden has the dtype of the sums if more gradients will be added to it, or if the matmuls convert the weight.
    # Otherwise it has the dtype of the weight.
    exact = task.sum_dtype if not is_whole or operand != weight.dtype else operand
    grad_hidden = task.hidden.new_empty(task.num_rows, weight.shape[1], dtype=exact) if wants_hidden else None

    tile = task.tile(plan.chunk_rows)
    matmuls = task.matmuls(plan.chunk_rows)
    store = task.hidden.new_empty(
        plan.chunk_rows, rounded_up(plan.kept, ROW_NUMBERS), dtype=torch.float16 if operand.itemsize == 2 else operand
    )
    gradients = store.view(operand)
    softmaxes, upstreams = [], []
    for start, end in parts_of(task.num_rows, plan.chunk_rows):
        hidden, rows = task.hidden_rows(start, end), task.rows.part(start, end)
        stored, gradient = store[: end - start, : plan.kept], gradients[: end - start, : plan.kept]
        sums = BlockSums.empty(end - start, task.head.num_blocks, rows.inverse_temperature, entropy=task.entropy)
        matmuls.reduce_rows(hidden, task.head, rows, sums, stored)
        softmax = task.elementwise.merge(sums)
        upstream = score_gradient(softmax, start)
        for row, last_row in parts_of(end - start, tile.rows):
            task.elementwise.gradient_from_stored(
                stored[row:last_row],
                task.head,
                rows.part(row, last_row),
                sums.peak[row:last_row],
                softmax.part(row, last_row),
                upstream.part(row, last_row),
                gradient[row:last_row],
            )
        if grad_hidden is not None:
            times_weight(task, gradient, grad_hidden[start:end])
        if weight_sums is not None:
            weight_sums.add(gradient, hidden)
        if wants_bias:
            bias_sums += gradient.sum(0, dtype=task.sum_dtype)
        softmaxes.append(softmax)
        upstreams.append(upstream)
        del sums  # free these sums before the sums of the next chunk are allocated
    del store, stored, gradients, gradient, matmuls
    softmax = Softmax.join(softmaxes)
    if weight_sums is not None:
        weight_sums.finish()
    if grad_bias is not None:
        grad_bias[: plan.kept] = bias_sums
    if not is_whole:
        tiled_gradients(
            task,
            softmax,
            Upstream.join(upstreams),
            first_column=plan.kept,
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
        )
    return softmax, (None if grad_hidden is None else restore_rows(task, grad_hidden), grad_weight, grad_bias)


def _plan(task: ScoringTask, weight_gradient: bool) -> FusedPlan:
    weight = task.head.weight
    return plan_fused(
        task.num_rows,
        weight.shape[1],
        len(weight),
        logit_bytes=task.operand_dtype.itemsize,
        row_bytes=task.row_bytes,
        sum_bytes=task.sum_dtype.itemsize,
        gradient_bytes=weight.dtype.itemsize,
        budget=task.budget - task.tile_bytes(task.num_rows),
        weight_gradient=weight_gradient,
        twice_bytes=TWICE_BYTES if task.fused is None else FUSED_TWICE_BYTES,
    )


def times_weight(task: ScoringTask, gradient: Tensor, out: Tensor) -> None:
    """Write gradient [C, K] @ weight [K, D] into `out` [C, D].

    `weight` is the part of the head's weight for the first K vocabulary ids.
    """
    kept = gradient.shape[1]
    # If the weight must be converted to another dtype, 4096 of its columns are converted and multiplied at a time.
    width = kept if gradient.dtype == task.head.weight.dtype else 4096
    for start, end in parts_of(kept, width):
        matmul(gradient[:, start:end], task.weight_block(start, end), out, accumulate=start > 0)


class WeightSums:
    """The gradient of the head's weight for the vocabulary entries [0, kept), summed over the chunks of tokens."""

    def __init__(self, grad_weight: Tensor, plan: FusedPlan, task: ScoringTask) -> None:
        self.grad_weight = grad_weight[: plan.kept]
        self.is_single = plan.chunk_rows >= task.num_rows  # a sum of one term needs no extra memory
        self.is_first = True
        self.parts: list[tuple[int, int, Tensor]] = []
        width, dtype = grad_weight.shape[1], task.sum_dtype
        if grad_weight.dtype == dtype:
            self.parts = [(0, plan.kept, self.grad_weight)]
        elif not self.is_single:
            numbers = plan.shared * width * dtype.itemsize // grad_weight.dtype.itemsize
            shared = grad_weight.view(-1)[:numbers].view(dtype).view(plan.shared, width)
            own = task.new_sums(plan.kept - plan.shared, width)
            self.parts = [(0, plan.shared, shared), (plan.shared, plan.kept, own)]
            self.parts = [part for part in self.parts if len(part[2])]

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add the weight gradient of one chunk of tokens.

        `gradient` [C, kept]: the gradient of the chunk's logits in the vocabulary columns [0, kept). `hidden` [C, D]:
        the hidden states of the chunk.
        """
        if self.is_single:
            rounded_matmul(gradient.T, hidden, self.grad_weight)
            return
        for start, end, part in self.parts:
            matmul(gradient[:, start:end].T, hidden, part, accumulate=not self.is_first)
        self.is_first = False

    def finish(self) -> None:
        """Round the float32 sums of the weight gradient to 16 bits, and write them into `grad_weight`."""
        for start, end, part in self.parts:
            if part is not self.grad_weight:
                # Rounded numbers take half the memory of sums, so only the first piece would overwrite its own sums.
                for first, last in parts_of(end - start, 4096):
                    rounded = part[first:last].to(self.grad_weight.dtype) if start + first == 0 else part[first:last]
                    self.grad_weight[start + first : start + last] = rounded
        self.parts.clear()
