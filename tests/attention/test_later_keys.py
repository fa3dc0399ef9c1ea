"""Images whose tokens attend to each other: the attention of a whole pack against a dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.batch import AttnContext
from padfree.cp import attend
from padfree.cp.image_blocks import ImageBlocks
from padfree.segments import Segments
from tests.refused import refused

LENGTHS = [7, 1, 12, 5, 9]
IMAGES = [(1, 5), (8, 9), (10, 13), (15, 20), (20, 25), (30, 34)]
"""The last image of one segment is followed by an image that begins the next; one image has a single token."""


def visible(segments: Segments, window: int | None) -> Tensor:
    """[T, T]: causal within segments and inside the window, and also later keys of the same image."""
    offsets = segments.offsets
    number = np.searchsorted(offsets, np.arange(offsets[-1]), side="right")
    place = np.arange(offsets[-1])
    same = number[:, None] == number[None]
    seen = same & (place[None] <= place[:, None])
    if window is not None:
        seen &= place[None] > place[:, None] - window
    for first, end in IMAGES:
        seen[first:end, first:end] |= place[None, first:end] > place[first:end, None]
    return torch.from_numpy(seen)


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(total, 4, 16), (total, 2, 16), (total, 2, 16), (total, 4, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None) -> Tensor:
    k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def both(
    dtype: torch.dtype, device: str, backend: str, window: int | None, softcap: float | None
) -> list[list[Tensor]]:
    """The output and the gradients of q, k and v: by padfree in `dtype`, and by the dense mask in float64."""
    segments = Segments.from_lengths(LENGTHS, device=torch.device(device))
    tokens = np.concatenate([np.arange(*image) for image in IMAGES])
    blocks = ImageBlocks(tokens, segments, torch.device(device))
    context = AttnContext(segments=segments, backend=backend, image_blocks=blocks)
    *states, upstream = inputs(dtype, device)
    leaves = [tensor.clone().requires_grad_() for tensor in states]
    out = attend(*leaves, context, window=window, softcap=softcap, image_blocks=True)
    found = [out, *torch.autograd.grad(out, leaves, upstream)]
    leaves = [tensor.double().requires_grad_() for tensor in states]
    expected = dense(*leaves, visible(segments, window).to(device), softcap)  # type: ignore[misc]
    return [found, [expected, *torch.autograd.grad(expected, leaves, upstream.double())]]


CASES: list[tuple[int | None, float | None]] = [(None, None), (3, None), (None, 2.0), (5, 2.0)]


@pytest.mark.parametrize(("window", "softcap"), CASES)
@pytest.mark.parametrize(
    ("backend", "dtype", "bound"), [("reference", torch.float64, 1e-13), ("cpu", torch.float32, 1e-5)]
)
def test_equals_a_dense_mask(
    backend: str, dtype: torch.dtype, bound: float, window: int | None, softcap: float | None
) -> None:
    pairs = both(dtype, "cpu", backend, window, softcap)
    for found, expected in zip(*pairs, strict=True):
        assert (found.double() - expected).abs().max() < bound


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_equals_a_dense_mask_on_cuda(window: int | None) -> None:
    for found, expected in zip(*both(torch.bfloat16, "cuda", "auto", window, None), strict=True):
        assert (found.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_segments_that_are_text_do_not_change_by_one_bit() -> None:
    segments = Segments.from_lengths(LENGTHS)
    q, k, v, _ = inputs(torch.float32)
    tokens = np.arange(1, 5)
    context = AttnContext(segments=segments, image_blocks=ImageBlocks(tokens, segments, q.device))
    plain: Any = attend(q, k, v, context)
    with_images = attend(q, k, v, context, image_blocks=True)
    assert torch.equal(plain[7:], with_images[7:])
    assert not torch.equal(plain[1:4], with_images[1:4])
    assert torch.equal(plain[4:7], with_images[4:7])  # the last token of the image, and the text after it


def test_what_is_refused() -> None:
    segments = Segments.from_lengths(LENGTHS)
    q, k, v, _ = inputs(torch.float32)
    context = AttnContext(segments=segments, image_blocks=ImageBlocks(np.arange(1, 5), segments, q.device))
    with refused("sinks", "image tokens"):
        attend(q, k, v, context, sinks=torch.zeros(4), image_blocks=True)
    with refused("causal", "image tokens"):
        attend(q, k, v, context, causal=False, image_blocks=True)
