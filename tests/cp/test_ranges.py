"""Selections of ranges against plain indexing and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padfree.arrays import concatenated_ranges
from padfree.cp.ranges import segments_of, select_ranges

CPU = torch.device("cpu")


def test_segments_are_on_host_and_device() -> None:
    segments = segments_of(np.array([3, 0, 2]), CPU)
    assert segments.cu_seqlens.tolist() == segments.offsets.tolist() == [0, 3, 3, 5]
    assert (segments.cu_seqlens.dtype, segments.max_seqlen) == (torch.int32, 3)


@given(
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    ranges=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8)), max_size=6),
    rest=st.booleans(),
)
def test_take_and_its_transpose(sizes: list[int], ranges: list[tuple[int, int, int]], rest: bool) -> None:
    num_tokens, borders = sum(sizes), np.append(0, np.cumsum(sizes))
    cut = [(p % len(sizes), a, b) for p, a, b in ranges]
    if rest:
        cut += [(part, 0, 8) for part in range(len(sizes))]
    starts = np.array([borders[p] + min(a, sizes[p]) for p, a, _ in cut], dtype=np.int64)
    ends = np.array([borders[p] + min(a + n, sizes[p]) for p, a, n in cut], dtype=np.int64)
    selection = select_ranges(starts, ends, sizes, CPU)
    numbers = concatenated_ranges(starts, ends - starts)
    tensor = torch.randn(num_tokens, 2, dtype=torch.float64, requires_grad=True)
    expected = tensor[torch.from_numpy(numbers)]
    assert torch.equal(selection.take(*tensor.split(sizes)), expected)
    weight = torch.randn_like(expected)
    before, gradient = weight.clone(), torch.zeros(num_tokens, 2, dtype=torch.float64)
    if len(numbers):
        (gradient,) = torch.autograd.grad((expected * weight).sum(), tensor)
    if num_tokens == len(np.unique(numbers)):
        torch.testing.assert_close(selection.summed(weight), gradient)
        assert torch.equal(torch.cat(selection.summed_apart(weight.clone())), selection.summed(weight))
    else:
        assert not rest
        with pytest.raises(AssertionError, match="some tokens are not selected"):
            selection.summed(weight)
        with pytest.raises(AssertionError, match="some tokens are not selected"):
            selection.summed_apart(weight)
    torch.testing.assert_close(selection.add_to(torch.ones(num_tokens, 2, dtype=torch.float64), weight), gradient + 1)
    assert torch.equal(weight, before)
    for _, targets in selection.repeats:
        assert len(targets.unique()) == len(targets)  # so that the order of a sum is fixed


def test_one_range_is_not_copied() -> None:
    tensor = torch.randn(5, 2)
    selection = select_ranges(np.array([0, 2]), np.array([2, 5]), [5], CPU)
    assert selection.is_everything
    assert selection.take(tensor).data_ptr() == tensor.data_ptr()
    selection = select_ranges(np.array([1]), np.array([4]), [5], CPU)
    assert not selection.is_everything
    assert selection.take(tensor).data_ptr() == tensor[1:].data_ptr()


def test_gradients_in_order_are_not_moved() -> None:
    """Received keys come before own keys; of 4 + 8 received and 2 + 3 + 20 own keys, 8 and 2 must move."""
    gradient = torch.arange(37.0)[:, None] * torch.ones(2)
    before = gradient.clone()
    selection = select_ranges(np.array([25, 0, 29, 2, 5]), np.array([29, 2, 37, 5, 25]), [25, 4, 8], CPU)
    own, others = selection.summed_apart(gradient)
    assert (own.data_ptr(), others.data_ptr()) == (gradient[12:].data_ptr(), gradient.data_ptr())
    assert torch.equal(torch.cat([own, others]), selection.summed(before))
    one_piece = select_ranges(np.array([25, 0]), np.array([37, 25]), [25, 12], CPU)
    version = before._version
    own, others = one_piece.summed_apart(before)
    assert before._version == version  # nothing was written
    assert (len(own), len(others)) == (25, 12)


def test_gradients_out_of_order_are_moved_once() -> None:
    selection = select_ranges(np.array([0, 4]), np.array([4, 8]), [4, 4], CPU)  # own keys come first
    gradient = torch.randn(8, 2)
    own, others = selection.summed_apart(gradient)
    assert torch.equal(torch.cat([own, others]), gradient)
    assert own.data_ptr() != gradient.data_ptr()
    strided = torch.randn(2, 8).T
    assert torch.equal(torch.cat(selection.summed_apart(strided)), strided)


def test_a_range_ends_with_its_part() -> None:
    selection = select_ranges(np.array([1, 2, 0]), np.array([2, 5, 1]), [2, 3], CPU)
    assert selection.ranges == ((0, 1, 1), (1, 0, 3), (0, 0, 1))
    assert selection.copies == ((0, 4, 1), (1, 0, 4))


def test_two_gradients_of_a_token_are_rounded_once() -> None:
    selection = select_ranges(np.array([0, 0]), np.array([1, 1]), [1], CPU)
    tensor = torch.tensor([[1.0], [2.0**-8 + 2.0**-9]]).to(torch.bfloat16)
    assert selection.summed(tensor).item() == (tensor.float().sum()).to(torch.bfloat16).item()


def test_many_gradients_of_a_token_are_rounded_once_as_well() -> None:
    """Sixteen pieces read one prefix: added one by one in bfloat16, they would lose half of their sum."""
    selection = select_ranges(np.zeros(16, np.int64), np.array([3] * 15 + [5]), [4, 1], CPU)
    assert selection.sums is not None
    assert selection.repeats == ()
    gradient = torch.full((50, 2), 2.0**-9, dtype=torch.bfloat16)
    gradient[0] = 1.0
    expected = torch.tensor([1 + 15 * 2.0**-9, 2.0**-5, 2.0**-5, 2.0**-9, 2.0**-9])[:, None].expand(5, 2)
    assert torch.equal(selection.summed(gradient), expected.to(torch.bfloat16))
    own, others = selection.summed_apart(gradient.clone())
    assert torch.equal(torch.cat([own, others]), expected.to(torch.bfloat16))
    total = torch.ones(5, 2)
    assert torch.equal(selection.add_to(total, gradient), 1 + expected)
