"""Attention sinks, applied after attention: each head has a learned score in the softmax, without a value.

    lse' = log(exp(lse) + exp(sink))          out' = out · exp(lse - lse')

The kernels need no support for sinks: their backward with (out', lse') is correct for q, k and v, because
exp(score - lse') is the probability of each key in the softmax with the sink. The gradient of the sink is
-Σ exp(sink - lse') · δ, summed over the queries. For each query, δ is the dot product of dout and out'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import need_tensor
from padfree.errors import UserError


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Include the sinks [H] in the softmax.

    `out` [Tq, H, dv] and `lse` [Tq, H] are the results of attention over the keys. Returns the new out and lse, in the
    same shapes.
    """
    _need_floats(out=out, lse=lse, sinks=sinks)
    if sinks.shape != out.shape[1:2] or lse.shape != out.shape[:2]:
        raise UserError(
            "sinks, lse",
            f"have shapes {tuple(sinks.shape)}, {tuple(lse.shape)}, but out has shape {tuple(out.shape)}",
            "give sinks [H] and lse [Tq, H]",
        )
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * torch.exp(lse - with_sink)[..., None]).to(out.dtype), with_sink


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [H] of the attention sinks [H]. `dout` is the gradient of the output.

    `out` and `lse` are the results of `apply_sinks`.
    """
    _need_floats(dout=dout, out=out, lse=lse, sinks=sinks)
    if sinks.shape != lse.shape[1:] or dout.shape != out.shape:
        raise UserError(
            "sinks, dout",
            f"have shapes {tuple(sinks.shape)}, {tuple(dout.shape)}, but out has shape {tuple(out.shape)}",
            "give sinks [H] and dout [Tq, H, dv]",
        )
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # [Tq, H]
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(dim=0).to(sinks.dtype)


def _need_floats(**tensors: Tensor) -> None:
    """Raise `UserError` for integer tensors, because results are cast to the dtype of one of these tensors."""
    for name, tensor in tensors.items():
        need_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise UserError(name, "is not a float dtype", f"give floats, such as {name}.float()", value=tensor.dtype)
