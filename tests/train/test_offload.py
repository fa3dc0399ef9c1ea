"""Offloading of weights, gradients and optimizer state to the CPU: the same results, checkpoints and exports.

The tests run on the CPU, where device and host are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.config import config_from_dict
from padfree.distributed import Mesh, make_mesh
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.model.named_tensors import named_tensors
from padfree.sample import with_arrays
from padfree.sharding.norm import gradient_norm
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.setup import build_engine
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, make_engine, make_samples, small_model


def tied_model() -> PreTrainedModel:
    return small_model("llama_tied", num_hidden_layers=1)


def policies(model: PreTrainedModel) -> list[object]:
    """The offload policy of each FSDP2 unit."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    return [group.offload_policy for group in groups if group is not None]


def offloaded(mesh: Mesh, folder: Path, **changes: object) -> list[float]:
    """Two steps, a checkpoint and an export; then one more step of a loaded model."""
    engine = make_engine(mesh, LOSSES["clip"], tied_model(), offload=True, **changes)
    samples = make_samples()
    samples = with_arrays(samples, old_logprobs=engine.scorer.logprobs(samples))
    losses = [engine.step(samples).loss for _ in range(2)]
    export_model(engine.model, folder / "model")
    saved = Checkpointer(folder / "checkpoints")
    path = saved.save(2, model=engine.model, optimizer=engine.optimizer, extra={}, rank_state={})
    steps = transformations(mesh, offload=True)
    model = load_model(folder / "model", shard=lambda model: parallelize(model, steps), offload=True)
    again = make_engine(mesh, LOSSES["clip"], tied_model(), offload=True, **changes)
    again_model = named_tensors(again.model)
    saved.load(path, model=again.model, optimizer=again.optimizer)
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor.full_tensor(), again_model[name].full_tensor()), name
    return [*losses, again.step(samples).loss]


@pytest.fixture(scope="module")
def expected(mesh: Mesh) -> list[float]:
    engine = make_engine(mesh, LOSSES["clip"], tied_model())
    samples = with_arrays(make_samples(), old_logprobs=engine.scorer.logprobs(make_samples()))
    return [engine.step(samples).loss for _ in range(3)]


def ranks(rank: int, world: int, folder: Path) -> list[float]:
    return offloaded(make_mesh("cpu"), folder)


def test_offloading_changes_no_number(mesh: Mesh, expected: list[float], tmp_path: Path) -> None:
    """One process, which also uses FSDP2 then; and two."""
    assert offloaded(mesh, tmp_path / "one", checkpointing="full") == pytest.approx(expected, rel=1e-4)
    assert run_ranks(2, ranks, tmp_path / "two")[0] == pytest.approx(expected, rel=1e-4)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("one", "two"))
    for (name, weight), other in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-5, rtol=0, msg=name)


def test_every_unit_is_offloaded(mesh: Mesh) -> None:
    model = tied_model()
    parallelize(model, transformations(mesh, offload=True))
    assert len(policies(model)) == 2
    assert policies(model) == [CPUOffloadPolicy(pin_memory=False)] * 2  # memory is pinned only for a GPU


def test_norms_are_on_the_device_of_the_run() -> None:
    """Gradients are on the CPU and the run on another device: here the meta device."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    assert gradient_norm([parameter], torch.device("meta")).device.type == "meta"


def test_a_run_on_the_cpu_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    config = config_from_dict(
        {
            "model": {"path": str(tmp_path)},
            "data": {"path": ["in memory"]},
            "batch": {"samples": 4, "max_tokens": 16},
            "parallel": {"offload": True},
            "run": {"folder": str(tmp_path)},
        }
    )
    message = "^parallel.offload: true, but the device is already the CPU; set parallel.offload=false$"
    with pytest.raises(ValueError, match=message):
        build_engine(config, mesh)
