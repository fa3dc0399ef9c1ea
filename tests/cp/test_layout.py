"""Layouts: every token once, equal shares, pieces inside documents, and equal work in `balanced`."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from padfree.batch import Layout
from padfree.choices import LayoutKind
from padfree.cp import keys_read, make_layout, modelled_cost, pieces, work
from padfree.cp.balanced_layout import EARLIER_KEY_PAIRS, OWN_KEY_PAIRS, QUERY_TILE, TILE
from padfree.cp.context_plan import Pieces
from padfree.cp.keys import key_traffic
from padfree.segments import Segments
from tests.cp.cases import KINDS

LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 60), st.integers(0, 2000)), max_size=30)


def padded(lengths: list[int], world: int) -> Segments:
    return Segments.from_lengths(lengths, pad_length=-sum(lengths) % world)


def owners(layout: Layout) -> np.ndarray:
    """[T] the rank of each token; fails if a token has none or two."""
    owner = np.full(layout.num_tokens, -1)
    for rank, (starts, ends) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        for start, end in zip(starts, ends, strict=True):
            assert (owner[start:end] == -1).all()
            owner[start:end] = rank
    assert (owner >= 0).all()
    return owner


@settings(max_examples=100)
@given(lengths=LENGTHS, world=st.integers(1, 12), kind=st.sampled_from(KINDS))
@example(lengths=[], world=3, kind="balanced")
@example(lengths=[0, 0], world=2, kind="headtail")
@example(lengths=[1], world=4, kind="balanced")
@example(lengths=[0, 7, 0], world=7, kind="balanced")
def test_every_layout_is_a_partition_into_pieces(lengths: list[int], world: int, kind: LayoutKind) -> None:
    segments = padded(lengths, world)
    layout = make_layout(segments, world, kind)
    owner = owners(layout)
    assert (np.bincount(owner, minlength=world) == layout.num_tokens // world).all()
    borders = set(segments.offsets.tolist())
    for rank, (starts, ends) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        assert starts.dtype == ends.dtype == np.int64
        assert (starts < ends).all()
        if kind != "balanced":
            assert (ends[:-1] <= starts[1:]).all()  # ascending
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            assert not borders & set(range(start + 1, end))
        # as few pieces as possible: neighbouring pieces on one rank belong to different documents
        assert set(starts[1:][starts[1:] == ends[:-1]].tolist()) <= borders, rank
    assert work(layout, segments).sum() == sum(n * (n + 1) // 2 for n in segments.lengths.tolist())
    assert pieces(layout).tolist() == [len(starts) for starts in layout.starts]
    if kind == "balanced":
        assert pieces(layout).sum() <= np.count_nonzero(segments.lengths) + 2 * (world - 1)


@settings(max_examples=100)
@given(lengths=LENGTHS, world=st.integers(1, 12))
@example(lengths=[41, 6, 7, 11, 9], world=3)
def test_balanced_begins_with_what_reads_other_keys_and_ends_with_the_shortest(lengths: list[int], world: int) -> None:
    segments = padded(lengths, world)
    layout = make_layout(segments, world, "balanced")
    for starts, ends in zip(layout.starts, layout.ends, strict=True):
        document = np.searchsorted(segments.offsets, starts, side="right") - 1
        first, end = starts - segments.offsets[document], ends - segments.offsets[document]
        held = list(dict.fromkeys(document.tolist()))
        assert [d for d in held for _ in range((document == d).sum())] == document.tolist()  # side by side
        assert (np.diff(starts)[np.diff(document) == 0] > 0).all()
        keys = [(not (first[document == d] > 0).any(), -end[document == d].max()) for d in held]
        assert keys == sorted(keys)


def test_work_and_keys_read_are_what_the_pieces_say() -> None:
    segments = Segments.from_lengths([5, 3], pad_length=4)
    layout = make_layout(segments, 2, "contiguous")  # [0,5) [5,6) | [6,8) [8,12)
    assert work(layout, segments).tolist() == [15 + 1, (2 + 3) + 10]
    assert keys_read(layout, segments).tolist() == [5 + 1, 3 + 4]
    assert pieces(layout).tolist() == [2, 2]


@settings(max_examples=50)
@given(lengths=LENGTHS, world=st.integers(1, 5), kind=st.sampled_from(KINDS))
def test_modelled_cost_counts_tiles_and_keys(lengths: list[int], world: int, kind: LayoutKind) -> None:
    segments = padded(lengths, world)
    layout = make_layout(segments, world, kind)
    expected = [0] * world
    for rank, (starts, ends) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            origin = max(offset for offset in segments.offsets.tolist() if offset <= start)
            first, last = start - origin, end - origin
            for query in range(first, last, QUERY_TILE):
                # a tile of keys counts if the last query of the query tile sees its first key
                seen = [key for key in range(0, last, TILE) if key < query + QUERY_TILE]
                expected[rank] += QUERY_TILE * TILE * len(seen)
            expected[rank] += EARLIER_KEY_PAIRS * first + OWN_KEY_PAIRS * (TILE * len(range(0, last, TILE)) - first)
    assert modelled_cost(layout, segments).tolist() == expected


def test_contiguous_cuts_the_pack_into_equal_ranges() -> None:
    segments = Segments.from_lengths([5, 3, 5], pad_length=3)
    layout = make_layout(segments, 4, "contiguous")
    assert owners(layout).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [starts.tolist() for starts in layout.starts] == [[0], [4, 5], [8], [12, 13]]


@pytest.mark.parametrize(
    ("num_tokens", "world", "expected"),
    [
        (8, 2, [0, 0, 1, 1, 1, 1, 0, 0]),
        (16, 4, [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]),
        (6, 2, [0, 0, 1, 1, 1, 0]),  # chunks of 2 2 1 1
        (3, 3, [0, 1, 2]),
    ],
)
def test_headtail_pairs_chunks_from_both_ends(num_tokens: int, world: int, expected: list[int]) -> None:
    assert owners(make_layout(Segments.from_lengths([num_tokens]), world, "headtail")).tolist() == expected


def cut_to(lengths: Any, num_tokens: int) -> tuple[list[int], int]:
    """As many of these documents as fit, followed by a pad."""
    total = np.cumsum(lengths)
    kept = [int(n) for n in lengths[: np.searchsorted(total, num_tokens, side="right")]]
    return kept, num_tokens - sum(kept)


def row_of(mix: str, num_tokens: int, rng: np.random.Generator, solutions: list[dict[str, Any]]) -> Segments:
    if mix == "short":
        lengths, pad = cut_to(rng.integers(32, 257, num_tokens // 32), num_tokens)
    elif mix == "lognormal":
        drawn = np.exp(rng.normal(np.log(490), 1.0, num_tokens // 64))
        lengths, pad = cut_to(np.clip(drawn, 1, 8192).astype(int), num_tokens)
    elif mix == "one 16k":
        lengths, pad = cut_to(rng.integers(64, 513, num_tokens // 64), num_tokens - 16384)
        lengths.insert(len(lengths) // 2, 16384)
    else:
        words = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")
        texts = [
            str(line["question"]) + str(solution["solution"])
            for line in solutions
            for solution in (v for v in line.values() if isinstance(v, dict))
        ]
        lengths, pad = cut_to(rng.permutation([len(words.findall(text)) for text in texts]), num_tokens)
    assert len(lengths) > 5
    return Segments.from_lengths(lengths, pad_length=pad)


# Tokens per rank -> modelled cost of the costliest rank relative to the mean. A tile of queries at the end of a 16k
# document costs a million pairs, a thirtieth of the work of a rank with 16384 tokens: fewer tokens are less balanced.
MOST_COST = {65536: 1.025, 32768: 1.03, 16384: 1.05, 8192: 1.11, 4096: 1.2, 2048: 1.2, 1024: 1.4}


@pytest.mark.parametrize("num_tokens", [32768, 131072])
@pytest.mark.parametrize("mix", ["short", "lognormal", "one 16k", "gsm8k"])
def test_balanced_is_balanced(mix: str, num_tokens: int, gsm8k_solutions: list[dict[str, Any]]) -> None:
    segments = row_of(mix, num_tokens, np.random.default_rng(0), gsm8k_solutions)
    for world in (2, 4, 8, 16, 32):
        layout = make_layout(segments, world, "balanced")
        load = work(layout, segments)
        assert (np.bincount(owners(layout)) == num_tokens // world).all()
        assert load.max() / load.mean() <= 1.02, world
        cost = modelled_cost(layout, segments)
        assert cost.max() / cost.mean() <= MOST_COST[num_tokens // world], world
        assert pieces(layout).sum() <= segments.num_segments + 2 * (world - 1)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 3000), st.integers(1, 60000)), max_size=60),
    world=st.integers(2, 33),
    share=st.integers(1024, 4096),
)
def test_balance_does_not_depend_on_the_mix(lengths: list[int], world: int, share: int) -> None:
    kept, pad = cut_to(np.array([*lengths, 0]), world * share)
    segments = Segments.from_lengths(kept, pad_length=pad)
    load = work(make_layout(segments, world, "balanced"), segments)
    assert load.max() / load.mean() <= 1.02


def test_short_documents_stay_whole_and_one_long_one_is_cut_once_per_rank() -> None:
    rng = np.random.default_rng(0)
    segments = row_of("short", 131072, rng, [])
    layout = make_layout(segments, 8, "balanced")
    assert pieces(layout).sum() <= segments.num_segments + 8
    assert keys_read(layout, segments).sum() <= 1.01 * 131072
    segments = row_of("one 16k", 131072, rng, [])
    layout = make_layout(segments, 8, "balanced")
    long = int(segments.offsets[np.argmax(segments.lengths)])
    held = [int(((s >= long) & (s < long + 16384)).sum()) for s in layout.starts]
    assert held == [1] * 8


def test_ranks_that_read_many_keys_get_less_work() -> None:
    segments = row_of("one 16k", 131072, np.random.default_rng(0), [])
    layout = make_layout(segments, 8, "balanced")
    load, read = work(layout, segments), keys_read(layout, segments)
    assert load[read.argmax()] < load.mean() < load[read.argmin()]
    alone = modelled_cost(make_layout(segments, 1), segments)[0]
    for kind, least in (("contiguous", 2.5), ("headtail", 1.5)):
        assert modelled_cost(make_layout(segments, 8, kind), segments).max() * 8 > least * alone, kind
    assert modelled_cost(layout, segments).max() * 8 <= 1.26 * alone


def test_the_same_pack_always_gets_the_same_layout() -> None:
    segments = row_of("lognormal", 32768, np.random.default_rng(3), [])
    one, two = (make_layout(segments, 8, "balanced") for _ in range(2))
    assert all((a == b).all() for a, b in zip(one.starts, two.starts, strict=True))


def test_planning_is_quick() -> None:
    """bench/layout.py measures the time; this test detects a quadratic step or a loop over documents."""
    segments = row_of("short", 131072, np.random.default_rng(0), [])
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        make_layout(segments, 32, "balanced")
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (13, 4, "contiguous"),
            r"segments: the 13 tokens of the pack cannot be divided equally over 4 context ranks; "
            r"pad the batch with padded_to_multiple\(4\)",
        ),
        ((12, 0, "contiguous"), "world: 0; give 1 or more ranks"),
        ((12, 4, "striped"), "kind: 'striped' is unknown; choose one of contiguous, headtail, balanced"),
    ],
)
def test_settings_are_checked(arguments: tuple[int, int, Any], message: str) -> None:
    num_tokens, world, kind = arguments
    with pytest.raises(ValueError, match=message):
        make_layout(Segments.from_lengths([num_tokens]), world, kind)


def test_groups_stay_whole_if_possible() -> None:
    """The rank that holds a prefix also holds its readers: nothing is exchanged, and the work is equal."""
    lengths, parents = [], []
    for group in range(4):
        lengths += [800, *[100] * 8]
        parents += [-1, *[9 * group] * 8]
    segments = Segments.from_lengths(lengths, parents=np.array(parents))
    layout = make_layout(segments, 4)
    assert not key_traffic(Pieces(layout, segments)).any()
    assert len(set(work(layout, segments).tolist())) == 1
