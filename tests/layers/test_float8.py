"""Linear layers in float8: the casts against their definition, the matmuls against float64, compiled against eager."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from padfree.choices import Float8Product
from padfree.layers.float8 import Float8Linear, check_float8_device, fits_float8, use_float8
from padfree.layers.ops.float8_format import DTYPE
from padfree.layers.ops.float8_linear import float8_columns, float8_matmul, float8_rows
from tests.refused import refused

OPS = torch.ops.padfree
PRODUCTS: tuple[Float8Product, ...] = ("output", "input-gradient", "weight-gradient")
SUBSETS = [chosen for count in (1, 2, 3) for chosen in combinations(PRODUCTS, count)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The casts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_scaled_by_the_smallest_power_of_two_that_fits(dtype: torch.dtype) -> None:
    x = random(40, 48, dtype=dtype) * torch.exp2(torch.arange(-10, 10, 0.5).floor())[:, None].to(dtype)
    q, scale, largest = float8_rows(x, columns=True)
    assert q.dtype == DTYPE
    assert scale.shape == (40, 1)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), "powers of two"
    exact, most = x.double(), x.double().abs().amax(1, keepdim=True)
    assert (most / scale <= 448).all()
    assert (most / scale > 224).all()
    # half a unit in the last place: 2⁻⁴ of normal numbers, 2⁻¹⁰ below 2⁻⁶
    allowed = torch.maximum(exact.abs() * 2**-4, scale.double() * 2**-10)
    assert ((q.double() * scale - exact).abs() <= allowed).all()
    assert torch.equal(largest.view(torch.float32), x.float().abs().amax(0))


def test_float8_numbers_stay_what_they_are() -> None:
    """All finite float8 numbers at once: a scale that is not a power of two would move some of them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
    x = numbers[numbers.isfinite()].bfloat16()[None]
    q, scale, _ = float8_rows(x, columns=False)
    assert float(scale) == 1
    assert torch.equal(q.float(), x.float())


@pytest.mark.parametrize("largest", [448.0, 449.0, 1.75, 1.7578125, 1.0, 2.0**-133, 2.0**127])
def test_the_largest_value_never_overflows(largest: float) -> None:
    q, scale, _ = float8_rows(torch.tensor([[largest, -largest, 0.0]]), columns=False)
    assert q.float().isfinite().all()
    torch.testing.assert_close(float(q[0, 0].double() * scale), largest, rtol=2**-4, atol=2.0**-136)
    assert float(q[0, 2].float()) == 0


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    x = random(4, 32)
    x[0] = 0
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    q, scale, largest = float8_rows(x, columns=True)
    values = q.float() * scale
    assert (values[0] == 0).all()
    assert values[1].isnan().all()
    assert values[2].isnan().all()
    assert values[3].isfinite().all()
    _, scale = float8_columns(x, largest)
    assert scale.isnan().flatten().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 37])
def test_columns_are_rows_of_the_transposed_matrix(rows: int) -> None:
    x = random(rows, 48)
    expected, scale, _ = float8_rows(x.T.contiguous(), columns=False)
    for largest in (torch.empty(0, dtype=torch.int32), float8_rows(x, columns=True)[2]):
        q, found = float8_columns(x, largest)
        assert q.shape[1] % 16 == 0
        assert q.shape[1] - rows < 16
        assert torch.equal(q[:, :rows].float(), expected.float())
        assert (q[:, rows:].float() == 0).all()
        assert torch.equal(found, scale)


def test_the_compiler_may_rely_on_shapes_and_strides() -> None:
    x, weight = random(5, 32), random(48, 32, seed=1)
    torch.library.opcheck(OPS.float8_rows.default, (x, True))
    torch.library.opcheck(OPS.float8_rows.default, (x, False))
    q, scale, largest = float8_rows(x, columns=True)
    torch.library.opcheck(OPS.float8_columns.default, (x, largest, None))
    other, other_scale, _ = float8_rows(weight, columns=False)
    for bias in (None, random(48, dtype=torch.bfloat16)):
        arguments = (q, other, scale, other_scale, bias, torch.bfloat16)
        # not the schema: the check cannot compare float8 tensors
        torch.library.opcheck(OPS.float8_matmul.default, arguments, test_utils=("test_faketensor",))


# The three matmuls


def rounded(x: Tensor, dim: int) -> Tensor:
    """x in float64 after a cast to float8 with one scale for all elements along `dim`: the definition, with a loop."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for source, target in zip(x.double().unbind(1 - dim), found.unbind(1 - dim), strict=True):
        largest = float(source.abs().max()) if source.numel() else 0.0
        if largest:
            scale = 2.0**-200
            while largest / scale > 448:
                scale *= 2
            target.copy_((source / scale).float().to(DTYPE).double() * scale)
    return found


@pytest.mark.parametrize("tokens", [1, 7, 16, 37])
@pytest.mark.parametrize("products", SUBSETS, ids="+".join)
def test_products_against_float64(tokens: int, products: tuple[Float8Product, ...]) -> None:
    linear = nn.Linear(32, 48)
    use_float8(linear, products)
    x, dy = random(1, tokens, 32, seed=2).requires_grad_(), random(1, tokens, 48, seed=3) * 1e-6
    y = linear(x)
    y.backward(dy)
    weight, rows, dout = linear.weight.detach(), x.detach()[0], dy[0]

    def cast(tensor: Tensor, dim: int, product: Float8Product) -> Tensor:
        return rounded(tensor, dim) if product in products else tensor.double()

    output = cast(rows, 1, "output") @ cast(weight, 1, "output").T + linear.bias.double()
    dx = cast(dout, 1, "input-gradient") @ cast(weight, 0, "input-gradient")
    dweight = cast(dout, 0, "weight-gradient").T @ cast(rows, 0, "weight-gradient")
    assert x.grad is not None
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    pairs = ((y[0], output), (x.grad[0], dx), (linear.weight.grad, dweight), (linear.bias.grad, dout.sum(0)))
    for found, expected in pairs:
        atol = 1e-5 * float(expected.detach().abs().max())
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


def test_without_products_it_is_nn_linear() -> None:
    plain, linear = nn.Linear(32, 48), nn.Linear(32, 48)
    linear.load_state_dict(plain.state_dict())
    use_float8(linear, ())
    assert isinstance(linear, Float8Linear)
    x = random(5, 32)
    assert torch.equal(linear(x), plain(x))
    use_float8(linear, PRODUCTS)
    assert not torch.equal(linear(x), plain(x))
    assert linear.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_only_the_gradients_that_are_needed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen weight (LoRA) and in the first layer: neither casts nor saves what the other gradient needs."""
    linear = nn.Linear(32, 48, bias=False)
    use_float8(linear, PRODUCTS)
    x = random(5, 32).requires_grad_(frozen != "input")
    linear.weight.requires_grad_(frozen != "weight")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = linear(x)
    shapes = [tuple(tensor.shape) for tensor in saved if tensor.numel()]
    assert shapes == ([(48, 32), (32,)] if frozen == "weight" else [(5, 32), (32,)])
    y.sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert (linear.weight.grad is None) == (frozen == "weight")


def test_without_gradients() -> None:
    linear = nn.Linear(32, 48)
    use_float8(linear, PRODUCTS)
    x = random(2, 5, 32)
    expected = linear(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(linear(x), expected)


def test_tokens_do_not_depend_on_each_other() -> None:
    """The output and the input gradient of a token have the same bits in every pack."""
    linear = nn.Linear(32, 48)
    use_float8(linear, PRODUCTS)
    x, dy = random(9, 32, dtype=torch.float32), random(9, 48, seed=1)
    x[4] *= 1e4
    results = []
    for rows in (slice(0, 9), slice(2, 4)):
        part = x[rows].clone().requires_grad_()
        y = linear(part)
        y.backward(dy[rows])
        assert part.grad is not None
        results.append((y.detach(), part.grad))
    for whole, part in zip(*results, strict=True):
        torch.testing.assert_close(whole[2:4], part, rtol=1e-6, atol=1e-7)


def test_matmul_of_float8_values_is_exact() -> None:
    a, b = random(5, 64), random(16, 64, seed=1)
    (qa, sa, _), (qb, sb, _) = float8_rows(a, columns=False), float8_rows(b, columns=False)
    expected = (qa.double() * sa) @ (qb.double() * sb).T
    found = float8_matmul(qa, qb, sa, sb, None, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


# Modules and devices


def test_sizes_that_float8_matmuls_accept() -> None:
    assert fits_float8(nn.Linear(32, 48))
    assert not fits_float8(nn.Linear(24, 48))
    assert not fits_float8(nn.Linear(32, 40))


def test_a_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_float8_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        check_float8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with refused("parallel.linear", "A100 has no float8 matmul: its compute capability is 8.0"):
        check_float8_device(torch.device("cuda"))
