from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padfree.attention.spec import AttentionSpec, blind_queries, key_ranges
from padfree.segments import Segments


def ranges(queries: list[int], keys: list[int], **mask: object) -> list[tuple[int, int]]:
    spec = AttentionSpec(scale=1.0, **mask)
    first, end = key_ranges(Segments.from_lengths(queries), Segments.from_lengths(keys), spec)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def test_the_picture_of_the_module() -> None:
    assert ranges([3, 2], [3, 4]) == [(0, 1), (0, 2), (0, 3), (3, 6), (3, 7)]
    assert ranges([3, 2], [3, 4], window=2) == [(0, 1), (0, 2), (1, 3), (4, 6), (5, 7)]
    assert ranges([3, 2], [3, 4], causal=False) == [(0, 3)] * 3 + [(3, 7)] * 2


def test_more_queries_than_keys_leave_the_first_ones_blind() -> None:
    assert ranges([3, 2], [1, 0]) == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1)]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 8),
    causal=st.booleans(),
)
def test_ranges_are_what_the_definition_says(lengths: list[tuple[int, int]], window: int | None, causal: bool) -> None:
    queries, keys = ([pair[axis] for pair in lengths] for axis in (0, 1))
    expected = []
    start = 0
    for num_queries, num_keys in lengths:
        for a in range(num_queries):
            own = num_keys - num_queries + a
            seen = [
                start + b for b in range(num_keys) if not causal or (b <= own and (window is None or b > own - window))
            ]
            expected.append(seen)
        start += num_keys
    found = ranges(queries, keys, causal=causal, window=window if causal else None)
    assert [list(range(*pair)) for pair in found] == expected
    spec = AttentionSpec(scale=1.0, causal=causal, window=window if causal else None)
    blind = blind_queries(Segments.from_lengths(queries), Segments.from_lengths(keys), spec)
    assert ([] if blind is None else blind.tolist()) == [t for t, seen in enumerate(expected) if not seen]


def test_one_set_of_segments_has_no_blind_queries() -> None:
    segments = Segments.from_lengths([3, 0, 2])
    assert blind_queries(segments, segments, AttentionSpec(scale=1.0)) is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"window": 0}, "window: 0"),
        ({"window": 4, "causal": False}, "window: 4 cannot be used with causal=False"),
        ({"softcap": 0.0}, "softcap: 0.0"),
        ({"softcap": float("nan")}, "softcap: nan"),
    ],
)
def test_masks_that_mean_nothing_are_refused(mask: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(scale=1.0, **mask)


def test_key_ranges_of_no_tokens_are_empty() -> None:
    first, end = key_ranges(Segments.from_lengths([]), Segments.from_lengths([]), AttentionSpec(scale=1.0))
    assert first.dtype == end.dtype == np.int64
    assert len(first) == len(end) == 0
