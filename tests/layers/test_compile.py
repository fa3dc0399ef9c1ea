"""What compiled layers keep for backward: which products, whatever the cache knows, and with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.layers import compile as compiled
from padfree.layers.compile import Kept, mark_kept
from padfree.layers.offload import HostMemory, _Call, _unpack
from padfree.train.engine import Engine
from tests.models import build
from tests.train.cases import LOSSES, make_engine, make_samples

BACKEND = "aot_eager_decomp_partition"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with distributed(device=request.param) as device:
        yield make_mesh(device)


class Layer(nn.Module):
    """Names of the products are those of the attributes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor, cu_seqlens: Tensor, longest: Tensor) -> Tensor:
        q, k, v = (layer(x).view(-1, 2, 4) for layer in (self.q, self.k, self.v))
        attended, _ = torch.ops.padfree.self_attention(
            q * 2, k, v, None, cu_seqlens, longest, 0.5, None, None, "reference"
        )
        x = x + self.o(attended.flatten(1))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def kept_by(kept: Kept) -> set[str]:
    """The modules whose products are kept; attention's results, both of them, as well."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        mark_kept(graph.graph, kept)
        graphs.append(graph)
        return graph.forward

    torch.compile(Layer(), backend=backend)(
        torch.randn(5, 8), torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor(3)
    )
    (graph,) = graphs
    nodes = [node for node in graph.graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    assert len([node for node in nodes if "self_attention" in str(node.target)]) == 1
    assert len([node for node in nodes if "getitem" in str(node.target)]) >= 1
    weights = [str(node.args[1]) for node in nodes if "linear" in str(node.target)]
    return {name for name in ("q", "k", "v", "o", "gate", "up", "down") if any(f"_{name}_" in text for text in weights)}


def test_what_is_kept() -> None:
    assert kept_by("selective") == set()
    assert kept_by("host") == {"q", "k", "v", "o"}


@pytest.mark.parametrize("kept", ["none", "selective", "host"])
def test_marks_are_not_lost_in_the_compilers_cache(kept: Kept) -> None:
    """The cache of `torch.compile` on disk knows a graph by its operations: marks must keep it away."""
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


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Of several micro-batches, with a pass without gradients before."""
    samples = make_samples((30, 3, 17, 40, 1, 12))
    engine.scorer.logprobs(samples)
    prepared = engine.prepare(samples)
    assert len(prepared.rows) > 1
    engine.gradients(prepared)
    return {name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def expected(mesh: Mesh) -> dict[str, Tensor]:
    """With everything kept on the device."""
    return gradients(engine_with(mesh, "none"))


@pytest.mark.slow
@pytest.mark.parametrize(("away", "pace"), [(0.6, 1.6), (1.0, 9.0)])
def test_gradients_are_the_same_when_activations_wait_on_the_host(
    mesh: Mesh, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, away: float, pace: float
) -> None:
    memories: list[HostMemory] = []

    def memory(num_layers: int) -> HostMemory:
        memories.append(HostMemory(num_layers, away=away, pace=pace, smallest=0))
        return memories[-1]

    sent: list[int] = []
    copy = HostMemory.copy
    monkeypatch.setattr(compiled, "HostMemory", memory)
    monkeypatch.setattr(
        HostMemory, "copy", lambda self, pairs, to_host: sent.append(to_host) or copy(self, pairs, to_host=to_host)
    )
    engine = engine_with(mesh, "host")
    found = gradients(engine)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert set(sent) == {True, False}, "to the host and back"
    (memory_,) = memories
    for call in memory_.calls.values():
        assert not call.away, "brought back"
        assert not call.parcels, "and not held on to"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "host"])
def test_gradients_are_the_same_with_operators_of_our_own(
    mesh: Mesh, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    """Norms, rotations, activations and products, as in wide layers on a GPU."""
    counts = []
    monkeypatch.setattr(compiled, "_pays", lambda row: True)
    monkeypatch.setattr(compiled, "_has_epilogues", lambda row: True)
    monkeypatch.setattr(compiled, "HostMemory", lambda num_layers: HostMemory(num_layers, smallest=0))
    for name in ("replace_norms", "replace_gated"):
        replace = getattr(compiled, name)
        monkeypatch.setattr(compiled, name, lambda *args, replace=replace: counts.append(replace(*args)) or counts[-1])
    found = gradients(engine_with(mesh, checkpointing, backend="inductor"))
    assert set(counts) == {4, 1}, "two norms and two rotated ones, and one activation, in each graph"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_what_vmap_sees_stays_where_it_is() -> None:
    call = _Call(HostMemory(1, away=1.0, smallest=0), nn.Linear(2, 2), None, stays=False)
    tickets = []
    torch.vmap(lambda row: tickets.append(call.pack(row)) or row)(torch.randn(3, 4))  # type: ignore[func-returns-value]
    assert [ticket.parcel for ticket in tickets] == [None]


def test_what_is_let_go_leaves_the_device() -> None:
    memory = HostMemory(4, away=0.5, pace=1.0, smallest=0)
    call = _Call(memory, nn.Linear(2, 2), None, stays=False)
    tensor = torch.randn(3, 4)
    tickets = [call.pack(tensor), call.pack(tensor.view(4, 3)), call.pack(call.layer.weight)]
    assert [ticket.parcel is not None for ticket in tickets] == [True, True, False]
    (parcel,) = call.parcels.values()
    call.let_go()
    assert parcel.device is None
    assert torch.equal(_unpack(tickets[1]), tensor.view(4, 3))
    assert parcel.device is not None, "somebody will still ask for it"
    assert torch.equal(_unpack(tickets[0]), tensor)
    assert parcel.device is None
    assert _unpack(tickets[2]) is call.layer.weight


def test_layers_are_let_go_of_at_the_pace_of_the_link() -> None:
    memory = HostMemory(10, away=0.5, pace=2.0)
    assert memory.num_away == 5
    assert [number for number, layers in enumerate(memory.let_go) for _ in layers] == [2, 4, 6, 8]
    assert memory.let_go[8] == [3], "layer 4 is let go of when backward begins"
