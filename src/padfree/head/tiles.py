"""The loops of `score` and `fused_loss` over tiles of logits. The loops record no autograd graph.

A tile is a block of the logits [M, V] of M labelled tokens and V vocabulary entries. `tiled_softmax` computes each
tile, adds its exponentials to the softmax sums, and discards the tile. `tiled_gradients` computes each tile again.

Logits and softmax are float32, or float64 for float64 inputs. In bfloat16 training, gradients of logits are bfloat16 on
CUDA. On other devices, operands are converted to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from padfree.head.budget import Tile, choose_tile, choose_width, rounded_up
from padfree.head.elementwise import BlockedHead, BlockSums, Elementwise, LabelledRows, LogitMatmuls, Softmax, Upstream

ROW_NUMBERS = 64
"""Matrix rows are padded to a multiple of this many elements, so that 16-bit rows are aligned to 128 bytes."""


LEAST_ROWS = 16
"""On a CPU, `_row_invariant_matmul` pads smaller matrices to this number of matrix rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoringTask:
    """M labelled tokens to score: their hidden states, the head and the settings of the scores."""

    hidden: Tensor  # [N, D]
    index: Tensor | None  # [M] the scored tokens of hidden; None: all
    rows: LabelledRows  # [M]
    head: BlockedHead
    elementwise: Elementwise
    fused: LogitMatmuls | None  # matmuls fused with the elementwise work, if available
    entropy: bool
    budget: int  # bytes

    @property
    def num_rows(self) -> int:
        return len(self.rows.labels)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype in which logits and sums over logits are computed."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def operand_dtype(self) -> torch.dtype:
        """Return the dtype of matmul operands and of the gradients of the logits."""
        return self.hidden.dtype if self.hidden.device.type == "cuda" else self.sum_dtype

    @property
    def copies_rows(self) -> bool:
        """Return whether `hidden_rows` returns a copy of hidden states. Otherwise it returns a view of `hidden`."""
        return self.index is not None or self.hidden.dtype != self.operand_dtype

    def hidden_rows(self, start: int, end: int) -> Tensor:
        """Return the hidden states of the labelled tokens [start, end). `start` and `end` count labelled tokens."""
        part = self.hidden[start:end] if self.index is None else self.hidden[self.index[start:end]]
        return part.to(self.operand_dtype)

    def weight_block(self, start: int, end: int) -> Tensor:
        return self.head.weight[start:end].to(self.operand_dtype)

    def tile(self, num_rows: int) -> Tile:
        """Return the size of the tiles of logits for `num_rows` tokens."""
        return choose_tile(
            num_rows,
            len(self.head.weight),
            itemsize=self.sum_dtype.itemsize,
            device_type=self.hidden.device.type,
            budget=self.budget,
        )

    def tile_bytes(self, num_rows: int) -> int:
        """Return the temporary memory in bytes of the matmuls for `num_rows` tokens."""
        tile = self.tile(num_rows)
        masks = (
            0 if self.rows.kept is None else 2
        )  # bytes per logit: the mask of a tile, and the copy from which it is made
        return 0 if self.fused is not None else tile.rows * tile.columns * (self.sum_dtype.itemsize + masks)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of temporary memory per token: the softmax sums of all vocabulary blocks, and the copy of
        the hidden state if `hidden_rows` copies hidden states.
        """
        copied = self.hidden.shape[1] * self.operand_dtype.itemsize if self.copies_rows else 0
        return copied + self.head.sums_bytes(entropy=self.entropy, itemsize=self.sum_dtype.itemsize)

    def matmuls(self, num_rows: int) -> LogitMatmuls:
        """Return what computes logits and their gradients: fused kernels, or one matmul per tile (`TiledMatmuls`)."""
        return TiledMatmuls(self, num_rows) if self.fused is None else self.fused

    def new_sums(self, *shape: int) -> Tensor:
        """Allocate uninitialised memory of the given shape in `sum_dtype` (float32, or float64 for float64 inputs)."""
        return self.hidden.new_empty(shape, dtype=self.sum_dtype)


class TiledMatmuls:
    """Computes logits tile by tile: a matmul, followed by elementwise work (softmax sums or gradients) on its
    result.
    """

    def __init__(self, task: ScoringTask, num_rows: int) -> None:
        self.task = task
        tile = task.tile(num_rows)
        self.memory = task.new_sums(tile.rows, tile.columns)

    def reduce_rows(
        self, hidden: Tensor, head: BlockedHead, rows: LabelledRows, sums: BlockSums, stored: Tensor | None
    ) -> None:
        """Compute the logits of `hidden` [R, D] tile by tile, and write softmax statistics (`BlockSums`) into `sums`.

        `stored` [R, kept] receives the logits of the columns [0, kept), each minus the largest logit of its token and
        block.
        """
        tile_rows, tile_columns = self.memory.shape
        kept = 0 if stored is None else stored.shape[1]  # a multiple of the block size, or the vocabulary size
        for column, last_column in (*parts_of(kept, tile_columns), *parts_of(len(head.weight), tile_columns, kept)):
            weight = self.task.weight_block(column, last_column)
            for row, last_row in parts_of(len(hidden), tile_rows):
                out = self.memory[: last_row - row, : last_column - column]
                _row_invariant_matmul(hidden[row:last_row], weight.T, out)
                self.task.elementwise.reduce_tile(
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
        head: BlockedHead,
        rows: LabelledRows,
        softmax: Softmax,
        upstream: Upstream,
        out: Tensor,
    ) -> None:
        """Fill `out` [R, W] with the gradient of the raw logits `hidden` [R, D] @ `weight`.T.

        `weight` [W, D] holds W vocabulary entries, from entry `first`.
        """
        tile_rows, tile_columns = self.memory.shape
        for row, last_row in parts_of(len(hidden), tile_rows):
            for column, last_column in parts_of(len(weight), tile_columns):
                tile = self.memory[: last_row - row, : last_column - column]
                matmul(hidden[row:last_row], weight[column:last_column].T, tile)
                self.task.elementwise.gradient_from_raw_logits(
                    tile,
                    first + column,
                    head,
                    rows.part(row, last_row),
                    softmax.part(row, last_row),
                    upstream.part(row, last_row),
                    out[row:last_row, column:last_column],
                )


def tiled_softmax(task: ScoringTask) -> Softmax:
    """Return for each labelled token the log-probability of the label, the log-sum-exp of the logits and, if
    `task.entropy` is True, the entropy. The logits are not kept.
    """
    num_rows = task.num_rows
    matmuls = task.matmuls(num_rows)
    # The running sums of the tokens that are processed at once fit into half of the memory budget: usually all do.
    at_once = max(1, task.budget // 2 // task.row_bytes)
    softmaxes = []
    for start, end in list(parts_of(num_rows, at_once)) or [(0, 0)]:
        sums = BlockSums.empty(end - start, task.head.num_blocks, task.rows.inverse_temperature, entropy=task.entropy)
        if num_rows:
            hidden, rows = task.hidden_rows(start, end), task.rows.part(start, end)
            matmuls.reduce_rows(hidden, task.head, rows, sums, None)
        softmaxes.append(task.elementwise.merge(sums))
    return Softmax.join(softmaxes)


def tiled_gradients(
    task: ScoringTask,
    softmax: Softmax,
    upstream: Upstream,
    *,
    first_column: int = 0,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Compute the gradients through the vocabulary columns [first_column, V), whose logits are computed again.

    Writes `grad_weight[first_column:]` and `grad_bias[first_column:]`, for `grad_weight` [V, D] and `grad_bias` [V].
    The gradient of the hidden states is added to `grad_hidden` [M, D], or overwrites it if `first_column` is 0.
    """
    head, num_rows = task.head, task.num_rows
    hidden = task.hidden_rows(0, num_rows)
    matmuls = task.matmuls(num_rows)
    held = task.tile_bytes(num_rows) + (num_bytes(hidden) if task.copies_rows else 0)
    # The gradient of hidden is summed in a wider dtype than it is returned in. Count the difference in bytes.
    if grad_hidden is not None:
        held += grad_hidden.numel() * (task.sum_dtype.itemsize - task.hidden.dtype.itemsize)
    width = choose_width(
        num_rows,
        len(head.weight) - first_column,
        itemsize=task.operand_dtype.itemsize,
        budget=max(0, task.budget - held),
    )
    grad_raw_logits = hidden.new_empty(num_rows, rounded_up(width, ROW_NUMBERS))
    for start, end in parts_of(len(head.weight), width, first_column):
        weight = task.weight_block(start, end)
        gradient = grad_raw_logits[:, : end - start]
        matmuls.gradient_columns(hidden, weight, start, head, task.rows, softmax, upstream, gradient)
        if grad_weight is not None:
            rounded_matmul(gradient.T, hidden, grad_weight[start:end])
        if grad_bias is not None:
            grad_bias[start:end] = gradient.sum(0, dtype=task.sum_dtype)
        if grad_hidden is not None:
            matmul(gradient, weight, grad_hidden, accumulate=start > 0)


def restore_rows(task: ScoringTask, values: Tensor) -> Tensor:
    """Scatter values [M, ...] of the labelled tokens to all tokens [N, ...]."""
    values = values.to(task.hidden.dtype)
    if task.index is None:
        return values
    return values.new_zeros(len(task.hidden), *values.shape[1:]).index_copy_(0, task.index, values)


def matmul(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Compute out = left @ right, or out += left @ right if `accumulate` is True. Sums have the dtype of `out`."""
    if left.dtype == out.dtype:
        if accumulate:
            torch.addmm(out, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
    elif accumulate:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _row_invariant_matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute out = left @ right. The bits of a matrix row of `out` do not depend on the number of matrix rows."""
    # For few matrix rows, the CPU's library might use another kernel, which sums in another order. So `left` is padded.
    missing = LEAST_ROWS - len(left)
    if missing <= 0 or left.device.type != "cpu":
        matmul(left, right, out)
        return
    padded = torch.nn.functional.pad(left, (0, 0, 0, missing))
    result = out.new_empty(LEAST_ROWS, out.shape[1])
    matmul(padded, right, result)
    out.copy_(result[: len(left)])


def rounded_matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute out = left @ right, summed in float32 or float64 and rounded once to the dtype of `out`."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        for start, end in parts_of(len(left), 4096):
            out[start:end] = left[start:end] @ right


def parts_of(end: int, size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Divide the range [start, end) into parts of `size`: 10 in parts of 4 gives (0, 4), (4, 8), (8, 10)."""
    for first in range(start, end, size):
        yield first, min(first + size, end)


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
