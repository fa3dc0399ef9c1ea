"""The norms as operators: the arithmetic of Hugging Face's modules, exact gradients, and what the compiler wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from padfree.train.norms import norm_backward

EPS = 1e-6
MODULES: dict[bool, Any] = {True: Qwen3RMSNorm, False: GptOssRMSNorm}
OPS = torch.ops.padfree


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def module_with(weight: Tensor, rounded: bool) -> nn.Module:
    module: nn.Module = MODULES[rounded](len(weight), eps=EPS).to(weight.dtype)
    module.weight.data.copy_(weight)  # type: ignore[operator, union-attr]
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("shape", [(1, 7, 64), (5, 123), (2, 0, 8), (1, 1, 2560)], ids=str)
def test_results_are_those_of_hugging_face_to_the_bit(
    shape: tuple[int, ...], rounded: bool, dtype: torch.dtype
) -> None:
    a, b = (random(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight = random(shape[-1], seed=2, dtype=dtype)
    module = module_with(weight, rounded)
    y, rstd = OPS.rms_norm(a, weight, EPS, rounded)
    assert torch.equal(y, module(a))
    assert rstd.shape == shape[:-1]
    assert rstd.dtype == torch.float32
    y, total, _ = OPS.add_rms_norm(a, b, weight, EPS, rounded)
    assert torch.equal(total, a + b)
    assert torch.equal(y, module(a + b))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("rounded", [True, False])
def test_gradients(rows: int, rounded: bool) -> None:
    a, b = (random(1, rows, 6, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))
    weight = random(6, seed=2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: OPS.rms_norm(x, w, EPS, rounded)[0], (a, weight))
    # The sum is used elsewhere, too.
    assert torch.autograd.gradcheck(lambda x, y, w: OPS.add_rms_norm(x, y, w, EPS, rounded)[:2], (a, b, weight))


def test_no_gradient_of_a_frozen_weight() -> None:
    x, weight = random(3, 8, seed=0).requires_grad_(), random(8, seed=1)
    OPS.rms_norm(x, weight, EPS, True)[0].sum().backward()
    (expected,) = torch.autograd.grad(module_with(weight, True)(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert weight.grad is None


def exact(dys: list[Tensor], x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    x, weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    y = weight * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    dy = sum(dy.double().view_as(x) for dy in dys)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)  # type: ignore[arg-type]
    return dx if residual is None else dx + residual.double(), dweight


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("num_dys", [1, 2, 3, 5])
def test_sums_around_backward(num_dys: int, with_residual: bool) -> None:
    """dys [T, D] of x [1, T, D], and the gradient that passes by, added once."""
    x, weight = random(1, 9, 48, seed=0), random(48, seed=1)
    dys = [random(9, 48, seed=2 + index) for index in range(num_dys)]
    residual = random(1, 9, 48, seed=9) if with_residual else None
    _, rstd = OPS.rms_norm(x, weight, EPS, True)
    for found, expected in zip(
        OPS.rms_norm_backward(dys, x, weight, rstd, residual, True), exact(dys, x, weight, residual), strict=True
    ):
        assert distance(found, expected) < 1e-6


def test_bfloat16_gradients_are_nearer_than_those_of_single_roundings() -> None:
    """Against autograd of the module in bfloat16, where sums are rounded before and after."""
    dtype = torch.bfloat16
    x, residual = (random(1, 300, 64, seed=seed, dtype=dtype) for seed in (0, 2))
    weight = random(64, seed=1, dtype=dtype)
    dys = [random(1, 300, 64, seed=3 + index, dtype=dtype) for index in range(3)]
    module = module_with(weight, True)
    leaf = x.clone().requires_grad_()
    dx, dweight = torch.autograd.grad(module(leaf), (leaf, module.weight), dys[0] + dys[1] + dys[2])  # type: ignore[arg-type]
    _, rstd = OPS.rms_norm(x, weight, EPS, True)
    mine = OPS.rms_norm_backward(dys, x, weight, rstd, residual, True)
    expected = exact(dys, x, weight, residual)
    assert distance(mine[0], expected[0]) < 0.6 * distance(dx + residual, expected[0])
    assert distance(mine[1], expected[1]) < distance(dweight, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_may_rely_on_shapes_strides_and_gradients(dtype: torch.dtype) -> None:
    a, b = (random(1, 5, 16, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 1))
    weight = random(16, seed=2, dtype=dtype).requires_grad_()
    torch.library.opcheck(OPS.rms_norm.default, (a, weight, EPS, True))
    columns = random(16, 5, 1, seed=3, dtype=dtype).permute(2, 1, 0).requires_grad_()  # rows not contiguous
    torch.library.opcheck(OPS.rms_norm.default, (columns, weight, EPS, False))
    torch.library.opcheck(OPS.add_rms_norm.default, (columns, b, weight, EPS, False))
    x, dy, rstd = a.detach(), b.detach(), torch.ones(1, 5)
    for residual, needs_weight in ((None, True), (dy, False)):
        torch.library.opcheck(
            OPS.rms_norm_backward.default, ([dy, dy[0]], x, weight.detach(), rstd, residual, needs_weight)
        )


def test_the_plain_backward_does_not_change_what_it_is_given() -> None:
    x, weight, dys = random(4, 8, seed=0), random(8, seed=1), [random(4, 8, seed=2), random(4, 8, seed=3)]
    before = [tensor.clone() for tensor in (x, weight, *dys)]
    norm_backward(dys, x, weight, torch.ones(4), dys[1])
    for tensor, kept in zip((x, weight, *dys), before, strict=True):
        assert torch.equal(tensor, kept)
