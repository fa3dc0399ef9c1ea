"""Experts divided over ranks: loss, gradients and router losses equal those of one process; bytes are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from padfree.distributed import Mesh, make_mesh
from padfree.losses import SFTSettings
from padfree.model.routers import routers_of
from padfree.sharding.norm import gradient_norm
from padfree.tools.check.exact import float64_throughout
from padfree.train.engine import Engine, LossSettings
from tests.ranks import run_ranks
from tests.rounding import largest_difference
from tests.train.cases import make_engine, make_samples, small_model

ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"]
BIASED = ("deepseek_v3", "glm4_moe")
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"expert": 2}, {"expert": 2, "context": 2}],
    4: [
        {"expert": 1},
        {"expert": 2},
        {"expert": 4},
        {"expert": 2, "context": 2},
        {"expert": 4, "context": 2},
        {"expert": 2, "context": 4},
        {"expert": 2, "replicate": 2},
    ],
}

Result = tuple[list[float], dict[str, Tensor], list[Tensor]]


def settings_of(name: str) -> LossSettings:
    return LossSettings(loss=SFTSettings(), load_balancing=0.5, router_bias=0.25 if name in BIASED else 0.0)


def engine_of(name: str, mesh: Mesh, **changes: Any) -> Engine:
    """In float64, with transformers' plain loop over the experts: its grouped matmul has no float64."""
    model = small_model(name).double()
    model.set_experts_implementation("eager")
    return make_engine(mesh, settings_of(name), model, **changes)


def result_of(engine: Engine) -> Result:
    """Loss, router loss and gradient norm, the whole gradients, and the biases of the routers after they have moved."""
    with float64_throughout():
        sums = engine.gradients(engine.prepare(make_samples()))
        total = torch.stack([sums.loss, sums.statistics["router"][0].double()])
        dist.all_reduce(total, group=engine.mesh.loss.group)
        found = {}
        for key, parameter in engine.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, key
            found[key] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
        norm = gradient_norm(engine.parameters, engine.mesh.device)
        assert engine.router is not None
        engine.router.move_biases(torch.tensor(True))
    biases = [router.owner._buffers[router.bias].clone() for router in routers_of(engine.model) if router.owner]  # type: ignore[union-attr]
    return [*total.tolist(), float(norm)], found, biases


def on_one(rank: int, world: int, name: str) -> Result:
    return result_of(engine_of(name, make_mesh("cpu")))


def on_several(rank: int, world: int, name: str) -> list[Result]:
    found = []
    for layout in LAYOUTS[world]:
        engine = engine_of(name, make_mesh("cpu", **layout))
        if layout["expert"] > 1:
            placements = {
                parameter.placements for key, parameter in engine.model.named_parameters() if ".experts." in key
            }
            assert placements == {(*[Replicate()] * ("replicate" in layout), Shard(1), Shard(0))}
        found.append(result_of(engine))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_what_one_process_gives(world: int, name: str) -> None:
    ((numbers, gradients, biases),) = run_ranks(1, on_one, name)
    assert numbers[1] > 0.1, "the routers' loss has an effect"
    for rank in run_ranks(world, on_several, name):
        for layout, (found, others, moved) in zip(LAYOUTS[world], rank, strict=True):
            assert found == pytest.approx(numbers, rel=1e-12), layout
            assert largest_difference(others, gradients)[0] < 1e-12, layout
            assert all(torch.equal(one, other) for one, other in zip(moved, biases, strict=True)), layout
        assert len(biases) == (name in BIASED)
