"""Which norms of a layer become operators, what their backward takes in, and that gradients stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build, row
from torch import Tensor, fx, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from padfree.cp.shard import shard
from padfree.model import attach, hidden_states
from padfree.train.compiled import PRODUCTS, _compiled, compile_layers
from padfree.train.norms.graph import GatherGradients, gather, replace_norms
from padfree.train.parallelize import layers_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler has its own
BACKEND = "aot_eager_decomp_partition"
BACKWARD = torch.ops.padfree.rms_norm_backward.default


def operators(graph: fx.Graph) -> list[str]:
    return [str(node.target).split(".")[1] for node in graph.nodes if "rms_norm" in str(node.target)]


# Which are found


def found_in(name: str, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The operators in the first layer, which with all its roundings gives what it gave before, to the bit."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        if replace_norms(graph.graph, PRODUCTS):
            graph.graph.lint()
            graph.recompile()
        graphs.append(graph.graph)
        return graph.forward

    model = build(name).to(dtype)
    attach(model, "reference")
    batch = shard(row([5, 2]))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.train.norms.graph.AS_WRITTEN", True)
        expected = hidden_states(model, batch)
        layers_of(model)[0].compile(backend=backend)
        found = hidden_states(model, batch)
    assert torch.equal(found, expected)
    return [name for graph in graphs for name in operators(graph)]


PRE_NORM = ["rms_norm", "add_rms_norm"]


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "phi3", "qwen3_moe", "gpt_oss"])
def test_norms_before_products_are_found(name: str) -> None:
    assert found_in(name) == PRE_NORM


@pytest.mark.parametrize("name", ["olmo2", "gemma3", "gpt2"])
def test_others_are_left_to_the_compiler(name: str) -> None:
    """OLMo2's come after products, Gemma's weight is 1 + w in float32, GPT-2's norms take a mean away."""
    assert found_in(name) == []


def test_float64_is_left_alone() -> None:
    assert found_in("llama", torch.float64) == []
    assert found_in("llama", torch.float32) == PRE_NORM


class Parallel(nn.Module):
    """Two norms of one sum, and a third whose result is only added."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Qwen3RMSNorm(8) for _ in range(3))
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = a + b
        first, second, third = (norm(x) for norm in self.norms)
        return x + self.left(first) + self.right(second) + third  # type: ignore[no-any-return]


def test_norms_that_share_a_sum() -> None:
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        assert replace_norms(graph.graph, PRODUCTS) == 2
        graph.graph.lint()
        graph.recompile()
        graphs.append(graph.graph)
        return graph.forward

    module, a, b = Parallel(), torch.ones(1, 3, 8), torch.arange(24.0).view(1, 3, 8)
    torch.testing.assert_close(torch.compile(module, backend=backend)(a, b), module(a, b))
    (graph,) = graphs
    assert operators(graph) == ["add_rms_norm", "rms_norm"]


# What backward takes in


class Layer(nn.Module):
    """Norms of a pre-norm layer without what is between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = Qwen3RMSNorm(width), Qwen3RMSNorm(width)
        for name in ("q", "k", "v", "gate", "up"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.q(y).sigmoid() * self.k(y) * self.v(y)
        y = self.second(x)
        return x + self.gate(y).sigmoid() * self.up(y)  # type: ignore[no-any-return]


def gradients(module: nn.Module, dtype: torch.dtype = torch.float32, rows: int = 7) -> list[Tensor]:
    x = torch.randn(1, rows, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    out = module(x)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, *module.parameters()), dout)]


def backward_nodes(seen: list[fx.Graph]) -> list[fx.Node]:
    return [node for graph in seen for node in graph.nodes if node.target is BACKWARD]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs after the pass."""
    graphs: list[fx.Graph] = []

    def call(self: GatherGradients, graph: fx.Graph) -> None:
        gather(graph)
        graph.lint()
        graphs.append(graph)

    monkeypatch.setattr(GatherGradients, "__call__", call)
    monkeypatch.setattr(GatherGradients, "uuid", lambda self: None)  # no cache: the pass must be called
    return graphs


def assert_taken_in(nodes: list[fx.Node]) -> None:
    """Backward comes to the second norm first: gate, up and the stream; then q, k, v and the stream."""
    assert [len(node.args[0]) for node in nodes] == [2, 3]  # type: ignore[arg-type]
    assert all(node.args[4] is not None for node in nodes)


def test_inductor_computes_the_same_gradients(seen: list[fx.Graph]) -> None:
    """Two lengths, so that the number of tokens is a variable in the second graph."""
    torch._dynamo.reset()
    layer, expected = Layer(), Layer().double()
    compile_layers([layer], "inductor")
    for rows in (7, 11):
        found = gradients(layer, rows=rows)
        exact = gradients(_Exact(expected), torch.float64, rows)
        for mine, right in zip(found, exact, strict=True):
            assert (mine - right).norm() <= 1e-6 * right.norm()
    nodes = backward_nodes(seen)
    assert len(nodes) == 4, "two norms, with a fixed and with any number of tokens"
    assert_taken_in(nodes[:2])
    assert_taken_in(nodes[2:])


class _Exact(nn.Module):
    """The layer with its norms in the type they are given, not in float32."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        for norm in (layer.first, layer.second):
            norm.forward = lambda x, norm=norm: nn.functional.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)  # type: ignore[method-assign, misc]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_inductor_with_bfloat16_errs_no_more_than_before(seen: list[fx.Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 512
    exact = gradients(_Exact(Layer().bfloat16().double()), torch.float64, rows)

    def errors() -> list[float]:
        torch._dynamo.reset()
        layer = Layer().bfloat16()
        compile_layers([layer], "inductor", "selective")
        found = gradients(layer, torch.bfloat16, rows)
        return [float((mine - right).norm() / right.norm()) for mine, right in zip(found, exact, strict=True)]

    mine = errors()
    assert_taken_in(backward_nodes(seen))
    monkeypatch.setattr("padfree.train.compiled.replace_norms", lambda graph, products: 0)
    before = errors()
    assert len(backward_nodes(seen)) == 2, "none of the graphs since"
    assert sum(mine) < 1.1 * sum(before)
    assert max(mine) < 1.1 * max(before)


def test_without_inductor() -> None:
    torch._dynamo.reset()
    layer = Layer()
    expected = gradients(layer)
    compile_layers([layer], BACKEND)
    for mine, right in zip(gradients(layer), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_the_caches_of_the_compiler_know_the_pass() -> None:
    assert GatherGradients().uuid()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches["post_grad_custom_pre_pass"].uuid())
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.train.compiled.lookup_backend", lambda name: backend)
        _compiled(fx.symbolic_trace(nn.Linear(2, 2)), (), backend=backend, kept="none")
    assert seen == [GatherGradients().uuid()]


def traced(function: Any, *inputs: Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    gather(graph.graph)
    graph.recompile()
    for mine, right in zip(graph(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(mine, right)
    return graph.graph


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))


def backward(dy: Tensor, x: Tensor, residual: Tensor | None = None) -> Any:
    return torch.ops.padfree.rms_norm_backward([dy], x, torch.ones(8), torch.ones(1, 5), residual, True)


def taken(graph: fx.Graph) -> tuple[int, bool]:
    (node,) = backward_nodes([graph])
    return len(node.args[0]), node.args[4] is not None  # type: ignore[arg-type]


def test_sums_that_somebody_else_asks_for_stay() -> None:
    def used_twice(a: Tensor, b: Tensor, x: Tensor) -> Any:
        dy = a + b
        dx, dweight = backward(dy, x)
        return dx + a, dx, dy, dweight

    assert taken(traced(used_twice, X, X.cos(), X.sin())) == (1, False)


def test_sums_of_other_shapes_and_kinds_stay() -> None:
    def broadcast(a: Tensor, b: Tensor, x: Tensor) -> Any:
        dx, dweight = backward(a + b[:, :1], x)
        return torch.add(dx, a, alpha=2), dweight

    assert taken(traced(broadcast, X, X.cos(), X.sin())) == (1, False)

    def doubled(a: Tensor, b: Tensor, x: Tensor) -> Any:
        dx, dweight = backward(a + a, x)
        return dx + dx, dweight

    assert taken(traced(doubled, X, X.cos(), X.sin())) == (1, False)


def test_a_gradient_that_comes_later_is_added_later() -> None:
    def later(a: Tensor, b: Tensor, x: Tensor) -> Any:
        dx, dweight = backward(a + b, x)
        return dx + dweight.expand_as(dx).cos(), dweight

    assert taken(traced(later, X, X.cos(), X.sin())) == (2, False)


def test_a_gradient_of_the_weight_alone() -> None:
    def weight_alone(a: Tensor, b: Tensor, x: Tensor) -> Any:
        return (backward(a + b, x)[1],)

    assert taken(traced(weight_alone, X, X.cos(), X.sin())) == (2, False)


def test_no_more_than_the_kernel_reads() -> None:
    def many(a: Tensor, b: Tensor, x: Tensor) -> Any:
        dy = ((a[0] + b[0]).view(1, 5, 8) + x) + (a.cos() + b.cos())
        dx, dweight = backward(dy, x)
        return b + dx, dweight

    assert taken(traced(many, X, X.cos(), X.sin())) == (3, True)
