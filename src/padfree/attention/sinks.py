"""Attention sinks as a step after attention: a learned score per head joins the softmax and carries no value.

    lse' = log(exp(lse) + exp(sink))          out' = out · exp(lse - lse')

The kernels then need not know of sinks: their backward with (out', lse') is right for q, k and v, because p =
exp(score - lse') is what each key got in the larger softmax. The sink's own gradient is -Σ exp(sink - lse') · δ.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [Tq, H, dv] and lse [Tq, H] over the keys, sinks [H] -> the same with the sink in the softmax"""
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * torch.exp(lse - with_sink)[..., None]).to(out.dtype), with_sink


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[H], from the out and lse that `apply_sinks` returned"""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # [Tq, H]
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(dim=0).to(sinks.dtype)
