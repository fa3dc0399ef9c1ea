"""Routes on the host: joined, merged over turns, stored, and compared for shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from padfree.packing.collate import collate
from padfree.rollout.base import Response
from padfree.rollout.collect.queue_state import KEY, queue_state, stored_in
from padfree.rollout.collect.sample_exchange import facts_of, placeholder_leaves
from padfree.rollout.environment.trajectory import Branch, leaf_of
from padfree.rollout.group import Leaf, Played
from padfree.rollout.response_log import Origin, ResponseLog
from padfree.routes import (
    as_int16,
    checked_routes,
    decoded_routes,
    encoded_routes,
    is_unknown,
    joined_routes,
    merged_routes,
    route_dtype,
    unknown_routes,
)
from padfree.sample import Sample
from tests.refused import refused

PROMPT = np.array([7, 8])


def routes_of(*numbers: int, dtype: Any = np.uint8) -> np.ndarray:
    """For each number a token whose routes are this number and the next, in one layer; -1 is unknown."""
    rows = [[[one, one + 1]] if one >= 0 else [[255 if dtype == np.uint8 else -1] * 2] for one in numbers]
    return np.array(rows, dtype)


def first(routes: Any) -> list[int]:
    assert routes is not None
    return [-1 if one else int(row[0, 0]) for one, row in zip(is_unknown(routes), routes, strict=True)]


def response(tokens: list[int], routes: np.ndarray | None) -> Response:
    return Response(
        tokens=np.array(tokens), logprobs=np.full(len(tokens), -1.0, np.float32), ended=True, version=0, routes=routes
    )


def test_dtypes() -> None:
    assert [route_dtype(number).name for number in (8, 255, 256, 512)] == ["uint8", "uint8", "int16", "int16"]
    mixed = joined_routes([routes_of(3, -1), None, routes_of(300, -1, dtype=np.int16)], [2, 1, 2])
    assert first(mixed) == [3, -1, -1, 300, -1]
    assert joined_routes([None, None], [3, 4]) is None
    assert checked_routes(routes_of(1, -1).tolist(), 2, "s").dtype == np.int16
    assert first(as_int16(routes_of(1, -1))) == [1, -1]
    assert first(unknown_routes(2, routes_of(1))) == [-1, -1]
    for wrong in (np.zeros((2, 1)), np.zeros((3, 1, 2), int), np.zeros((2, 1, 2)), np.full((2, 1, 2), 40_000)):
        with refused("routes of s"):
            checked_routes(wrong, 2, "s")
    with refused("routes", "shapes"):
        joined_routes([routes_of(1), np.zeros((1, 2, 2), np.uint8)], [1, 1])


def test_json() -> None:
    for routes in (routes_of(1, -1, 9), routes_of(300, -1, dtype=np.int16)):
        found = decoded_routes(json.loads(json.dumps(encoded_routes(routes))))
        assert found.dtype == routes.dtype
        assert np.array_equal(found, routes)
    for wrong in ({}, {"dtype": "uint8", "shape": [3], "base64": "AA=="}, {"dtype": "float32"}, [[1], [2, 3]]):
        with pytest.raises(ValueError, match=r"."):
            decoded_routes(wrong)


def test_turns() -> None:
    """A token keeps its route of the first turn; the prefill of the second turn gives the routes that were unknown."""
    branch = Branch(PROMPT)
    branch.write(response([5, 6], routes_of(1, 2, 3, -1)))
    branch.add([9, 9])
    child = branch.branch(3)
    branch.write(response([4, 0], routes_of(21, 22, 23, 24, 25, 26, 27, -1)))
    assert first(leaf_of(branch, "", None).routes) == [1, 2, 3, 24, 25, 26, 27, -1]
    child.write(response([3], routes_of(31, 32, 33, -1)))
    assert first(leaf_of(child, "", None).routes) == [1, 2, 3, -1]
    silent = Branch(PROMPT)
    silent.write(response([5], None))
    assert leaf_of(silent, "", None).routes is None
    silent.write(response([6], routes_of(1, 2, 3, -1)))
    silent.add([4])
    assert first(leaf_of(silent, "", None).routes) == [1, 2, 3, -1, -1]
    assert merged_routes(None, None, 3) is None


def test_continued_responses() -> None:
    begun, rest = response([5], routes_of(1, 2, -1)), response([6, 0], routes_of(11, 12, 13, 14, -1))
    assert first(begun.followed_by(rest).routes) == [1, 2, 13, 14, -1]
    assert response([5], None).followed_by(rest).routes is None


def leaf(tokens: list[int], routes: np.ndarray | None) -> Leaf:
    number = len(tokens)
    sampled = np.arange(number) >= len(PROMPT)
    return Leaf(
        tokens=np.array(tokens), sampled=sampled, logprobs=-sampled.astype(np.float32), versions=np.zeros(number, int),
        ended=True, turns=1, text="", reward=1.0, routes=routes,
    )  # fmt: skip


def test_checkpoints_of_queued_batches() -> None:
    leaves = (leaf([7, 8, 5], routes_of(1, 2, -1)), leaf([7, 8, 6, 0], None), leaf([7, 8, 4], routes_of(4, 5, -1)))
    partial = response([5], routes_of(6, 7, -1))
    stored = [(1, 0, Played(number=0, leaves=leaves)), (1, 1, partial), (1, 2, response([1], None))]
    state = queue_state(stored, "environment")
    tensors = load(save({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}))
    (_, _, played), (_, _, one), (_, _, other) = stored_in({**state, **tensors})
    for found, expected in zip([*played.leaves, one, other], [*leaves, partial, stored[2][2]], strict=True):
        assert np.array_equal(found.tokens, expected.tokens)
        assert (found.routes is None) == (expected.routes is None)
        assert found.routes is None or np.array_equal(found.routes, expected.routes)
    without = queue_state([(1, 0, Played(number=0, leaves=leaves[1:2]))], "environment")
    assert f"{KEY}/routes" not in without
    assert stored_in(without)[0][2].leaves[0].routes is None


def test_the_response_log(tmp_path: Path) -> None:
    origin = Origin(step=0, weights="w", settings="s")
    log = ResponseLog(tmp_path, 0)
    log.begin(origin, after=0)
    given = [response([5, 0], routes_of(1, 2, 3, -1)), response([6], None)]
    log.keep(1, [(number, PROMPT, one) for number, one in enumerate(given)])
    log.close()
    again = ResponseLog(tmp_path, 0)
    again.begin(origin, after=0)
    for number, one in enumerate(given):
        found = again.find(1, number, PROMPT)
        assert found is not None
        assert (found.routes is None) == (one.routes is None)
        assert found.routes is None or np.array_equal(found.routes, one.routes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_placeholders_share_as_far_as_routes_are_equal(ranks: int) -> None:
    """Two leaves with the same prompt share it if its routes are equal, on one rank or on two."""
    for second, shared in ((routes_of(1, 2, 9, -1), 2), (routes_of(1, 3, 9, -1), 0)):
        leaves = [leaf([7, 8, 5, 6], routes_of(1, 2, 3, -1)), leaf([7, 8, 4, 6], second)]
        parts = [leaves] if ranks == 1 else [[one] for one in leaves]
        digests: dict[bytes, int] = {}
        found: list[Leaf] = []
        for part in parts:
            facts = [
                each for one in facts_of([Played(number=0, leaves=tuple(part))], PROMPT, shown=None) for each in one
            ]
            found += placeholder_leaves(facts, PROMPT, len(found), digests)
        one, other = (each.tokens for each in found)
        equal = one[:2] == other[:2]
        assert int(np.argmin([*equal, False])) == shared


def test_packs() -> None:
    samples = [
        Sample(tokens=[7, 8, 5], routes=routes_of(1, 2, -1)),
        Sample(tokens=[4, 4]),
        Sample(tokens=[7, 8, 6], routes=routes_of(1, 2, -1)),
    ]
    batch = collate(samples).padded_to(10)
    assert batch.routes is not None
    assert first(batch.routes.numpy()) == [1, 2, -1, -1, -1, 1, 2, *[-1] * 3]
    assert first(samples[0].truncated(1).routes) == [1]
    shared = collate(samples, share_prefixes=True)
    assert shared.num_tokens == 6
    assert shared.routes is not None
    assert sorted(first(shared.routes.numpy())) == [-1] * 4 + [1, 2]
