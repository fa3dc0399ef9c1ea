"""The `tiles` backend: right for every mask and shape, and the same bits for a query alone, in a pack, and in pages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from padfree.attention import fixed_tiles
from padfree.attention.backend import PAGE_SIZE, Pages
from padfree.attention.selection import choose_backend
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments
from tests.attention.cases import CASES, Case, assert_same, expected, make_inputs, run


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 2e-4)], ids=str)
def test_it_equals_the_reference(case: Case, dtype: torch.dtype, bound: float) -> None:
    inputs = make_inputs(case, dtype)
    assert_same(run(case, inputs, "tiles"), expected(case, inputs, torch.float64), atol=bound, rtol=bound)


def test_auto_never_chooses_it() -> None:
    for dtype in (torch.float32, torch.float64):
        assert choose_backend("cpu", dtype, 64) != "tiles"
        assert choose_backend("cpu", dtype, 64, requested="tiles") == "tiles"


@pytest.mark.parametrize("spec", [{}, {"window": 150}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)], ids=str)
def test_a_query_has_the_same_bits_alone_in_any_pack_and_in_pages(
    spec: dict[str, float], heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    lengths = (1, 300, 127, 128, 129, 16, 17, 40)
    size, total = 24, sum(lengths)
    q, k, v = (torch.randn(total, count, size) for count in (heads[0], heads[1], heads[1]))
    segments = Segments.from_lengths(lengths)
    options = AttentionSpec(scale=0.2, **spec)  # type: ignore[arg-type]
    out, lse = fixed_tiles.BACKEND.forward(q, k, v, segments, segments, options)
    starts = segments.offsets

    # Each segment alone, and only its last queries
    for start, length in zip(starts, lengths, strict=False):
        for last in {length, 1, min(length, 50)}:
            queries, keys = slice(start + length - last, start + length), slice(start, start + length)
            alone = fixed_tiles.BACKEND.forward(
                q[queries], k[keys], v[keys], Segments.from_lengths([last]), Segments.from_lengths([length]), options
            )
            assert torch.equal(alone[0], out[queries])
            assert torch.equal(alone[1], lse[queries])

    # Another order of the segments
    order = [5, 0, 7, 1, 3, 6, 4, 2]
    index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
    shuffled = Segments.from_lengths([lengths[i] for i in order])
    again, again_lse = fixed_tiles.BACKEND.forward(q[index], k[index], v[index], shuffled, shuffled, options)
    assert torch.equal(again, out[index])
    assert torch.equal(again_lse, lse[index])

    # One query per slot at many positions, with keys in pages
    rng = np.random.default_rng(0)
    places = [(i, int(p)) for i, n in enumerate(lengths) for p in {0, n - 1, *rng.integers(0, n, 4).tolist()}]
    pages_of = [-(-(position + 1) // PAGE_SIZE) for _, position in places]
    first = [0, *itertools.accumulate(pages_of)]
    key_pages, value_pages = (torch.randn(first[-1] * PAGE_SIZE, heads[1], size) for _ in range(2))
    table = torch.zeros(len(places), max(pages_of), dtype=torch.int32)
    for number, (i, position) in enumerate(places):
        here = slice(first[number] * PAGE_SIZE, first[number] * PAGE_SIZE + position + 1)
        key_pages[here], value_pages[here] = (x[starts[i] : starts[i] + position + 1] for x in (k, v))
        table[number, : pages_of[number]] = torch.arange(first[number], first[number + 1])
    index = torch.tensor([int(starts[i]) + position for i, position in places])
    pages = Pages(
        table=table,
        lengths=torch.tensor([position + 1 for _, position in places], dtype=torch.int32),
        longest=max(lengths),
    )
    one = Segments.from_lengths([1] * len(places))
    found, found_lse = fixed_tiles.BACKEND.paged_forward(
        q[index], key_pages.view(-1, PAGE_SIZE, heads[1], size), value_pages.view(-1, PAGE_SIZE, heads[1], size), one,
        pages, options,
    )  # fmt: skip
    assert torch.equal(found, out[index])
    assert torch.equal(found_lse, lse[index])
