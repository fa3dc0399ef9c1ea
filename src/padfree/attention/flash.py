"""The argument conventions that the kernels of the backends `torch` and `fa4` share.

The kernels take [T, H, d] (T tokens, H heads of size d) with a contiguous last dimension. They return the log-sum-exp
(lse) as [H, T]; padfree uses [T, H], a transposed view. A window is given as the number of keys to the left of a query.
For queries that see no key, the two kernels return different values, which padfree replaces by out 0 and lse -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.spec import AttentionSpec, blind_queries
from padfree.segments import Segments


def flash_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def window_left(spec: AttentionSpec, segments_k: Segments) -> int:
    """The maximum number of keys that a query sees to the left of the key that it is aligned with.

    Returns -1, which selects a faster kernel, if there is no window or if no segment is longer than the window.
    """
    return -1 if spec.window is None or spec.window >= segments_k.max_seqlen else spec.window - 1


def fill_blind_queries(
    out: Tensor, lse: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Set out [Tq, H, dv] to 0 and lse [Tq, H] to -inf for the queries that see no key, and return both.

    In the usual case that every query sees a key, no kernel runs.
    """
    blind = blind_queries(segments_q, segments_k, spec)
    if blind is None:
        return out, lse
    index = torch.from_numpy(blind).to(out.device, non_blocking=True)
    return out.index_fill_(0, index, 0), lse.index_fill_(0, index, -torch.inf)


def lse_for_kernel(lse: Tensor, segments_q: Segments, segments_k: Segments) -> Tensor:
    """Transpose lse [Tq, H] to [H, Tq], and replace -inf by +inf.

    With +inf, exp(score - lse) is exp(-inf) = 0 for a query that sees no key.
    """
    kernel_lse = lse.T.contiguous()
    if segments_q is segments_k or not (segments_q.lengths > segments_k.lengths).any():
        return kernel_lse
    return kernel_lse.masked_fill(kernel_lse == -torch.inf, torch.inf)
