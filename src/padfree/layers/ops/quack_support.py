"""Whether a device and a shape support matmuls with epilogues (elementwise work before the result is written)."""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from padfree.warning import PadfreeWarning

OLDEST = (0, 6, 5)
"""The oldest supported version of the package `quack-kernels`."""


def is_supported(a: Tensor, b: Tensor) -> bool:
    """Return whether the matmul a·b can be computed by a kernel with an epilogue (elementwise work on its result)."""
    return is_whole(a.shape[1]) and is_whole(b.shape[1]) and has_epilogues(a.device, a.dtype)


def is_whole(columns: int | torch.SymInt) -> bool:
    """Return whether a matrix row of `columns` 16-bit numbers takes a multiple of 16 bytes."""
    return isinstance(columns, int) and columns % 8 == 0


def has_epilogues(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and _is_installed()


@functools.cache
def _is_installed() -> bool:
    try:
        found = version("quack-kernels")
    except PackageNotFoundError:
        return False
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < OLDEST:
        return False
    try:
        import padfree.layers.ops.quack_matmul_epilogues  # noqa: F401
    except (ImportError, TypeError) as error:  # a TypeError means that quack-kernels is installed outside site-packages
        message = f"layers will be slower, because quack-kernels {found} cannot be used: {error}"
        warnings.warn(message, PadfreeWarning, stacklevel=2)
        return False
    return True
