"""The parameters of one attention call other than its tensors, and the keys that each query sees.

In a segment of Lq queries and Lk keys, query a is aligned with key a + Lk - Lq. The keys that a query sees are always
one range, as in this example with two segments:

    all keys             0 1 2            |  3 4 5 6
    query                0     1     2    |  3     4
    keys seen            0..0  0..1  0..2 |  3..5  3..6
    with a window of 2   0..0  0..1  1..2 |  4..5  5..6
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import need_number, need_whole
from padfree.errors import UserError
from padfree.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The parameters of an attention call.

    The score of a key is `softcap · tanh(scale · q·k / softcap)`, or `scale · q·k` without a softcap.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    """The maximum number of keys that a query sees, including its own (`sliding_window` in Hugging Face). A window is
    allowed only if `causal` is True.
    """
    softcap: float | None = None

    def __post_init__(self) -> None:
        need_number("scale", self.scale, -sys.float_info.max, sys.float_info.max, "give a finite number, or None")
        if self.window is not None:
            need_whole("window", self.window, 1, "give 1 or more and causal=True, or window=None")
        if self.window is not None and not self.causal:
            raise UserError(
                "window",
                f"{self.window} cannot be used with causal={self.causal}",
                "give 1 or more and causal=True, or window=None",
            )
        if self.softcap is not None:
            need_number(
                "softcap", self.softcap, sys.float_info.min, sys.float_info.max, "give a number above 0, or None"
            )


def key_ranges(
    segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays [Tq], `first` and `end`: query t sees the keys `first[t] <= key < end[t]` of the key axis.

    If `first[t]` equals `end[t]`, query t sees no key.
    """
    lengths = segments_q.lengths
    starts, ends = (np.repeat(offsets, lengths) for offsets in (segments_k.offsets[:-1], segments_k.offsets[1:]))
    if not spec.causal:
        return starts, ends
    after_last = np.repeat(segments_q.offsets[1:], lengths) - np.arange(segments_q.num_tokens)
    ends = np.maximum(ends - after_last + 1, starts)
    if spec.window is None:
        return starts, ends
    return np.maximum(ends - spec.window, starts), ends


def blind_queries(segments_q: Segments, segments_k: Segments, spec: AttentionSpec) -> NDArray[np.int64] | None:
    """Return the indices of the queries that see no key, or None if every query sees a key."""
    if segments_q is segments_k:
        return None
    lengths_q, lengths_k = segments_q.lengths, segments_k.lengths
    if not ((lengths_q > lengths_k) if spec.causal else (lengths_q > 0) & (lengths_k == 0)).any():
        return None
    first, end = key_ranges(segments_q, segments_k, spec)
    return np.flatnonzero(first == end)
