"""The KV cache of a decoder: prompts and responses share one token axis, and each prompt is stored only once.

    index     0 1 2     3 4 5 6       7 8 9 10      11 ...
    holds     prompt    response A    response B    free

Both responses attend to the prompt and then to their own tokens. Layers may differ in the number and size of their
heads.

A response reserves `max_new_tokens` entries when it starts. Nothing is allocated while it is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one token in one layer."""

    heads: int  # Hkv
    key_size: int  # d
    value_size: int  # dv
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KVCache:
    """Keys and values of `capacity` tokens for each layer."""

    capacity: int  # M
    keys: Sequence[Tensor]  # [M, Hkv, d] for each layer
    values: Sequence[Tensor]  # [M, Hkv, dv] for each layer

    @staticmethod
    def allocated(shapes: Sequence[LayerShape], capacity: int, device: torch.device) -> KVCache:
        def empty(shape: LayerShape, size: int) -> Tensor:
            # Start with zeros: masked values are multiplied by probability 0, and 0 times a NaN left in memory is NaN.
            return torch.zeros(capacity, shape.heads, size, dtype=shape.dtype, device=device)

        return KVCache(
            capacity=capacity,
            keys=[empty(shape, shape.key_size) for shape in shapes],
            values=[empty(shape, shape.value_size) for shape in shapes],
        )


class Extents:
    """First-fit allocator of contiguous ranges of cache indices. It runs on the host."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), sorted and never adjacent

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, length: int) -> int | None:
        """Allocate `length` contiguous indices and return the first; return None if no free range is long enough."""
        if length == 0:
            return 0
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index : index + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Free the indices `start` to `start + length - 1`. `start` is what `allocate(length)` returned."""
        if length == 0:
            return
        end = start + length
        index = next((i for i, (first, _) in enumerate(self._free) if first > start), len(self._free))
        assert index == 0 or self._free[index - 1][1] <= start, "this range is already free"
        assert index == len(self._free) or end <= self._free[index][0], "this range is already free"
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))
