"""The memory of a decoder: keys and values of every layer on one token axis, of which prompts and responses have parts.

    places     0 1 2 | 3 4 5 6 | 7 8 9 10 | 11 …         M in all
               prompt   response   response   free        both responses attend to places 0 1 2, and then to their own

    layer      keys [M, Hkv, d]      values [M, Hkv, dv]      layers may differ in Hkv, d and dv

A prompt is in the cache once, however many responses follow it. A response has as many places as it has room for tokens
from the moment it begins, so that nothing has to be found for it while it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What a token takes in the cache of one layer."""

    heads: int  # Hkv
    key_size: int  # d
    value_size: int  # dv
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KVCache:
    """Keys and values of `num_places` tokens for each layer."""

    num_places: int  # M
    keys: Sequence[Tensor]  # of each layer [M, Hkv, d]
    values: Sequence[Tensor]  # of each layer [M, Hkv, dv]

    @staticmethod
    def allocated(shapes: Sequence[LayerShape], num_places: int, device: torch.device) -> KVCache:
        def empty(shape: LayerShape, size: int) -> Tensor:
            # Zeros: masked keys are multiplied by probability 0, which must not meet a NaN of old memory.
            return torch.zeros(num_places, shape.heads, size, dtype=shape.dtype, device=device)

        return KVCache(
            num_places=num_places,
            keys=[empty(shape, shape.key_size) for shape in shapes],
            values=[empty(shape, shape.value_size) for shape in shapes],
        )


class Extents:
    """Which places are free: contiguous ranges, first fit. Host only."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), in order, never touching

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, length: int) -> int | None:
        """The first of `length` free places side by side, which are taken now; None if there are none."""
        if length == 0:
            return 0
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index : index + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Back what `take` gave."""
        if length == 0:
            return
        end = start + length
        index = next((i for i, (first, _) in enumerate(self._free) if first > start), len(self._free))
        assert index == 0 or self._free[index - 1][1] <= start, "these places are free already"
        assert index == len(self._free) or end <= self._free[index][0], "these places are free already"
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))
