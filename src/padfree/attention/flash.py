"""What the flash kernels of the backends `torch` and `fa4` have in common.

The kernels take tensors [T, H, d] of T tokens and H heads of size d. They return the log-sum-exp as [H, T], which
padfree transposes to [T, H]. For a query that sees no key, padfree sets the output to 0 and the log-sum-exp to -inf,
because the two kernels return different values for such a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.spec import AttentionSpec, blind_queries
from padfree.segments import Segments


def flash_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def window_left(spec: AttentionSpec, segments_k: Segments) -> int:
    """Return the left window size for the flash kernels: the number of keys before its own key that a query sees.

    Returns -1 (no limit) if there is no window, or if no segment is longer than the window.
    """
    return -1 if spec.window is None or spec.window >= segments_k.max_seqlen else spec.window - 1


def fill_blind_queries(
    out: Tensor, lse: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Set out [Tq, H, dv] to 0 and lse [Tq, H] to -inf for the queries that see no key."""
    blind = blind_queries(segments_q, segments_k, spec)
    if blind is None:
        return out, lse
    index = torch.from_numpy(blind).to(out.device, non_blocking=True)
    return out.index_fill_(0, index, 0), lse.index_fill_(0, index, -torch.inf)


def lse_for_kernel(lse: Tensor, segments_q: Segments, segments_k: Segments) -> Tensor:
    """Transpose lse [Tq, H] to [H, Tq] for the backward kernel.

    For a query that sees no key, -inf becomes +inf, so that the kernel computes exp(score - lse) = 0.
    """
    kernel_lse = lse.T.contiguous()
    if segments_q is segments_k or not (segments_q.lengths > segments_k.lengths).any():
        return kernel_lse
    return kernel_lse.masked_fill(kernel_lse == -torch.inf, torch.inf)
