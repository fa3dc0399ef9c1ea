"""Training with adapters on experts: every adapter moves, layouts agree, and a resumed run is bitwise equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.config import Config, LoraConfig, config_from_dict
from padfree.distributed import Mesh, make_mesh
from padfree.model.export import export_adapters, export_model
from padfree.model.load import clean_name
from padfree.model.lora import is_adapter
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.train.setup import build_engine
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, LR, VOCABULARY, make_engine, make_samples, small_model, two_steps, weights_of

ROUTERS = {"qwen3_moe": "gate", "mixtral": "gate", "gpt_oss": "router", "deepseek_v3": "gate", "glm4_moe": "gate"}
LORA = LoraConfig(rank=2, alpha=4.0, targets=("all-linear", "experts", "gate"))
CHANGES: dict[str, dict[str, Any]] = {
    "full": {"checkpointing": "full"},
    "compiled, full": {"compile": "eager", "checkpointing": "full"},
    "offloaded": {"offload": True},
}

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def outcome(mesh: Mesh, **changes: Any) -> Outcome:
    torch._dynamo.reset()
    engine = make_engine(mesh, LOSSES["sft"], small_model("qwen3_moe"), lora=LORA, **changes)
    reports, weights = two_steps(engine, make_samples())
    return [(report.loss, report.gradient_norm) for report in reports], {
        clean_name(name): weight for name, weight in weights.items()
    }


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == [pytest.approx(numbers, rel=1e-5) for numbers in expected[0]]
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in ROUTERS), ("qwen3_moe", "muon")])
def test_every_adapter_moves_in_ten_steps(name: str, optimizer: str, mesh: Mesh) -> None:
    settings = OptimizerConfig(name=optimizer, lr=LR)  # type: ignore[arg-type]
    lora = replace(LORA, targets=("all-linear", "experts", ROUTERS[name]))
    engine = make_engine(mesh, LOSSES["sft"], small_model(name), lora=lora, optimizer=settings)
    before = weights_of(engine.model)
    losses = [engine.step(make_samples(), step=step).loss for step in range(10)]
    after = weights_of(engine.model)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == {key for key in before if is_adapter(key)}
    assert any(".experts.lora_A.gate_up_proj" in key for key in moved)
    assert any(f".{ROUTERS[name]}.lora_A." in key for key in moved)
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def single(mesh: Mesh) -> Outcome:
    return outcome(mesh)


@pytest.mark.parametrize("name", CHANGES)
def test_no_transformation_changes_what_is_learned(name: str, mesh: Mesh, single: Outcome) -> None:
    assert_same(outcome(mesh, **CHANGES[name]), single)


def ranks(rank: int, world: int, folder: Path) -> list[Outcome]:
    data, context = make_mesh("cpu"), make_mesh("cpu", context=2)
    engine = make_engine(data, LOSSES["sft"], small_model("qwen3_moe"), lora=LORA)
    engine.step(make_samples())
    Checkpointer(folder).save(1, model=engine.model, optimizer=engine.optimizer, extra={}, rank_state={})
    export_model(engine.model, folder / "merged")
    export_adapters(engine.model, folder / "adapter")
    return [outcome(data), outcome(data, offload=True), outcome(context, checkpointing="full")]


def test_two_ranks_learn_what_one_learns(mesh: Mesh, single: Outcome, tmp_path: Path) -> None:
    """Data ranks, offloading, context ranks; one process resumes their checkpoint and exports the same."""
    for result in run_ranks(2, ranks, tmp_path)[0]:
        assert_same(result, single)
    engine = make_engine(mesh, LOSSES["sft"], small_model("qwen3_moe"), lora=LORA)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load(checkpointer.latest() or "", model=engine.model, optimizer=engine.optimizer)
    export_model(engine.model, tmp_path / "own merged")
    export_adapters(engine.model, tmp_path / "own adapter")
    for name in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
        exported, own = load_file(tmp_path / name), load_file(tmp_path / f"own {name}")
        assert exported.keys() == own.keys()
        assert any(".experts." in key for key in own)
        for key, tensor in own.items():
            torch.testing.assert_close(exported[key], tensor, atol=1e-6, rtol=0, msg=key)
    assert engine.step(make_samples()).loss == pytest.approx(single[0][1][0], rel=1e-5)


@pytest.mark.parametrize("reshard", [True, False], ids=["fsdp", "master weights"])
def test_bfloat16_holds_the_base_in_bfloat16(reshard: bool, mesh: Mesh, single: Outcome) -> None:
    numbers, weights = outcome(mesh, dtype=torch.bfloat16, reshard=reshard)
    assert {weight.dtype for name, weight in weights.items() if is_adapter(name)} == {torch.float32}
    assert numbers[0][1] == pytest.approx(single[0][0][1], rel=0.05)
    names = [name for name in weights if ".experts.lora_B." in name]
    moved, expected = (torch.cat([found[1][name].flatten() for name in names]) for found in ((0, weights), single))
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.95


def make_config(folder: Path) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(folder / "model"), "init": "random"},
            "data": {"path": ["in memory"]},
            "batch": {"samples": 4, "max_tokens": 16},
            "optimizer": {"lr": LR},
            "lora": {"rank": 2, "dropout": 0.1, "targets": ["all-linear", "experts", "gate"]},
            "run": {"folder": str(folder / "run"), "device": "cpu"},
        }
    )


def test_resume_is_bitwise(mesh: Mesh, tmp_path: Path) -> None:
    """Also with dropout, which uses the rank's random state."""
    small_model("glm4_moe", vocab_size=VOCABULARY).config.save_pretrained(tmp_path / "model")
    config, samples = make_config(tmp_path), make_samples()
    engine = build_engine(config, mesh)
    for _ in range(2):
        engine.step(samples)
    path = Checkpointer(tmp_path / "checkpoints").save(
        2, model=engine.model, optimizer=engine.optimizer, extra={}, rank_state={"cpu": torch.get_rng_state()}
    )
    expected = [engine.step(samples).loss for _ in range(2)]
    again = build_engine(config, mesh)
    _, rank_state = Checkpointer(path.parent).load(path, model=again.model, optimizer=again.optimizer)
    assert rank_state is not None
    torch.set_rng_state(rank_state["cpu"])
    assert [again.step(samples).loss for _ in range(2)] == expected
    assert any(".experts.lora_" in name for name, _ in again.model.named_parameters())
    for (name, weight), other in zip(engine.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
