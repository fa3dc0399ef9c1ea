"""Attention of nodes to their paths on a GPU: every backend there against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padfree.attention.paths import path_attention, prepare_path_keys
from padfree.attention.selection import choose_backend
from padfree.batch import Segments

LENGTHS = [300, 130, 64, 257, 1, 190]
PARENTS = np.array([-1, 0, 1, 1, 0, -1])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "fa4"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("trunks", [(), (0, 1)])
def test_against_the_reference(backend: str, window: int | None, trunks: tuple[int, ...]) -> None:
    try:
        choose_backend("cuda", torch.bfloat16, 128, requested=backend)
    except ValueError as error:
        pytest.skip(str(error))
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS, device="cuda")
    keys = prepare_path_keys(segments, np.array(trunks, dtype=np.int64))
    assert keys is not None
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(sum(LENGTHS), heads, 128, device="cuda", generator=generator).bfloat16() for heads in (8, 2, 2, 8)
    )
    found, right = [], []
    for results, dtype, chosen in ((found, torch.bfloat16, backend), (right, torch.float64, "reference")):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = path_attention(*leaves, segments, keys, window=window, backend=chosen)
        results += [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]
    for one, other in zip(found, right, strict=True):
        assert float((one.double() - other).abs().max()) < 0.02 * float(other.abs().max())
