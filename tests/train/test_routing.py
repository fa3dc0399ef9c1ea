"""Runs that replay routes: equal on any layout, after a resume and from files; planted route flips do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.config import Config
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.losses import SFTSettings
from padfree.model.route_replay import ReplayedTopK
from padfree.model.routers import routers_of
from padfree.optim.optimizer import make_optimizer
from padfree.packing.collate import collate, prefixes_of
from padfree.record.metrics_file import write_samples
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.routes import is_unknown
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import save_with_tokenizer
from padfree.tools.check.exact import float64_throughout
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.run import train
from padfree.train.scorer import Scorer
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import largest_difference
from tests.train.cases import MAX_TOKENS, OPTIMIZER, make_samples, small_model
from tests.train.test_rollouts_run import first_samples, lines, make_config

NUM_EXPERTS, TOP = 4, 2


def routed_samples(*, prefix: int = 0) -> list[Sample]:
    """Samples with random routes; some tokens have none. `prefix` tokens and their routes are those of the group."""
    rng = np.random.default_rng(1)
    samples, firsts = [], {}
    for sample in make_samples():
        routes = rng.random((len(sample), 2, NUM_EXPERTS)).argsort(-1)[..., :TOP].astype(np.uint8)
        routes[-1] = 255
        tokens = sample.tokens.copy()
        first = firsts.setdefault(sample.group, (tokens, routes))
        shared = min(prefix, len(tokens), len(first[0]) - 1)
        tokens[:shared], routes[:shared] = first[0][:shared], first[1][:shared]
        samples.append(replace(sample, tokens=tokens, routes=routes))
    return samples


def engine_of(
    mesh: Mesh, dtype: torch.dtype = torch.float64, *, shares: bool = False, balance: float = 0.5, **changes: Any
) -> Engine:
    model = small_model("qwen3_moe").to(dtype)
    model.set_experts_implementation("eager")
    parallelize(model, transformations(mesh, replay=True, **changes))
    scorer = Scorer(
        model,
        mesh,
        max_tokens=3 * MAX_TOKENS // mesh.context.size,
        overlong="alone",
        pack_settings=PackSettings(routes=True, share_prefixes=shares),
    )
    settings = LossSettings(loss=SFTSettings(), load_balancing=balance)
    return Engine(scorer, make_optimizer(model, OPTIMIZER), settings)


Result = tuple[list[float], dict[str, Tensor], list[Any]]


def result_of(engine: Engine, samples: list[Sample]) -> Result:
    with float64_throughout() if engine.model.dtype == torch.float64 else nullcontext():
        sums = engine.gradients(engine.prepare(samples))
        router = sums.statistics["router"][0].double() if engine.router is not None else torch.zeros_like(sums.loss)
        total = torch.stack([sums.loss, router])
        dist.all_reduce(total, group=engine.mesh.loss.group)
    scores = engine.scorer.logprobs(samples)
    found = {}
    for key, parameter in engine.model.named_parameters():
        assert parameter.grad is not None, key
        gradient = parameter.grad
        found[key] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
    return total.tolist(), found, scores


LAYOUTS: list[dict[str, int]] = [{}, {"context": 2}, {"expert": 2}]


def on_ranks(rank: int, world: int) -> list[tuple[Result, Result]]:
    found = []
    for layout in LAYOUTS if world > 1 else [{}]:
        mesh = make_mesh("cpu", **layout)
        plain = result_of(engine_of(mesh), routed_samples())
        shared = result_of(engine_of(mesh, shares=True), routed_samples(prefix=3))
        found.append((plain, shared))
    return found


def test_layouts() -> None:
    """Two data ranks with FSDP2, two context ranks and two expert ranks give what one process gives."""
    ((expected,),) = run_ranks(1, on_ranks)
    for found in run_ranks(2, on_ranks):
        for layout, results in zip(LAYOUTS, found, strict=True):
            for (numbers, gradients, scores), (others, other_gradients, other_scores) in zip(
                results, expected, strict=True
            ):
                assert numbers == pytest.approx(others, rel=1e-12), layout
                assert largest_difference(gradients, other_gradients)[0] < 1e-12, layout
                for one, other in zip(scores, other_scores, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def alone(rank: int, world: int) -> dict[str, Result]:
    """In float32, because what makes routers compute in float64 does not reach backward.

    Routers are not balanced, because a shared token counts once in their loss.
    """
    make = partial(engine_of, make_mesh("cpu"), torch.float32, balance=0.0)
    samples = routed_samples(prefix=3)
    return {
        "unshared": result_of(make(), samples),
        "full": result_of(make(checkpointing="full"), samples),
        "shared": result_of(make(shares=True), samples),
        "shared and full": result_of(make(shares=True, checkpointing="full"), samples),
        "compiled": result_of(make(compile="aot_eager"), samples),
        "free": result_of(make(), [replace(sample, routes=None) for sample in samples]),
    }


def test_shared_prefixes_recomputation_and_compiled_layers() -> None:
    (found,) = run_ranks(1, alone)
    expected = found.pop("unshared")
    assert largest_difference(found.pop("free")[1], expected[1])[0] > 1e-3, "the routes matter"
    numbers, gradients, _ = found.pop("full")
    assert numbers == expected[0]
    assert all(torch.equal(gradients[key], expected[1][key]) for key in gradients), "the same routes"
    for name, (numbers, gradients, scores) in found.items():
        assert numbers == pytest.approx(expected[0], rel=1e-5), name
        assert largest_difference(gradients, expected[1])[0] < 1e-5, name
        for one, other in zip(scores, expected[2], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_samples_share_a_prefix_only_with_equal_routes() -> None:
    shared = routed_samples(prefix=3)
    assert prefixes_of(shared, True).num_tokens < sum(map(len, shared))
    assert shared[0].routes is not None
    other = shared[0].routes.copy()
    other[1] = other[1, :, ::-1]
    apart = [replace(shared[0], routes=other), shared[1]]
    assert prefixes_of(shared[:2], True).num_tokens == len(shared[0]) + len(shared[1]) - 3
    assert prefixes_of(apart, True).num_tokens == len(shared[0]) + len(shared[1]) - 1
    packed = collate(apart, share_prefixes=True)
    assert packed.routes is not None
    assert packed.routes.shape == (packed.num_tokens, 2, TOP)


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("experts"), architecture="qwen3_moe", writes_back=True)


def config_of(target: Path, model: Path, routing: str = "replay", **sections: Any) -> Config:
    rollout = {"routing": routing, **sections.pop("rollout", {})}
    loss = {"kind": "clip", "old_policy": "trainer", **sections.pop("loss", {})}
    return make_config(target, model, rollout=rollout, loss=loss, **sections)


@contextmanager
def flipped_routes() -> Iterator[None]:
    """The routers of the sampler shift the experts of about half of the tokens by one."""
    make = InProcessSampler.__init__

    def made(self: InProcessSampler, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for router in routers_of(self.policy.model):
            object.__setattr__(router.module, "forward", flipping(router.module.forward))

    def flipping(own: Any) -> Any:
        def forward(hidden: Tensor) -> Any:
            _, _, choices = own(hidden)
            flips = hidden.reshape(-1, hidden.shape[-1])[:, :1] > 0
            with ReplayedTopK(torch.where(flips, (choices + 1) % NUM_EXPERTS, choices), NUM_EXPERTS):
                return own(hidden)

        return forward

    with mock.patch.object(InProcessSampler, "__init__", made):
        yield


def test_planted_route_flips(folder: Path, tmp_path: Path) -> None:
    """With replay, sampler and trainer agree to rounding; without it, they do not."""
    differences = {}
    with flipped_routes():
        for routing in ("recompute", "replay"):
            train(config_of(tmp_path / routing, folder, routing))
            differences[routing] = [line["loss/sampler_difference"] for line in lines(tmp_path / routing)]
    assert min(differences["recompute"]) > 1e-3
    assert max(differences["replay"]) < 1e-5
    train(config_of(tmp_path / "exact", folder))
    train(config_of(tmp_path / "exact_recompute", folder, "recompute"))
    for line, other in zip(lines(tmp_path / "exact"), lines(tmp_path / "exact_recompute"), strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5), "without flips, replay changes nothing"


def test_a_resumed_run_repeats_to_the_bit(folder: Path, tmp_path: Path) -> None:
    """The second run stops between two updates of a batch, so its checkpoint holds the routes."""
    loss = {"epochs": 2}
    with flipped_routes():
        train(config_of(tmp_path / "whole", folder, loss=loss, run={"steps": 4}))
        for steps in (1, 3, 4):
            train(config_of(tmp_path / "parts", folder, loss=loss, run={"steps": steps}))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def replayed(rank: int, world: int, configs: list[Config]) -> list[list[Sample]]:
    found = []
    with flipped_routes():
        for config in configs:
            found.append(first_samples(config))
            train(config)
    return found


def test_ranks_exchange_routes(folder: Path, tmp_path: Path) -> None:
    changes = {"batch": {"share_prefixes": True}}
    (one,) = run_ranks(1, replayed, [config_of(tmp_path / "one", folder, **changes)])
    layouts = {"data": {}, "context": {"context": 2}, "expert": {"expert": 2}}
    configs = [config_of(tmp_path / name, folder, parallel=each, **changes) for name, each in layouts.items()]
    for found in run_ranks(2, replayed, configs):
        for samples in found:
            for sample, other in zip(samples, one[0], strict=True):
                assert np.array_equal(sample.tokens, other.tokens)
                assert np.array_equal(sample.routes, other.routes)
                assert is_unknown(sample.routes).tolist() == [False] * (len(sample) - 1) + [True]
    for name in layouts:
        for line, other in zip(lines(tmp_path / name), lines(tmp_path / "one"), strict=True):
            assert line["loss/sampler_difference"] < 1e-5
            assert line == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_routes_from_files(folder: Path, tmp_path: Path) -> None:
    """Rollouts are written with their routes, and a run that reads them replays them."""
    config = config_of(tmp_path / "sampling", folder)
    with flipped_routes(), distributed(device="cpu"):
        samples = first_samples(config)
    data = tmp_path / "rollouts.jsonl"
    write_samples(data, samples)
    differences = {}
    for routing in ("recompute", "replay"):
        changes = {"data": {"path": [str(data)], "columns": {}, "epochs": 1}, "run": {"steps": 1}}
        reading = config_of(tmp_path / routing, folder, routing, **changes)
        reading = replace(reading, rollout=replace(reading.rollout, reward=None))
        train(reading)
        (line,) = lines(tmp_path / routing)
        differences[routing] = line["loss/sampler_difference"]
    assert differences["replay"] < 1e-5 < 1e-3 < differences["recompute"]


def test_rollouts_without_routes_are_refused(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "rollouts.jsonl"
    write_samples(data, [replace(sample, loss_mask=None) for sample in make_samples()])
    changes = {"data": {"path": [str(data)], "columns": {}, "epochs": 1}}
    reading = config_of(tmp_path / "run", folder, **changes)
    with refused("rollout.routing", "but rollouts.jsonl:1 has no 'routes'"):
        train(replace(reading, rollout=replace(reading.rollout, reward=None)))
    routed = [replace(sample, routes=np.full((len(sample), 2, TOP), 4, np.int16)) for sample in make_samples()]
    write_samples(data, routed)
    with refused(
        "routes",
        "are for 2 layers with at least 5 experts each, but this model has 2 layers with experts, the smallest",
    ):
        train(replace(reading, rollout=replace(reading.rollout, reward=None)))
