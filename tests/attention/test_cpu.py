from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.attention import cpu
from padfree.attention.spec import AttentionSpec, key_ranges
from padfree.segments import Segments
from tests.attention.cases import (
    CASES,
    FEWER_QUERIES,
    MORE_QUERIES,
    Case,
    assert_same,
    expected,
    leaked,
    make_inputs,
    run,
)

LONG = Case(queries=(2100, 5), keys=(2100, 5), heads=(1, 1), head_dim=16)  # one call with the kernel's own causal flag
SHARED = Case(queries=(9, 40, *[9] * 8), keys=(9, 40, *[9] * 8), heads=(4, 2))  # nine pieces of one shape


@pytest.mark.parametrize("case", [*CASES, SHARED, LONG, Case(head_dim=24, value_dim=40)], ids=str)
@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 1e-4, 1e-4), (torch.float64, 1e-11, 1e-11)])
def test_it_equals_the_reference(case: Case, dtype: torch.dtype, atol: float, rtol: float) -> None:
    inputs = make_inputs(case, dtype)
    assert_same(run(case, inputs, "cpu"), expected(case, inputs, torch.float64), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [Case(sinks=True), Case(mask="softcap and window")], ids=str)
def test_small_types(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    got = run(case, inputs, "cpu")
    assert got["out"].dtype == got["dq"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    assert_same(got, expected(case, inputs, torch.float32), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("changed", [1, 4, 6])
@pytest.mark.parametrize(
    "case", [Case(), Case(mask="window"), Case(mask="softcap"), Case(queries=FEWER_QUERIES), SHARED], ids=str
)
def test_no_bit_of_a_segment_depends_on_another(case: Case, changed: int) -> None:
    assert leaked("cpu", case, make_inputs(case, torch.float32), changed % len(case.queries)) == []


def test_tensors_need_not_be_contiguous() -> None:
    case = Case()
    inputs = make_inputs(case, torch.float32)
    want = run(case, inputs, "cpu")
    for name in ("q", "k", "v", "dout"):
        setattr(inputs, name, getattr(inputs, name).permute(1, 2, 0).contiguous().permute(2, 0, 1))
    assert not inputs.q.is_contiguous()
    assert_same(run(case, inputs, "cpu"), want, atol=1e-6, rtol=1e-6)


@settings(max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=6),
    mask=st.sampled_from(
        [{}, {"causal": False}, {"window": 1}, {"window": 150}, {"softcap": 2.0}, {"softcap": 2.0, "causal": False}]
    ),
)
def test_every_query_that_sees_a_key_is_in_one_piece_with_its_keys(
    lengths: list[tuple[int, int]], mask: dict[str, object]
) -> None:
    segments_q, segments_k = (Segments.from_lengths([pair[axis] for pair in lengths]) for axis in (0, 1))
    spec = AttentionSpec(scale=1.0, **mask)
    first, end = key_ranges(segments_q, segments_k, spec)
    found_first, found_end = np.zeros_like(first), np.zeros_like(end)
    times = np.zeros(len(first), dtype=int)
    for shape, queries, keys in cpu._plan(segments_q, segments_k, spec):
        visible = cpu._visible(shape, spec).numpy()
        for query, key in zip(queries, keys, strict=True):
            span = slice(query, query + shape.queries)
            times[span] += 1
            found_first[span] = key + visible.argmax(axis=1)
            found_end[span] = found_first[span] + visible.sum(axis=1)
            assert visible[:, [0, -1]].any(axis=0).all()  # no key is read that no query sees
    sees = first < end
    assert times.tolist() == sees.astype(int).tolist()
    assert found_first[sees].tolist() == first[sees].tolist()
    assert found_end[sees].tolist() == end[sees].tolist()


def test_a_window_reads_only_the_keys_inside() -> None:
    segments = Segments.from_lengths([5000])
    calls = cpu._plan(segments, segments, AttentionSpec(scale=1.0, window=100))
    assert max(shape.keys for shape, _, _ in calls) == 125 + 99  # 40 pieces


@pytest.mark.parametrize("causal", [True, False])
def test_a_soft_cap_never_stores_the_scores_of_a_whole_segment(causal: bool) -> None:
    segments = Segments.from_lengths([5000])
    calls = cpu._plan(segments, segments, AttentionSpec(scale=1.0, softcap=2.0, causal=causal))
    assert max(shape.queries for shape, _, _ in calls) <= cpu.PIECE_QUERIES


def test_many_short_pieces_of_one_shape_share_a_call() -> None:
    segments = Segments.from_lengths([16] * 50 + [7] * 3)
    calls = cpu._plan(segments, segments, AttentionSpec(scale=1.0))
    assert sorted(len(queries) for _, queries, _ in calls) == [1, 1, 1, 50]


def test_what_queries_without_keys_get() -> None:
    case = Case(queries=MORE_QUERIES)
    got = run(case, make_inputs(case, torch.float32), "cpu")
    blind = got["lse"].isinf()
    assert blind[:2].all()  # 5 queries for 3 keys
    assert not blind[2:5].any()
    assert (got["out"][blind] == 0).all()
    assert (got["dq"][blind] == 0).all()
