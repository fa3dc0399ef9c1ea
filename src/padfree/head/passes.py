"""The loops over tiles of logits that `score` is made of, and `fused_loss` too. None of them records a graph.

    softmax_pass       every tile of [M, V], forgotten at once          -> the softmax of each row
    vocabulary_pass    every tile again, [M, width] gradients at a time -> the gradients

Precision. Logits, sums and softmax are float32 (float64 for float64 inputs). In bfloat16 training the gradients of
the logits are bfloat16, being one side of a matrix product with bfloat16 on the other; such products add up in float32
and are rounded once. Only CUDA multiplies bfloat16 fast and into float32; elsewhere the operands are made float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from padfree.head.budget import Tile, choose_tile, choose_width
from padfree.head.steps import BlockSums, Head, Rows, Softmax, Steps, Upstream


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """M rows to be scored, and with what."""

    hidden: Tensor  # [N, D]
    index: Tensor | None  # [M] the rows of hidden that are scored; None: all of them
    rows: Rows  # [M]
    head: Head
    steps: Steps
    entropy: bool
    budget: int  # bytes

    @property
    def num_rows(self) -> int:
        return len(self.rows.labels)

    @property
    def sum_dtype(self) -> torch.dtype:
        """What logits and sums are."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def operand_dtype(self) -> torch.dtype:
        """What is multiplied, and what the gradients of the logits are."""
        return self.hidden.dtype if self.hidden.device.type == "cuda" else self.sum_dtype

    @property
    def copies_rows(self) -> bool:
        """Whether `hidden_rows` costs memory."""
        return self.index is not None or self.hidden.dtype != self.operand_dtype

    def hidden_rows(self, start: int, end: int) -> Tensor:
        """[R, D] rows [start, end) of the M."""
        part = self.hidden[start:end] if self.index is None else self.hidden[self.index[start:end]]
        return part.to(self.operand_dtype)

    def weight_block(self, start: int, end: int) -> Tensor:
        return self.head.weight[start:end].to(self.operand_dtype)

    def tile(self, num_rows: int) -> Tile:
        """A tile for so many rows."""
        return choose_tile(
            num_rows,
            len(self.head.weight),
            itemsize=self.sum_dtype.itemsize,
            device_type=self.hidden.device.type,
            budget=self.budget,
        )

    def new_sums(self, *shape: int) -> Tensor:
        """Memory for sums of this shape, not set to anything."""
        return self.hidden.new_empty(shape, dtype=self.sum_dtype)


def softmax_pass(problem: Problem) -> Softmax:
    """The softmax of each of the M rows."""
    num_rows = problem.num_rows
    tile = problem.tile(num_rows)
    products = problem.new_sums(tile.rows, tile.columns)
    sums = BlockSums.empty(num_rows, problem.head.num_blocks, products, entropy=problem.entropy)
    for start, end in parts_of(num_rows, tile.rows):
        sum_rows(
            problem, problem.hidden_rows(start, end), problem.rows.part(start, end), products, sums.part(start, end)
        )
    return sums.merge()


def sum_rows(
    problem: Problem, hidden: Tensor, rows: Rows, products: Tensor, sums: BlockSums, stored: Tensor | None = None
) -> None:
    """Write the sums of the rows of `hidden` [R, D]; keep their logits of columns [0, K), if there is `stored` [R, K].

    `products` is the memory of one tile. K is a multiple of the block size, or V.
    """
    head = problem.head
    tile_rows, tile_columns = products.shape
    kept = 0 if stored is None else stored.shape[1]
    for column, last_column in (*parts_of(kept, tile_columns), *parts_of(len(head.weight), tile_columns, kept)):
        weight = problem.weight_block(column, last_column)
        for row, last_row in parts_of(len(hidden), tile_rows):
            out = products[: last_row - row, : last_column - column]
            product(hidden[row:last_row], weight.T, out)
            problem.steps.reduce_tile(
                out,
                column,
                head,
                rows.part(row, last_row),
                sums.part(row, last_row),
                stored[row:last_row, column:last_column] if stored is not None and column < kept else None,
            )


def vocabulary_pass(
    problem: Problem,
    softmax: Softmax,
    upstream: Upstream,
    *,
    first_column: int = 0,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """The gradients that come through columns [first_column, V), whose logits are computed for it.

    Writes these rows of `grad_weight` [V, D] and `grad_bias` [V]. `grad_hidden` [M, D] holds sums: it is set if
    first_column is 0, else added to.
    """
    head, num_rows = problem.head, problem.num_rows
    hidden = problem.hidden_rows(0, num_rows)
    tile = problem.tile(num_rows)
    products = problem.new_sums(tile.rows, tile.columns)
    held = num_bytes(products) + (num_bytes(hidden) if problem.copies_rows else 0)
    if grad_hidden is not None:  # of which the returned one will have its part
        held += grad_hidden.numel() * (problem.sum_dtype.itemsize - problem.hidden.dtype.itemsize)
    width = choose_width(
        num_rows,
        len(head.weight) - first_column,
        itemsize=problem.operand_dtype.itemsize,
        budget=max(0, problem.budget - held),
    )
    grad_products = hidden.new_empty(num_rows, width)
    for start, end in parts_of(len(head.weight), width, first_column):
        weight = problem.weight_block(start, end)
        gradient = grad_products[:, : end - start]
        for row, last_row in parts_of(num_rows, tile.rows):
            for column, last_column in parts_of(end, tile.columns, start):
                out = products[: last_row - row, : last_column - column]
                product(hidden[row:last_row], weight[column - start : last_column - start].T, out)
                problem.steps.gradient_from_products(
                    out,
                    column,
                    head,
                    problem.rows.part(row, last_row),
                    softmax.part(row, last_row),
                    upstream.part(row, last_row),
                    gradient[row:last_row, column - start : last_column - start],
                )
        if grad_weight is not None:
            rounded_product(gradient.T, hidden, grad_weight[start:end])
        if grad_bias is not None:
            grad_bias[start:end] = gradient.sum(0, dtype=problem.sum_dtype)
        if grad_hidden is not None:
            product(gradient, weight, grad_hidden, accumulate=start > 0)


def restore_rows(problem: Problem, values: Tensor) -> Tensor:
    """[M, ...] -> [N, ...] in the type of hidden, 0 where there is no label."""
    values = values.to(problem.hidden.dtype)
    if problem.index is None:
        return values
    return values.new_zeros(len(problem.hidden), *values.shape[1:]).index_copy_(0, problem.index, values)


def product(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """out = left @ right, or out += left @ right, summed in the type of `out`."""
    if left.dtype == out.dtype:
        if accumulate:
            torch.addmm(out, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
    elif accumulate:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def rounded_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, summed in float32 or better and rounded once."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        for start, end in parts_of(len(left), 4096):
            out[start:end] = left[start:end] @ right


def parts_of(end: int, size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """[start, end) in parts of `size`: 10 in parts of 4 -> (0, 4) (4, 8) (8, 10)."""
    for first in range(start, end, size):
        yield first, min(first + size, end)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
