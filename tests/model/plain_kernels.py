"""The recurrences of mixers in plain PyTorch, token by token, to replace the kernels of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.model.mixers import fla_kernels, varlen_kernel
from padfree.model.mixers.forward import STATE, MixerState
from padfree.segments import Segments


def plain_kernels(patch: pytest.MonkeyPatch) -> None:
    """Replace flash-linear-attention by recurrences computed token by token, with segment boundaries."""
    patch.setattr(varlen_kernel, "_TRIALS", {})
    patch.setattr(varlen_kernel, "LENGTHS", (9, 1, 6, 3))  # short, because there are no chunks of 64 tokens here
    patch.setattr(fla_kernels, "unavailable", lambda device_type: None)
    patch.setattr(fla_kernels, "DTYPES", (torch.float32,))
    patch.setattr(fla_kernels, "gated_delta_rule", delta_rule)
    patch.setattr(fla_kernels, "kimi_delta_attention", delta_rule)
    patch.setattr(fla_kernels, "_decayed_attention", decayed_attention)


@torch.compiler.disable
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    assert use_qk_l2norm_in_kernel
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    decay = g[..., None] if g.ndim == 3 else g

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * decay[0, t].exp()[..., None]
        written = beta[0, t][:, None] * (value[0, t] - torch.einsum("hkv,hk->hv", state, key[0, t]))
        state = state + torch.einsum("hk,hv->hkv", key[0, t], written)
        return state, torch.einsum("hkv,hk->hv", state, query[0, t]) * query.shape[-1] ** -0.5

    return scan(step, (value.shape[2], key.shape[3], value.shape[3]), segments), None


@torch.compiler.disable
def decayed_attention(queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, segments: Segments) -> Tensor:
    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * decay[0, t].exp()[:, None, None] + torch.einsum("hk,hv->hkv", keys[0, t], values[0, t])
        return state, torch.einsum("hkv,hk->hv", state, queries[0, t])

    return scan(step, (values.shape[2], keys.shape[3], values.shape[3]), segments)


def scan(step: Callable[[Tensor, int], tuple[Tensor, Tensor]], shape: tuple[int, ...], segments: Segments) -> Tensor:
    outputs = []
    for begin, end in zip(segments.offsets[:-1].tolist(), segments.offsets[1:].tolist(), strict=True):
        state = torch.zeros(shape)
        for t in range(begin, end):
            state, output = step(state, t)
            outputs.append(output)
    return torch.stack(outputs)[None]


def ways(model: PreTrainedModel) -> set[bool]:
    """Whether the mixers of the model use the fast forward."""
    states = [module.__dict__.get(STATE) for module in model.modules()]
    return {state.fast is not None for state in states if isinstance(state, MixerState)}
