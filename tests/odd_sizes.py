"""Every Triton kernel of ours once, at sizes that no tile divides: what `make memcheck` runs under compute-sanitizer.

    head      vocabularies 5, 129, 50257; 1 and 47 rows; with and without soft cap and bias; bfloat16 (matmuls with the
              elementwise work at their end) and float32 (elementwise kernels); scores and fused loss, with gradients
    layers    RMSNorm, QK-norm with RoPE, SwiGLU; 1 and 47 rows; widths 40 and 2056

Memory is taken from the driver for every tensor by itself (no caching allocator), so that a number written behind a
tensor is seen. Exits with an error if a result is not finite.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from torch import Tensor

from padfree.head import fused_loss, score
from padfree.layers.ops import triton_qk_norm_rope, triton_rms_norm, triton_swiglu

VOCABULARIES = (5, 129, 50257)
ROWS = (1, 47)
WIDTHS = (40, 2056)
EPS = 1e-6


def main() -> None:
    torch.manual_seed(0)
    launches = 0
    for vocabulary, rows, dtype, form in itertools.product(
        VOCABULARIES, ROWS, (torch.bfloat16, torch.float32), ("plain", "softcap", "bias")
    ):
        check(head(vocabulary, rows, dtype, form), f"head {vocabulary} {rows} {dtype} {form}")
        launches += 1
    for rows, width, dtype in itertools.product(ROWS, WIDTHS, (torch.bfloat16, torch.float32)):
        for name, results in (
            ("RMSNorm", rms_norm(rows, width, dtype)),
            ("QK-norm", qk_norm(rows, dtype)),
            ("SwiGLU", swiglu(rows, width, dtype)),
        ):
            check(results, f"{name} {rows} {width} {dtype}")
            launches += 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{launches} cases of odd sizes, all finite\n")


def check(results: list[Tensor], name: str) -> None:
    torch.cuda.synchronize()
    if not all(bool(torch.isfinite(result).all()) for result in results):
        raise SystemExit(f"{name}: a result is not finite")


def head(vocabulary: int, rows: int, dtype: torch.dtype, form: str) -> list[Tensor]:
    hidden, weight = (torch.randn(n, 64, device="cuda", dtype=dtype).requires_grad_() for n in (rows, vocabulary))
    bias = torch.randn(vocabulary, device="cuda", dtype=dtype).requires_grad_() if form == "bias" else None
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    options = {"bias": bias, "softcap": 5.0 if form == "softcap" else None, "entropy": True}
    scores = score(hidden, weight, labels, **options)  # type: ignore[arg-type]
    assert scores.entropy is not None
    fused = fused_loss(hidden, weight, labels, lambda logprobs, entropy, index: -logprobs + 0.1 * entropy, **options)  # type: ignore[arg-type, operator]
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    return [
        scores.logprobs,
        *torch.autograd.grad(scores.logprobs.sum() - scores.entropy.sum(), leaves),
        *torch.autograd.grad(fused.loss, leaves),
    ]


def rms_norm(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    x, added, dy = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(3))
    weight = torch.randn(width, device="cuda", dtype=dtype)
    y, total, rstd = triton_rms_norm.forward(x, added, weight, EPS)
    return [y, total, *triton_rms_norm.backward([dy, dy, dy], total, weight, rstd, dy)]


def qk_norm(rows: int, dtype: torch.dtype, heads: int = 3, size: int = 24) -> list[Tensor]:
    x, dy = (torch.randn(1, rows, heads, size, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.randn(size, device="cuda", dtype=dtype)
    cos, sin = (torch.randn(1, rows, size, device="cuda", dtype=dtype) for _ in range(2))
    y, rstd = triton_qk_norm_rope.forward(x, weight, cos, sin, EPS)
    return [y, *triton_qk_norm_rope.backward(dy, x, weight, rstd, cos, sin)]


def swiglu(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    gate, up, dact = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(3))
    results = [triton_swiglu.forward(gate, up), *triton_swiglu.backward(dact, gate, up)]
    triton_swiglu.backward_overwriting(dact, gate, up)
    return [*results, dact, gate, up]


if __name__ == "__main__":
    main()
