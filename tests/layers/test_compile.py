"""Compiled layers: the same gradients whatever they save and whichever operators they use; no cache is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from padfree import attach
from padfree.config import config_from_dict
from padfree.cp import shard
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.layers import compile as compiled
from padfree.layers.offload import ActivationOffload
from padfree.layers.passes import PASSES
from padfree.layers.recompute import Kept
from padfree.model.structure import layers_of
from padfree.testing.models import build, row
from padfree.train.engine import Engine
from padfree.train.setup import build_engine
from tests.layers.graph_cases import passes_alone
from tests.refused import refused
from tests.train.cases import LOSSES, make_engine, make_samples

BACKEND = "aot_eager_decomp_partition"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with distributed(device=request.param) as device:
        yield make_mesh(device)


@pytest.mark.parametrize("kept", ["none", "selective", "host"])
def test_marks_are_not_lost_in_the_compilers_cache(kept: Kept) -> None:
    """The disk cache of `torch.compile` identifies a graph by its operations: marks must disable it."""
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(functorch_config.enable_autograd_cache)
        return graph

    before = functorch_config.enable_autograd_cache
    compiled._compiled(torch.fx.symbolic_trace(nn.Linear(2, 2)), (), backend=backend, kept=kept)
    assert seen == [before if kept == "none" else False]
    assert functorch_config.enable_autograd_cache == before


def engine_with(mesh: Mesh, checkpointing: str, backend: str = BACKEND) -> Engine:
    torch._dynamo.reset()
    model = build("qwen3", num_hidden_layers=5).to(mesh.device)
    return make_engine(
        mesh, LOSSES["sft"], model, attention="reference", compile=backend, checkpointing=checkpointing, max_tokens=40
    )


def gradients(engine: Engine, *, scored: bool = False) -> dict[str, Tensor]:
    """Gradients of several micro-batches; with `scored` a forward pass without gradients comes first."""
    samples = make_samples((30, 3, 17, 40, 1, 12))
    if scored:
        engine.scorer.logprobs(samples)
    prepared = engine.prepare(samples)
    assert len(prepared.packs) > 1
    engine.gradients(prepared)
    return {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama4", marks=pytest.mark.slow), "lfm2"])
def test_more_layers_of_the_same_kinds_are_not_compiled_again(name: str) -> None:
    """If a graph depended on its layer index, there would be one per layer, soon more than the compiler allows."""
    model = attach(build(name, **twice_the_layers(name)))
    layers = list(layers_of(model))
    graphs_of(model, layers)  # the first batch decides how mixers are computed, for all existing layers
    torch._dynamo.reset()
    counters.clear()
    compiled.compile_layers(layers, "eager")
    few = graphs_of(model, layers[: len(layers) // 2])
    assert graphs_of(model, layers) == few > 0
    torch._dynamo.reset()


class Doubling(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


def test_the_layers_of_many_models_are_all_compiled() -> None:
    """torch.compile counts the graphs of all models together, and at its limit runs layers without compiling them."""
    torch._dynamo.reset()
    counters.clear()
    count = 20  # the limit is 8 by default
    for number in range(count):
        layer = type(f"Layer{number}", (Doubling,), {})()
        compiled.compile_layers([layer], "eager")
        layer(torch.ones(1, 3, 2))
    assert counters["frames"] == {"total": count, "ok": count}
    torch._dynamo.reset()


def twice_the_layers(name: str) -> dict[str, Any]:
    """Config changes that give a model each of its layers twice."""
    small = build(name).config
    changes: dict[str, Any] = {"num_hidden_layers": small.num_hidden_layers * 2}
    for field in ("layer_types", "no_rope_layers"):
        if hasattr(small, field):
            changes[field] = list(getattr(small, field)) * 2
    return changes


def graphs_of(model: Any, layers: list[nn.Module]) -> int:
    """Number of graphs after batches of several lengths with these layers."""
    model.model.layers = nn.ModuleList(layers)
    with torch.no_grad():
        for seed, lengths in enumerate(([15, 1, 8], [9, 9])):
            model(**shard(row(lengths, seed=seed), world=1, rank=0).model_inputs())
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(scope="module")
def expected(mesh: Mesh) -> dict[str, Tensor]:
    """Without a compiler, everything kept on the device."""
    return gradients(engine_with(mesh, "none", backend="none"))


@pytest.fixture(scope="module")
def offloading(mesh: Mesh) -> tuple[Engine, ActivationOffload]:
    """One engine for several offload settings, which do not affect the compiled layers."""
    offloads: list[ActivationOffload] = []

    def offload(num_layers: int) -> ActivationOffload:
        offloads.append(ActivationOffload(num_layers))
        return offloads[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "ActivationOffload", offload)
        engine = engine_with(mesh, "host")
    (used,) = offloads
    return engine, used


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "layers_per_copy"), [(0.6, 1.6), (1.0, 9.0)])
def test_gradients_are_the_same_when_activations_are_offloaded(
    offloading: tuple[Engine, ActivationOffload],
    expected: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    fraction: float,
    layers_per_copy: float,
) -> None:
    engine, used = offloading
    used.__init__(5, fraction=fraction, layers_per_copy=layers_per_copy, min_bytes=0)  # type: ignore[misc]
    sent: list[int] = []
    copy = ActivationOffload.copy
    monkeypatch.setattr(
        ActivationOffload,
        "copy",
        lambda self, pairs, to_host: sent.append(to_host) or copy(self, pairs, to_host=to_host),
    )
    engine.model.zero_grad()
    found = gradients(engine, scored=fraction < 1)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert set(sent) == {True, False}, "to the host and back"
    assert len(used.calls) == 5
    for call in used.calls.values():
        assert not call.on_host, "prefetched"
        assert not call.copied, "and not held on to"


@pytest.mark.slow
def test_gradients_are_the_same_with_levels_by_layer(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level, with offloaded layers between layers that keep their tensors."""
    offloads: list[ActivationOffload] = []

    def offload(num_layers: int, **options: Any) -> ActivationOffload:
        offloads.append(ActivationOffload(num_layers, min_bytes=0, **options))
        return offloads[-1]

    monkeypatch.setattr(compiled, "ActivationOffload", offload)
    plain = gradients(engine_with(mesh, "none"))
    levels = "1 attention, 1 host, 1 full, 1 selective, 1 none"
    sent: list[int] = []
    copy = ActivationOffload.copy
    monkeypatch.setattr(
        ActivationOffload,
        "copy",
        lambda self, pairs, to_host: sent.append(to_host) or copy(self, pairs, to_host=to_host),
    )
    found = gradients(engine_with(mesh, levels), scored=True)
    for name, gradient in plain.items():
        if mesh.device.type == "cpu":  # the embeddings' gradient is summed in any order on a GPU
            assert torch.equal(found[name], gradient), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    (used,) = offloads
    assert used.offloaded == {1}
    assert set(sent) == {True, False}
    with refused("parallel.checkpointing", about="names 3 layers, but the model has 5"):
        engine_with(mesh, "1 host, 2 none")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "host"])
def test_gradients_are_the_same_with_operators_of_our_own(
    mesh: Mesh, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    """RMSNorm, QK-norm with RoPE, SwiGLU and epilogues, as in wide layers on a GPU."""
    counts: dict[str, set[int]] = {}
    monkeypatch.setattr(compiled, "_operators_pay", lambda hidden: True)
    monkeypatch.setattr(compiled, "_has_epilogues", lambda hidden: True)
    monkeypatch.setattr(compiled, "ActivationOffload", lambda num_layers: ActivationOffload(num_layers, min_bytes=0))

    def counted(run: Any) -> Any:
        def count(graph: Any) -> int:
            number = run(graph)
            counts.setdefault(run.__name__, set()).add(number)
            return number

        return count

    passes = [replace(each, run=counted(each.run)) if each.stage == "before autograd" else each for each in PASSES]
    monkeypatch.setattr(compiled, "PASSES", passes)
    found = gradients(engine_with(mesh, checkpointing, backend="inductor"), scored=checkpointing == "selective")
    assert counts == {"rms_norm_pass": {2}, "qk_norm_rope_pass": {2}, "swiglu_pass": {1}}, "in each graph"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_kernels_none_leaves_the_layer_to_the_compiler(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str
) -> None:
    """From the setting to the graphs: with `none` attention is our only operator in every graph."""
    monkeypatch.setattr(compiled, "_operators_pay", lambda hidden: True)
    monkeypatch.setattr(compiled, "_has_epilogues", lambda hidden: True)
    targets: list[set[str]] = []
    backend: Any = lookup_backend("inductor")

    def seeing(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        patches = dict(config_patches)

        def look(after: fx.Graph) -> None:
            if behind is not None:
                behind(after)
            targets.append({str(node.target) for node in after.nodes if str(node.target).startswith("padfree.")})

        behind = patches.get("post_grad_custom_post_pass")
        patches["post_grad_custom_post_pass"] = Uncached(look)
        without_code = {"inner_compile": passes_alone} if mesh.device.type == "cpu" else {}
        return backend(graph, inputs, config_patches=patches, **without_code)

    monkeypatch.setattr(compiled, "lookup_backend", lambda name: seeing)
    build("qwen3").save_pretrained(tmp_path / "model")
    config = config_from_dict(
        {
            "model": {"path": str(tmp_path / "model"), "attention": "reference"},
            "data": {"path": ["in memory"]},
            "batch": {"samples": 2, "max_tokens": 40},
            "parallel": {"compile": "inductor", "kernels": kernels, "checkpointing": "none"},
            "run": {"folder": str(tmp_path / "run")},
        }
    )
    torch._dynamo.reset()
    engine = build_engine(config, mesh)
    engine.gradients(engine.prepare(make_samples((30, 3))))
    torch._dynamo.reset()
    ours = {name.split(".")[1] for found in targets for name in found}
    attention = {"self_attention", "self_attention_backward"}
    if kernels == "none":
        assert ours == attention
    else:
        norms = {"rms_norm", "add_rms_norm", "rms_norm_backward", "qk_norm_rope", "qk_norm_rope_backward"}
        epilogues = {"matmul_swiglu", "matmul_swiglu_backward", "matmul_add"}
        assert ours == attention | norms | epilogues


class Uncached(CustomGraphPass):
    """A pass that is not in Inductor's caches, so that it is called."""

    def __init__(self, run: Callable[[fx.Graph], None]) -> None:
        self.run = run

    def __call__(self, graph: fx.Graph) -> None:
        self.run(graph)

    def uuid(self) -> None:
        return None
