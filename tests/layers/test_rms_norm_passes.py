"""Which RMSNorms and RoPEs of a layer become operators, what is folded into their backward, and that gradients stay."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb, rotate_half

from padfree.cp.shard import shard
from padfree.layers.compile import InductorPass, _compiled, compile_layers
from padfree.layers.passes import PASSES, Stage
from padfree.layers.passes.qk_norm_rope import qk_norm_rope_pass
from padfree.layers.passes.rms_norm import rms_norm_backward_pass, rms_norm_pass
from padfree.model import attach, hidden_states
from padfree.model.structure import layers_of
from padfree.testing.models import build, row
from tests.layers.graph_cases import graphs_after, passes_alone

BACKEND = "aot_eager_decomp_partition"
BACKWARD = torch.ops.padfree.rms_norm_backward.default
VIEWS = [torch.ops.aten.unsqueeze.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int]


@pytest.fixture(autouse=True)
def as_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Insert the operators into compiled layers on the CPU too."""
    monkeypatch.setattr("padfree.layers.compile._operators_pay", lambda hidden: True)


def operators(graph: fx.Graph) -> list[str]:
    return [
        str(node.target).split(".")[1]
        for node in graph.nodes
        if "rms_norm" in str(node.target) or "qk_norm_rope" in str(node.target)
    ]


# Which are found


def found_in(name: str, dtype: torch.dtype = torch.float32, away: float = 0) -> list[str]:
    """The operators in the first layer; checks that hidden states change by at most a tolerance."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        if rms_norm_pass(graph.graph) + qk_norm_rope_pass(graph.graph):
            graph.graph.lint()
            graph.recompile()
        graphs.append(graph.graph)
        return graph.forward

    model = build(name).to(dtype)
    attach(model, "reference")
    batch = shard(row([5, 2]))
    with torch.no_grad():
        expected = hidden_states(model, batch)
        layers_of(model)[0].compile(backend=backend)
        found = hidden_states(model, batch)
    assert (found - expected).norm() <= away * expected.norm()
    return [name for graph in graphs for name in operators(graph)]


PRE_NORM = ["rms_norm", "add_rms_norm"]
WITH_HEADS = ["rms_norm", "qk_norm_rope", "qk_norm_rope", "add_rms_norm"]


@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "gpt_oss"])
def test_norms_before_matmuls_are_found(name: str) -> None:
    assert found_in(name) == PRE_NORM


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_norms_of_heads_are_found_with_their_rotation(name: str) -> None:
    assert found_in(name) == WITH_HEADS


@pytest.mark.parametrize("name", ["olmo2", "gemma3", "gpt2"])
def test_others_are_left_to_the_compiler(name: str) -> None:
    """OLMo2's norms come after matmuls, Gemma's weight is 1 + w in float32, GPT-2's norms subtract a mean."""
    assert found_in(name) == []


def test_types() -> None:
    """With bfloat16 there is one rounding less."""
    assert found_in("llama", torch.float64) == []
    assert found_in("qwen3", torch.float64) == []
    assert found_in("qwen3", torch.bfloat16, away=2e-2) == WITH_HEADS


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
        assert rms_norm_pass(graph.graph) == 2
        graph.graph.lint()
        graph.recompile()
        graphs.append(graph.graph)
        return graph.forward

    module, a, b = Parallel(), torch.ones(1, 3, 8), torch.arange(24.0).view(1, 3, 8)
    torch.testing.assert_close(torch.compile(module, backend=backend)(a, b), module(a, b))
    (graph,) = graphs
    assert operators(graph) == ["add_rms_norm", "rms_norm"]


# Rotations


class Heads(nn.Module):
    """A norm of heads [1, T, H, d] and something after it."""

    def __init__(self, after: Callable[..., Any], width: int = 8, place: int = 1) -> None:
        super().__init__()
        self.norm, self.after, self.place = Qwen3RMSNorm(width), after, place

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.after(self.norm(x).transpose(1, 2), cos.unsqueeze(self.place), sin.unsqueeze(self.place))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_and_angles(width: int = 8, heads: int = 2) -> list[Tensor]:
    angle = random(1, 5, width, seed=1)
    return [random(1, 5, heads, width, seed=0), angle.cos(), angle.sin()]


def rotations_in(module: nn.Module, *inputs: Tensor) -> int:
    """The number of replacements; results stay bit-identical."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        count = rms_norm_pass(graph.graph) + qk_norm_rope_pass(graph.graph)
        graph.graph.lint()
        graph.recompile()
        assert operators(graph.graph) == count * ["qk_norm_rope"]
        graphs.append(graph.graph)
        return graph.forward

    with torch.no_grad():
        expected = module(*inputs)
        found = torch.compile(module, backend=backend)(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (graph,) = graphs
    return len(operators(graph))


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[..., :4], t[..., 4:]


def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return t * cos + rotate_half(t) * sin  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "after",
    [
        turned,
        lambda t, cos, sin: sin * rotate_half(t) + cos * t,
        lambda t, cos, sin: turned(t, cos, sin).transpose(1, 2).sigmoid() + 1,
        lambda t, cos, sin: (turned(t, cos, sin), cos + 1),
    ],
    ids=["as Hugging Face does it", "the other way round", "used", "angles used"],
)
def test_a_rotation_is_replaced(after: Callable[..., Any]) -> None:
    assert rotations_in(Heads(after), *heads_and_angles()) == 1


def with_a_part(t: Tensor, cos: Tensor, sin: Tensor, part: str) -> Tensor:
    low, high = halves(t)
    negative = -high
    crossed = torch.cat((negative, low), dim=-1)
    straight, added = t * cos, crossed * sin
    out = straight + added
    parts = {"t": t, "low": low, "high": high, "negative": negative, "crossed": crossed}
    return out * {**parts, "straight": straight, "added": added}[part].sum()


@pytest.mark.parametrize("part", ["t", "low", "high", "negative", "crossed", "straight", "added"])
def test_a_rotation_whose_parts_have_other_users_stays(part: str) -> None:
    module = Heads(lambda t, cos, sin: with_a_part(t, cos, sin, part))
    assert rotations_in(module, *heads_and_angles()) == 0


def joined(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As `turned`, with other parts than (-high, low)."""
    return lambda t, cos, sin: t * cos + torch.cat((first(*halves(t)), second(*halves(t))), dim=-1) * sin


def low_of(low: Tensor, high: Tensor) -> Tensor:
    return low


def high_of(low: Tensor, high: Tensor) -> Tensor:
    return high


OTHERS: dict[str, Callable[..., Any]] = {
    "no rotation": lambda t, cos, sin: t + 1,
    "a scale": lambda t, cos, sin: t * cos,
    "no sign": joined(high_of, low_of),
    "the other sign": joined(high_of, lambda low, high: -low),
    "both signs": joined(lambda low, high: -high, lambda low, high: -low),
    "not swapped": joined(low_of, lambda low, high: -high),
    "not swapped, the other sign": joined(lambda low, high: -low, high_of),
    "high twice": joined(lambda low, high: -high, high_of),
    "turned back": lambda t, cos, sin: t * cos - rotate_half(t) * sin,
    "cut elsewhere": lambda t, cos, sin: t * cos + torch.cat((-t[..., 3:], t[..., :3]), dim=-1) * sin,
    "every other": lambda t, cos, sin: t * cos + torch.cat((-t[..., 1::2], t[..., ::2]), dim=-1) * sin,
    "angles changed": lambda t, cos, sin: t * (cos + 1) + rotate_half(t) * sin,
    "a number": lambda t, cos, sin: t * 2.0 + rotate_half(t) * sin,
}


@pytest.mark.parametrize("after", OTHERS.values(), ids=OTHERS)
def test_other_arithmetic_stays(after: Callable[..., Any]) -> None:
    assert rotations_in(Heads(after), *heads_and_angles()) == 0


def test_heads_that_are_not_transposed_stay() -> None:
    class Straight(Heads):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return self.after(self.norm(x), cos.unsqueeze(2), sin.unsqueeze(2))

    assert rotations_in(Straight(turned), *heads_and_angles()) == 0


def test_angles_of_another_kind_stay() -> None:
    x, cos, sin = heads_and_angles()
    assert rotations_in(Heads(turned), x, cos.double(), sin.double()) == 0, "of another type"
    assert rotations_in(Heads(turned), x, cos, sin.double()) == 0
    assert rotations_in(Heads(turned), x, cos[:, :1], sin[:, :1]) == 0, "the same for all tokens"
    assert rotations_in(Heads(turned), torch.cat((x, x)), cos, sin) == 0, "the same for both sequences"
    # One for each head: there are as many as tokens.
    x, cos, sin = heads_and_angles(heads=5)
    assert rotations_in(Heads(turned, place=2), x, cos, sin) == 0
    assert rotations_in(Heads(turned), x, cos, sin) == 1


def test_heads_without_two_equal_halves_stay() -> None:
    assert rotations_in(Heads(turned, width=7), *heads_and_angles(width=7)) == 0


def test_angles_that_require_a_gradient_stay() -> None:
    x, cos, sin = heads_and_angles()
    assert rotations_in(Heads(turned), x, cos.requires_grad_(), sin) == 0
    assert rotations_in(Heads(turned), x, cos.detach(), sin.requires_grad_()) == 0


# What is folded into backward


@torch.no_grad()
def fill(module: nn.Module) -> None:
    for index, parameter in enumerate(module.parameters()):
        parameter.copy_(random(*parameter.shape, seed=index))


class Layer(nn.Module):
    """The norms of a pre-norm layer without attention and MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = Qwen3RMSNorm(width), Qwen3RMSNorm(width)
        for name in ("q", "k", "v", "gate", "up"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.q(y).sigmoid() * self.k(y) * self.v(y)
        y = self.second(x)
        return x + self.gate(y).sigmoid() * self.up(y)  # type: ignore[no-any-return]


def gradients(module: nn.Module, dtype: torch.dtype = torch.float32, tokens: int = 7) -> list[Tensor]:
    """The result and the gradients of x and of all parameters. Inputs are exact in every dtype."""
    x = random(1, tokens, 16, seed=0).bfloat16().to(dtype).requires_grad_()
    out = module(x)
    dout = random(*out.shape, seed=1).bfloat16().to(dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, *module.parameters()), dout)]


def backward_nodes(seen: list[fx.Graph]) -> list[fx.Node]:
    return [node for graph in seen for node in graph.nodes if node.target is BACKWARD]


@pytest.fixture
def seen() -> Iterator[list[fx.Graph]]:
    """The graphs after the pass."""
    with graphs_after(rms_norm_backward_pass) as graphs:
        yield graphs


def assert_taken_in(nodes: list[fx.Node]) -> None:
    """Backward reaches the second norm first: gate, up and the residual stream; then q, k, v and the stream."""
    assert [len(node.args[0]) for node in nodes] == [2, 3]  # type: ignore[arg-type]
    assert all(node.args[4] is not None for node in nodes)


@pytest.mark.slow
def test_inductor_computes_the_same_gradients(seen: list[fx.Graph]) -> None:
    """Two lengths, and one graph for both."""
    torch._dynamo.reset()
    layer, expected = Layer(), Layer().double()
    compile_layers([layer], "inductor")
    for tokens in (7, 11):
        found = gradients(layer, tokens=tokens)
        exact = gradients(_Exact(expected), torch.float64, tokens)
        for mine, right in zip(found, exact, strict=True):
            assert (mine - right).norm() <= 1e-5 * right.norm()
    assert_taken_in(backward_nodes(seen))


class _Exact(nn.Module):
    """A layer whose norms compute in the dtype of their input, not in float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        for norm in layer.modules():
            if isinstance(norm, Qwen3RMSNorm):
                norm.forward = lambda x, norm=norm: nn.functional.rms_norm(x, x.shape[-1:], norm.weight, 1e-6)  # type: ignore[method-assign, misc]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Rotated(nn.Module):
    """Norms of heads and rotations, followed by matmuls as in attention; more heads of q than of k."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(*shape, bias=False) for shape in ((16, 32), (16, 8), (32, 16)))
        self.q_norm, self.k_norm = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
        fill(self)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_norm(self.q(x).unflatten(-1, (4, 8))).transpose(1, 2)
        k = self.k_norm(self.k(x).unflatten(-1, (1, 8))).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = q @ (k.mT @ k) / x.shape[1]
        return x + self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Angled(nn.Module):
    """A layer that takes the angles of the positions as input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[None, :, None] * 0.1 ** torch.arange(4).repeat(2)
        return self.layer(x, *(part.bfloat16().to(x.dtype) for part in (angle.cos(), angle.sin())))  # type: ignore[no-any-return]


ROTATED_BACKWARD = torch.ops.padfree.qk_norm_rope_backward.default


def rotated_backwards(seen: list[fx.Graph]) -> int:
    return sum(node.target is ROTATED_BACKWARD for graph in seen for node in graph.nodes)


@pytest.mark.slow
def test_inductor_computes_the_same_gradients_of_rotated_heads(seen: list[fx.Graph]) -> None:
    torch._dynamo.reset()
    layer, expected = Rotated(), Rotated().double()
    compile_layers([layer], "inductor")
    for tokens in (7, 11):
        found = gradients(Angled(layer), tokens=tokens)
        exact = gradients(_Exact(Angled(expected)), torch.float64, tokens)
        for mine, right in zip(found, exact, strict=True):
            assert (mine - right).norm() <= 1e-5 * right.norm()
    assert rotated_backwards(seen) == 2, "one graph for both lengths"


def bfloat16_errors(make: Callable[[], nn.Module], around: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Of a compiled layer's result and gradients."""
    tokens = 512
    torch._dynamo.reset()
    exact = gradients(_Exact(around(make().bfloat16().double())), torch.float64, tokens)
    layer = make().bfloat16()
    compile_layers([layer], "inductor", "selective")
    found = gradients(around(layer), torch.bfloat16, tokens)
    return [float((mine - right).norm() / right.norm()) for mine, right in zip(found, exact, strict=True)]


@contextmanager
def norms_left_alone() -> Iterator[None]:
    """Ends before the fixture `seen`, which restores the list."""
    left = tuple(each for each in PASSES if each.run not in (rms_norm_pass, qk_norm_rope_pass))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.layers.compile.PASSES", left)
        yield


@pytest.mark.slow
def test_inductor_with_bfloat16_errs_no_more_than_before(seen: list[fx.Graph]) -> None:
    mine = bfloat16_errors(Layer, lambda layer: layer)
    assert_taken_in(backward_nodes(seen))
    with norms_left_alone():
        before = bfloat16_errors(Layer, lambda layer: layer)
    assert len(backward_nodes(seen)) == 2, "none of the graphs since"
    assert sum(mine) < 1.25 * sum(before)
    assert max(mine) < 1.25 * max(before)


@pytest.mark.slow
def test_rotated_heads_in_bfloat16_err_no_more_than_before(seen: list[fx.Graph]) -> None:
    mine = bfloat16_errors(Rotated, Angled)
    assert rotated_backwards(seen) == 2
    with norms_left_alone():
        before = bfloat16_errors(Rotated, Angled)
    assert rotated_backwards(seen) == 2, "none of the graphs since"
    assert sum(mine) < 1.25 * sum(before)
    assert max(mine) < 1.25 * max(before)


def test_without_inductor() -> None:
    torch._dynamo.reset()
    layer = Layer()
    expected = gradients(layer)
    compile_layers([layer], BACKEND)
    for mine, right in zip(gradients(layer), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_the_caches_of_the_compiler_know_the_passes() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.extend(config_patches[f"post_grad_custom_{place}_pass"].uuid() for place in ("pre", "post"))
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.layers.compile.lookup_backend", lambda name: backend)
        _compiled(fx.symbolic_trace(nn.Linear(2, 2)), (), backend=backend, kept="none")
    assert all(seen)
    assert seen[0] != seen[1]
    stages: list[Stage] = ["after autograd", "after inductor"]
    assert seen == [InductorPass(stage, epilogues=False).uuid() for stage in stages]
    with_epilogues = InductorPass("after autograd", epilogues=True).uuid()
    assert with_epilogues not in seen


def traced(function: Any, *inputs: Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    rms_norm_backward_pass(graph.graph)
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


def test_sums_with_other_users_stay() -> None:
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


# A whole layer


def test_gradients_of_attention_reach_the_norms_without_a_copy(
    seen: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything between them is a view of [T, H, d]: a copy of the queries' gradient costs as much as the norm."""
    torch._dynamo.reset()
    model = build("qwen3", num_hidden_layers=1)
    attach(model, "reference")
    backend = partial(compile_fx, inner_compile=passes_alone)
    monkeypatch.setattr("padfree.layers.compile.lookup_backend", lambda name: backend)
    compile_layers(layers_of(model), "inductor")
    hidden_states(model, shard(row([5, 2]))).sum().backward()
    nodes = [node for graph in seen for node in graph.nodes if node.op == "call_function"]
    rotated = [node for node in nodes if node.target is torch.ops.padfree.qk_norm_rope_backward.default]
    assert len(rotated) == 2
    for node in rotated:
        gradient: Any = node.args[0]
        assert gradient.meta["val"].is_contiguous()
        while gradient.target is not operator.getitem:
            assert gradient.target in VIEWS
            gradient = gradient.args[0]
        assert gradient.args[0].target is torch.ops.padfree.self_attention_backward.default
