"""The registry has every matmul of a compiled layer, with and without float8, and graph passes match alike in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import flop_registry

from padfree import attach
from padfree.choices import Float8Product
from padfree.cp import shard
from padfree.layers import compile as compiled
from padfree.layers.float8 import use_float8
from padfree.layers.matmuls import Stage, is_matmul, matmuls_of
from padfree.layers.passes import PASSES
from padfree.layers.recompute import Kept
from padfree.model.decoder_linears import decoder_linears
from padfree.model.structure import layers_of
from padfree.testing.models import build, row

PRODUCTS: tuple[Float8Product, ...] = ("output", "input-gradient", "weight-gradient")
SUBSETS: list[tuple[Float8Product, ...]] = [(), PRODUCTS, PRODUCTS[:2], PRODUCTS[:1], PRODUCTS[1:]]
LINEARS = 7
"""The linear layers of a decoder layer of Qwen3: q, k, v, o, gate, up, down."""


class Graphs:
    """The graphs of the layers of a model, and how many changes each pass before autograd made in each."""

    def __init__(self) -> None:
        self.before: list[fx.Graph] = []
        self.forward: list[fx.Graph] = []
        self.backward: list[fx.Graph] = []
        self.counts: dict[str, list[int]] = {}

    def backend(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.before.append(graph.graph)
        compile_graph = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_graph(graph, inputs)

    def _keep(self, graphs: list[fx.Graph]) -> Callable[..., Any]:
        def keep(graph: fx.GraphModule, _: Any) -> Any:
            graphs.append(graph.graph)
            return make_boxed_func(graph.forward)

        return keep


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    found = Graphs()
    monkeypatch.setattr(compiled, "_operators_pay", lambda hidden: True)
    monkeypatch.setattr(compiled, "lookup_backend", lambda name: found.backend if name == "counting" else name)

    def counted(run: Callable[[fx.Graph], int]) -> Callable[[fx.Graph], int]:
        def count(graph: fx.Graph) -> int:
            number = run(graph)
            found.counts.setdefault(run.__name__, []).append(number)
            return number

        return count

    monkeypatch.setattr(
        compiled,
        "PASSES",
        [replace(each, run=counted(each.run)) if each.stage == "before autograd" else each for each in PASSES],
    )
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def train(products: tuple[Float8Product, ...], kept: Kept | None, backend: str = "counting") -> dict[str, Tensor]:
    """Gradients of two packs. `kept`: None leaves the layers eager."""
    model = attach(build("qwen3", num_hidden_layers=1, hidden_size=48), "reference")
    linears = decoder_linears(model)
    assert len(linears) == LINEARS
    for linear in linears.values():
        use_float8(linear, products)
    if kept is not None:
        compiled.compile_layers(layers_of(model), backend, kept)
    for seed, lengths in enumerate(([15, 1, 8], [9, 10])):
        hidden = model.model(**shard(row(lengths, seed=seed), world=1, rank=0).model_inputs()).last_hidden_state
        (hidden.sin() ** 2).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def unlisted(graph: fx.Graph, stage: Stage) -> list[str]:
    """Calls that PyTorch's FLOP counter knows, or that are named like a matmul, but that the registry does not have."""
    found = []
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or is_matmul(target, stage):
            continue
        packet = getattr(target, "overloadpacket", target)
        name = str(getattr(target, "__name__", target))
        if packet in flop_registry or any(word in name.split(".")[0].split("_") for word in ("mm", "matmul", "linear")):
            found.append(str(target))
    return found


@pytest.mark.parametrize("products", SUBSETS, ids=lambda products: "+".join(products) or "none")
def test_all_matmuls_of_a_compiled_layer_are_known_and_all_passes_match(
    graphs: Graphs, products: tuple[Float8Product, ...]
) -> None:
    train(products, "none")
    (before,), (forward,), (backward,) = graphs.before, graphs.forward, graphs.backward
    assert len(matmuls_of(before, "before autograd")) == LINEARS
    assert len(matmuls_of(forward, "after autograd")) == LINEARS
    assert len(matmuls_of(backward, "after autograd")) == 2 * LINEARS
    assert not unlisted(before, "before autograd")
    for graph in (forward, backward):
        assert not unlisted(graph, "after autograd")
    in_float8 = [
        sum(node.target is torch.ops.padfree.float8_matmul.default for node in graph.nodes)
        for graph in (forward, backward)
    ]
    gradients = sum(product in products for product in ("input-gradient", "weight-gradient"))
    assert in_float8 == [LINEARS * ("output" in products), LINEARS * gradients]
    assert graphs.counts == {"rms_norm_pass": [2], "qk_norm_rope_pass": [2], "swiglu_pass": [1]}


@pytest.mark.parametrize("kept", ["none", "input", "selective", "host"])
def test_gradients_in_float8_are_those_of_eager_layers(
    graphs: Graphs, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modes of recompute save the same matmuls as without float8, and no cast."""
    monkeypatch.setattr(compiled, "_operators_pay", lambda hidden: False)
    saved: dict[bool, list[list[str]]] = {}
    for products in ((), PRODUCTS):
        torch._dynamo.reset()
        graphs.forward.clear()
        found = train(products, kept)
        expected = train(products, None)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
        saved[bool(products)] = [results_of(graph) for graph in graphs.forward]
    assert [names.count("matmul") for names in saved[True]] == [names.count("matmul") for names in saved[False]]
    for names in saved[True]:
        assert names.count("cast") <= (4 if kept == "none" else 0), "in place of the inputs, which are twice as large"


def results_of(graph: fx.Graph) -> list[str]:
    """For each result of a forward graph, i.e. its output and what it saves: matmul, cast or other."""
    (output,) = graph.find_nodes(op="output")
    found = []
    for node in output.all_input_nodes:
        while node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
            node = node.args[0]
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
            found.append("cast")
        else:
            found.append("matmul" if is_matmul(node.target, "after autograd") else "other")
    return found


def test_casts_are_shared(graphs: Graphs) -> None:
    """q, k and v read one cast of their input, gate and up another; in backward likewise."""
    train(PRODUCTS, "none")
    (forward,), (backward,) = graphs.forward, graphs.backward

    def calls(graph: fx.Graph, name: str) -> int:
        return len(graph.find_nodes(op="call_function", target=getattr(torch.ops.padfree, name).default))

    assert calls(forward, "float8_rows") == LINEARS + 4, "seven weights; inputs of qkv, o, gate and up, down"
    assert calls(backward, "float8_rows") == LINEARS, "output gradients"
    both = calls(forward, "float8_columns") + calls(backward, "float8_columns")
    assert both == 2 * LINEARS + 4, "weights, output gradients, inputs"
    of_weights = [
        node
        for node in backward.find_nodes(op="call_function", target=torch.ops.padfree.float8_columns.default)
        if len(node.args) == 3
    ]
    assert len(of_weights) == LINEARS, "no cast of a weight is kept from forward to backward"


def test_no_other_file_lists_matmuls() -> None:
    """Graph passes and recompute ask the registry."""
    files = list(Path(compiled.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.name == "matmuls.py":
            continue
        for name in ("functional.linear,", "_nn.linear", "aten.addmm", "aten.bmm", "operator.matmul"):
            assert name not in text, f"{file.name}: {name} belongs into layers/matmuls.py"
