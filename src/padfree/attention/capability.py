"""Which backend can do what, and which one a call gets.

    backend     device  dtypes             head sizes         softcap  v's head size  raw backward  package
    fa4         CUDA 9+ fp16 bf16          8, 16 .. 256       yes      = or 192/128   yes           flash-attn-4
    fa3         CUDA 9  fp16 bf16          8, 16 .. 256       yes      =              yes           flash_attn_interface
    torch       CUDA 8+ fp16 bf16          8, 16 .. 256       no       =              yes           -
    fa2         CUDA 8+ fp16 bf16          8, 16 .. 256       yes      =              yes           flash-attn
    flex        CUDA    fp16 bf16 fp32     16, 17 .. 256      yes      any            no            triton
    cpu         CPU     fp16 bf16 fp32 64  any                yes      any            yes           -
    reference   any     fp16 bf16 fp32 64  any                yes      any            yes           -

All of them have gradients, lse, sinks, windows, MQA and GQA, and different segments for queries and keys. The order
of the table is the order of speed: `auto` takes the first that can serve (float64 on CUDA goes to the reference,
nothing else does by itself), a named one that cannot serve is refused with the reason and with the ones that can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
MULTIPLES_OF_8 = range(8, 257, 8)
FLASH4_SIZES = (64, 96, 128, 192, 256)
"""Others compile, but on an H200 with 4.0.0b36 the gradient of q was wrong for head sizes 16, 40 and 80."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a call needs. `compute_capability` is that of its CUDA device."""

    device: str
    compute_capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool
    raw_backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One row of the table."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Sequence[int] = range(1, 1 << 16)
    any_value_dim: bool = False
    """Whether v's head size may differ from that of q and k."""
    softcap: bool = True
    raw_backward: bool = True
    majors: range = range(100)
    """Major compute capabilities of CUDA devices."""
    installed: Callable[[], bool] = lambda: True
    install: str = ""

    def refusal(self, request: Request) -> str | None:
        """Why this backend cannot serve the request, or None."""
        major, minor = request.compute_capability
        if request.device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, not on {request.device}"
        if request.device == "cuda" and major not in self.majors:
            return f"compute capability {major}.{minor} is not among the {_span(self.majors)} it has kernels for"
        if request.dtype not in self.dtypes:
            return f"{request.dtype} is not among its types ({', '.join(map(str, self.dtypes))})"
        if request.head_dim not in self.head_dims:
            return f"head size {request.head_dim} is not among its sizes ({_span(self.head_dims)})"
        if request.head_dim != request.value_dim and not self.any_value_dim:
            return f"q and k have head size {request.head_dim} but v has {request.value_dim}"
        if request.softcap and not self.softcap:
            return "it has no softcap"
        if request.raw_backward and not self.raw_backward:
            return "it has no backward that takes the lse of a larger softmax, which ring needs"
        if not self.installed():
            return f"its package is not installed ({self.install})"
        return None


def _span(values: Sequence[int]) -> str:
    if not isinstance(values, range):
        return ", ".join(map(str, values))
    step = f" in steps of {values.step}" if values.step > 1 else ""
    return f"{values[0]} to {values[-1]}{step}"


def _module_installed(name: str) -> Callable[[], bool]:
    return functools.cache(lambda: find_spec(name) is not None)


@functools.cache
def _flash4_installed() -> bool:
    # flash-attn 2 and 4 share the name `flash_attn`, and looking for a submodule would import the former.
    spec = find_spec("flash_attn")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    there = any(Path(folder, "cute", "interface.py").is_file() for folder in folders)
    return there and find_spec("cutlass") is not None


class _Flash4(Backend):
    """On Blackwell its head sizes are fewer than on Hopper."""

    __slots__ = ()

    def refusal(self, request: Request) -> str | None:
        reason = Backend.refusal(self, request)
        if reason is not None or request.compute_capability[0] == 9:
            return reason
        if request.head_dim == 192:
            return "head size 192 is not among those it has on Blackwell (64, 96, 128, 256)"
        if request.head_dim == 256 and request.softcap:
            return "it has no softcap at head size 256 on Blackwell"
        return None


BACKENDS: dict[str, Backend] = {
    "fa4": _Flash4(
        devices=("cuda",),
        majors=range(9, 12),
        dtypes=HALF,
        head_dims=FLASH4_SIZES,
        installed=_flash4_installed,
        install="pip install 'padfree[fa4]'",
    ),
    "fa3": Backend(
        devices=("cuda",),
        majors=range(9, 10),
        dtypes=HALF,
        head_dims=MULTIPLES_OF_8,
        installed=_module_installed("flash_attn_interface"),
        install="flash_attn_interface of the flash-attention project's hopper folder",
    ),
    "torch": Backend(devices=("cuda",), majors=range(8, 100), dtypes=HALF, head_dims=MULTIPLES_OF_8, softcap=False),
    "fa2": Backend(
        devices=("cuda",),
        majors=range(8, 100),
        dtypes=HALF,
        head_dims=MULTIPLES_OF_8,
        installed=_module_installed("flash_attn_2_cuda"),
        install="pip install flash-attn",
    ),
    "flex": Backend(
        devices=("cuda",),
        dtypes=(*HALF, torch.float32),
        head_dims=range(16, 257),
        any_value_dim=True,
        raw_backward=False,
        installed=_module_installed("triton"),
        install="pip install triton",
    ),
    "cpu": Backend(devices=("cpu",), dtypes=FLOATS, any_value_dim=True),
    "reference": Backend(devices=("cpu", "cuda", "mps", "xpu"), dtypes=FLOATS, any_value_dim=True),
}


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    softcap: bool = False,
    raw_backward: bool = False,
    requested: str = "auto",
) -> str:
    """The name of the backend that serves such a call: the fastest that can, or `requested`, which must be able to.

    `raw_backward` asks for one that `varlen_backward` can use.
    """
    if not isinstance(requested, str):
        raise ValueError(f"backend: {requested!r}; use 'auto' or one of {', '.join(BACKENDS)}")
    if not isinstance(device, torch.device):
        device = torch.device(device)
    return _choose(device, dtype, head_dim, value_dim or head_dim, softcap, raw_backward, requested)


@functools.lru_cache(maxsize=1024)
def _choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: bool,
    raw_backward: bool,
    requested: str,
) -> str:
    request = Request(
        device=device.type,
        compute_capability=_compute_capability(device),
        dtype=dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        softcap=softcap,
        raw_backward=raw_backward,
    )
    refusals = {name: backend.refusal(request) for name, backend in BACKENDS.items()}
    able = [name for name, reason in refusals.items() if reason is None]
    if requested == "auto":
        # The reference is not a kernel to train with, so it is never the answer to what a kernel refused.
        fast = [name for name in able if name != "reference" or dtype == torch.float64]
        if not fast:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items() if reason is not None)
            raise ValueError(f"backend: 'auto' found no kernel ({reasons}); change that, or name backend='reference'")
        return fast[0]
    if requested not in BACKENDS:
        raise ValueError(f"backend: {requested!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    if refusals[requested] is not None:
        raise ValueError(f"backend: {requested!r} cannot serve: {refusals[requested]}; use 'auto' or {_either(able)}")
    return requested


def _either(names: list[str]) -> str:
    return " or ".join(map(repr, names)) if names else "another device or type"


def _compute_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return (0, 0)
    if not torch.cuda.is_available():
        raise ValueError(f"device: '{device}', but PyTorch sees no CUDA device; use 'cpu', or a PyTorch built for CUDA")
    return torch.cuda.get_device_capability(device)
