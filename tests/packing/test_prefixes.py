"""The prefix tree: against a trie of all prefixes, and the packs and entries made from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.batch import IGNORE
from padfree.packing import CostModel, collate, find_prefixes, plan_shared_step
from padfree.packing.prefixes import FREE, SharingCost
from padfree.prefix_tree import (
    check_parents,
    first_positions,
    path_copies,
    path_tokens,
    prefix_pages,
    prefix_ranges,
    subtree_ends,
)
from padfree.sample import Sample
from tests.refused import refused

# Two letters: common prefixes of any length, equal samples, and samples that are prefixes of others.
LISTS = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=8)


def samples_of(lists: list[list[int]], num_groups: int = 2) -> list[Sample]:
    return [
        Sample(
            tokens=np.array(tokens, dtype=np.int64),
            loss_mask=np.arange(len(tokens)) % 3 != 0,
            advantages=np.full(len(tokens), index, dtype=np.float32) + np.arange(len(tokens)),
            group=index % num_groups,
        )
        for index, tokens in enumerate(lists)
    ]


@given(LISTS)
@settings(max_examples=100, deadline=None)
def test_every_prefix_is_stored_once_and_every_sample_is_a_path(lists: list[list[int]]) -> None:
    groups = [index % 2 for index in range(len(lists))]
    tokens = [np.array(each, dtype=np.int64) for each in lists]
    tree = find_prefixes(tokens, groups, overhead=FREE)
    prefixes = {
        (g, tuple(each[:end])) for g, each in zip(groups, lists, strict=True) for end in range(1, len(each) + 1)
    }
    assert tree.num_tokens == len(prefixes)
    assert tree.is_shared == (tree.num_tokens < sum(map(len, lists)))
    check_parents(tree.parents, len(tree.parents))
    assert (first_positions(tree.parents, tree.lengths) == tree.begin).all()
    pack = np.concatenate(
        [tokens[0][:0], *(tokens[s][a:b] for s, a, b in zip(tree.sample, tree.begin, tree.end, strict=True))]
    )
    assert (pack[tree.token_positions()] == np.concatenate(tokens)).all()
    assert (tree.lengths > 0).all()


@given(LISTS, st.floats(0, 0.3), st.floats(0, 4))
@settings(max_examples=100, deadline=None)
def test_prefixes_that_do_not_pay_off_are_not_shared(lists: list[list[int]], key: float, node: float) -> None:
    tokens = [np.array(each, dtype=np.int64) for each in lists]
    tree = find_prefixes(tokens, [0] * len(lists), overhead=SharingCost(key=key, node=node))
    pack = np.concatenate(
        [tokens[0][:0], *(tokens[s][a:b] for s, a, b in zip(tree.sample, tree.begin, tree.end, strict=True))]
    )
    assert (pack[tree.token_positions()] == np.concatenate(tokens)).all()
    least = find_prefixes(tokens, [0] * len(lists), overhead=FREE).num_tokens
    assert least <= tree.num_tokens <= sum(map(len, lists))
    nothing = find_prefixes(tokens, [0] * len(lists), overhead=SharingCost(node=1e9))
    assert not nothing.is_shared


@given(LISTS, st.data())
@settings(max_examples=100, deadline=None)
def test_some_samples_share_what_they_shared(lists: list[list[int]], data: st.DataObject) -> None:
    tokens = [np.array(each, dtype=np.int64) for each in lists]
    tree = find_prefixes(tokens, [0] * len(lists), overhead=FREE)
    some = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1), unique=True, max_size=8)), dtype=np.int64)
    part = tree.restricted(some)
    again = find_prefixes([tokens[i] for i in some], [0] * len(some), overhead=FREE)
    assert part.num_tokens == again.num_tokens
    assert len(part.parents) == len(again.parents)
    pack = np.concatenate(
        [tokens[0][:0], *(tokens[some[s]][a:b] for s, a, b in zip(part.sample, part.begin, part.end, strict=True))]
    )
    assert (pack[part.token_positions()] == np.concatenate([tokens[0][:0], *(tokens[i] for i in some)])).all()


@given(LISTS)
@settings(max_examples=100, deadline=None)
def test_entries_are_the_labels_of_the_pack_without_sharing(lists: list[list[int]]) -> None:
    samples = samples_of(lists)
    plain, shared = collate(samples), collate(samples, share_prefixes=True)
    shared = shared.padded_to_multiple(4)
    if shared.entries is None:
        assert shared.padded_to(plain.num_tokens).input_ids.tolist() == plain.input_ids.tolist()
        return
    scored = plain.labels != IGNORE
    for field in ("labels", "weights", "sample_index"):
        assert torch.equal(getattr(shared, field), getattr(plain, field)[scored]), field
    assert shared.rollout is not None
    assert plain.rollout is not None
    assert shared.rollout.advantages is not None
    assert plain.rollout.advantages is not None
    assert torch.equal(shared.rollout.advantages, plain.rollout.advantages[scored])
    # The position that predicts an entry has the same token and position id as without sharing.
    positions = torch.from_numpy(shared.entries.positions)
    assert torch.equal(shared.input_ids[positions], plain.input_ids[scored])
    assert torch.equal(shared.position_ids[positions], plain.position_ids[scored])
    for one, other in zip(shared.unpack(shared.labels), plain.unpack(plain.labels), strict=True):
        assert torch.equal(one, torch.where(other == IGNORE, 0, other))


@given(LISTS)
@settings(max_examples=60, deadline=None)
def test_path_copies_are_the_transpose_of_paths(lists: list[list[int]]) -> None:
    tokens = [np.array(each, dtype=np.int64) for each in lists]
    tree = find_prefixes(tokens, [0] * len(lists), overhead=FREE)
    offsets = np.concatenate([[0], np.cumsum(tree.lengths)])
    ranges = prefix_ranges(tree.parents, offsets)
    index = np.concatenate([offsets[:0], *(np.arange(a, b) for a, b in zip(ranges.begin, ranges.end, strict=True))])
    places, begins = path_copies(tree.parents, offsets)
    assert (places == np.argsort(index, kind="stable")).all()
    assert (np.diff(begins) == np.bincount(index, minlength=tree.num_tokens)).all()
    assert (subtree_ends(tree.parents) > np.arange(len(tree.parents))).all()


@given(LISTS, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_pages_of_a_path_hold_its_tokens(lists: list[list[int]], size: int) -> None:
    tokens = [np.array(each, dtype=np.int64) for each in lists]
    tree = find_prefixes(tokens, [0] * len(lists), overhead=FREE)
    offsets = np.concatenate([[0], np.cumsum(tree.lengths)])
    found = prefix_pages(tree.parents, offsets, size)
    pages = found.tokens.reshape(-1, size)
    first = first_positions(tree.parents, tree.lengths)
    used = set()
    for node, parent in enumerate(tree.parents.tolist()):
        path = path_tokens(tree.parents, offsets, node)
        own = found.table[node, : -(-len(path) // size)]
        taken = pages[own].ravel()
        assert taken[: len(path)].tolist() == path.tolist()
        assert set(taken[len(path) :].tolist()) <= {path[-1]}  # no token of another sample
        shared = first[node] // size
        assert own[:shared].tolist() == found.table[parent, :shared].tolist()
        assert not used & set(own[shared:].tolist())
        used |= set(own[shared:].tolist())
    assert used == set(range(len(pages)))


@given(LISTS, st.integers(1, 3), st.integers(6, 30))
@settings(max_examples=100, deadline=None)
def test_a_plan_holds_every_sample_once_and_no_pack_computes_more_than_the_cap(
    lists: list[list[int]], ranks: int, max_tokens: int
) -> None:
    samples = samples_of(lists, num_groups=1)
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    tree = find_prefixes([sample.tokens for sample in samples], [0] * len(samples), overhead=FREE)
    plan = plan_shared_step(tree, lengths, ranks=ranks, max_tokens=max_tokens, cost=CostModel(linear=1, quadratic=0.1))
    found = [index for of_rank in plan.micro_batches for batch in of_rank for index in batch.tolist()]
    assert sorted(found) == list(range(len(lists)))
    assert len({len(of_rank) for of_rank in plan.micro_batches}) == 1
    for of_rank, tokens in zip(plan.micro_batches, plan.computed_tokens, strict=True):
        for batch, count in zip(of_rank, tokens, strict=True):
            planned = 0 if plan.prefixes is None else plan.prefixes.restricted(batch).num_tokens
            assert plan.prefixes is None or planned <= count <= max_tokens
    assert plan.sharing >= 1


def test_a_group_stays_together_on_one_rank_and_is_divided_over_two() -> None:
    prompt = np.arange(100)
    tokens = [np.append(prompt, 200 + np.arange(20) + 20 * i) for i in range(8)]
    lengths = np.array([len(each) for each in tokens], dtype=np.int64)
    tree = find_prefixes(tokens, [0] * 8)
    assert tree.num_tokens == 100 + 8 * 20
    one = plan_shared_step(tree, lengths, ranks=1, max_tokens=300)
    assert one.computed_tokens.tolist() == [[260]]
    assert one.sharing == pytest.approx(960 / 260)
    two = plan_shared_step(tree, lengths, ranks=2, max_tokens=300)
    assert two.computed_tokens.tolist() == [[180], [180]]
    small = plan_shared_step(tree, lengths, ranks=1, max_tokens=150)
    assert (small.computed_tokens <= 150).all()


def test_groups_that_must_stay_whole_are_never_divided() -> None:
    tokens = [np.append(np.arange(100) + 1000 * (i // 2), 200 + np.arange(20) + 20 * i) for i in range(6)]
    lengths = np.array([len(each) for each in tokens], dtype=np.int64)
    groups = [i // 2 for i in range(6)]
    tree = find_prefixes(tokens, groups)
    plan = plan_shared_step(tree, lengths, ranks=2, max_tokens=150, groups=groups)
    batches = [batch.tolist() for of_rank in plan.micro_batches for batch in of_rank]
    assert sorted(filter(None, batches)) == [[0, 1], [2, 3], [4, 5]]
    assert plan.computed_tokens.sum() == 3 * 140
    with refused("max_tokens"):
        plan_shared_step(tree, lengths, ranks=1, max_tokens=130, groups=groups)


def test_only_samples_of_a_group_are_compared_and_short_prefixes_do_not_pay_off() -> None:
    tokens = [np.append(np.arange(100), [200 + i]) for i in range(4)]
    assert not find_prefixes(tokens, [None] * 4).is_shared
    assert not find_prefixes(tokens, [0, 1, 2, 3]).is_shared
    assert find_prefixes(tokens, [0, 0, 1, 1]).num_tokens == 2 * 102
    assert find_prefixes(tokens, [None] * 4, across_groups=True).num_tokens == 104
    short = [each[95:] for each in tokens]
    assert not find_prefixes(short, [0] * 4).is_shared


def test_real_solutions_share_their_questions(gsm8k_solutions: list[dict[str, Any]]) -> None:
    """Groups of four, one token per byte: every sample once, no pack above the cap, few questions computed twice."""
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    tokens = [
        np.frombuffer((row["question"] + row[model]["solution"]).encode(), dtype=np.uint8).astype(np.int64)
        for row in gsm8k_solutions[:200]
        for model in models
    ]
    lengths = np.array([len(each) for each in tokens], dtype=np.int64)
    questions = sum(len(row["question"].encode()) for row in gsm8k_solutions[:200])
    tree = find_prefixes(tokens, [index // 4 for index in range(len(tokens))])
    assert tree.num_tokens <= int(lengths.sum()) - 3 * questions
    plan = plan_shared_step(tree, lengths, ranks=4, max_tokens=8192)
    assert sorted(i for of_rank in plan.micro_batches for batch in of_rank for i in batch.tolist()) == list(
        range(len(tokens))
    )
    assert (plan.computed_tokens <= 8192).all()
    assert plan.sharing > 0.95 * int(lengths.sum()) / tree.num_tokens
    assert plan.imbalance < 1.05


def test_nodes_that_are_not_in_preorder_are_refused() -> None:
    with pytest.raises(ValueError, match="preorder"):
        check_parents(np.array([-1, 0, -1, 0]), 4)
