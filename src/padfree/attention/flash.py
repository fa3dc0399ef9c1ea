"""What the flash kernels (`torch`, `fa4`) have in common: how they want their arguments.

They take [T, H, d] with a contiguous last dimension and give lse as [H, T]; ours is its transpose, a view. They count
a window by the keys to the left, and they differ in what they return for queries that see no key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.spec import AttentionSpec, blind_queries
from padfree.batch import Segments


def flash_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def window_left(spec: AttentionSpec, segments_k: Segments) -> int:
    """Keys to the left of a query's own that it sees; -1 for all, which is the faster kernel."""
    return -1 if spec.window is None or spec.window >= segments_k.max_seqlen else spec.window - 1


def fill_blind_queries(
    out: Tensor, lse: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Set out to 0 and lse to -inf where a query sees no key. Almost always every query sees one, and nothing runs."""
    blind = blind_queries(segments_q, segments_k, spec)
    if blind is None:
        return out, lse
    index = torch.from_numpy(blind).to(out.device, non_blocking=True)
    return out.index_fill_(0, index, 0), lse.index_fill_(0, index, -torch.inf)


def lse_for_kernel(lse: Tensor, segments_q: Segments, segments_k: Segments) -> Tensor:
    """[Tq, H] -> [H, Tq], with +inf for -inf: exp(score - inf) is the 0 that a query without keys must get."""
    kernel_lse = lse.T.contiguous()
    if segments_q is segments_k or not (segments_q.lengths > segments_k.lengths).any():
        return kernel_lse
    return kernel_lse.masked_fill(kernel_lse == -torch.inf, torch.inf)
