"""Sharding rules for some parameters: training, norm, clipping and checkpoints equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.distributed import Mesh, make_mesh
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sharding.rules import ParameterInfo, Rule, rules_by_module, shard_everything
from padfree.train.engine import Engine, LossSettings
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, make_engine, make_samples, small_model, weights_of

CLIPPED = LossSettings(loss=LOSSES["sft"].loss, max_grad_norm=0.5)

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def planted(mesh: Mesh) -> list[Rule]:
    """Experts are sharded over two ranks and replicated on two more; key and value projections by column."""
    pairs = mesh.over(shard=("shard",), replicate=("context",))
    return [
        Rule("experts", lambda info: info.role == "expert", pairs),
        Rule("columns", is_key_projection, mesh.fsdp, dim=1),
    ]


def is_key_projection(info: ParameterInfo) -> bool:
    """By role and shape: key and value projections have fewer outputs than inputs."""
    return info.role == "hidden" and info.parameter.shape[0] < info.parameter.shape[1]


def engine_of(mesh: Mesh, optimizer: str, rules: list[Rule]) -> Engine:
    settings = OptimizerConfig(name=optimizer, lr=1e-2, eps=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    model = small_model("qwen3_moe", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    return make_engine(mesh, CLIPPED, model, optimizer=settings, rules=rules)


def steps(engine: Engine, count: int) -> list[tuple[float, float]]:
    reports = [engine.step(make_samples()) for _ in range(count)]
    return [(report.loss, report.gradient_norm) for report in reports]


def on_one(rank: int, world: int, optimizer: str) -> Outcome:
    engine = engine_of(make_mesh("cpu"), optimizer, [])
    return steps(engine, 4), weights_of(engine.model)


def on_four(rank: int, world: int, optimizer: str, folder: Path) -> Outcome:
    """Two steps, a checkpoint, and two more steps by an engine that has loaded it, without the rules and with them."""
    mesh = make_mesh("cpu", context=2)
    first = engine_of(mesh, optimizer, planted(mesh))
    placements = {
        name: parameter.placements
        for name, parameter in first.model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    assert {each for name, each in placements.items() if ".experts." in name} == {(Replicate(), Shard(0))}
    assert {each for name, each in placements.items() if ".k_proj." in name} == {(Shard(1),)}
    assert {each for name, each in placements.items() if ".o_proj." in name} == {(Shard(0),)}
    found = steps(first, 2)
    checkpointer = Checkpointer(folder)
    path = checkpointer.save(2, model=first.model, optimizer=first.optimizer, extra={}, rank_state={})
    expected = steps(first, 2)
    for rules in ([], planted(mesh)):
        engine = engine_of(mesh, optimizer, rules)
        checkpointer.load(path, model=engine.model, optimizer=engine.optimizer)
        again = steps(engine, 2)
        assert (again == expected) if rules else again == [pytest.approx(each, rel=1e-5) for each in expected]
    assert all(torch.equal(weight, weights_of(first.model)[name]) for name, weight in weights_of(engine.model).items())
    return [*found, *again], weights_of(engine.model)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_planted_rule_changes_no_number(optimizer: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, on_one, optimizer)
    for numbers, weights in run_ranks(4, on_four, optimizer, tmp_path):
        assert numbers == [pytest.approx(each, rel=1e-5) for each in expected[0]]
        assert expected[0][0][1] > 0.5, "the gradient is clipped"
        for name, weight in expected[1].items():
            torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=0)


def test_the_first_rule_that_applies_decides(mesh: Mesh) -> None:
    model = small_model("qwen3_moe")
    heads = Rule("heads", lambda info: info.role == "head", mesh.fsdp)
    matrices = Rule("matrices", lambda info: info.parameter.ndim >= 2, mesh.fsdp)
    found = rules_by_module(model, [heads, matrices, shard_everything(mesh.fsdp)])
    names = {name: found[module].name for name, module in model.named_modules() if module in found}
    assert names["lm_head"] == names["model.layers.0.mlp.gate"] == "heads"
    assert names["model.layers.0.mlp.experts"] == names["model.embed_tokens"] == "matrices"
    assert names["model.norm"] == "fsdp"
    with pytest.raises(AssertionError, match="matches rule 'fsdp', but its module uses 'matrices'"):
        rules_by_module(small_model("llama_tied"), [matrices, shard_everything(mesh.fsdp)])  # biases beside weights
