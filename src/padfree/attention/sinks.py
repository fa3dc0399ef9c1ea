"""Attention sinks: each head has a learned score that takes part in the softmax but has no value.

    lse' = log(exp(lse) + exp(sink))          out' = out · exp(lse - lse')

Sinks are applied after attention, so kernels need no support for sinks. The backward of a kernel gives the right
gradients of q, k and v if it receives out' and lse'. The gradient of the sink is -Σ exp(sink - lse') · δ over the
queries, where δ is the dot product of the output and its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import need_tensor
from padfree.errors import UserError


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Include the sinks [H], one learned extra score for each head, in the softmax of attention.

    `out` [Tq, H, dv] and `lse` [Tq, H] are the results without sinks. Returns both with sinks.
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
    """Return the gradient of the sinks [H].

    `out` and `lse` are the results with sinks, and `dout` is the gradient of `out`.
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
    """Raise a `UserError` if a tensor has an integer dtype."""
    for name, tensor in tensors.items():
        need_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise UserError(name, "is not a float dtype", f"give floats, such as {name}.float()", value=tensor.dtype)
