# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matmuls with epilogues on Hopper, made with `quack-kernels`, which compiles its kernels on first use.

The tile sizes are the fastest on an H200 for an input of [14918, 2560] and 9,728 output columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quack.activation import dswiglu
from quack.activation import swiglu as activated
from quack.cache import EXTRA_SOURCE_DIRS
from quack.epilogue.frontend import gemm_epilogue
from quack.gemm_config import GemmConfig
from torch import Tensor

# quack-kernels caches compiled kernels on disk. Its cache keys must include the source code of this folder.
EXTRA_SOURCE_DIRS.append(Path(__file__).parent)

# With `pingpong`, the epilogue of a tile runs while the next tile is computed.
WIDE_TILE = GemmConfig(tile_m=128, tile_n=256, pingpong=False, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
FORWARD_TILE = GemmConfig(tile_m=192, tile_n=128, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
BACKWARD_TILE = GemmConfig(tile_m=192, tile_n=128, pingpong=True, cluster_m=1, cluster_n=2, is_dynamic_persistent=False)


def add(a: Tensor, b: Tensor, c: Tensor, out: Tensor) -> None:
    _run(_add, WIDE_TILE, a, b, c, {"D": out})


def swiglu(a: Tensor, b: Tensor, gate: Tensor, up: Tensor, act: Tensor) -> None:
    _run(_swiglu, FORWARD_TILE, a, b, gate, {"D": up, "act": act})


def swiglu_backward(a: Tensor, b: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Write the gradients of gate and up into `dgate` and `dup`. The gradient of silu(gate) · up is the matmul a @ b.

    `dgate` and `dup` may be the tensors gate and up themselves.
    """
    _run(_swiglu_backward, BACKWARD_TILE, a, b, gate, {"D": dgate, "dup": dup}, up=up)


# The epilogues. `acc` is the result of the matmul a·b, and `c` is a tensor of the same shape.


@gemm_epilogue()
def _add(acc, c):
    return {"D": acc + c}


@gemm_epilogue(outputs=("act",))
def _swiglu(acc, c):
    return {"D": acc, "act": activated(c, acc)}


@gemm_epilogue(outputs=("dup",))
def _swiglu_backward(acc, c, up):
    dgate, dup, _ = dswiglu(c, up, acc)
    return {"D": dgate, "dup": dup}


_plans: dict[tuple[Any, ...], Any] = {}


def _run(epilogue, tile: GemmConfig, a: Tensor, b: Tensor, c: Tensor, out: dict[str, Tensor], **operands: Tensor):
    if c.numel() == 0:
        return
    a, c = a.contiguous(), c.contiguous()
    if 1 not in b.stride():
        b = b.contiguous()
    # A kernel is compiled for the dtypes and for the memory layout of b, not for the number of tokens.
    key = (epilogue, a.device, a.dtype, b.shape, b.stride(1) == 1)
    if key not in _plans:
        _plans[key] = epilogue.plan(a, b, c, out=out, config=tile, **operands)
    _plans[key].run(a, b, c, out=out, **operands)
