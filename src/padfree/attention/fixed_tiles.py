"""The `tiles` backend: CPU attention whose bits for a query do not depend on the other queries of the call.

A CPU library may sum a matmul in another order if the shape changes. Every matmul here therefore has the same shape: a
tile of 16 queries by a block of 128 keys, with zeros where tokens are missing. Tiles and blocks are counted from the
start of the segment.

A decode step with one query thus gives the same bits as the packed forward pass, which the setting `rollout.exact`
needs. The decode step does 16 times the necessary arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention import reference
from padfree.attention.backend import AttentionBackend, Capabilities
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments

QUERIES, KEYS = 16, 128
"""The number of queries in a tile, and the number of keys in a block."""


class TiledAttention(AttentionBackend):
    name = "tiles"
    key_block = KEYS
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=(torch.float32, torch.float64),
        any_value_dim=True,
        lengths_on_host=True,
        auto_dtypes=(),
    )

    def has_decode_bits(self, q: Tensor, spec: AttentionSpec) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(segments_q, segments_k)
        num_heads, heads = q.shape[1], k.shape[1]
        out, lse = q.new_zeros(len(q), num_heads, v.shape[2]), q.new_full((len(q), num_heads), -torch.inf)
        if not len(tiles.queries):
            return out, lse
        queries = _padded(q, tiles.queries).view(-1, QUERIES, heads, num_heads // heads, q.shape[2])
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()  # [tiles, Hkv, G·16, d]
        peak = q.new_full(queries.shape[:3], -torch.inf)
        total, weighted = torch.zeros_like(peak), q.new_zeros(*queries.shape[:3], v.shape[2])
        for block in range(int(tiles.num_blocks.max(initial=0))):
            here = np.flatnonzero(tiles.num_blocks > block)
            index = torch.from_numpy(here)
            places = tiles.keys(here, block)
            keys, values = (
                _padded(states, places).view(-1, KEYS, heads, states.shape[2]).transpose(1, 2).contiguous()
                for states in (k, v)
            )  # [tiles, Hkv, 128, d]
            scores = torch.matmul(queries[index], keys.transpose(2, 3)) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            seen = tiles.seen(here, block, spec)[:, None, None]  # [tiles, 1, 1, 16, 128]
            scores = torch.unflatten(scores, 2, (-1, QUERIES)).masked_fill(~seen, -torch.inf).flatten(2, 3)
            higher = torch.maximum(peak[index], scores.amax(3))
            safe = higher.masked_fill(higher == -torch.inf, 0)  # -inf minus -inf is NaN
            # If a query sees no key of the block, the bits of its result stay: `faded` is 1 and `shares` are 0.
            faded = torch.exp(peak[index] - safe)
            shares = torch.exp(scores - safe[..., None])
            total[index] = total[index] * faded + shares.sum(3)
            weighted[index] = weighted[index] * faded[..., None] + torch.matmul(shares, values)
            peak[index] = higher
        result = weighted / total.masked_fill(total == 0, 1)[..., None]
        rows = (result, (peak + torch.log(total))[..., None])
        found = (
            torch.unflatten(states, 2, (-1, QUERIES)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
            for states in rows
        )  # [tiles·16, H, dv] and [tiles·16, H, 1]
        real = torch.from_numpy(tiles.queries >= 0)
        place = torch.from_numpy(tiles.queries[tiles.queries >= 0])
        for target, states in zip((out, lse[..., None]), found, strict=True):
            target[place] = states[real]
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments_q: Segments,
        segments_k: Segments,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference.BACKEND.backward(dout, q, k, v, out, lse, segments_q, segments_k, spec)


class _Tiles:
    """The queries of each segment, cut into tiles of 16, and the keys of each segment, cut into blocks of 128.

    Each element of a tile or block is the index of a token in the pack, or -1 if the element is empty.
    """

    def __init__(self, segments_q: Segments, segments_k: Segments) -> None:
        num_queries, num_keys = segments_q.lengths, segments_k.lengths
        before = num_keys - num_queries  # position of the first query, counted from the first key; may be negative
        first, last = before // QUERIES, -(-num_keys // QUERIES)
        counts = np.where(num_queries > 0, np.maximum(last - first, 0), 0)
        self._segment = np.repeat(np.arange(len(counts)), counts)
        self._start = concatenated_ranges(first, counts) * QUERIES  # [tiles] position of the first query
        position = self._start[:, None] + np.arange(QUERIES)
        number = position - before[self._segment, None]
        inside = (number >= 0) & (number < num_queries[self._segment, None])
        self.queries: NDArray[np.int64] = np.where(
            inside, number + segments_q.offsets[:-1][self._segment, None], -1
        ).ravel()
        self._num_keys, self._key_offsets = num_keys[self._segment], segments_k.offsets[:-1][self._segment]
        self.num_blocks: NDArray[np.int64] = -(-self._num_keys // KEYS)

    def keys(self, tiles: NDArray[np.int64], block: int) -> NDArray[np.int64]:
        number = block * KEYS + np.arange(KEYS)
        inside = number < self._num_keys[tiles, None]
        places: NDArray[np.int64] = np.where(inside, number + self._key_offsets[tiles, None], -1).ravel()
        return places

    def seen(self, tiles: NDArray[np.int64], block: int, spec: AttentionSpec) -> Tensor:
        """Return the mask [tiles, 16, 128] of the keys in block `block` that each query of the given tiles sees."""
        query = (self._start[tiles, None] + np.arange(QUERIES))[:, :, None]
        key = block * KEYS + np.arange(KEYS)
        seen = np.broadcast_to(key < self._num_keys[tiles, None, None], (len(tiles), QUERIES, KEYS))
        if spec.causal:
            seen = seen & (key <= query)
        if spec.window is not None:
            seen = seen & (key > query - spec.window)
        return torch.from_numpy(np.ascontiguousarray(seen))


def _padded(states: Tensor, places: NDArray[Any]) -> Tensor:
    """Gather tokens of `states` [T, H, d]. `places` are their indices; the index -1 gives zeros."""
    index = torch.from_numpy(places)
    return torch.where((index >= 0)[:, None, None], states[index.clamp(min=0)], 0)


BACKEND = TiledAttention()
