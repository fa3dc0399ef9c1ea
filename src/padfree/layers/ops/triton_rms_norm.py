# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""RMSNorm as Triton kernels, which read each input once.

A program keeps ROWS hidden states in registers. It loads a hidden state in chunks of CHUNK columns, 8 elements per
thread. If D = 2560 were padded to a power of two (4096), three eighths of the threads would be idle.

Each program sums the gradient of the weight over its tokens in float32. A second kernel adds these sums in a fixed
order, so results do not depend on the order of execution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMMED_ROWS = 64
SUMMED_COLUMNS = 32
SHARED_MEMORY = 96 << 10
"""The maximum shared memory per thread block, in bytes. Small GPUs have this much, too."""


class LaunchConfiguration(NamedTuple):
    """The launch parameters of a Triton kernel, found by measurement (`bench/rms_norm.py`)."""

    rows: int = 1  # tokens that a program holds in registers at a time
    warps: int = 2
    stages: int = 1  # pipeline depth of the loads; with 1, loads overlap only with the work of other programs
    resident: int = 4  # programs per multiprocessor

    @property
    def chunk(self) -> int:
        """Return the number of elements of one hidden state that a program loads at once. Each thread loads 8."""
        return 8 * 32 * self.warps // self.rows


class Choice(NamedTuple):
    forward: LaunchConfiguration
    backward: LaunchConfiguration


def choose(width: int, itemsize: int = 2) -> Choice:
    """Choose the launch parameters of the forward and the backward kernel for hidden states of `width` elements."""
    warps = 1
    while 32 * 40 * warps < width and warps < 16:  # up to 40 elements of a hidden state per thread
        warps *= 2
    back = 4
    while 32 * 32 * back < width and back < 16:  # up to 32 elements
        back *= 2
    # The backward kernel prefetches the next two tokens if they fit into shared memory.
    ahead = 2 * 5 * triton.next_power_of_2(width) * itemsize <= SHARED_MEMORY
    return Choice(
        forward=LaunchConfiguration(warps=warps, resident=max(1, 28 // warps)),
        backward=LaunchConfiguration(warps=back, stages=3 if ahead else 1, resident=max(1, 8 // back)),
    )


def forward(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, configuration: LaunchConfiguration | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute RMSNorm of x, or of x + added if `added` is given.

    Returns the result y [.., D], the sum x + added [.., D] (empty without `added`), and 1 / rms [..] of each token.
    """
    configuration = configuration or choose(x.shape[-1], x.itemsize).forward
    x = x.contiguous()
    num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    total = torch.empty_like(x) if added is not None else x.new_empty(0)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    _forward_kernel[(programs(num_rows, x.device, configuration),)](
        x,
        x if added is None else added.contiguous(),
        weight.contiguous(),
        y,
        y if added is None else total,
        rstd,
        num_rows,
        eps,
        HAS_ADDED=added is not None,
        **_launch(width, configuration),
    )
    return y, total, rstd


def backward(
    dys: list[Tensor],
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    *,
    weight_gradient: bool = True,
    configuration: LaunchConfiguration | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients dx [.., D] and dweight [D]. dweight is empty if `weight_gradient` is False."""
    configuration = configuration or choose(x.shape[-1], x.itemsize).backward
    x = x.contiguous()
    num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
    first, *others = (dy.contiguous() for dy in _at_most_three(dys))
    dx = torch.empty_like(x)
    count = programs(num_rows, x.device, configuration)
    partial = x.new_empty(count if weight_gradient else 0, width, dtype=torch.float32)
    _backward_kernel[(count,)](
        first,
        others[0] if others else first,
        others[1] if len(others) > 1 else first,
        x,
        weight.contiguous(),
        rstd,
        first if residual is None else residual.contiguous(),
        dx,
        partial,
        num_rows,
        NUM_DY=1 + len(others),
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight_gradient,
        **_launch(width, configuration),
    )
    return dx, sum_of_partials(partial, weight) if weight_gradient else weight.new_empty(0)


def sum_of_partials(partial: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `weight` [D]: the sum of the gradients [programs, D] that the Triton programs computed."""
    count, width = partial.shape
    total = weight.new_empty(width)
    grid = (triton.cdiv(width, SUMMED_COLUMNS),)
    _sum_kernel[grid](partial, total, count, D=width, ROWS=SUMMED_ROWS, COLUMNS=SUMMED_COLUMNS, num_warps=4)
    return total


def _at_most_three(dys: list[Tensor]) -> list[Tensor]:
    """Return at most three gradients, because the kernel takes no more.

    If there are more than three `dys`, the third and all later ones are added in float32.
    """
    if len(dys) <= 3:
        return dys
    last = dys[2].float()
    for dy in dys[3:]:
        last = last + dy.view_as(last)
    return [*dys[:2], last]


def programs(num_rows: int, device: torch.device, configuration: LaunchConfiguration) -> int:
    """Return the number of Triton programs to launch: as many as the device runs at once, or fewer for few tokens."""
    held = 3  # if the kernels run in Triton's interpreter
    if device.type == "cuda":
        held = torch.cuda.get_device_properties(device).multi_processor_count * configuration.resident
    return max(1, min(-(-num_rows // configuration.rows), held))


def _launch(width: int, configuration: LaunchConfiguration) -> dict[str, int]:
    return {
        "D": width,
        "CHUNK": min(triton.next_power_of_2(width), configuration.chunk),
        "ROWS": configuration.rows,
        "STAGES": configuration.stages,
        "num_warps": configuration.warps,
    }


@triton.jit
def _offset(first, c: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Return offsets [ROWS, CHUNK] of the elements from row `first` and column c · CHUNK on, in a matrix [.., D]."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    return row[:, None] * D + (c * CHUNK + tl.arange(0, CHUNK))[None, :]


@triton.jit
def _inside(first, c: tl.constexpr, num_rows, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Return a mask [ROWS, CHUNK] for the elements of `_offset`: False beyond the last token and the last column."""
    row = first + tl.arange(0, ROWS)
    column = c * CHUNK + tl.arange(0, CHUNK)
    return (row < num_rows)[:, None] & (column < D)[None, :]


@triton.jit
def _read(pointer, first, c: tl.constexpr, num_rows, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    offset = _offset(first, c, D, CHUNK, ROWS)
    if ROWS == 1 and (c + 1) * CHUNK <= D:
        value = tl.load(pointer + offset)
    else:
        value = tl.load(pointer + offset, mask=_inside(first, c, num_rows, D, CHUNK, ROWS), other=0.0)
    return value


@triton.jit
def _write(
    pointer, value, first, c: tl.constexpr, num_rows, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    offset = _offset(first, c, D, CHUNK, ROWS)
    value = value.to(pointer.dtype.element_ty)
    if ROWS == 1 and (c + 1) * CHUNK <= D:
        tl.store(pointer + offset, value)
    else:
        tl.store(pointer + offset, value, mask=_inside(first, c, num_rows, D, CHUNK, ROWS))


@triton.jit
def _per_row(pointer, first, num_rows, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    return tl.load(pointer + row, mask=row < num_rows, other=0.0)[:, None]


@triton.jit
def _weights(weight, D: tl.constexpr, CHUNK: tl.constexpr):
    """Return the weight [D] of the norm as a tuple of chunks [1, CHUNK]."""
    chunks = ()
    for c in tl.static_range((D + CHUNK - 1) // CHUNK):
        chunks += (_read(weight, 0, c, 1, D, CHUNK, 1),)
    return chunks


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x, added, weight, y, total, rstds, num_rows, eps,
    HAS_ADDED: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    weights = _weights(weight, D, CHUNK)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        values = ()
        for c in tl.static_range(CHUNKS):
            value = _read(x, first, c, num_rows, D, CHUNK, ROWS)
            if HAS_ADDED:
                other = _read(added, first, c, num_rows, D, CHUNK, ROWS)
                value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
            values += (value,)
        squares = tl.zeros((ROWS, CHUNK), tl.float32)
        for c in tl.static_range(CHUNKS):
            wide = values[c].to(tl.float32)
            squares += wide * wide
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)
        row = first + tl.arange(0, ROWS)
        tl.store(rstds + row, rstd, mask=row < num_rows)
        for c in tl.static_range(CHUNKS):
            if HAS_ADDED:
                _write(total, values[c], first, c, num_rows, D, CHUNK, ROWS)
            normal = values[c].to(tl.float32) * rstd[:, None]
            _write(y, normal * weights[c].to(tl.float32), first, c, num_rows, D, CHUNK, ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    dy0, dy1, dy2, x, weight, rstds, residual, dx, partial, num_rows,
    NUM_DY: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    weights = _weights(weight, D, CHUNK)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums += (tl.zeros((ROWS, CHUNK), tl.float32),)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        rstd = _per_row(rstds, first, num_rows, ROWS)
        dys = ()
        values = ()
        residuals = ()
        for c in tl.static_range(CHUNKS):  # start all loads first, so that they run at the same time
            dy = _read(dy0, first, c, num_rows, D, CHUNK, ROWS).to(tl.float32)
            if NUM_DY > 1:
                dy += _read(dy1, first, c, num_rows, D, CHUNK, ROWS).to(tl.float32)
            if NUM_DY > 2:
                dy += _read(dy2, first, c, num_rows, D, CHUNK, ROWS).to(tl.float32)
            dys += (dy,)
            values += (_read(x, first, c, num_rows, D, CHUNK, ROWS),)
            if HAS_RESIDUAL:
                residuals += (_read(residual, first, c, num_rows, D, CHUNK, ROWS),)
        products = tl.zeros((ROWS, CHUNK), tl.float32)
        added = ()
        for c in tl.static_range(CHUNKS):
            normal = values[c].to(tl.float32) * rstd
            weighted = dys[c] * normal
            added += (sums[c] + weighted,)
            products += weighted * weights[c].to(tl.float32)
        if HAS_WEIGHT:
            sums = added
        mean = (tl.sum(products, axis=1) / D)[:, None]
        for c in tl.static_range(CHUNKS):
            normal = values[c].to(tl.float32) * rstd
            gradient = (dys[c] * weights[c].to(tl.float32) - normal * mean) * rstd
            if HAS_RESIDUAL:
                gradient += residuals[c].to(tl.float32)
            _write(dx, gradient, first, c, num_rows, D, CHUNK, ROWS)
    if HAS_WEIGHT:
        for c in tl.static_range(CHUNKS):
            total = tl.sum(sums[c], axis=0)[None, :]
            _write(partial, total, tl.program_id(0), c, tl.num_programs(0), D, CHUNK, 1)


@triton.jit(do_not_specialize=["num_partial"])
def _sum_kernel(partial, dweight, num_partial, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, num_partial, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < num_partial)[:, None] & (column < D)[None, :]
        sums += tl.load(partial + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    tl.store(dweight + column, tl.sum(sums, axis=0).to(dweight.dtype.element_ty), mask=column < D)
