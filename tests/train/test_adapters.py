"""Adapters: the same result on every layout, frozen weights unchanged, bit-identical resume, other base refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import Checkpointer
from padfree.config import Config, LoraConfig, config_from_dict
from padfree.distributed import Mesh, make_mesh
from padfree.model.lora import is_adapter
from padfree.model.named_tensors import clean_name
from padfree.train.engine import Engine
from padfree.train.setup import build_engine, export
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LOSSES, LR, VOCABULARY, make_engine, make_samples, small_model, two_steps

LORA = LoraConfig(rank=2, alpha=4.0)
CHANGES: dict[str, dict[str, Any]] = {
    "full": {"checkpointing": "full"},
    "compiled, full": {"compile": "eager", "checkpointing": "full"},
    "offloaded": {"offload": True},
}

Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def outcome(mesh: Mesh, loss: str = "sft", **changes: Any) -> Outcome:
    torch._dynamo.reset()
    engine = make_engine(mesh, LOSSES[loss], tied_model(), lora=LORA, **changes)
    reports, weights = two_steps(engine, make_samples())
    return [(report.loss, report.gradient_norm) for report in reports], {
        clean_name(name): weight for name, weight in weights.items()
    }


def tied_model() -> Any:
    return small_model("llama_tied", num_hidden_layers=1)


@pytest.fixture(scope="module")
def single(mesh: Mesh) -> Outcome:
    found = outcome(mesh)
    start = {name: parameter.detach() for name, parameter in tied_model().named_parameters()}
    for name, weight in found[1].items():
        if is_adapter(name):
            assert weight.abs().max() > 0, name
        else:
            assert torch.equal(weight, start[name]), name
    assert found[0][1][0] < found[0][0][0]
    return found


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == [pytest.approx(numbers, rel=1e-5) for numbers in expected[0]]
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CHANGES)
def test_no_transformation_changes_what_is_learned(name: str, mesh: Mesh, single: Outcome) -> None:
    assert_same(outcome(mesh, **CHANGES[name]), single)


def ranks(rank: int, world: int, folder: Path) -> list[Outcome]:
    data, context = make_mesh("cpu"), make_mesh("cpu", context=2)
    engine = make_engine(data, LOSSES["sft"], tied_model(), lora=LORA)
    engine.step(make_samples())
    Checkpointer(folder).save(1, model=engine.model, optimizer=engine.optimizer, extra={}, rank_state={})
    return [outcome(data), outcome(data, offload=True), outcome(context, checkpointing="full")]


def test_two_ranks_learn_what_one_learns(mesh: Mesh, single: Outcome, tmp_path: Path) -> None:
    """Data ranks, offloading, context ranks; one process resumes their checkpoints."""
    for result in run_ranks(2, ranks, tmp_path)[0]:
        assert_same(result, single)
    engine = make_engine(mesh, LOSSES["sft"], tied_model(), lora=LORA)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load(checkpointer.latest() or "", model=engine.model, optimizer=engine.optimizer)
    assert engine.step(make_samples()).loss == pytest.approx(single[0][1][0], rel=1e-5)


def test_bfloat16_holds_the_base_in_bfloat16(mesh: Mesh, single: Outcome) -> None:
    numbers, weights = outcome(mesh, dtype=torch.bfloat16)
    assert {weight.dtype for name, weight in weights.items() if is_adapter(name)} == {torch.float32}
    assert {weight.dtype for name, weight in weights.items() if not is_adapter(name)} == {torch.bfloat16}
    assert numbers[0][1] == pytest.approx(single[0][0][1], rel=0.03)
    names = [name for name in weights if ".lora_B." in name]
    moved, expected = (torch.cat([found[1][name].flatten() for name in names]) for found in ((0, weights), single))
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.98


# Checkpoints


def make_config(folder: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"path": ["in memory"]},
        "batch": {"samples": 4, "max_tokens": 16},
        "optimizer": {"lr": LR},
        "lora": {"rank": 2, "dropout": 0.1},
        "run": {"folder": str(folder / "run"), "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model("llama_tied").config.save_pretrained(tmp_path / "model")
    return tmp_path


def save(folder: Path, engine: Engine) -> Path:
    return Checkpointer(folder / "checkpoints").save(
        2,
        model=engine.model,
        optimizer=engine.optimizer,
        extra={},
        rank_state={"cpu": torch.get_rng_state()},
    )


def load(path: Path, engine: Engine) -> None:
    _, rank_state = Checkpointer(path.parent).load(path, model=engine.model, optimizer=engine.optimizer)
    assert rank_state is not None
    torch.set_rng_state(rank_state["cpu"])


def test_resume_is_bitwise_and_reads_the_base_again(mesh: Mesh, folder: Path) -> None:
    """Also with dropout, which uses the rank's random state."""
    config, samples = make_config(folder), make_samples()
    engine = build_engine(config, mesh)
    for _ in range(2):
        engine.step(samples)
    path = save(folder, engine)
    names = json.loads((path / "manifest.json").read_text())["content"]["tensors"]
    assert names
    assert all(is_adapter(name) for name in names)
    expected = [engine.step(samples).loss for _ in range(2)]
    again = build_engine(config, mesh)
    load(path, again)
    assert [again.step(samples).loss for _ in range(2)] == expected
    for (name, weight), other in zip(engine.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_a_checkpoint_of_other_adapters_is_refused(mesh: Mesh, folder: Path) -> None:
    path = save(folder, build_engine(make_config(folder), mesh))
    none = save(folder, build_engine(make_config(folder, lora={"rank": 0, "dropout": 0.0}), mesh))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (
            path,
            {"lora": {"rank": 0}},
            r"the checkpoint has adapters, but this run has none\); set lora.rank, or give another run.folder",
        ),
        (none, {}, r"the checkpoint has no adapters, but this run has some\); set lora.rank to 0"),
        (
            path,
            {"lora": {"rank": 3}},
            r"lora_A.default.weight is \[2, 32\] .* and \[3, 32\] F32 in this run\); give",
        ),
        (path, {"lora": {"alpha": 8.0}}, r"trained with another lora.alpha\); restore the earlier lora.alpha"),
        (
            path,
            {"run": {"seed": 1}},
            r"adapters were trained on other frozen weights\); restore the earlier model.path and its files",
        ),
        (
            path,
            {"lora": {"targets": ["q_proj"]}},
            r"down_proj.lora_A.default.weight is \[2, 32\] F32 in the checkpoint and missing",
        ),
    ]
    for checkpoint, sections, message in cases:
        with pytest.raises(CheckpointError, match=rf"^checkpoint: [^\n]* belongs to another model \([^\n]*{message}"):
            load(checkpoint, build_engine(make_config(folder, **sections), mesh))
    load(path, build_engine(make_config(folder, model={"dtype": "bfloat16"}), mesh))  # the same weights, rounded


def test_the_form_of_the_export_is_a_setting(mesh: Mesh, folder: Path) -> None:
    config = make_config(folder)
    engine = build_engine(config, mesh)
    export(config, engine.model, folder / "merged")
    assert (folder / "merged" / "model.safetensors").exists()
    alone = replace(config, lora=replace(config.lora, export="adapter"))
    with refused("lora.export"):
        build_engine(alone, mesh)
    small_model("llama_tied", vocab_size=VOCABULARY).save_pretrained(folder / "model")
    alone = replace(alone, model=replace(alone.model, init="weights"))
    export(alone, build_engine(alone, mesh).model, folder / "adapter")
    noted = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert noted["base_model_name_or_path"] == str(folder / "model")
    assert noted["lora_dropout"] == 0.1
