"""Float32 weights as bfloat16 roundings and the missing bits: every pattern, views, writes, and the Triton kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from padfree.model.split_weight import (
    SplitStorage,
    SplitWeight,
    aligned,
    join_reference,
    split_in_place,
    split_reference,
    storage_bytes,
)
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

# upper halves beside carries, both zeros, subnormal numbers, the largest finite numbers, infinities and NaN
EDGES = [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x8000, 0x8001, 0x807F, 0xBF7F, 0xFF7F, 0xFF80]


def values_of(upper: list[int], lower: Tensor) -> Tensor:
    bits = (torch.tensor(upper)[:, None] << 16 | lower[None, :]).reshape(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def check(values: Tensor, split: Callable[..., None], join: Callable[..., Tensor]) -> None:
    count, device = values.numel(), values.device
    rounded = torch.empty(count, dtype=torch.bfloat16, device=device)
    rest = torch.empty(count, dtype=torch.int16, device=device)
    ties = torch.empty(-(-count // 8), dtype=torch.uint8, device=device)
    split(values, rounded, rest, ties)
    found, number = join(rounded, rest, ties), ~values.isnan()
    assert torch.equal(rounded.view(torch.int16)[number], values.bfloat16().view(torch.int16)[number])
    assert torch.equal(found.view(torch.int32)[number], values.view(torch.int32)[number])
    assert found[~number].isnan().all()
    assert rounded[~number].isnan().all()


def test_every_lower_half_is_recovered() -> None:
    """All 2^16 lower halves, ties included, with one upper half in 509 and with those at the edges."""
    upper = [*range(0, 65536, 509), *EDGES]
    for begin in range(0, len(upper), 16):
        check(values_of(upper[begin : begin + 16], torch.arange(65536)), split_reference, join_reference)


def test_every_upper_half_is_recovered_beside_ties() -> None:
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    check(values_of(list(range(65536)), lower), split_reference, join_reference)


@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1023, 1024, 3001])
def test_kernels_match_the_reference(count: int) -> None:
    from padfree.model import triton_split_weight as kernels

    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator)
    bits[::3] = bits[::3] & ~0xFFFF | 0x8000
    values = bits.to(torch.int32).view(torch.float32).to(DEVICE)
    if count:
        check(values, kernels.split, kernels.join)
        edges = values_of(EDGES, torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]))
        check(edges.to(DEVICE), kernels.split, kernels.join)
    storage = SplitStorage(count, DEVICE)
    storage.split(values, 0)
    assert storage.join(0, count).shape == (count,)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes hours in the interpreter")
def test_kernels_recover_all_values() -> None:
    from padfree.model import triton_split_weight as kernels

    lower = torch.arange(65536, dtype=torch.int32, device="cuda")
    for first in range(-(1 << 15), 1 << 15, 512):
        upper = torch.arange(first, first + 512, dtype=torch.int32, device="cuda") << 16
        check((upper[:, None] | lower).reshape(-1).view(torch.float32), kernels.split, kernels.join)


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[nn.Parameter, Tensor]:
    """A parameter in a storage, and its values as a plain tensor."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    parameter = nn.Parameter(values.clone())
    storage = SplitStorage(2 * aligned(values.numel()), "cpu")
    split_in_place(parameter, storage, aligned(values.numel()))
    return parameter, values


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(1.37).add_(1e-3),
    "operator": lambda weight: weight.__imul__(0.3),
    "element": lambda weight: weight.__setitem__((1, 2), 7.0),
    "column": lambda weight: weight.__setitem__((slice(None), 3), float("nan")),
    "row": lambda weight: weight[2].copy_(torch.arange(5)),
    "copy": lambda weight: weight.copy_(torch.ones(3, 5)),
    "part": lambda weight: weight[0:2, 1:4].zero_(),
    "transposed": lambda weight: weight.T[1].fill_(0.123),
    "flat": lambda weight: weight.view(15)[4:9].sub_(0.5),
    "detached": lambda weight: weight.detach().exp_(),
    "data": lambda weight: weight.data.neg_(),
    "pieces": lambda weight: torch._foreach_add_(list(torch.split(weight.view(15), 4)), 0.321),
    "foreach": lambda weight: torch._foreach_copy_([weight], [torch.full((3, 5), 0.1)]),
    "rows": lambda weight: weight.unbind(0)[2].add_(1),
    "index": lambda weight: weight.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 5)),
    "out": lambda weight: torch.add(torch.ones(3, 5), 0.7, out=weight),
    "random": lambda weight: weight.normal_(generator=torch.Generator().manual_seed(1)),
    "init": lambda weight: nn.init.orthogonal_(weight, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_a_weight_or_a_view_changes_the_stored_values(name: str) -> None:
    parameter, values = pair((3, 5))
    with torch.no_grad():
        WRITES[name](parameter)
        WRITES[name](values)
    torch.testing.assert_close(parameter.detach().clone(), values, rtol=0, atol=0, equal_nan=True)
    assert isinstance(parameter, SplitWeight)
    assert torch.equal(parameter.rounded.nan_to_num(), values.bfloat16().nan_to_num())


def test_a_split_weight_is_a_float32_parameter() -> None:
    parameter, values = pair((3, 5))
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.dtype, parameter.shape, parameter.is_leaf, parameter.requires_grad) == (
        torch.float32,
        (3, 5),
        True,
        True,
    )
    (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((3, 5), 2.0))
    for made in (parameter.clone(), parameter + 0, torch.zeros_like(parameter), parameter.detach().new_ones(2)):
        assert not isinstance(made, SplitWeight)
    assert (parameter.detach().numpy() == values.numpy()).all()
    assert repr(values) in repr(parameter)
    assert nn.Linear(1, 1).requires_grad_(False).weight.dtype == parameter.dtype


def test_a_deep_copy_is_independent() -> None:
    parameter, values = pair((3, 5))
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, nn.Parameter)
    with torch.no_grad():
        parameter.zero_()
    assert torch.equal(copied, values)


def test_neighbours_do_not_share_memory() -> None:
    storage = SplitStorage(aligned(3) + aligned(130), "cpu")
    first, second = nn.Parameter(torch.full((3,), 1 + 2**-8)), nn.Parameter(torch.full((130,), 1 + 2**-8))
    split_in_place(first, storage, 0)
    split_in_place(second, storage, aligned(3))
    with torch.no_grad():
        first.fill_(0.5)
        assert (second == 1 + 2**-8).all()
        second[-1] = 3.0
        assert (first == 0.5).all()
    assert storage_bytes(16) == 66
