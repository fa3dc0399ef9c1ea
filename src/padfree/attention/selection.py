"""Choose the backend for an attention call.

`BACKENDS` is ordered by speed, and `auto` chooses the first backend that supports the call. However, `auto` chooses
`reference` only for float64, and it never chooses `tiles`.
"""

from __future__ import annotations

import functools

import torch

from padfree.attention import cpu, fixed_tiles, flash4, flex, reference, torch_varlen
from padfree.attention.backend import AttentionBackend, AttentionNeeds, span
from padfree.errors import UserError

BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        flash4.BACKEND,
        torch_varlen.BACKEND,
        flex.BACKEND,
        cpu.BACKEND,
        reference.BACKEND,
        fixed_tiles.BACKEND,
    )
}


def register_backend(backend: AttentionBackend) -> None:
    """Add your own attention backend, which `auto` chooses for calls that no other backend supports."""
    if backend.name == "auto" or backend.name in BACKENDS:
        raise UserError(
            "name", "is already in use", f"choose a name other than auto, {', '.join(BACKENDS)}", value=backend.name
        )
    BACKENDS[backend.name] = backend
    _choose.cache_clear()


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
    """Return the name of the fastest backend that supports the call. A `requested` backend other than `auto` must
    support the call and is returned.

    `value_dim` is the head size of v, if it differs from `head_dim`. `raw_backward`: whether the caller will use
    `varlen_backward`.
    """
    if not isinstance(requested, str):
        raise UserError("backend", "is not a string", f"use 'auto' or one of {', '.join(BACKENDS)}", value=requested)
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
    needs = AttentionNeeds(
        device=device.type,
        compute_capability=_compute_capability(device),
        dtype=dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        softcap=softcap,
        raw_backward=raw_backward,
    )
    reasons = {name: backend.unsupported_reason(needs) for name, backend in BACKENDS.items()}
    if requested == "auto":
        reasons = {name: reason or _not_by_auto(BACKENDS[name], dtype) for name, reason in reasons.items()}
        for name, reason in reasons.items():
            if reason is None:
                return name
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UserError(
            "backend",
            f"'auto' found no backend for this call ({listed})",
            "change the call so that a backend supports it, or set backend='reference'",
        )
    if requested not in BACKENDS:
        raise UserError("backend", "is unknown", f"use 'auto' or one of {', '.join(BACKENDS)}", value=requested)
    if reasons[requested] is not None:
        able = [name for name, reason in reasons.items() if reason is None]
        raise UserError(
            "backend",
            f"does not support this call: {reasons[requested]}",
            f"use 'auto' or {_either(able)}",
            value=requested,
        )
    return requested


def _not_by_auto(backend: AttentionBackend, dtype: torch.dtype) -> str | None:
    """Return the reason why `auto` skips a backend that supports the call, or None if `auto` may choose the backend."""
    return None if dtype in backend.capabilities.auto_dtypes else f"'auto' never chooses this backend for {dtype}"


def _either(names: list[str]) -> str:
    return " or ".join(map(repr, names)) if names else "another device or dtype"


def _compute_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return (0, 0)
    if not torch.cuda.is_available():
        raise UserError(
            "device",
            f"is '{device}', but PyTorch sees no CUDA device",
            "use 'cpu', or install a PyTorch built for CUDA",
        )
    return torch.cuda.get_device_capability(device)


def capability_table() -> str:
    """Return the capabilities of all backends as a Markdown table, for docs/reference/backends.md."""
    rows = [["backend", "devices", "types", "head sizes", "v's head size", "soft cap", "ring", "`auto`", "needs"]]
    rows.append(["---"] * len(rows[0]))
    for name, backend in BACKENDS.items():
        can = backend.capabilities
        first, last = can.majors[0], can.majors[-1]
        upwards = f"CUDA {first}.0 and newer" if first else "CUDA"
        cuda = upwards if last == 99 else f"CUDA {first}.x" if first == last else f"CUDA {first}.0 to {last}.x"
        auto = "yes"
        if not set(can.dtypes) <= set(can.auto_dtypes):
            auto = ", ".join(_short(dtype) for dtype in can.auto_dtypes)
        rows.append(
            [
                f"`{name}`",
                ", ".join(cuda if device == "cuda" else device.upper() for device in can.devices),
                ", ".join(_short(dtype) for dtype in can.dtypes),
                span(can.head_dims) if len(can.head_dims) < 1000 else "any",
                "any" if can.any_value_dim else "that of q",
                "yes" if can.softcap else "no",
                "yes" if can.raw_backward else "no",
                auto,
                f"`{can.package}`" if can.package.startswith("pip") else can.package or "nothing",
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def key_block(requested: str) -> int:
    """Return the number of keys per block, if the bits of the backend's results depend on how keys are divided into
    blocks. Otherwise, return 1. `requested`: the name of the backend, or `auto` (which gives 1).
    """
    return BACKENDS[requested].key_block if requested in BACKENDS else 1
