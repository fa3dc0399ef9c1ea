"""The loop over chunks of rows that `fused_loss` is made of. It records no graph.

    logits of a chunk [C, kept]  ->  softmax [C]  ->  gradient of the loss by its scores  ->  gradient of the logits,
    in their place  ->  gradient of hidden [C, D], and one more term of the weight gradient [kept, D]

Columns [kept, V), if there are any, only add to the softmax here. Their gradients follow when all rows are done, by
`vocabulary_pass`. `budget` says how large everything is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from padfree.head.budget import FUSED_TWICE_BYTES, TWICE_BYTES, FusedPlan, plan_fused, rounded_up
from padfree.head.passes import (
    ROW_NUMBERS,
    Problem,
    parts_of,
    product,
    restore_rows,
    rounded_product,
    vocabulary_pass,
)
from padfree.head.steps import BlockSums, Softmax, Upstream

Pull = Callable[[Softmax, int], Upstream]
"""(softmax of a chunk, its first row of the M) -> the gradient of the loss by the chunk's scores."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""By hidden [N, D], weight [V, D] and bias [V], where they are wanted."""


def chunk_pass(problem: Problem, pull: Pull, wanted: tuple[bool, bool, bool]) -> tuple[Softmax, Gradients]:
    """The softmax of all M rows, M > 0, and the wanted gradients by hidden, weight and bias."""
    wants_hidden, wants_weight, wants_bias = wanted
    weight, operand = problem.head.weight, problem.operand_dtype
    plan = _plan(problem, wants_weight)
    is_whole = plan.kept == len(weight)
    grad_weight = weight.new_empty(weight.shape) if wants_weight else None
    grad_bias = weight.new_empty(len(weight)) if wants_bias else None
    weight_sums = None if grad_weight is None else _WeightSums(grad_weight, plan, problem)
    bias_sums = problem.new_sums(plan.kept).zero_()
    # Summed over both ways in full precision; where there is only this way, rounded at once.
    exact = problem.sum_dtype if not is_whole or operand != weight.dtype else operand
    grad_hidden = problem.hidden.new_empty(problem.num_rows, weight.shape[1], dtype=exact) if wants_hidden else None

    tile = problem.tile(plan.chunk_rows)
    products = problem.products(plan.chunk_rows)
    store = problem.hidden.new_empty(
        plan.chunk_rows, rounded_up(plan.kept, ROW_NUMBERS), dtype=torch.float16 if operand.itemsize == 2 else operand
    )
    gradients = store.view(operand)
    softmaxes, upstreams = [], []
    for start, end in parts_of(problem.num_rows, plan.chunk_rows):
        hidden, rows = problem.hidden_rows(start, end), problem.rows.part(start, end)
        stored, gradient = store[: end - start, : plan.kept], gradients[: end - start, : plan.kept]
        sums = BlockSums.empty(end - start, problem.head.num_blocks, rows.inverse_temperature, entropy=problem.entropy)
        products.reduce_rows(hidden, problem.head, rows, sums, stored)
        softmax = problem.steps.merge(sums)
        upstream = pull(softmax, start)
        for row, last_row in parts_of(end - start, tile.rows):
            problem.steps.gradient_from_stored(
                stored[row:last_row],
                problem.head,
                rows.part(row, last_row),
                sums.peak[row:last_row],
                softmax.part(row, last_row),
                upstream.part(row, last_row),
                gradient[row:last_row],
            )
        if grad_hidden is not None:
            _times_weight(problem, gradient, grad_hidden[start:end])
        if weight_sums is not None:
            weight_sums.add(gradient, hidden)
        if wants_bias:
            bias_sums += gradient.sum(0, dtype=problem.sum_dtype)
        softmaxes.append(softmax)
        upstreams.append(upstream)
        del sums  # before there are those of the next chunk
    del store, stored, gradients, gradient, products
    softmax = Softmax.join(softmaxes)
    if weight_sums is not None:
        weight_sums.finish()
    if grad_bias is not None:
        grad_bias[: plan.kept] = bias_sums
    if not is_whole:
        vocabulary_pass(
            problem,
            softmax,
            Upstream.join(upstreams),
            first_column=plan.kept,
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
        )
    return softmax, (None if grad_hidden is None else restore_rows(problem, grad_hidden), grad_weight, grad_bias)


def _plan(problem: Problem, weight_gradient: bool) -> FusedPlan:
    weight = problem.head.weight
    return plan_fused(
        problem.num_rows,
        weight.shape[1],
        len(weight),
        logit_bytes=problem.operand_dtype.itemsize,
        row_bytes=problem.row_bytes,
        sum_bytes=problem.sum_dtype.itemsize,
        gradient_bytes=weight.dtype.itemsize,
        budget=problem.budget - problem.tile_bytes(problem.num_rows),
        weight_gradient=weight_gradient,
        twice_bytes=TWICE_BYTES if problem.fused is None else FUSED_TWICE_BYTES,
    )


def _times_weight(problem: Problem, gradient: Tensor, out: Tensor) -> None:
    """out [C, D] = gradient [C, kept] @ weight [kept, D]."""
    kept = gradient.shape[1]
    # In one product, unless the weight must be made float32 for it.
    width = kept if gradient.dtype == problem.head.weight.dtype else 4096
    for start, end in parts_of(kept, width):
        product(gradient[:, start:end], problem.weight_block(start, end), out, accumulate=start > 0)


class _WeightSums:
    """The weight gradient of columns [0, kept) while it is a sum over chunks."""

    def __init__(self, grad_weight: Tensor, plan: FusedPlan, problem: Problem) -> None:
        self.grad_weight = grad_weight[: plan.kept]
        self.is_single = plan.chunk_rows >= problem.num_rows  # a sum of one term needs no memory
        self.is_first = True
        self.parts: list[tuple[int, int, Tensor]] = []
        width, dtype = grad_weight.shape[1], problem.sum_dtype
        if grad_weight.dtype == dtype:
            self.parts = [(0, plan.kept, self.grad_weight)]
        elif not self.is_single:
            numbers = plan.shared * width * dtype.itemsize // grad_weight.dtype.itemsize
            shared = grad_weight.view(-1)[:numbers].view(dtype).view(plan.shared, width)
            own = problem.new_sums(plan.kept - plan.shared, width)
            self.parts = [(0, plan.shared, shared), (plan.shared, plan.kept, own)]
            self.parts = [part for part in self.parts if len(part[2])]

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add the term of a chunk: `gradient` [C, kept], `hidden` [C, D]."""
        if self.is_single:
            rounded_product(gradient.T, hidden, self.grad_weight)
            return
        for start, end, part in self.parts:
            product(gradient[:, start:end].T, hidden, part, accumulate=not self.is_first)
        self.is_first = False

    def finish(self) -> None:
        """Round the sums into the gradient.

        The shared ones lie behind where they go, the first few excepted, which are copied aside: going forward in
        equal pieces never overwrites one that is still needed.
        """
        for start, end, part in self.parts:
            if part is not self.grad_weight:
                for first, last in parts_of(end - start, 4096):
                    rounded = part[first:last].to(self.grad_weight.dtype) if start + first == 0 else part[first:last]
                    self.grad_weight[start + first : start + last] = rounded
        self.parts.clear()
