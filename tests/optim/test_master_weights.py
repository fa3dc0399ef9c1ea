"""Float32 master weights in a single process, against FSDP2."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from padfree.checkpoint import Checkpointer
from padfree.checkpoint.optimizer_state import optimizer_tensors
from padfree.config import LoraConfig
from padfree.distributed import Mesh
from padfree.estimate.memory import estimate_memory
from padfree.model.named_tensors import local_part, named_tensors
from padfree.model.split_weight import ALIGNMENT, SplitWeight, is_split
from padfree.optim.master_weights import compute_copies
from padfree.optim.optimizer_settings import OptimizerName
from padfree.optim.pieces import BLOCK
from padfree.sharding.parallelize import inside
from padfree.train.engine import Engine
from tests.estimate.test_memory import settings
from tests.train.cases import (
    LOSSES,
    MAX_TOKENS,
    OPTIMIZER,
    alone,
    make_engine,
    make_samples,
    small_model,
    two_steps,
    weights_of,
)

BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16}


@pytest.fixture
def mesh() -> Mesh:
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")
    return alone()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("loss", ["sft", "clip"])
@pytest.mark.parametrize("model", ["qwen3", "llama_tied"])
def test_steps_are_those_of_fsdp_to_the_bit(model: str, loss: str, checkpointing: str, mesh: Mesh) -> None:
    """With several micro-batches, which accumulate into float32 gradients, and with recomputation in backward."""
    samples = make_samples()
    found = []
    for reshard in (True, False):
        engine = make_engine(
            mesh, LOSSES[loss], small_model(model), checkpointing=checkpointing, reshard=reshard, **BFLOAT16
        )
        assert isinstance(engine.model, FSDPModule) == reshard
        assert engine.prepare(samples).plan.num_micro_batches > 2
        found.append(two_steps(engine, samples))
    (sharded, sharded_weights), (reports, weights) = found
    for mine, theirs in zip(reports, sharded, strict=True):
        assert (mine.loss, mine.gradient_norm) == (theirs.loss, theirs.gradient_norm)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, sharded_weights[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", ["qwen3", "llama_tied"])
def test_fifty_steps_are_those_of_float32_weights(
    model: str, optimizer: OptimizerName, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split weights, in blocks that cut parameters, against FSDP2's float32 shards. Many weights are ties at first."""
    monkeypatch.setitem(BLOCK, "cpu", 256)
    found: list[tuple[list[tuple[float, float]], dict[str, torch.Tensor]]] = []
    for reshard in (True, False):
        chosen = replace(OPTIMIZER, name=optimizer, lr=1e-3)
        engine = make_engine(
            mesh, LOSSES["sft"], small_model(model), optimizer=chosen, reshard=reshard, max_tokens=64, **BFLOAT16
        )
        with torch.no_grad():
            for parameter in engine.model.parameters():
                bits = local_part(parameter).view(torch.int32)
                bits.copy_(bits & ~0xFFFF | 0x8000)
        steps = [engine.step(make_samples(seed=step % 4)) for step in range(50)]
        assert any(isinstance(parameter, SplitWeight) for parameter in engine.model.parameters()) != reshard
        tensors = {name: local_part(tensor).clone() for name, tensor in named_tensors(engine.model).items()}
        for name, tensor in optimizer_tensors(engine.model, engine.optimizer).items():
            tensors[name] = local_part(tensor).clone()
        found.append(([(report.loss, report.gradient_norm) for report in steps], tensors))
    (expected, tensors), (reports, split_tensors) = found
    assert reports == expected
    assert split_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(split_tensors[name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize("loads_float32", [False, True])
def test_a_checkpoint_does_not_depend_on_how_weights_are_stored(
    loads_float32: bool, mesh: Mesh, tmp_path: Path
) -> None:
    """A checkpoint of float32 weights resumes with split weights, and the other way round, to the bit."""

    def engine(reshard: bool, seed: int) -> Engine:
        torch.manual_seed(seed)
        return make_engine(mesh, LOSSES["sft"], small_model(), reshard=reshard, **BFLOAT16)

    def steps(of: Engine) -> list[tuple[float, float]]:
        reports = [of.step(make_samples(seed=number)) for number in range(3)]
        return [(report.loss, report.gradient_norm) for report in reports]

    checkpointer = Checkpointer(tmp_path)
    first = engine(reshard=not loads_float32, seed=0)
    steps(first)
    path = checkpointer.save(3, model=first.model, optimizer=first.optimizer, extra={}, rank_state={})
    expected = steps(first)
    second = engine(reshard=loads_float32, seed=1)
    steps(second)
    checkpointer.load(path, model=second.model, optimizer=second.optimizer)
    assert steps(second) == expected


def test_a_step_that_is_not_finite_changes_nothing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK, "cpu", 256)
    engine = make_engine(mesh, LOSSES["sft"], reshard=False, **BFLOAT16)
    engine.step(make_samples())
    state = {id(parameter): own for parameter, own in engine.optimizer.state.items()}
    before = [parameter.detach().clone() for parameter in engine.parameters]
    counters = [float(own["step"]) for own in state.values()]
    for parameter in engine.parameters:
        parameter.grad = torch.full(parameter.shape, float("nan"))
    engine.optimizer.step(torch.zeros((), dtype=torch.bool))
    for parameter, values in zip(engine.parameters, before, strict=True):
        assert torch.equal(parameter, values)
    assert [float(own["step"]) for own in state.values()] == counters


def test_the_estimate_counts_split_weights(mesh: Mesh) -> None:
    engine = make_engine(mesh, LOSSES["sft"], small_model(), reshard=False, **BFLOAT16)
    engine.step(make_samples())
    splits = [parameter for parameter in engine.model.parameters() if is_split(parameter)]
    (storage,) = {id(parameter.storage_): parameter.storage_ for parameter in splits}.values()
    config = settings(model={"path": "m", "dtype": "bfloat16"}, parallel={"reshard": False})
    estimate = estimate_memory(config, small_model(), processes=1, device_type="cpu")
    allocated = sum(tensor.nbytes for tensor in (storage.rounded, storage.rest, storage.ties))
    alignment = storage.rounded.numel() - sum(parameter.numel() for parameter in splits)
    assert estimate.weights == pytest.approx(allocated - 4.125 * alignment, abs=1)
    assert alignment < ALIGNMENT * len(splits)
    gathered = estimate_memory(
        settings(model={"path": "m", "dtype": "bfloat16"}), small_model(), processes=1, device_type="cpu"
    )
    assert gathered.weights < estimate.weights
    assert gathered.gathered > estimate.gathered


def test_modules_hold_copies_only_while_they_compute(mesh: Mesh) -> None:
    engine = make_engine(mesh, LOSSES["sft"], small_model("llama_tied"), reshard=False, **BFLOAT16)
    master_weights = dict(engine.model.named_parameters())

    def seen(model: Any) -> set[torch.dtype]:
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, "the embeddings are tied"
        return {parameter.dtype for parameter in model.parameters()}

    assert inside(engine.model, seen) == {torch.bfloat16}
    with compute_copies(engine.model), compute_copies(engine.model):
        pass
    engine.gradients(engine.prepare(make_samples()))
    after = dict(engine.model.named_parameters())
    assert all(after[name] is master_weights[name] for name in master_weights)
    assert {parameter.grad.dtype for parameter in after.values() if parameter.grad is not None} == {torch.float32}
    with pytest.raises(KeyboardInterrupt), compute_copies(engine.model):
        raise KeyboardInterrupt
    assert all(parameter is master_weights[name] for name, parameter in engine.model.named_parameters())


def test_copies_follow_the_masters(mesh: Mesh) -> None:
    engine = make_engine(mesh, LOSSES["sft"], reshard=False, **BFLOAT16)
    samples = make_samples()
    before = engine.scorer.logprobs(samples)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)
    after = engine.scorer.logprobs(samples)
    assert max(abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-2


def test_frozen_weights_need_no_master(mesh: Mesh) -> None:
    pytest.importorskip("peft")
    engine = make_engine(mesh, LOSSES["sft"], reshard=False, lora=LoraConfig(rank=2), **BFLOAT16)
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in engine.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    start = weights_of(engine.model)
    two_steps(engine, make_samples())
    moved = {name for name, weight in weights_of(engine.model).items() if not torch.equal(weight, start[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_parameter_without_a_gradient_does_not_hold_the_others_back(mesh: Mesh) -> None:
    """An expert without tokens: its gradient stays None, and the other gradients of its layer are collected."""
    model = small_model()
    unused = torch.nn.Linear(4, 4)
    model.model.layers[0].register_module("unused", unused)  # type: ignore[operator]
    engine = make_engine(mesh, LOSSES["sft"], model, max_tokens=MAX_TOKENS, reshard=False, **BFLOAT16)
    engine.gradients(engine.prepare(make_samples()))
    assert unused.weight.grad is None
    others = [parameter for name, parameter in model.named_parameters() if "unused" not in name]
    assert all(parameter.grad is not None for parameter in others)
