"""The loops over tiles of logits that `score` is made of, and `fused_loss` too. None of them records a graph.

    softmax_pass       every tile of [M, V], forgotten at once          -> the softmax of each row
    vocabulary_pass    every tile again, [M, width] gradients at a time -> the gradients

A tile is a product and the elementwise work on it. `Tiles` does one after the other, on any device; where there are
products that end in the elementwise work (`products.py`), no tile of logits is ever in memory.

Precision. Logits, sums and softmax are float32 (float64 for float64 inputs). In bfloat16 training the gradients of
the logits are bfloat16, being one side of a matrix product with bfloat16 on the other; such products add up in float32
and are rounded once. Only CUDA multiplies bfloat16 fast and into float32; elsewhere the operands are made float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from padfree.head.budget import Tile, choose_tile, choose_width, rounded_up
from padfree.head.steps import BlockSums, Head, Products, Rows, Softmax, Steps, Upstream

ROW_NUMBERS = 64
"""Rows have a multiple of so many numbers: 16-bit ones begin at multiples of 128 bytes then, as products like it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """M rows to be scored, and with what."""

    hidden: Tensor  # [N, D]
    index: Tensor | None  # [M] the rows of hidden that are scored; None: all of them
    rows: Rows  # [M]
    head: Head
    steps: Steps
    fused: Products | None  # products that end in the elementwise work, where there are any
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

    def tile_bytes(self, num_rows: int) -> int:
        """What the products of so many rows hold while they are at work."""
        tile = self.tile(num_rows)
        return 0 if self.fused is not None else tile.rows * tile.columns * self.sum_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """What a row takes while it is reduced: its sums, and its copy if there is one."""
        copied = self.hidden.shape[1] * self.operand_dtype.itemsize if self.copies_rows else 0
        return copied + self.head.sums_bytes(entropy=self.entropy, itemsize=self.sum_dtype.itemsize)

    def products(self, num_rows: int) -> Products:
        """What multiplies and does the elementwise work, with the memory it needs for so many rows."""
        return Tiles(self, num_rows) if self.fused is None else self.fused

    def new_sums(self, *shape: int) -> Tensor:
        """Memory for sums of this shape, not set to anything."""
        return self.hidden.new_empty(shape, dtype=self.sum_dtype)


class Tiles:
    """A product and the elementwise work on it, one tile of logits at a time, in memory for one."""

    def __init__(self, problem: Problem, num_rows: int) -> None:
        self.problem = problem
        tile = problem.tile(num_rows)
        self.memory = problem.new_sums(tile.rows, tile.columns)

    def reduce_rows(self, hidden: Tensor, head: Head, rows: Rows, sums: BlockSums, stored: Tensor | None) -> None:
        """Write the sums of the rows of `hidden` [R, D]; keep the logits of columns [0, K) if there is `stored` [R, K].

        K is a multiple of the block size, or V.
        """
        tile_rows, tile_columns = self.memory.shape
        kept = 0 if stored is None else stored.shape[1]
        for column, last_column in (*parts_of(kept, tile_columns), *parts_of(len(head.weight), tile_columns, kept)):
            weight = self.problem.weight_block(column, last_column)
            for row, last_row in parts_of(len(hidden), tile_rows):
                out = self.memory[: last_row - row, : last_column - column]
                product(hidden[row:last_row], weight.T, out)
                self.problem.steps.reduce_tile(
                    out,
                    column,
                    head,
                    rows.part(row, last_row),
                    sums.part(row, last_row),
                    stored[row:last_row, column:last_column] if stored is not None and column < kept else None,
                )

    def gradient_columns(
        self,
        hidden: Tensor,
        weight: Tensor,
        first: int,
        head: Head,
        rows: Rows,
        softmax: Softmax,
        upstream: Upstream,
        out: Tensor,
    ) -> None:
        """Write the gradient by `hidden` [R, D] @ `weight` [W, D].T, which are columns `first` on, to `out` [R, W]."""
        tile_rows, tile_columns = self.memory.shape
        for row, last_row in parts_of(len(hidden), tile_rows):
            for column, last_column in parts_of(len(weight), tile_columns):
                tile = self.memory[: last_row - row, : last_column - column]
                product(hidden[row:last_row], weight[column:last_column].T, tile)
                self.problem.steps.gradient_from_products(
                    tile,
                    first + column,
                    head,
                    rows.part(row, last_row),
                    softmax.part(row, last_row),
                    upstream.part(row, last_row),
                    out[row:last_row, column:last_column],
                )


def softmax_pass(problem: Problem) -> Softmax:
    """The softmax of each of the M rows."""
    num_rows = problem.num_rows
    products = problem.products(num_rows)
    # Sums of all rows at once take much less than half of the budget, unless there are very many rows.
    at_once = max(1, problem.budget // 2 // problem.row_bytes)
    softmaxes = []
    for start, end in list(parts_of(num_rows, at_once)) or [(0, 0)]:
        sums = BlockSums.empty(
            end - start, problem.head.num_blocks, problem.rows.inverse_temperature, entropy=problem.entropy
        )
        if num_rows:
            hidden, rows = problem.hidden_rows(start, end), problem.rows.part(start, end)
            products.reduce_rows(hidden, problem.head, rows, sums, None)
        softmaxes.append(problem.steps.merge(sums))
    return Softmax.join(softmaxes)


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
    products = problem.products(num_rows)
    held = problem.tile_bytes(num_rows) + (num_bytes(hidden) if problem.copies_rows else 0)
    if grad_hidden is not None:  # of which the returned one will have its part
        held += grad_hidden.numel() * (problem.sum_dtype.itemsize - problem.hidden.dtype.itemsize)
    width = choose_width(
        num_rows,
        len(head.weight) - first_column,
        itemsize=problem.operand_dtype.itemsize,
        budget=max(0, problem.budget - held),
    )
    grad_products = hidden.new_empty(num_rows, rounded_up(width, ROW_NUMBERS))
    for start, end in parts_of(len(head.weight), width, first_column):
        weight = problem.weight_block(start, end)
        gradient = grad_products[:, : end - start]
        products.gradient_columns(hidden, weight, start, head, problem.rows, softmax, upstream, gradient)
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
