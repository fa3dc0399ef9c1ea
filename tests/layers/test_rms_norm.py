"""The norms as operators: the arithmetic of Hugging Face's modules, exact gradients, and what the compiler requires."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from padfree.layers.ops.qk_norm_rope import qk_norm_rope_backward
from padfree.layers.ops.rms_norm import rms_norm_backward

EPS = 1e-6
HALF_TYPES = [torch.bfloat16, torch.float16]
OPS = torch.ops.padfree


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def module_with(weight: Tensor, kind: Any = Qwen3RMSNorm) -> nn.Module:
    module: nn.Module = kind(len(weight), eps=EPS).to(weight.dtype)
    module.weight.data.copy_(weight)  # type: ignore[operator, union-attr]
    return module


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize("shape", [(1, 7, 64), (5, 123), (2, 0, 8), (1, 1, 2560)], ids=str)
def test_results_are_those_of_hugging_face_in_float32_rounded_once(
    shape: tuple[int, ...], kind: Any, dtype: torch.dtype
) -> None:
    """Bit-identical."""
    a, b = (random(*shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight = random(shape[-1], seed=2, dtype=dtype)
    module = module_with(weight.float(), kind)
    y, rstd = OPS.rms_norm(a, weight, EPS)
    assert y.dtype == dtype
    assert torch.equal(y, module(a.float()).to(dtype))
    assert rstd.shape == shape[:-1]
    assert rstd.dtype == torch.float32
    y, total, _ = OPS.add_rms_norm(a, b, weight, EPS)
    assert torch.equal(total, a + b)
    assert torch.equal(y, module(total.float()).to(dtype))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_gradients(tokens: int) -> None:
    a, b = (random(1, tokens, 6, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))
    weight = random(6, seed=2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: OPS.rms_norm(x, w, EPS)[0], (a, weight))
    # The sum is used elsewhere, too.
    assert torch.autograd.gradcheck(lambda x, y, w: OPS.add_rms_norm(x, y, w, EPS)[:2], (a, b, weight))


def test_no_gradient_of_a_frozen_weight() -> None:
    x, weight = random(3, 8, seed=0).requires_grad_(), random(8, seed=1)
    OPS.rms_norm(x, weight, EPS)[0].sum().backward()
    (expected,) = torch.autograd.grad(module_with(weight)(x).sum(), x)
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
    """dys [T, D] of x [1, T, D], and the gradient of the residual stream, added once."""
    x, weight = random(1, 9, 48, seed=0), random(48, seed=1)
    dys = [random(9, 48, seed=2 + index) for index in range(num_dys)]
    residual = random(1, 9, 48, seed=9) if with_residual else None
    _, rstd = OPS.rms_norm(x, weight, EPS)
    for found, expected in zip(
        OPS.rms_norm_backward(dys, x, weight, rstd, residual, True), exact(dys, x, weight, residual), strict=True
    ):
        assert distance(found, expected) < 1e-5


def test_bfloat16_gradients_are_nearer_than_those_of_single_roundings() -> None:
    """Against autograd of the module in bfloat16, where sums are rounded before and after."""
    dtype = torch.bfloat16
    x, residual = (random(1, 300, 64, seed=seed, dtype=dtype) for seed in (0, 2))
    weight = random(64, seed=1, dtype=dtype)
    dys = [random(1, 300, 64, seed=3 + index, dtype=dtype) for index in range(3)]
    module = module_with(weight)
    leaf = x.clone().requires_grad_()
    dx, dweight = torch.autograd.grad(module(leaf), (leaf, module.weight), dys[0] + dys[1] + dys[2])  # type: ignore[arg-type]
    _, rstd = OPS.rms_norm(x, weight, EPS)
    mine = OPS.rms_norm_backward(dys, x, weight, rstd, residual, True)
    expected = exact(dys, x, weight, residual)
    assert distance(mine[0], expected[0]) < 0.7 * distance(dx + residual, expected[0])
    assert distance(mine[1], expected[1]) < distance(dweight, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_may_rely_on_shapes_strides_and_gradients(dtype: torch.dtype) -> None:
    a, b = (random(1, 5, 16, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 1))
    weight = random(16, seed=2, dtype=dtype).requires_grad_()
    torch.library.opcheck(OPS.rms_norm.default, (a, weight, EPS))
    columns = random(16, 5, 1, seed=3, dtype=dtype).permute(2, 1, 0).requires_grad_()  # tokens not contiguous
    torch.library.opcheck(OPS.rms_norm.default, (columns, weight, EPS))
    torch.library.opcheck(OPS.add_rms_norm.default, (columns, b, weight, EPS))
    x, dy, rstd = a.detach(), b.detach(), torch.ones(1, 5)
    for residual, needs_weight in ((None, True), (dy, False)):
        torch.library.opcheck(
            OPS.rms_norm_backward.default, ([dy, dy[0]], x, weight.detach(), rstd, residual, needs_weight)
        )


def test_the_plain_backward_does_not_change_what_it_is_given() -> None:
    x, weight, dys = random(4, 8, seed=0), random(8, seed=1), [random(4, 8, seed=2), random(4, 8, seed=3)]
    before = [tensor.clone() for tensor in (x, weight, *dys)]
    rms_norm_backward(dys, x, weight, torch.ones(4), dys[1])
    for tensor, kept in zip((x, weight, *dys), before, strict=True):
        assert torch.equal(tensor, kept)


# With a rotation


def angles(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, d]; the two columns of a pair differ, so that a mix-up is detected."""
    angle = 3 * random(*shape, seed=seed, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Hugging Face does it, [1, T, H, d]."""
    y: Tensor
    y, _ = apply_rotary_pos_emb(module(x).transpose(1, 2), module(x).transpose(1, 2), cos, sin)
    return y.transpose(1, 2)


# T, H, d
ROTATED_SHAPES = [(7, 4, 64), (5, 1, 128), (3, 2, 96), (0, 2, 8), (1, 3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_rotated_results_are_those_of_hugging_face_in_float32_rounded_once(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, _, width = shape
    x, weight = random(1, *shape, seed=0, dtype=dtype), random(width, seed=1, dtype=dtype)
    cos, sin = angles(1, num_tokens, width, seed=2, dtype=dtype)
    y, rstd = OPS.qk_norm_rope(x, weight, cos, sin, EPS)
    assert y.dtype == dtype
    assert torch.equal(y, rotated(module_with(weight.float()), x.float(), cos.float(), sin.float()).to(dtype))
    assert torch.equal(rstd, OPS.rms_norm(x, weight, EPS)[1])


@pytest.mark.parametrize("shape", [(3, 2, 6), (2, 1, 4), (0, 2, 4)], ids=str)
def test_gradients_of_rotated(shape: tuple[int, int, int]) -> None:
    x = random(1, *shape, seed=0, dtype=torch.float64).requires_grad_()
    weight = random(shape[2], seed=1, dtype=torch.float64).requires_grad_()
    cos, sin = angles(1, shape[0], shape[2], seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: OPS.qk_norm_rope(x, w, cos, sin, EPS)[0], (x, weight))


def test_no_gradient_of_a_frozen_weight_of_rotated() -> None:
    x, weight = random(1, 3, 2, 8, seed=0).requires_grad_(), random(8, seed=1)
    cos, sin = angles(1, 3, 8, seed=2)
    dy = random(1, 3, 2, 8, seed=3)
    OPS.qk_norm_rope(x, weight, cos, sin, EPS)[0].backward(dy)
    (expected,) = torch.autograd.grad(rotated(module_with(weight), x, cos, sin), x, dy)
    torch.testing.assert_close(x.grad, expected)
    assert weight.grad is None


@pytest.mark.parametrize("shape", [(300, 4, 64), (200, 1, 96)], ids=str)
def test_bfloat16_gradients_of_rotated_are_no_farther_than_those_of_hugging_face(
    shape: tuple[int, int, int],
) -> None:
    dtype = torch.bfloat16
    num_tokens, _, width = shape
    x, dy = (random(1, *shape, seed=seed, dtype=dtype) for seed in (0, 1))
    weight = random(width, seed=2, dtype=dtype)
    cos, sin = angles(1, num_tokens, width, seed=3, dtype=dtype)

    wide_x, wide_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
    exact_y = rotated(
        lambda x: nn.functional.rms_norm(x, (width,), wide_weight, EPS), wide_x, cos.double(), sin.double()
    )
    expected = torch.autograd.grad(exact_y, (wide_x, wide_weight), dy.double())
    module = module_with(weight)
    leaf = x.clone().requires_grad_()
    theirs = torch.autograd.grad(rotated(module, leaf, cos, sin), (leaf, module.weight), dy)  # type: ignore[arg-type]
    leaf, own = x.clone().requires_grad_(), weight.clone().requires_grad_()
    mine = torch.autograd.grad(OPS.qk_norm_rope(leaf, own, cos, sin, EPS)[0], (leaf, own), dy)
    for found, other, right in zip(mine, theirs, expected, strict=True):
        assert distance(found, right) <= distance(other, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_may_rely_on_rotated(dtype: torch.dtype) -> None:
    x = random(1, 5, 2, 16, seed=0, dtype=dtype).requires_grad_()
    weight = random(16, seed=1, dtype=dtype).requires_grad_()
    cos, sin = angles(1, 5, 16, seed=2, dtype=dtype)
    torch.library.opcheck(OPS.qk_norm_rope.default, (x, weight, cos, sin, EPS))
    heads = random(1, 2, 5, 16, seed=3, dtype=dtype).transpose(1, 2).requires_grad_()  # tokens not contiguous
    torch.library.opcheck(OPS.qk_norm_rope.default, (heads, weight, cos, sin, EPS))
    rstd = torch.ones(1, 5, 2)
    for needs_weight in (True, False):
        arguments = (heads.detach(), x.detach(), weight.detach(), rstd, cos, sin, needs_weight)
        torch.library.opcheck(OPS.qk_norm_rope_backward.default, arguments)
        dx, dweight = OPS.qk_norm_rope_backward(*arguments)
        assert dx.shape == x.shape
        assert dweight.shape == ((16,) if needs_weight else (0,))


def test_the_plain_backward_of_rotated_does_not_change_what_it_is_given() -> None:
    x, weight, dy = random(4, 2, 8, seed=0), random(8, seed=1), random(4, 2, 8, seed=2)
    cos, sin = angles(4, 8, seed=3)
    given = (dy, x, weight, torch.ones(4, 2), cos, sin)
    before = [tensor.clone() for tensor in given]
    qk_norm_rope_backward(*given)
    for tensor, kept in zip(given, before, strict=True):
        assert torch.equal(tensor, kept)
