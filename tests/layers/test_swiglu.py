"""SwiGLU as an operator: its gradients, where it is found, and a backward that overwrites its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from padfree.cp.shard import shard
from padfree.layers.compile import compile_layers
from padfree.layers.ops.swiglu import swiglu, swiglu_backward
from padfree.layers.passes.swiglu import swiglu_overwrite_pass, swiglu_pass
from padfree.layers.recompute import Kept
from padfree.model import attach, hidden_states
from padfree.model.structure import layers_of
from padfree.testing.models import build, row
from tests.interpreter import DEVICE, needs_kernels
from tests.layers.graph_cases import calls, graphs_after

OPS = torch.ops.padfree


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


# The operators


def test_gradients() -> None:
    gate, up = (random(2, 5, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))
    assert torch.equal(OPS.swiglu(gate, up), by_torch(gate, up))
    assert torch.autograd.gradcheck(OPS.swiglu, (gate, up))


def test_bfloat16_is_rounded_once() -> None:
    gate, up, dact = (random(50, 64, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in range(3))
    assert torch.equal(OPS.swiglu(gate, up), by_torch(gate.float(), up.float()).bfloat16())
    wide = [tensor.detach().float().requires_grad_() for tensor in (gate, up)]
    exact = torch.autograd.grad(by_torch(*wide), wide, dact.detach().float())
    for mine, right in zip(torch.autograd.grad(OPS.swiglu(gate, up), (gate, up), dact), exact, strict=True):
        torch.testing.assert_close(mine, right.bfloat16(), rtol=1e-2, atol=1e-6)  # at most to the other neighbour


def test_overwriting_its_inputs() -> None:
    gate, up, dact = (random(3, 7, seed=seed) for seed in range(3))
    act, (dgate, dup) = swiglu(gate, up), swiglu_backward(dact, gate, up)
    OPS.swiglu_backward_(dact, gate, up)
    for mine, right in ((dact, act), (gate, dgate), (up, dup)):
        assert torch.equal(mine, right)


def test_the_compiler_may_rely_on_shapes_strides_and_gradients() -> None:
    gate, up = random(1, 5, 16, seed=0).requires_grad_(), random(16, 5, 1, seed=1).permute(2, 1, 0).requires_grad_()
    torch.library.opcheck(OPS.swiglu.default, (gate, up))
    dact, gate, up = (tensor.detach() for tensor in (gate.cos(), gate, up))
    torch.library.opcheck(OPS.swiglu_backward.default, (dact, gate, up))
    torch.library.opcheck(OPS.swiglu_backward_.default, (dact, gate.clone(), up.clone()))


# Where it is found


@pytest.mark.parametrize(("name", "count"), [("qwen3", 1), ("llama", 1), ("phi3", 0), ("gemma3", 0), ("gpt2", 0)])
def test_where_it_is_found(name: str, count: int) -> None:
    """Phi-3's gate and up are halves of one matmul, Gemma has another activation, GPT-2 has no gate."""
    torch._dynamo.reset()
    counts = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        counts.append(swiglu_pass(graph.graph))
        graph.graph.lint()
        graph.recompile()
        return graph.forward

    model = build(name)
    attach(model, "reference")
    batch = shard(row([5, 2]))
    with torch.no_grad():
        expected = hidden_states(model, batch)
        layers_of(model)[0].compile(backend=backend)
        assert torch.equal(hidden_states(model, batch), expected)
    assert sum(counts) == count


# Its backward


class Layer(nn.Module):
    def __init__(self, width: int = 8, *, more: bool = False) -> None:
        super().__init__()
        self.more = more  # the gate has another user
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        act = nn.functional.silu(gate) * self.up(x)
        return x + self.down(act) + (gate.square().mean(-1, keepdim=True) if self.more else 0)  # type: ignore[no-any-return]


def gradients(module: nn.Module, tokens: int) -> list[Tensor]:
    x = random(1, tokens, 8, seed=tokens).requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad(out, (x, *module.parameters()), random(*out.shape, seed=1))]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Graph]]:
    """The graphs after the pass, of layers that are narrow and on a CPU."""
    monkeypatch.setattr("padfree.layers.compile._operators_pay", lambda hidden: True)
    with graphs_after(swiglu_overwrite_pass) as seen:
        yield seen


@pytest.mark.parametrize(
    ("kept", "more", "expected"),
    [
        ("none", False, ["swiglu", "swiglu_backward"]),
        ("input", False, ["swiglu", "swiglu_backward_"]),
        ("selective", False, ["swiglu", "swiglu_backward_"]),
        ("selective", True, None),
    ],
)
def test_memory_is_reused_if_gate_and_up_are_recomputed(
    graphs: list[fx.Graph], kept: Kept, more: bool, expected: list[str] | None
) -> None:
    """Two lengths, and one graph for both."""
    layer, plain = Layer(more=more), Layer(more=more)
    compile_layers([layer], "inductor", kept)
    for tokens in (7, 11):
        for mine, right in zip(gradients(layer, tokens), gradients(plain, tokens), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    if expected is None:
        assert "swiglu_backward_" not in calls(graphs), "the gate's other gradient comes from the gate as it was"
    else:
        assert calls(graphs) == expected


# The kernels


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 700), (0, 8)], ids=str)
def test_kernels_against_plain_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from padfree.layers.ops import triton_swiglu as kernels

    dact, gate, up = (random(*shape, seed=seed, dtype=dtype).to(DEVICE) for seed in range(3))
    act, (dgate, dup) = swiglu(gate, up), swiglu_backward(dact, gate, up)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    torch.testing.assert_close(kernels.forward(gate, up), act, **tolerance)
    torch.testing.assert_close(kernels.backward(dact, gate, up), (dgate, dup), **tolerance)
    kernels.backward_overwriting(dact, gate, up)
    torch.testing.assert_close((dact, gate, up), (act, dgate, dup), **tolerance)
