"""Attention of nodes to their paths: against each sample by itself, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.attention import varlen_attention
from padfree.attention.copies import copies_of, sum_copies, sum_copies_reference, take_copies
from padfree.attention.prefix_attention import (
    COSTS,
    MOST_LONG_PREFIXES,
    choose_long_prefixes,
    pages_pay,
    prefix_attention,
    prepare_prefix_keys,
)
from padfree.prefix_tree import Indices, path_tokens
from padfree.segments import Segments
from tests.interpreter import DEVICE, needs_kernels

# Depth 3; node 3 has a sibling, node 5 is a sample by itself.
LENGTHS = [5, 3, 2, 4, 6, 7]
PARENTS = np.array([-1, 0, 1, 1, 0, -1])
ENDS = [2, 3, 4, 5, 1]  # the nodes where samples end; the last one is a prefix of the first two


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    return [torch.randn(total, heads, 8, generator=generator, dtype=torch.float64).to(dtype) for heads in (4, 2, 2)]


@pytest.fixture(params=["gathered", "long_prefixes"])
def long_prefixes(request: pytest.FixtureRequest) -> Indices:
    """No node is a long prefix, or every node that has children is."""
    return np.array([0, 1] if request.param == "long_prefixes" else [], dtype=np.int64)


def test_the_compiler_may_rely_on_shapes_strides_and_gradients(long_prefixes: Indices) -> None:
    """Queries, keys and values are views, as models pass them: heads first in memory."""
    q, k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for tensor in inputs())
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS)
    keys = prepare_prefix_keys(segments, long_prefixes)
    assert keys is not None
    arguments = (
        q, k, v, None, segments.cu_seqlens, segments.longest, keys.numbers, keys.sizes, 0.25, None, None, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.padfree.prefix_attention.default, arguments)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
    "all": {"window": 6, "softcap": 2.0, "sinks": torch.linspace(-1, 1, 4, dtype=torch.float64), "scale": 0.3},
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_path_is_a_sample(name: str, backend: str, long_prefixes: Indices) -> None:
    options = dict(OPTIONS[name])
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
        leaves.append(options["sinks"])
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS)
    keys = prepare_prefix_keys(segments, long_prefixes)
    assert keys is not None
    out = prefix_attention(*leaves[:3], segments, keys, backend=backend, **options)

    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    paths = [torch.from_numpy(path_tokens(PARENTS, segments.offsets, node)) for node in ENDS]
    loss = sum((out[path] * weights[path]).sum() for path in paths)
    shared = torch.autograd.grad(loss, leaves)

    total = torch.zeros(())
    for path in paths:
        alone = Segments.from_lengths([len(path)])
        taken = [tensor[path] for tensor in leaves[:3]]
        each = varlen_attention(*taken, alone, alone, backend="reference", **options)
        assert torch.allclose(each, out[path], rtol=0, atol=1e-12)
        total = total + (each * weights[path]).sum()
    for one, other in zip(shared, torch.autograd.grad(total, leaves), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 150])
def test_keys_in_pages_are_the_keys(window: int | None) -> None:
    """Branches inside a page and at its end, a page that two levels fill, and a node of one token."""
    lengths = [300, 84, 130, 300, 1, 190]
    parents = np.array([-1, 0, 1, 1, 0, -1])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    segments = Segments.from_lengths(lengths, parents=parents)
    found = []
    for paged in (True, False):
        keys = prepare_prefix_keys(segments, paged=paged)
        assert keys is not None
        found.append(prefix_attention(q, k, v, segments, keys, window=window, backend="reference"))
    assert torch.equal(*found)


def test_a_changed_leaf_changes_no_other_bitwise(long_prefixes: Indices) -> None:
    q, k, v = inputs(torch.float32)
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS)
    keys = prepare_prefix_keys(segments, long_prefixes)
    assert keys is not None
    before = prefix_attention(q, k, v, segments, keys)
    changed = slice(*segments.offsets[3:5].tolist())
    for tensor in (q, k, v):
        tensor[changed] += 1.0
    after = prefix_attention(q, k, v, segments, keys)
    others = torch.ones(len(q), dtype=torch.bool)
    others[changed] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[changed], after[changed])


def test_copies_are_summed() -> None:
    index = np.array([0, 0, 2, 1, 0, 4])
    copies = copies_of(index, 5, torch.device("cpu"))
    tensor = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    taken = take_copies(tensor, copies)
    assert torch.equal(taken, tensor[torch.from_numpy(index)])
    gradient = torch.randn(6, 3, dtype=torch.float64)
    taken.backward(gradient)
    expected = torch.stack([gradient[index == element].sum(0) for element in range(5)])
    assert tensor.grad is not None
    assert torch.allclose(tensor.grad, expected, rtol=0, atol=1e-14)
    assert torch.equal(tensor.grad[3], torch.zeros(3, dtype=torch.float64))


@needs_kernels
@pytest.mark.parametrize("width", [(3,), (4, 8), (1500,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_sums_like_the_reference(width: tuple[int, ...], dtype: torch.dtype) -> None:
    from padfree.attention.triton_copies import sum_rows

    index = np.array([0, 0, 2, 1, 0, 4, 2, 2])
    copies = copies_of(index, 5, torch.device(DEVICE))
    gradient = torch.randn(8, *width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    found = sum_rows(gradient, copies.copy_index, copies.offsets)
    expected = sum_copies_reference(gradient, copies.index, 5)
    assert found.dtype == dtype
    assert torch.equal(found[3].float(), torch.zeros_like(found[3]).float())
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_long_prefixes_are_few_and_long() -> None:
    """A prompt that many nodes read is a long prefix; a short one and a node without children are not."""
    lengths = [8192, *[1024] * 16, 512, *[2048] * 16, 30_000, 100, 50_000]
    parents = np.array([-1, *[0] * 16, -1, *[17] * 16, -1, 34, -1])
    offsets = Segments.from_lengths(lengths).offsets
    assert choose_long_prefixes(parents, offsets, *COSTS["cuda"]).tolist() == [0, 34]
    assert choose_long_prefixes(parents, offsets, *COSTS["cpu"]).tolist() == [0, 17, 34]
    groups = np.concatenate([[-1 if i == 0 else 9 * number for i in range(9)] for number in range(20)])
    sizes = np.concatenate([[4096 + number, *[64] * 8] for number in range(20)])
    chosen = choose_long_prefixes(groups, Segments.from_lengths(sizes).offsets, *COSTS["cuda"])
    assert chosen.tolist() == [9 * number for number in range(20 - MOST_LONG_PREFIXES, 20)]


def test_pages_are_for_prompts_that_many_nodes_read() -> None:
    """Not if padding pages costs as much as the copies did, and not for a few copies."""

    def pay(prompt: int, response: int, size: int) -> bool:
        offsets = Segments.from_lengths([prompt, *[response] * size]).offsets
        return pages_pay(np.array([-1, *[0] * size]), offsets)

    assert pay(8192, 1024, 16)
    assert pay(1024, 1024, 16)
    assert pay(4000, 1, 8)
    assert not pay(512, 2048, 16)
    assert not pay(1000, 100, 8)
    assert not pay(127, 1, 200)


def test_a_pack_that_shares_nothing_has_no_prefix_keys() -> None:
    assert prepare_prefix_keys(Segments.from_lengths([3, 2])) is None
    half = torch.randn(6, 3).bfloat16()
    copies = copies_of(np.array([0, 0, 2, 1, 0, 1]), 3, torch.device("cpu"))
    assert torch.equal(
        sum_copies(half, copies.index, copies.copy_index, copies.offsets), sum_copies_reference(half, copies.index, 3)
    )
