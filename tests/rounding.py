"""Bounds for float32 that come from this machine's own rounding, not from that of another.

    expected    the plain way, in float32
    wide        the same in float64
    found       the way that is tested, in float32

Both float32 results are rounded, each in an order of its own: `found` may be a few times as far from `expected` as
`expected` is from `wide`. What can be computed in float64 altogether is compared there, at 1e-12.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

FACTOR = 8.0
"""Of the noise: the largest of many errors is another one in another order of arithmetic."""


def in_float64(model: Any) -> Any:
    """A copy of a transformers or PEFT model. Its norms may round to float32 all the same: they are not the noise."""
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = "eager"  # there is no grouped product for float64
    return wide


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """In units of the largest entry of its tensor, or of a hundredth of the largest of all; and where it is."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(
        (
            float((found[name].double() - tensor.double()).abs().max())
            / max(float(tensor.abs().max()), 1e-2 * largest),
            name,
        )
        for name, tensor in expected.items()
    )


def noise_of(expected: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> float:
    noise, where = largest_difference(expected, wide)
    # Gradients through the recurrence of a tiny Qwen3.5 reach 1.1e-4 on an x86_64 CPU.
    assert 0 < noise < 1e-3, f"{where}: {noise:.1e} is another result, not rounding"
    return noise


def assert_same_but_for_rounding(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], wide: Mapping[str, Tensor]
) -> None:
    difference, where = largest_difference(found, expected)
    allowed = FACTOR * noise_of(expected, wide)
    assert difference <= allowed, f"{where}: {difference:.1e} over {allowed:.1e}"
