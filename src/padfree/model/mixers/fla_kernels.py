"""The chunk kernels of flash-linear-attention, for packs: no state passes from one segment (sample) to the next.

Each function of this file (first column) replaces a function of transformers (second column), and takes the same
arguments and the segment boundaries. The third column names the models that use the function.

    gated_delta_rule           torch_chunk_gated_delta_rule       Qwen3-Next, Qwen3.5, OLMo-Hybrid
    kimi_delta_attention       chunk_kimi_delta_attention         Kimi-Linear: a decay for each channel
    mamba2_scan                mamba2_chunk_scan                  Mamba-2: linear attention with a decay for each head

torch.compile does not trace the kernels, so each call is a graph break in a compiled layer.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakTensorKeyDictionary

from padfree.model.model_files import one_line
from padfree.segments import Segments

DTYPES = (torch.bfloat16, torch.float16)
NO_GRADIENTS = ("3.4.0", "3.7.1")
"""A range of Triton versions: the first version in it and the first version after it. With a Triton version in this
range, flash-linear-attention cannot compute gradients on Hopper GPUs unless tilelang is installed.
"""


@cache
def unavailable(device_type: str) -> str | None:
    """Return why the kernels of flash-linear-attention cannot be used on this type of device, or None if they can."""
    if device_type != "cuda":
        return "flash-linear-attention needs a GPU"
    try:
        import_module("fla.ops.gated_delta_rule")
        triton = TorchVersion(version("triton"))
    except Exception as error:  # dependencies of the package can be missing or have unusable versions
        return f"flash-linear-attention cannot be imported ({one_line(error)}); install padfree[fla]"
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    if on_hopper and triton >= NO_GRADIENTS[0] and triton < NO_GRADIENTS[1] and find_spec("tilelang") is None:
        return (
            f"flash-linear-attention cannot compute gradients on Hopper with Triton {triton}; install Triton "
            f"{NO_GRADIENTS[1]} or newer, or tilelang"
        )
    return None


_HOST_LENGTHS: Any = WeakTensorKeyDictionary()


def _lengths(segments: Segments) -> dict[str, Tensor]:
    """Return the segment boundaries, on device and host, as keyword arguments of flash-linear-attention's kernels.

    All layers get the same tensor objects, because flash-linear-attention caches results per input object.
    """
    device = segments.cu_seqlens
    if device not in _HOST_LENGTHS:
        _HOST_LENGTHS[device] = torch.from_numpy(segments.offsets).to(device.dtype)
    return {"cu_seqlens": device, "cu_seqlens_cpu": _HOST_LENGTHS[device]}


@torch.compiler.disable(reason="kernels of another package")  # type: ignore[no-untyped-call, untyped-decorator]
def gated_delta_rule(
    query: Tensor,  # [1, T, H, d_k]
    key: Tensor,  # [1, T, H, d_k]
    value: Tensor,  # [1, T, H, d_v]
    *,
    g: Tensor,  # [1, T, H]
    beta: Tensor,  # [1, T, H]
    segments: Segments,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    kernel = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return _output(kernel, query, key, value, segments, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


@torch.compiler.disable(reason="kernels of another package")  # type: ignore[no-untyped-call, untyped-decorator]
def kimi_delta_attention(
    query: Tensor,  # [1, T, H, d]
    key: Tensor,  # [1, T, H, d]
    value: Tensor,  # [1, T, H, d]
    *,
    g: Tensor,  # [1, T, H, d]
    beta: Tensor,  # [1, T, H]
    segments: Segments,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    kernel = import_module("fla.ops.kda").chunk_kda
    return _output(kernel, query, key, value, segments, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


def _output(
    kernel: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **options: Any
) -> tuple[Tensor, None]:
    output, _ = kernel(query, key, value, **options, **_lengths(segments))
    return output, None


def mamba2_scan(
    hidden_states: Tensor,  # [1, T, H, P]
    dt: Tensor,  # [1, T, H]
    A: Tensor,  # [H] negative
    B: Tensor,  # [1, T, G, N]
    C: Tensor,  # [1, T, G, N]
    *,
    segments: Segments,
    D: Tensor | None = None,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Compute the recurrence of Mamba-2 as linear attention: keys B, queries C, values dt · x and decay exp(dt · A).

    x is the argument `hidden_states` [1, T, H, P] for T tokens and H heads of size P. Returns [1, T, H, P].
    """
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = functional.softplus(steps) if dt_softplus else steps
    steps = steps.clamp(*dt_limit)
    groups = hidden_states.shape[2] // B.shape[2]
    keys, queries = (each.repeat_interleave(groups, dim=2) for each in (B, C))
    values = (hidden_states.float() * steps[..., None]).to(hidden_states.dtype)
    output = _decayed_attention(queries, keys, values, steps * A.float(), segments)
    result: Tensor = output if D is None else output + hidden_states * D[:, None].to(hidden_states.dtype)
    return result


@torch.compiler.disable(reason="kernels of another package")  # type: ignore[no-untyped-call, untyped-decorator]
def _decayed_attention(queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, segments: Segments) -> Tensor:
    kernel: Any = import_module("fla.ops.simple_gla").chunk_simple_gla
    output: Tensor = kernel(queries, keys, values, g=decay, scale=1.0, **_lengths(segments))[0]
    return output


def no_fused_layer(*_args: Any, **_kwargs: Any) -> None:
    """Replaces Mamba-2's fused kernel `mamba2_split_conv1d_scan_combined`, which does not support segment boundaries.

    Returns None, so that the layer runs its convolution and recurrence as separate steps instead.
    """
    return None
