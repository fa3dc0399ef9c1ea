"""Training every kind of mixer: two data ranks equal one process, bit-identical resume, export for transformers.

One pair of processes tests all kinds, because starting processes is slow.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from padfree.cp import shard
from padfree.distributed import Mesh, make_mesh
from padfree.model.export import export_model
from padfree.model.mixers import installed
from padfree.model.named_tensors import local_part, named_tensors
from padfree.model.routers import routers_of
from padfree.testing.models import build, row
from padfree.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.rounding import largest_difference
from tests.train.cases import make_samples, weights_of
from tests.train.trainer_cases import make_config, make_trainer

BIAS_RATE = 2.0**-6  # small, so that the load order does not change in two steps
KINDS = {
    "gated_delta": "qwen3_5",
    "mamba1": "jamba",
    "mamba2": "bamba",
    "lightning": "minimax",
    "short_convolution": "lfm2_moe",  # and routers with biases
    "chunked attention": "llama4",
    "biased routers": "deepseek_v3",  # biases in another module
}
BIASED = ("lfm2_moe", "deepseek_v3")
ROW = [9, 3, 12]


def trainer_of(folder: Path, name: str, where: str, mesh: Mesh, steps: int = 2) -> Trainer:
    loss: dict[str, Any] = {"loss": {"router_bias": BIAS_RATE}} if name in BIASED else {}
    config = make_config(
        folder / f"{name} {where}",
        folder / name,
        batch={"samples": 4, "max_tokens": 16},
        checkpoint={"every": 1, "keep": 2},
        run={"steps": steps},
        **loss,
    )
    return make_trainer(config, mesh, make_samples((5, 9, 4, 12, 7, 6, 3, 8)))


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.engine.gradients(trainer.engine.prepare(make_samples()))
    found = {}
    for name, parameter in trainer.engine.model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
    return found


def biases_of(trainer: Trainer) -> list[Tensor]:
    routers = [router for router in routers_of(trainer.engine.model) if router.owner is not None]
    return [router.owner._buffers[router.bias].clone() for router in routers]  # type: ignore[union-attr]


def held(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's shards of all parameters and buffers."""
    return {name: local_part(tensor).clone() for name, tensor in named_tensors(trainer.engine.model).items()}


def two_ranks(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    mesh, found = make_mesh("cpu"), {}
    for name in KINDS.values():
        trainer = trainer_of(folder, name, "two", mesh)
        gradients = gradients_of(trainer)
        assert trainer.run().step == 2
        if rank == 0:
            shutil.rmtree(folder / f"{name} two" / "checkpoints" / "step-00000002")
        dist.barrier()
        resumed = trainer_of(folder, name, "two", mesh)
        assert resumed.step == 1
        assert resumed.run().step == 2
        once, again = held(trainer), held(resumed)
        assert once.keys() == again.keys()
        with torch.no_grad():
            logits = resumed.engine.model(**shard(row(ROW, vocabulary=40)).model_inputs()).logits[0]
        export_model(resumed.engine.model, folder / f"{name} exported")
        found[name] = {
            "gradients": gradients,
            "weights": weights_of(resumed.engine.model),
            "biases": biases_of(resumed),
            "logits": logits,
            "changed by the resume": [key for key in once if not torch.equal(once[key], again[key])],
        }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    for name in KINDS.values():
        groups = {"n_group": 1} if name == "deepseek_v3" else {}  # in groups of two, the biases would move together
        build(name, intermediate_size=32, **groups).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, two_ranks, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_what_one_process_gives_and_go_on_bitwise(
    kind: str, folder: Path, found: list[dict[str, dict[str, Any]]], mesh: Mesh
) -> None:
    name = KINDS[kind]
    trainer = trainer_of(folder, name, "one", mesh)
    kinds = {mixer.kind for module in trainer.engine.model.modules() if (mixer := installed(module)) is not None}
    assert kinds == ({kind} if "_" in kind or kind[-1].isdigit() or kind == "lightning" else set())
    gradients = gradients_of(trainer)
    trainer.run()
    for rank in (0, 1):
        assert found[rank][name]["changed by the resume"] == []
    first = found[0][name]
    assert largest_difference(first["gradients"], gradients)[0] < 1e-5
    assert largest_difference(first["weights"], weights_of(trainer.engine.model))[0] < 1e-5
    biases = biases_of(trainer)
    assert len(biases) == len(first["biases"])
    assert all(torch.equal(one, other) for one, other in zip(first["biases"], biases, strict=True))
    assert bool(biases) == (name in BIASED)
    assert all(bias.abs().max() >= BIAS_RATE for bias in biases), "the biases have moved"


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_what_was_trained(kind: str, folder: Path, found: list[dict[str, dict[str, Any]]]) -> None:
    first = found[0][KINDS[kind]]
    model = AutoModelForCausalLM.from_pretrained(folder / f"{KINDS[kind]} exported")
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in first["weights"].items())
    biases = [router.owner._buffers[router.bias] for router in routers_of(model) if router.owner is not None]
    assert all(torch.equal(one, other) for one, other in zip(biases, first["biases"], strict=True))
    batch = row(ROW, vocabulary=40)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids in batch.unpack(batch.input_ids)])
    assert largest_difference({"logits": logits}, {"logits": first["logits"]})[0] < 1e-5
