"""The gated delta rule: Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear.

    S_t = exp(g_t) · S_{t-1} + k_t (beta_t · (v_t - S_{t-1}ᵀ k_t))ᵀ        o_t = S_tᵀ q_t       S is [d_k, d_v] per head

For token t, S_t is the recurrent state, q_t, k_t and v_t are query, key and value, g_t is the log decay, beta_t the
learning rate and o_t the output. A short convolution on q, k and v comes before the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from padfree.model.mixers import fla_kernels
from padfree.model.mixers.convolution import convolution
from padfree.model.mixers.mixer import (
    MixerKind,
    convolution_flops,
    convolution_width,
    decay_of,
    depthwise_convolutions,
)


def matches(module: nn.Module) -> bool:
    """Return whether a mixer uses the gated delta rule: it has a decay per head and convolutions, but unlike Mamba no
    skip connection `D`.
    """
    return decay_of(module) is not None and not hasattr(module, "D") and bool(depthwise_convolutions(module))


def _head_sizes(module: nn.Module) -> tuple[int, int, int]:
    """Return the number of heads, the key size d_k and the value size d_v of a head.

    Models store these sizes under different names. If no known name is found, q, k and v are assumed to have a third of
    the convolution channels each.
    """

    def number(*names: str) -> int:
        found = (getattr(module, name, None) for name in names)
        return next((each for each in found if isinstance(each, int)), 0)

    heads = number("num_v_heads", "num_heads") or 1
    d_k, d_v = number("head_k_dim", "head_dim"), number("head_v_dim", "head_dim")
    if not d_k or not d_v:
        d_k = d_v = max(1, convolution_width(module) // (3 * heads))
    return heads, d_k, d_v


def state_flops(module: nn.Module) -> int:
    """Return the FLOPs per token of the recurrence: each head reads, corrects and writes a state [d_k, d_v]."""
    heads, d_k, d_v = _head_sizes(module)
    return 6 * heads * d_k * d_v + convolution_flops(module)


def state_width(module: nn.Module) -> int:
    """Return the number of values per token saved for backward: q, k and v before and after the convolution, and the
    output before the gate.
    """
    heads, _, d_v = _head_sizes(module)
    return 2 * convolution_width(module) + heads * d_v


def functions(device: torch.device) -> dict[str, Callable[..., Any]] | str:
    return fla_kernels.unavailable(device.type) or {
        "causal_conv1d_fn": convolution,
        "torch_chunk_gated_delta_rule": fla_kernels.gated_delta_rule,
        "chunk_kimi_delta_attention": fla_kernels.kimi_delta_attention,
    }


KIND = MixerKind(
    name="gated_delta",
    matches=matches,
    state_flops=state_flops,
    state_width=state_width,
    functions=functions,
    dtypes=lambda device: fla_kernels.DTYPES,
)
