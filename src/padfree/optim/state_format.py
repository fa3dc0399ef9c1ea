"""The formats in which AdamW's two moments are stored (setting `optimizer.state`).

    format       bytes per weight    exp_avg            exp_avg_sq         scales
    float32      8                   float32            float32            -
    bfloat16     4                   bfloat16           bfloat16           -
    int8         2 + 8 / 128         int8               uint8              float32, two for each block of 128 weights

Moments are rounded up or down at random (stochastic rounding). Rounding to nearest would lose small changes: with the
decay rate 0.999, exp_avg_sq would never decay.

The random bits depend only on the step, the parameter and the index of the weight. A resumed run, or a run with
another number of ranks, therefore rounds exactly alike. Vectors (norms, biases) keep float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from padfree.errors import UserError
from padfree.model.named_tensors import Region, local_region, sharded_like
from padfree.optim.optimizer_settings import StateFormat

BLOCK = 128
"""The largest number of weights that share a scale."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-120, 2.0**120
"""The smallest and the largest scale of int8 codes. Between these limits, 1 / scale is a finite, normal float32 number.
A scale below SMALLEST_SCALE becomes 0, and a scale above LARGEST_SCALE becomes LARGEST_SCALE.
"""

MASK = 0xFFFFFFFF
STRIDE = 0x9E3779B9  # 2^32 / golden ratio: separates keys and the upper halves of indices
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


class Rounding(NamedTuple):
    """The int8 format of one of AdamW's moments.

    A code with a magnitude from 0 to `most` stands for (magnitude / most)^(2^squarings) times the scale. The scale is
    the largest magnitude of the moment in a block of weights.
    """

    most: int
    squarings: int
    dtype: torch.dtype


INT8 = {"exp_avg": Rounding(127, 2, torch.int8), "exp_avg_sq": Rounding(255, 3, torch.uint8)}


class RowRange(NamedTuple):
    """The rows that a rank holds of a parameter [..., C], viewed as one matrix [R, C].

    The rank holds `inner` rows from row `first` on, `inner` rows from row `first + outer` on, and so on. For example,
    `first` 2, `inner` 2 and `outer` 6 give the rows 2, 3, 8, 9, ...
    """

    first: int
    inner: int
    outer: int

    def after(self, rows: int) -> RowRange:
        """Return this range without its first `rows` rows. `rows` must be 0 if the range is not consecutive."""
        assert rows == 0 or self.inner == self.outer
        return self._replace(first=self.first + rows)


def num_blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def state_bytes(state: StateFormat, numbers: int, columns: int) -> int:
    """Return the size in bytes of AdamW's two moments for a matrix.

    `numbers` is the number of weights of the matrix, and `columns` is the number of weights in each matrix row.
    """
    if state != "int8":
        return 2 * numbers * (4 if state == "float32" else 2)
    return 2 * numbers + 2 * 4 * num_blocks(columns) * (numbers // max(1, columns))


def new_state(parameter: Tensor, state: StateFormat) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter before its first step: the step counter and all moments are 0.

    For the format "float32", the moments have the parameter's dtype, so that a float64 model has float64 moments.
    """
    made = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    if state != "int8":
        dtype = parameter.dtype if state == "float32" else torch.bfloat16
        return made | {kind: sharded_like(parameter, parameter.shape, dtype) for kind in INT8}
    for kind, rounding in INT8.items():
        made[kind] = sharded_like(parameter, parameter.shape, rounding.dtype)
        shape = (*parameter.shape[:-1], num_blocks(parameter.shape[-1]))
        made[f"{kind}_scale"] = sharded_like(parameter, shape, torch.float32)
    return made


def rows_of(parameter: Tensor) -> RowRange:
    """Return the matrix rows that this rank holds of a parameter with two or more dimensions."""
    return row_range(parameter.shape, local_region(parameter))


def row_range(shape: torch.Size, region: Region) -> RowRange:
    """Return the rows that a region (shard) covers of a parameter of this shape, viewed as one matrix [R, C].

    Raises `UserError` if the parameter is sharded along its last dimension, or along a third or later one.
    """
    whole = [part.stop - part.start == size for part, size in zip(region, shape, strict=True)]
    if not all(whole[2:]) or not whole[-1]:
        raise UserError(
            "optimizer.state",
            f"a parameter of shape {list(shape)} is sharded along a dimension that this format does not support (the "
            "last, or a third or later one)",
            "set optimizer.state=float32",
        )
    if len(shape) == 2:
        return RowRange(region[0].start, shape[0], shape[0])
    rest = shape[2:-1].numel()
    inner, outer = (region[1].stop - region[1].start) * rest, shape[1] * rest
    return RowRange(region[0].start * outer + region[1].start * rest, max(1, inner), outer)


# Random numbers


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit numbers (stored as int64) by a bijection whose results look random."""
    x = x ^ (x >> 16)
    # No product exceeds 63 bits.
    x = x * MULTIPLIERS[0] & MASK
    x = x ^ (x >> 15)
    x = x * (MULTIPLIERS[1] - (1 << 32)) & MASK
    return x ^ (x >> 16)


def random_bits(step: Tensor, number: int, rows: RowRange, part: slice, columns: int) -> Tensor:
    """Return 32 random bits for each weight in R matrix rows, as int64 [R, columns].

    `part` selects R of this rank's `rows`. The bits depend only on `step`, the parameter's `number` and the weight's
    index in the whole parameter.
    """
    key = mix(mix(step * STRIDE & MASK) + number * STRIDE & MASK)
    row = torch.arange(part.start, part.stop, device=step.device)
    row = rows.first + row // rows.inner * rows.outer + row % rows.inner
    index = row[:, None] * columns + torch.arange(columns, device=step.device)
    return mix((index & MASK) + (index >> 32) * STRIDE + key & MASK)


# Rounding


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values stochastically to bfloat16. `bits` (int64) holds 16 random bits for each value."""
    rounded = (values.view(torch.int32) + bits.int() & ~0xFFFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def levels(codes: Tensor, rounding: Rounding) -> Tensor:
    """Return the magnitudes that int8 codes stand for, as fractions of the scale (0 to 1)."""
    found = codes.abs().float() * (1 / rounding.most)
    for _ in range(rounding.squarings):
        found = found * found
    return found


def decode_int8(codes: Tensor, scales: Tensor, rounding: Rounding) -> Tensor:
    """Return the values that the int8 codes [R, C] with scales [R, blocks] stand for."""
    spread = scales.repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    return (levels(codes.int(), rounding) * spread).copysign(codes)


def encode_int8(values: Tensor, bits: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round float32 values [R, C] stochastically to int8 codes, with 16 random bits for each value. Returns the codes
    and the scales.
    """
    rows, columns = values.shape
    blocks = num_blocks(columns)
    magnitude = torch.nn.functional.pad(values.abs(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = magnitude.amax(dim=2).clamp(max=LARGEST_SCALE)
    scales = torch.where(scales < SMALLEST_SCALE, 0, scales)
    reciprocal = torch.where(scales > 0, 1 / scales, 0)
    share = (magnitude * reciprocal[:, :, None]).clamp(max=1).view(rows, -1)[:, :columns]
    root = share
    for _ in range(rounding.squarings):
        root = root.sqrt()
    code = (root * rounding.most).int().clamp(max=rounding.most - 1)
    low, high = levels(code, rounding), levels(code + 1, rounding)
    code = code + (bits.float() * 2.0**-16 * (high - low) < share - low).int()
    if rounding.dtype == torch.uint8:
        # An exp_avg_sq of 0 would make the update huge.
        code = torch.where(share > 0, code.clamp(min=1), code)
    else:
        code = torch.where(values < 0, -code, code)
    return code.to(rounding.dtype), scales
