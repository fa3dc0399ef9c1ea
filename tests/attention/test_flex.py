"""The block masks of flex attention; flex itself is compared with the reference in test_function, on CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.attention import flex
from padfree.attention.spec import AttentionSpec, key_ranges
from padfree.segments import Segments
from tests.attention.cases import FEWER_QUERIES, MORE_QUERIES, ODD, Case, dense, make_inputs


@settings(max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=5),
    mask=st.sampled_from([{}, {"causal": False}, {"window": 1}, {"window": 200}]),
)
def test_blocks_are_skipped_only_where_no_pair_is_visible_and_full_only_where_all_are(
    lengths: list[tuple[int, int]], mask: dict[str, object]
) -> None:
    segments_q, segments_k = (Segments.from_lengths([pair[axis] for pair in lengths]) for axis in (0, 1))
    first, end = key_ranges(segments_q, segments_k, AttentionSpec(scale=1.0, **mask))
    partial, full = flex.block_table(first, end, segments_k.num_tokens)
    keys = np.arange(segments_k.num_tokens)
    visible = (keys >= first[:, None]) & (keys < end[:, None])
    blocks_q, blocks_k = (-(-size // flex.BLOCK) for size in visible.shape)
    assert partial.shape == full.shape == (blocks_q, blocks_k)
    padded = np.zeros((blocks_q * flex.BLOCK, blocks_k * flex.BLOCK), dtype=bool)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    tiles = padded.reshape(blocks_q, flex.BLOCK, blocks_k, flex.BLOCK)
    assert np.array_equal(full, tiles.all(axis=(1, 3)))
    assert np.array_equal(partial, tiles.any(axis=(1, 3)) & ~full)


@pytest.mark.parametrize(
    ("mask", "queries"),
    [("causal", ODD), ("window", FEWER_QUERIES), ("softcap", MORE_QUERIES)],
    ids=["causal", "window", "softcap"],
)
def test_the_mask_and_the_cap_say_what_they_should(
    mask: str, queries: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward only and uncompiled, which is what flex supports on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    case = Case(mask=mask, queries=queries, head_dim=16, heads=(4, 2))
    inputs = make_inputs(case, torch.float32)
    with torch.no_grad():
        out, lse = flex.BACKEND.forward(inputs.q, inputs.k, inputs.v, inputs.segments_q, inputs.segments_k, case.spec)
    want = dense(case, inputs)
    torch.testing.assert_close(out, want["out"], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, want["lse"], atol=2e-5, rtol=2e-5)


def test_a_mask_is_cached_by_the_values_of_the_segments() -> None:
    def mask(lengths: list[int], **change: object) -> object:
        segments = Segments.from_lengths(lengths)
        options = AttentionSpec(**{"scale": 1.0, **change})
        return flex._cached_mask(flex._MaskKey(segments, segments, options, torch.device("cpu")))

    assert mask([3, 4]) is mask([3, 4])
    assert mask([3, 4]) is not mask([4, 3])
    assert mask([3, 4]) is not mask([3, 4], window=2)
