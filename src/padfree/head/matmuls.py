"""Matmuls that are fused with the elementwise work on their result, for bfloat16 tensors on Hopper GPUs.

A tile of logits stays in registers, so that float32 logits are never written to memory.

Tiles are processed in bands of a few rows of tiles, column by column. So the L2 cache holds the hidden states and
weights in use. In a band of two rows, the order of the tiles (row, column) is (0, 0), (1, 0), (0, 1), (1, 1), (0, 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from padfree.head.elementwise import BlockedHead, BlockSums, LabelledRows, Softmax, Upstream


class MatmulConfiguration(NamedTuple):
    """The tile sizes of a fused matmul, found by measurement (`bench/head_matmuls.py`)."""

    rows: int = 128  # of a tile
    columns: int = 256  # of a tile
    depth: int = 64  # elements of the hidden dimension per step of the matmul loop
    stages: int = 3  # loop steps whose operands are in shared memory at the same time
    warps: int = 8
    band: int = 16  # row tiles that share the weights in use
    parts: int = 1  # 1: reduce all columns of a tile at once; 2: in two halves, which needs fewer registers
    resident: int = 1  # programs per multiprocessor: one finishes its tile while another runs its matmul

    @property
    def block(self) -> int:
        """Return the block size: the number of vocabulary columns that share a maximum and sums of exponentials."""
        return self.columns // self.parts


PLAIN = MatmulConfiguration()
# The configuration for heads with a bias or a soft cap. It reduces each tile in two parts, because one part would need
# too much shared memory.
OTHER = MatmulConfiguration(stages=4, parts=2)


def choose(head: BlockedHead) -> MatmulConfiguration:
    """Return the tile sizes that were fastest on an H200. Output heads with bias or soft cap have their own sizes."""
    return PLAIN if head.bias is None and head.softcap is None else OTHER


def unsupported_reason(hidden: Tensor, weight: Tensor, operand_dtype: torch.dtype) -> str | None:
    """Return the reason why the fused matmuls do not support these tensors, or None if they do."""
    if operand_dtype != torch.bfloat16:
        return f"{operand_dtype}: only bfloat16 matmuls accumulate in float32 at full speed"
    if hidden.device.type == "cuda" and torch.cuda.get_device_capability(hidden.device)[0] != 9:
        return "not a Hopper GPU: earlier GPUs have no tensor descriptors, later ones were not measured"
    if hidden.device.type != "cuda" and not _is_interpreted():
        return "not a GPU"
    if hidden.shape[1] % 8:
        return "the hidden size D is not a multiple of 8: matrix rows would not be aligned to 16 bytes"
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            return f"{name}: its matrix rows are not contiguous or not aligned to 16 bytes"
    return None


def reduce_rows(
    hidden: Tensor,
    head: BlockedHead,
    rows: LabelledRows,
    sums: BlockSums,
    stored: Tensor | None,
    configuration: MatmulConfiguration | None = None,
) -> None:
    """Compute the logits of `hidden` [R, D], and write softmax statistics (`BlockSums`) into `sums`.

    `stored` [R, kept] receives the logits of the columns [0, kept) as float16, each minus the largest logit of its
    token and block. The matrix rows of `stored` must be aligned to 16 bytes.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from padfree.head import triton_matmuls as kernels

    configuration = configuration or _fitting(choose(head), stored)
    assert head.block == configuration.block, f"blocks of {head.block} and {configuration.block} columns"
    num_rows, width = hidden.shape
    absent = rows.labels  # a placeholder for arguments that are absent and never read
    kernels.reduce_kernel[_grid(num_rows, len(head.weight), hidden.device, configuration)](
        TensorDescriptor.from_tensor(hidden, [configuration.rows, configuration.depth]),
        TensorDescriptor.from_tensor(head.weight, [configuration.columns, configuration.depth]),
        absent if stored is None else TensorDescriptor.from_tensor(stored, [configuration.rows, configuration.block]),
        absent if stored is None else stored,
        rows.labels,
        absent if head.bias is None else head.bias,
        rows.inverse_temperature,
        sums.peak,
        sums.total,
        absent if sums.moment is None else sums.moment,
        sums.target,
        num_rows,
        width,
        len(head.weight),
        0 if stored is None else stored.shape[1],
        0 if stored is None else stored.stride(0),
        sums.peak.stride(1),
        float(head.logit_scale),
        float(head.softcap or 1.0),
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_MOMENT=sums.moment is not None,
        HAS_STORED=stored is not None,
        IS_CUT=stored is not None and _is_cut(stored),
        **_launch(configuration),
    )


def gradient_columns(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    head: BlockedHead,
    rows: LabelledRows,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
    configuration: MatmulConfiguration | None = None,
) -> None:
    """Write the gradient of the raw logits `hidden` [R, D] @ `weight` [W, D].T to `out` [R, W].

    `weight` holds W columns of the vocabulary, from column `first`. The matrix rows of `out` must be aligned to 16
    bytes.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from padfree.head import triton_matmuls as kernels

    configuration = configuration or _fitting(choose(head), out)
    num_rows, width = hidden.shape
    num_columns = out.shape[1]
    absent = rows.labels
    kernels.gradient_kernel[_grid(num_rows, num_columns, hidden.device, configuration)](
        TensorDescriptor.from_tensor(hidden, [configuration.rows, configuration.depth]),
        TensorDescriptor.from_tensor(weight, [configuration.columns, configuration.depth]),
        TensorDescriptor.from_tensor(out, [configuration.rows, configuration.block]),
        out,
        rows.labels,
        absent if head.bias is None else head.bias,
        rows.inverse_temperature,
        softmax.peak,
        softmax.log_total,
        absent if softmax.entropy is None else softmax.entropy,
        upstream.logprobs,
        absent if upstream.entropy is None else upstream.entropy,
        num_rows,
        width,
        first,
        num_columns,
        out.stride(0),
        float(head.logit_scale),
        float(head.softcap or 1.0),
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_ENTROPY=upstream.entropy is not None,
        IS_CUT=_is_cut(out),
        **_launch(configuration),
    )


def _fitting(configuration: MatmulConfiguration, written: Tensor | None) -> MatmulConfiguration:
    """Return `configuration`, adapted to a kernel that writes to `written`.

    If the size of a matrix row of `written` is not a multiple of 16 bytes, the result has one pipeline stage fewer.
    """
    return (
        configuration
        if written is None or not _is_cut(written)
        else configuration._replace(stages=configuration.stages - 1)
    )


def _is_cut(written: Tensor) -> bool:
    """Return True if the size of a matrix row of `written` is not a multiple of 16 bytes, else False."""
    return bool(written.shape[1] * written.element_size() % 16)


def _grid(num_rows: int, num_columns: int, device: torch.device, configuration: MatmulConfiguration) -> tuple[int]:
    tiles = -(-num_rows // configuration.rows) * -(-num_columns // configuration.columns)
    held = 2  # if the kernels run in Triton's interpreter
    if device.type == "cuda":
        held = torch.cuda.get_device_properties(device).multi_processor_count * configuration.resident
    return (min(tiles, held),)


def _launch(configuration: MatmulConfiguration) -> dict[str, int]:
    return {
        "ROWS": configuration.rows,
        "COLUMNS": configuration.columns,
        "DEPTH": configuration.depth,
        "BAND": configuration.band,
        "PARTS": configuration.parts,
        "INTERPRETED": _is_interpreted(),
        "num_stages": configuration.stages,
        "num_warps": configuration.warps,
    }


def _is_interpreted() -> bool:
    from padfree.head.triton_elementwise import is_interpreted

    return is_interpreted()
