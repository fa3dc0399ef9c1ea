"""The argument conventions that the flash kernels (`torch`, `fa4`) share.

The kernels take [T, H, d] with a contiguous last dimension and return lse as [H, T]; padfree uses [T, H], a transposed
view. They specify a window by the keys to the left. They return different values for queries that see no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.spec import AttentionSpec, blind_queries
from padfree.segments import Segments


def flash_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def window_left(spec: AttentionSpec, segments_k: Segments) -> int:
    """The number of keys to the left of its own key that a query sees. If it sees all, -1, which selects a faster
    kernel."""
    return -1 if spec.window is None or spec.window >= segments_k.max_seqlen else spec.window - 1


def fill_blind_queries(
    out: Tensor, lse: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Set out to 0 and lse to -inf for queries that see no key. If there are none, as almost always, nothing runs."""
    blind = blind_queries(segments_q, segments_k, spec)
    if blind is None:
        return out, lse
    index = torch.from_numpy(blind).to(out.device, non_blocking=True)
    return out.index_fill_(0, index, 0), lse.index_fill_(0, index, -torch.inf)


def lse_for_kernel(lse: Tensor, segments_q: Segments, segments_k: Segments) -> Tensor:
    """[Tq, H] -> [H, Tq], with -inf replaced by +inf, so that exp(score - inf) = 0 for a query that sees no key."""
    kernel_lse = lse.T.contiguous()
    if segments_q is segments_k or not (segments_q.lengths > segments_k.lengths).any():
        return kernel_lse
    return kernel_lse.masked_fill(kernel_lse == -torch.inf, torch.inf)
