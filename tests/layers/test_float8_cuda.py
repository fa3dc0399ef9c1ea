"""Linear layers in float8 on a GPU: `torch._scaled_mm` and the compiled layer against the reference on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from padfree.choices import Float8Product
from padfree.layers.compile import compile_layers
from padfree.layers.float8 import CAPABILITY, use_float8
from padfree.layers.ops.float8_linear import float8_matmul, float8_rows
from padfree.layers.recompute import Kept

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _has_float8_matmuls() -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("needs a GPU with float8 matmuls")


PRODUCTS: tuple[Float8Product, ...] = ("output", "input-gradient", "weight-gradient")
ROUNDING = 6e-3
"""Relative distance of results that are rounded to bfloat16 (2⁻⁸), with float8 tensor cores' accumulation."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 77, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_matmul_takes_any_number_of_tokens(tokens: int, has_bias: bool) -> None:
    a, b, bias = random(tokens, 1024), random(1536, 1024, seed=1), random(1536, seed=2) if has_bias else None
    (qa, sa, _), (qb, sb, _) = float8_rows(a, columns=False), float8_rows(b, columns=False)
    expected = float8_matmul(qa, qb, sa, sb, bias, torch.float32)
    arguments = (each.cuda() if isinstance(each, Tensor) else each for each in (qa, qb, sa, sb, bias))
    found = torch.ops.padfree.float8_matmul(*arguments, torch.bfloat16)
    assert found.shape == expected.shape
    assert not tokens or distance(found, expected) < ROUNDING


@pytest.mark.parametrize("products", [PRODUCTS, PRODUCTS[:2], PRODUCTS[:1], PRODUCTS[2:]], ids="+".join)
@pytest.mark.parametrize("tokens", [77, 1024])
def test_products_against_the_cpu(products: tuple[Float8Product, ...], tokens: int) -> None:
    linear = nn.Linear(512, 768).bfloat16()
    use_float8(linear, products)
    x, dy = random(1, tokens, 512), random(1, tokens, 768, seed=1)
    results: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        module, states = linear.to(device), x.detach().to(device).requires_grad_()
        module.zero_grad()
        y = module(states)
        y.backward(dy.to(device))
        assert states.grad is not None
        found = [y, states.grad, *(parameter.grad for parameter in module.parameters())]
        results.append([each.detach().cpu().clone() for each in found if each is not None])
    for expected, found in zip(*results, strict=True):
        assert distance(found, expected) < ROUNDING


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(2048, 4096, bias=False) for _ in range(2))
        self.down = nn.Linear(4096, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", ["none", "selective", "input"])
def test_a_compiled_layer_is_as_close_to_bfloat16_as_an_eager_one(kept: Kept) -> None:
    """Packs of two lengths, the second not a multiple of 16. Twice the same bits."""

    def gradients(products: tuple[Float8Product, ...], compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        layer = Layer().to("cuda", torch.bfloat16)
        for linear in (layer.gate, layer.up, layer.down):
            use_float8(linear, products)
        if compiled:
            compile_layers([layer], "inductor", kept)
        found = []
        for tokens in (896, 1501):
            x = random(1, tokens, 2048, seed=tokens).cuda().requires_grad_()
            out = layer(x)
            found += [out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), out.detach().sin())]
        return found

    plain, eager = gradients((), False), gradients(PRODUCTS, False)
    found, again = gradients(PRODUCTS, True), gradients(PRODUCTS, True)
    for right, slow, fast, twice in zip(plain, eager, found, again, strict=True):
        assert distance(fast, right) < 1.1 * distance(slow, right) + 1e-3
        assert torch.equal(fast, twice)
