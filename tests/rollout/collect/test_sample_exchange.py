"""Tokens stay on the rank that sampled them: plans without tokens, and the number of bytes that a rank receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.distributed import distributed_c10d

from padfree.config import Config
from padfree.distributed import make_mesh
from padfree.packing import CostModel, find_prefixes
from padfree.packing.collate import prefixes_of
from padfree.packing.prefixes import FREE, common_length
from padfree.record.run_folder import mark_run_folder
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.sample_exchange import arrived, facts_of, placeholder_leaves, whole
from padfree.rollout.group import Leaf, Played
from padfree.train.batcher import make_batcher
from padfree.train.microbatch import plan_samples
from padfree.train.run import train
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.train.test_rollouts_run import lines, make_config, model_folder

__all__ = ["model_folder"]  # a fixture
PROMPT = np.array([1, 2, 3])
MAX_NEW_TOKENS = 300


def leaf(tokens: Sequence[int], versions: Sequence[int] = ()) -> Leaf:
    sampled = np.arange(len(tokens)) >= len(PROMPT)
    found = np.array(versions, np.int64) if len(versions) else np.where(sampled, 4, 0)
    array = np.array(tokens, np.int64)
    logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    return Leaf(
        tokens=array, sampled=sampled, logprobs=logprobs, versions=found, ended=True, turns=1, text="x", reward=0.5
    )


def stand_in_tokens(parts: Sequence[Sequence[Leaf]]) -> list[NDArray[Any]]:
    """Placeholders for the leaves of one group that several ranks sampled."""
    found: list[NDArray[Any]] = []
    for part in parts:
        played = [Played(number=number, leaves=(one,)) for number, one in enumerate(part)]
        facts = [about for each in facts_of(played, PROMPT, shown=None) for about in each]
        found += [one.tokens for one in placeholder_leaves(facts, PROMPT, len(found))]
    return found


responses = st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(responses, responses, st.integers(0, 3))
def test_placeholders_have_the_prefixes_of_the_tokens(first: Any, second: Any, kept: int) -> None:
    """One rank finds all shared prefixes. Two ranks find only the prompt, and never a prefix that is not shared."""
    begin = PROMPT[:kept].tolist()  # a leaf of an agent need not start with the prompt
    parts = [[leaf([*PROMPT, *each]) for each in first], [leaf([*begin, *each]) for each in second]]
    real = [one.tokens for part in parts for one in part]
    found = stand_in_tokens(parts)
    where = [0] * len(first) + [1] * len(second)
    for one in range(len(real)):
        assert len(found[one]) == len(real[one])
        assert found[one][-1] == real[one][-1]
        for other in range(one):
            shared, seen = common_length(real[one], real[other]), common_length(found[one], found[other])
            assert seen <= shared
            assert seen >= min(shared, kept)
            if where[one] == where[other]:
                assert seen == shared
    alone = stand_in_tokens(parts[:1])
    trees = [find_prefixes(tokens, [0] * len(first), overhead=FREE) for tokens in (real[: len(first)], alone)]
    assert trees[0].num_tokens == trees[1].num_tokens
    assert trees[0].roots.tolist() == trees[1].roots.tolist()


def test_placeholders_have_masks_and_versions() -> None:
    one = leaf([*PROMPT, 7, 8, 9, 7], versions=[0, 0, 0, 2, 2, 3, 3])
    ((facts,),) = facts_of([Played(number=5, leaves=(one,))], PROMPT, shown=5)
    (found,) = placeholder_leaves([facts], PROMPT, 0)
    for name in ("sampled", "versions", "ended", "turns", "text", "reward"):
        assert np.array_equal(getattr(found, name), getattr(one, name)), name


class KeySampler:
    """Samples a response whose length and tokens depend on the key of the request."""

    def update_weights(self, trained: Any, version: int) -> None:
        pass

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        return [self._response(request) for request in requests]

    def _response(self, request: SamplingRequest) -> Response:
        rng = np.random.default_rng(request.key & 0xFFFFFFFF)
        tokens = rng.integers(3, 12, rng.integers(request.max_new_tokens // 2, request.max_new_tokens))
        return Response(tokens=tokens, logprobs=-rng.random(len(tokens), np.float32), ended=False, version=0)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def collected(rank: int, world: int, config: Config) -> dict[str, Any]:
    """The number of bytes that a rank receives for its share of a batch, and that share."""
    mesh = make_mesh("cpu")
    if rank == 0:
        mark_run_folder(config)
    dist.barrier()
    tokenizer = load_tokenizer(config)
    groups: Any = next(make_batcher(config, load_training_data(config, tokenizer).samples))
    collector = Collector(config.rollout, config.loss, config.run, mesh, KeySampler(), tokenizer, vocabulary=50)
    received: dict[str, int] = {"facts": 0, "tokens": 0}
    gather, all_to_all = distributed_c10d.all_gather, dist.all_to_all_single

    def counted_gather(outputs: Any, own: Any, *args: Any, **options: Any) -> Any:
        received["facts"] += sum(one.nbytes for source, one in enumerate(outputs) if source != rank)
        return gather(outputs, own, *args, **options)

    def counted_exchange(output: Any, rows: Any, *args: Any, **options: Any) -> Any:
        received["tokens"] += output.nbytes
        return all_to_all(output, rows, *args, **options)

    with (
        mock.patch.object(distributed_c10d, "all_gather", counted_gather),
        mock.patch.object(dist, "all_to_all_single", counted_exchange),
    ):
        collector.sync_weights(None, 0)  # type: ignore[arg-type]
        collector.put(groups, batch=1, version=0)
        samples = collector.take(1, version=0)
        cost = CostModel.tokens()
        plan = plan_samples(samples, prefixes_of(samples, "auto", cost), ranks=world, max_tokens=2000, cost=cost)
        here = arrived(samples, plan.micro_batches)
        assert arrived(samples, plan.micro_batches) is not here
        first = dict(received)
        own = np.concatenate(plan.micro_batches[rank])
    assert received == first, "nothing is received twice"
    return {
        **received,
        "own": {here[index].uid: here[index].tokens.tolist() for index in own},
        "all": {sample.uid: sample.tokens.tolist() for sample in whole(samples)},
        "logprobs": [float(np.sum(sample.logprobs)) for sample in whole(samples)],
    }


def collected_each(rank: int, world: int, configs: Sequence[Config]) -> list[dict[str, Any]]:
    return [collected(rank, world, config) for config in configs]


def test_number_of_bytes_that_a_rank_receives(model_folder: Path, tmp_path: Path) -> None:
    """With more ranks, each receives fewer bytes of a batch, and never more than the samples that it trains on.

    If the batch grows with the ranks, the bytes of tokens that a rank receives stay bounded.
    """
    tokens: dict[tuple[int, int], int] = {}  # the most bytes that a rank receives, by number of ranks and of samples
    facts: dict[tuple[int, int], int] = {}
    for world in (2, 4, 8):
        sizes = sorted({6 * world, 48})
        configs = [
            make_config(
                tmp_path / f"{world} {samples}",
                model_folder,
                batch={"samples": samples, "max_tokens": 2000},
                rollout={"max_new_tokens": MAX_NEW_TOKENS},
            )
            for samples in sizes
        ]
        for samples, results in zip(sizes, zip(*run_ranks(world, collected_each, configs), strict=True), strict=True):
            for result in results:
                assert result["all"] == results[0]["all"]
                assert result["logprobs"] == results[0]["logprobs"]
                assert result["own"].items() <= result["all"].items()
                assert result["tokens"] <= 8 * sum(map(len, result["own"].values()))
            assert sorted(uid for result in results for uid in result["own"]) == sorted(results[0]["all"])
            tokens[world, samples] = max(one["tokens"] for one in results)
            facts[world, samples] = max(one["facts"] for one in results)
    assert tokens[2, 48] > tokens[4, 48] > tokens[8, 48]
    assert tokens[8, 48] + facts[8, 48] <= tokens[2, 48] + facts[2, 48]
    assert max(tokens[world, 6 * world] for world in (2, 4, 8)) <= 8 * 6 * (MAX_NEW_TOKENS + 8)


def trained(rank: int, world: int, configs: Sequence[Config]) -> None:
    for config in configs:
        train(config)


def test_two_ranks_resume_inside_a_batch(model_folder: Path, tmp_path: Path) -> None:
    """Each update of a batch may distribute its samples differently; a checkpoint in between has all of them."""

    def config(name: str, steps: int) -> Config:
        loss = {"kind": "clip", "epochs": 2, "mini_batches": 2, "old_policy": "trainer"}
        return make_config(tmp_path / name, model_folder, loss=loss, run={"steps": steps})

    run_ranks(2, trained, [config("whole", 5), config("parts", 3), config("parts", 5)])
    train(config("one", 5))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    for line, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "one"), strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)
