"""The Triton kernels of the norms against plain torch, on CUDA or in Triton's interpreter.

Triton decides when it is imported whether it interprets: see `tests/head/test_kernels.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.train.norms import norm, norm_backward

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # what Triton 3.9 says
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device; run by test_in_the_interpreter"
)
EPS = 1e-6
# D in one chunk, several, several and a part of one; with the chosen configuration and with others
SHAPES = [(5, 64), (0, 64), (1, 200), (5, 300), (3, 1)]
CONFIGURATIONS: list[dict[str, int] | None] = [None, {"rows": 2, "warps": 2, "stages": 2, "resident": 1}, {"rows": 4}]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.7", reason="the interpreter of Triton 3.6 cannot count loops")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "26 passed, 1 skipped" in result.stdout, result.stdout


def test_numbers_per_thread() -> None:
    pytest.importorskip("triton")
    from padfree.train.norms.kernels import choose

    for width in (64, 1024, 2560, 2880, 4096, 5120, 8192):
        for by in choose(width):
            assert by.rows * by.chunk == 8 * 32 * by.warps
            assert width <= 40 * 32 * by.warps, "more would not fit into registers"


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def configuration(values: dict[str, int] | None) -> Any:
    from padfree.train.norms.kernels import Configuration

    return None if values is None else Configuration(**values)


@needs_kernels
@pytest.mark.parametrize("values", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_plain_torch(shape: tuple[int, int], values: dict[str, int] | None) -> None:
    from padfree.train.norms import kernels

    by = configuration(values)
    a, b = (random(1, *shape, seed=seed) for seed in (0, 1))
    weight = random(shape[1], seed=2)
    y, total, rstd = kernels.forward(a, b, weight, EPS, True, by)
    torch.testing.assert_close(total, a + b)
    torch.testing.assert_close((y, rstd), norm(a + b, weight, EPS, True))
    y, _, rstd = kernels.forward(a, None, weight, EPS, False, by)
    torch.testing.assert_close((y, rstd), norm(a, weight, EPS, False))
    for num_dys, residual in ((1, None), (3, b)):
        dys = [random(*shape, seed=3 + index) for index in range(num_dys)]
        found = kernels.backward(dys, a, weight, rstd, residual, by=by)
        expected = norm_backward(dys, a, weight, rstd, residual)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (2, 300)], ids=str)
@pytest.mark.parametrize("values", CONFIGURATIONS[:2], ids=str)
def test_half_precision(shape: tuple[int, int], dtype: torch.dtype, values: dict[str, int] | None) -> None:
    from padfree.train.norms import kernels

    by = configuration(values)
    a, b, *dys = (random(1, *shape, seed=seed, dtype=dtype) for seed in range(4))
    weight = random(shape[1], seed=4, dtype=dtype)
    # Two roundings may fall to another side each; and the interpreter rounds bfloat16 its own way.
    tolerance = {"rtol": 2e-2, "atol": 2e-2 if INTERPRETED else 1e-3}
    y, total, rstd = kernels.forward(a, b, weight, EPS, True, by)
    torch.testing.assert_close(total, a + b, **tolerance)
    expected, _ = norm(total, weight, EPS, True)
    torch.testing.assert_close(y, expected, **tolerance)
    found = kernels.backward(dys, total, weight, rstd, b, by=by)
    torch.testing.assert_close(found, norm_backward(dys, total, weight, rstd, b), **tolerance)


@needs_kernels
def test_any_number_of_gradients_and_none_of_the_weight() -> None:
    from padfree.train.norms import kernels

    x, weight = random(1, 3, 64, seed=0), random(64, seed=1)
    dys = [random(3, 64, seed=2 + index) for index in range(5)]
    _, _, rstd = kernels.forward(x, None, weight, EPS, True)
    dx, nothing = kernels.backward(dys, x, weight, rstd, None, weight_gradient=False)
    torch.testing.assert_close(dx, norm_backward(dys, x, weight, rstd, None)[0], rtol=1e-5, atol=1e-5)
    assert len(nothing) == 0


@needs_kernels
def test_twice_the_same() -> None:
    from padfree.train.norms import kernels

    num_rows, width = (10, 64) if INTERPRETED else (5000, 2560)
    x, dy = random(num_rows, width, seed=0), random(num_rows, width, seed=1)
    weight = random(width, seed=2)
    _, _, rstd = kernels.forward(x, None, weight, EPS, True)
    first, second = (kernels.backward([dy, dy], x, weight, rstd, None) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
