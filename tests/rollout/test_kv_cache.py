"""The allocator of the KV cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padfree.rollout.engines.in_process.kv_cache import Extents, KVCache, LayerShape


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_ranges_never_overlap_and_none_is_lost(actions: list[tuple[bool, int]]) -> None:
    size = 24
    extents, taken = Extents(size), []
    for takes, number in actions:
        if takes:
            start = extents.allocate(number)
            if start is not None:
                taken.append((start, number))
            else:
                owned = {index for first, length in taken for index in range(first, first + length)}
                free = [all(index not in owned for index in range(at, at + number)) for at in range(size - number + 1)]
                assert not any(free), "there is a free range"
        elif taken:
            extents.free(*taken.pop(number % len(taken)))
        indices = [index for first, length in taken for index in range(first, first + length)]
        assert len(set(indices)) == len(indices)
        assert extents.num_free == size - len(indices)
    for one in taken:
        extents.free(*one)
    assert extents.allocate(size) == 0


def test_a_free_range_cannot_be_freed() -> None:
    extents = Extents(10)
    assert extents.allocate(4) == 0
    extents.free(0, 4)
    with pytest.raises(AssertionError, match="this range is already free"):
        extents.free(2, 2)


def test_layers_of_different_shapes() -> None:
    shapes = [
        LayerShape(heads=2, key_size=8, value_size=4, dtype=torch.float32),
        LayerShape(heads=1, key_size=16, value_size=16, dtype=torch.bfloat16),
    ]
    assert [shape.token_bytes for shape in shapes] == [2 * 12 * 4, 32 * 2]
    cache = KVCache.allocated(shapes, 5, torch.device("cpu"))
    assert [tuple(keys.shape) for keys in cache.keys] == [(5, 2, 8), (5, 1, 16)]
    assert [tuple(values.shape) for values in cache.values] == [(5, 2, 4), (5, 1, 16)]
    assert cache.keys[1].dtype == torch.bfloat16
