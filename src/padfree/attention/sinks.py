"""Attention sinks as a step after attention: a learned score per head joins the softmax and carries no value.

    lse' = log(exp(lse) + exp(sink))          out' = out · exp(lse - lse')

The kernels need no support for sinks: their backward with (out', lse') is correct for q, k and v, because p =
exp(score - lse') is the probability of each key in the larger softmax. The sink's gradient is -Σ exp(sink - lse') · δ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import need_tensor
from padfree.errors import UserError


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [Tq, H, dv] and lse [Tq, H] with `sinks` [H] in the softmax, given `out` and `lse` over the keys."""
    _need_floats(out=out, lse=lse, sinks=sinks)
    if sinks.shape != out.shape[1:2] or lse.shape != out.shape[:2]:
        raise UserError(
            "sinks, lse",
            f"shapes {tuple(sinks.shape)}, {tuple(lse.shape)} for out {tuple(out.shape)}",
            "give [H], [Tq, H]",
        )
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * torch.exp(lse - with_sink)[..., None]).to(out.dtype), with_sink


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [H] of `sinks`. `out` and `lse` are the results of `apply_sinks`."""
    _need_floats(dout=dout, out=out, lse=lse, sinks=sinks)
    if sinks.shape != lse.shape[1:] or dout.shape != out.shape:
        raise UserError(
            "sinks, dout",
            f"shapes {tuple(sinks.shape)}, {tuple(dout.shape)} for out {tuple(out.shape)}",
            "give [H], [Tq, H, dv]",
        )
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # [Tq, H]
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(dim=0).to(sinks.dtype)


def _need_floats(**tensors: Tensor) -> None:
    """Refuse integer tensors: results are cast to the dtype of one of these tensors."""
    for name, tensor in tensors.items():
        need_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise UserError(name, "is not a float dtype", f"give floats, such as {name}.float()", value=tensor.dtype)
