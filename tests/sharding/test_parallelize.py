"""No transformation changes what is learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.attention import cpu
from padfree.distributed import Mesh, make_mesh
from padfree.layers.recompute import recompute_layers
from padfree.model.structure import layers_of
from padfree.sharding.parallelize import inside, parallelize, transformations
from padfree.train.step import StepReport
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LOSSES, make_engine, make_samples, small_model, two_steps, weights_of

CHANGES: dict[str, dict[str, Any]] = {
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "compiled, full": {"compile": "eager", "checkpointing": "full"},
    "compiled, selective": {"compile": "aot_eager", "checkpointing": "selective"},
}
SHARDED = ("selective", "compiled, full", "compiled, selective")

Outcome = tuple[list[StepReport], dict[str, Tensor]]


def tied_model() -> PreTrainedModel:
    return small_model("llama_tied", num_hidden_layers=1)


def outcome(mesh: Mesh, **changes: Any) -> Outcome:
    torch._dynamo.reset()
    return two_steps(make_engine(mesh, LOSSES["sft"], tied_model(), **changes), make_samples())


@pytest.fixture(scope="module")
def reference(mesh: Mesh) -> Outcome:
    return outcome(mesh)


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=tolerance)
        assert mine.gradient_norm == pytest.approx(other.gradient_norm, rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", CHANGES)
def test_one_process(name: str, mesh: Mesh, reference: Outcome) -> None:
    assert_same(outcome(mesh, **CHANGES[name]), reference)


def sharded(rank: int, world: int) -> tuple[dict[str, Outcome], bool]:
    mesh = make_mesh("cpu", context=2)
    found = {name: outcome(mesh, **CHANGES[name]) for name in SHARDED}
    model = tied_model()
    parallelize(model, transformations(mesh))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return found, tied


def test_levels_by_layer_without_a_compiler(mesh: Mesh) -> None:
    found = []
    for checkpointing in ("none", "1 full, 1 none, 1 selective"):
        engine = make_engine(mesh, LOSSES["sft"], small_model(num_hidden_layers=3), checkpointing=checkpointing)
        found.append(two_steps(engine, make_samples()))
        recomputed = [layer.gradient_checkpointing for layer in layers_of(engine.model)]
    assert recomputed == [True, False, True]
    assert_same(found[1], found[0], tolerance=0.0)


@pytest.mark.slow
def test_two_context_ranks(reference: Outcome) -> None:
    """Recomputation repeats the collectives of attention on both ranks. Tied embeddings stay one parameter."""
    found, tied = run_ranks(2, sharded)[0]
    assert tied
    for result in found.values():
        assert_same(result, reference)


def test_checkpointing_computes_layers_again(mesh: Mesh) -> None:
    calls: list[str] = []
    for mode in ("none", "full"):
        engine = make_engine(mesh, LOSSES["sft"], checkpointing=mode, max_tokens=1000)
        for layer in layers_of(engine.model):
            layer.mlp.register_forward_pre_hook(lambda *_, mode=mode: calls.append(mode))
        engine.step(make_samples(), lr_factor=0.0)
    assert (calls.count("none"), calls.count("full")) == (2, 4)


def test_compiled_layers_keep_the_output_of_attention(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpointing stores fewer bytes than none, and computes attention only once."""
    calls: list[str] = []
    held: dict[str, int] = {}
    attend = cpu.BACKEND.forward
    monkeypatch.setattr(cpu.BACKEND, "forward", lambda *args: calls.append(mode) or attend(*args))
    for mode in ("none", "selective"):
        torch._dynamo.reset()
        engine = make_engine(
            mesh,
            LOSSES["sft"],
            small_model(num_hidden_layers=1),
            compile="aot_eager_decomp_partition",
            checkpointing=mode,
            max_tokens=1000,
        )
        prepared = engine.prepare(make_samples())
        calls = [call for call in calls if call != mode]  # without the calls of the probe, which runs once per process
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor,  # type: ignore[func-returns-value]
            lambda tensor: tensor,
        ):
            engine.gradients(prepared)
        held[mode] = sum(kept)
    assert held["selective"] < 0.5 * held["none"]
    assert (calls.count("none"), calls.count("selective")) == (1, 1), "once for the layer"


@pytest.mark.parametrize("checkpointing", ["none", "selective", "host"])
def test_varying_lengths_are_compiled_once(mesh: Mesh, checkpointing: str) -> None:
    """Also if a length or a number of samples occurs twice in succession, which looks like a constant."""
    torch._dynamo.reset()
    counters.clear()
    model = small_model(num_hidden_layers=1)
    engine = make_engine(mesh, LOSSES["sft"], model, compile="aot_eager", checkpointing=checkpointing, max_tokens=1000)
    rng = np.random.default_rng(0)
    graphs = []
    for step in range(20):
        lengths = tuple(int(n) for n in rng.integers(2, 14, size=int(rng.integers(1, 6))))
        engine.step(make_samples(lengths if step > 2 else (5, 7, 7), seed=step), lr_factor=0.0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
    assert not counters["graph_break"]


def test_bfloat16_rounds_the_model_and_not_the_batch(mesh: Mesh) -> None:
    """FSDP2 could cast the inputs of forward; token weights and log-probabilities must stay float32."""
    engine = make_engine(mesh, LOSSES["sft"], tied_model(), dtype=torch.bfloat16)
    ((batch, _),) = engine.prepare(make_samples((30,))).packs
    assert inside(engine.model, lambda model, given: {given.local.weights.dtype}, batch) == {torch.float32}


def test_bfloat16_has_float32_master_weights(mesh: Mesh, reference: Outcome) -> None:
    """A single process also uses FSDP2 then, for the two precisions."""
    engine = make_engine(mesh, LOSSES["sft"], tied_model(), dtype=torch.bfloat16)
    assert isinstance(engine.model, FSDPModule)
    seen = inside(engine.model, lambda model: {model.get_output_embeddings().weight.dtype})
    assert seen == {torch.bfloat16}
    reports, weights = two_steps(engine, make_samples())
    assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert reports[0].gradient_norm == pytest.approx(reference[0][0].gradient_norm, rel=0.03)
    start = weights_of(tied_model())
    moved = torch.cat([(weights[name] - start[name]).flatten() for name in start])
    expected = torch.cat([(reference[1][name] - start[name]).flatten() for name in start])
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.98


def test_layers_that_stay_whole_make_the_same_steps(mesh: Mesh) -> None:
    weights = []
    for reshard in (True, False):
        engine = make_engine(mesh, LOSSES["clip"], small_model(), dtype=torch.bfloat16, reshard=reshard)
        weights.append(two_steps(engine, make_samples())[1])
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_are_gathered_again_after_scoring(mesh: Mesh, reshard: bool) -> None:
    """If the weights change after a pass without backward, the next pass must not use the old ones."""
    engine = make_engine(mesh, LOSSES["sft"], small_model(), dtype=torch.bfloat16, reshard=reshard)
    samples = make_samples()
    before = engine.scorer.logprobs(samples)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)
    after = engine.scorer.logprobs(samples)
    assert abs(before[0] - after[0]).max() > 0.1


def test_layers_that_cannot_be_recomputed_are_refused() -> None:
    model = small_model()
    layers = layers_of(model)
    layers[0] = torch.nn.Linear(2, 2)
    with refused("parallel.checkpointing"):
        recompute_layers(layers_of(model), "full")


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = small_model()
    model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match=r"no nn\.ModuleList with its 7 layers"):
        layers_of(model)
