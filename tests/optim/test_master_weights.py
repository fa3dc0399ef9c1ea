"""Float32 master weights in a single process, against FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from padfree.config import LoraConfig
from padfree.distributed import Mesh
from padfree.optim.master_weights import compute_copies
from padfree.sharding.parallelize import inside
from tests.train.cases import LOSSES, MAX_TOKENS, alone, make_engine, make_samples, small_model, two_steps, weights_of

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
