"""Merging the levels of a tree gives what gathering keys gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padfree.attention.paths import path_attention, prepare_path_keys
from padfree.batch import Segments
from padfree.cp.levels import attend_levels, prepare_levels


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True, "scale": 0.3}])
def test_against_gathered_keys(options: dict[str, Any]) -> None:
    segments = Segments.from_lengths([5, 3, 2, 4, 6, 7], parents=np.array([-1, 0, 1, 1, 0, -1]), pad_length=2)
    keys = prepare_path_keys(segments)
    assert keys is not None
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(29, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    if options.get("sinks"):
        leaves.append(torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True))
        options = options | {"sinks": leaves[3]}
    dout = torch.randn(29, 4, 8, generator=generator, dtype=torch.float64)
    steps = prepare_levels(segments)
    assert len(steps) == 3
    merged = attend_levels(*leaves[:3], steps, **options)
    gathered = path_attention(*leaves[:3], segments, keys, **options)
    torch.testing.assert_close(merged, gathered, rtol=0, atol=1e-12)
    found, expected = (torch.autograd.grad(out, leaves, dout) for out in (merged, gathered))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_windows_are_refused() -> None:
    segments = Segments.from_lengths([2, 1], parents=np.array([-1, 0]))
    q = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match="window: 2 for prefixes that are merged"):
        attend_levels(q, q, q, prepare_levels(segments), window=2)
