"""Matmuls with epilogues: what they compute, where they are inserted, and their kernels on Hopper."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import padfree.attention  # noqa: F401  (what is saved names its operator)
from padfree.layers.compile import compile_layers
from padfree.layers.ops import quack_support as support
from padfree.layers.ops.quack_support import has_epilogues, is_supported
from padfree.layers.ops.swiglu import swiglu, swiglu_backward
from padfree.layers.passes.matmul_epilogues import matmul_epilogues_overwrite_pass, matmul_epilogues_pass
from padfree.layers.recompute import Kept
from padfree.warning import PadfreeWarning
from tests.layers.graph_cases import calls, graphs_after

OPS = torch.ops.padfree


@pytest.fixture
def _hopper() -> None:
    if not has_epilogues(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs a Hopper GPU and quack-kernels")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(device, dtype)


# The operators


def test_they_are_matmuls_and_what_comes_next() -> None:
    a, b, c, up = random(5, 3, seed=0), random(3, 7, seed=1), random(5, 7, seed=2), random(5, 7, seed=3)
    torch.testing.assert_close(OPS.matmul_add(a, b, c), a @ b + c)
    torch.testing.assert_close(OPS.matmul_swiglu(a, b, c), (a @ b, swiglu(c, a @ b)))
    expected = swiglu_backward(a @ b, c, up)
    torch.testing.assert_close(OPS.matmul_swiglu_backward(a, b, c, up), expected)
    OPS.matmul_swiglu_backward_(a, b, c, up)
    torch.testing.assert_close((c, up), expected)


def test_the_compiler_may_rely_on_shapes_and_strides() -> None:
    a, b, c, up = random(5, 3, seed=0), random(7, 3, seed=1).T, random(7, 5, seed=2).T, random(5, 7, seed=3)
    torch.library.opcheck(OPS.matmul_add.default, (a, b, c))
    torch.library.opcheck(OPS.matmul_swiglu.default, (a, b, c))
    torch.library.opcheck(OPS.matmul_swiglu_backward.default, (a, b, c, up))
    torch.library.opcheck(OPS.matmul_swiglu_backward_.default, (a, b, c.clone(), up))


def test_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_supported(random(5, 8, seed=0, dtype=torch.bfloat16), random(8, 8, seed=1, dtype=torch.bfloat16))
    monkeypatch.setattr(support, "_is_installed", lambda: True)
    cuda = torch.device("cuda")
    for major, expected in ((8, False), (9, True), (10, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        assert has_epilogues(cuda, torch.bfloat16) == expected
        assert not has_epilogues(cuda, torch.float32)
    monkeypatch.setattr(support, "has_epilogues", lambda device, dtype: True)
    assert is_supported(torch.empty(5, 8), torch.empty(8, 16))
    assert not is_supported(torch.empty(5, 8), torch.empty(8, 12)), "columns that are not a multiple of 16 bytes"
    assert not is_supported(torch.empty(5, 4), torch.empty(4, 8))


@pytest.mark.parametrize(("version", "new_enough"), [(None, False), ("0.5.9", False), ("0.6.5", True), ("1.0", True)])
def test_which_quack_will_do(monkeypatch: pytest.MonkeyPatch, version: str | None, new_enough: bool) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(support, "version", found)
    monkeypatch.setitem(sys.modules, "padfree.layers.ops.quack_matmul_epilogues", None)
    if new_enough:
        with pytest.warns(PadfreeWarning, match=f"quack-kernels {version} cannot be used"):
            assert not support._is_installed.__wrapped__(), "for it cannot be imported"
        monkeypatch.setitem(sys.modules, "padfree.layers.ops.quack_matmul_epilogues", support)
    assert support._is_installed.__wrapped__() == new_enough


# Where they are inserted


class Layer(nn.Module):
    """`more` uses the gate, the up projection or the activation a second time."""

    def __init__(self, width: int = 8, inner: int = 24, *, more: str = "") -> None:
        super().__init__()
        self.more = more
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        act = nn.functional.silu(gate) * up
        out = x + self.down(act)
        for name, tensor in (("gate", gate), ("up", up), ("act", act)):
            if name in self.more:
                out = out + tensor.square().mean(-1, keepdim=True)
        return out  # type: ignore[no-any-return]


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = module(x)
    dout = random(*out.shape, seed=1, dtype=x.dtype, device=x.device.type)
    return [out.detach(), *torch.autograd.grad(out, (x, *module.parameters()), dout)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Graph]]:
    """The graphs after the passes, of layers that are narrow and on a CPU."""
    monkeypatch.setattr("padfree.layers.compile._operators_pay", lambda hidden: True)
    monkeypatch.setattr("padfree.layers.compile._has_epilogues", lambda hidden: True)
    with graphs_after(matmul_epilogues_overwrite_pass) as seen:
        yield seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "more", "expected"),
    [
        ("none", "", ["matmul_swiglu", "matmul_add", "matmul_swiglu_backward"]),
        ("selective", "", ["matmul_swiglu", "matmul_add", "matmul_swiglu", "matmul_swiglu_backward_"]),
        ("input", "", ["matmul_swiglu", "matmul_add", "matmul_swiglu", "matmul_swiglu_backward_"]),
        ("none", "up", None),
        ("selective", "gate", None),
        ("selective", "up", None),
        ("selective", "act", None),
    ],
)
def test_gradients_with_them(graphs: list[fx.Graph], kept: Kept, more: str, expected: list[str] | None) -> None:
    """Two lengths, and one graph for both."""
    layer, plain = Layer(more=more), Layer(more=more)
    compile_layers([layer], "inductor", kept)
    for tokens in (7, 11):
        x = random(1, tokens, 8, seed=tokens)
        for mine, right in zip(gradients(layer, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    if expected is not None:
        assert calls(graphs) == expected
    elif more in ("gate", "up"):
        assert "matmul_swiglu_backward_" not in calls(graphs), "it is needed as it was"


@pytest.mark.parametrize(("width", "inner"), [(8, 20), (12, 24)])
def test_sizes_without_kernels_are_left_alone(graphs: list[fx.Graph], width: int, inner: int) -> None:
    layer, plain = Layer(width, inner), Layer(width, inner)
    compile_layers([layer], "inductor", "none")
    x = random(1, 7, width, seed=0)
    for mine, right in zip(gradients(layer, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    assert calls(graphs) == ["swiglu", "swiglu_backward"]


def test_other_sums_are_left_alone() -> None:
    """Columns that are heads in the sum, two matmuls, a matmul with another reader, and three summands."""

    def changed(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
        traced = make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes))
        matmul_epilogues_pass(traced.graph)
        traced.graph.lint()
        return calls([traced.graph])

    a, b = (5, 8), (8, 16)
    assert changed(lambda a, b, c: torch.mm(a, b) + c, a, b, (5, 16)) == ["matmul_add"]
    assert changed(lambda a, b, c: c + torch.mm(a, b).view(1, 5, 16), a, b, (1, 5, 16)) == ["matmul_add"]
    assert changed(lambda a, b, c: torch.mm(a, b).view(1, 5, 2, 8) + c, a, b, (1, 5, 2, 8)) == []
    assert changed(lambda a, b, c: torch.mm(a, b).view(5, 2, 8) + c, a, b, (5, 2, 8)) == []
    assert changed(lambda a, b, c: torch.mm(a, b) + c, a, b, (16,)) == []
    assert changed(lambda a, b: torch.mm(a, b) + torch.mm(a.cos(), b), a, b) == []
    assert changed(lambda a, b, c: torch.add(torch.mm(a, b), c, alpha=2), a, b, (5, 16)) == []

    three = [a, b, (5, 16), (5, 16)]
    assert changed(lambda a, b, c, d: torch.mm(a, b) + c + d, *three) == []
    assert changed(lambda a, b, c, d: torch.mm(a, b) + (c + d), *three) == []

    def twice(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        product = torch.mm(a, b)
        return product + c, product.cos()

    assert changed(twice, a, b, (5, 16)) == []


# The kernels


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_against_float32(dtype: torch.dtype, transposed: bool) -> None:
    """Packs of many lengths, each with the kernel that was compiled for the first."""
    inner, columns = 520, 264
    b = random(inner, columns, seed=0, dtype=dtype, device="cuda") * inner**-0.5
    if transposed:
        b = b.T.contiguous().T
    for tokens in (300, 0, 1, 7, 128, 193, 1000, 4099):
        a = random(tokens, inner, seed=1, dtype=dtype, device="cuda")
        gate, up = (random(tokens, columns, seed=seed, dtype=dtype, device="cuda") for seed in (2, 3))
        product = a.float() @ b.float()
        close = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(OPS.matmul_add(a, b, gate).float(), product + gate, **close)
        found_up, act = OPS.matmul_swiglu(a, b, gate)
        torch.testing.assert_close(found_up.float(), product, **close)
        torch.testing.assert_close(act.float(), swiglu(gate.float(), product), **close)
        expected = swiglu_backward(product, gate.float(), up.float())
        found = OPS.matmul_swiglu_backward(a, b, gate, up)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.float(), right, **close)
        OPS.matmul_swiglu_backward_(a, b, gate, up)
        assert torch.equal(gate, found[0])
        assert torch.equal(up, found[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("kept", ["none", "selective"])
def test_a_compiled_layer_is_as_exact_as_without_them(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    def compiled(fused: bool) -> list[list[Tensor]]:
        torch._dynamo.reset()
        if not fused:
            monkeypatch.setattr("padfree.layers.compile._has_epilogues", lambda hidden: False)
        layer = Layer(2048, 4096).to("cuda", torch.bfloat16)
        compile_layers([layer], "inductor", kept)
        return [gradients(layer, x) for x in packs]

    packs = [random(1, length, 2048, seed=length, dtype=torch.bfloat16, device="cuda") for length in (900, 1501)]
    exact = Layer(2048, 4096).to("cuda", torch.bfloat16).double()
    expected = [gradients(exact, x.double()) for x in packs]
    errors = []
    for found in (compiled(fused=True), compiled(fused=False)):
        pairs = [pair for results in zip(found, expected, strict=True) for pair in zip(*results, strict=True)]
        errors.append([float((mine.double() - right).norm() / right.norm()) for mine, right in pairs])
    assert all(with_them < 1.05 * without + 1e-4 for with_them, without in zip(*errors, strict=True)), errors
