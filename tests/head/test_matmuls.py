"""The fused matmuls, against a matmul followed by the elementwise work.

On a Hopper GPU, or in Triton's interpreter: see `test_triton_elementwise.py`. Tiles are small here, so that there are
several.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.head import chunks, elementwise, fused_loss, matmuls, score
from padfree.head.budget import FusedPlan
from padfree.head.elementwise import BlockedHead, BlockSums, LabelledRows, Softmax, Upstream
from padfree.head.matmuls import MatmulConfiguration, unsupported_reason
from tests.head.cases import imitate_cuda
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def needs_matmuls(test: Any) -> Any:
    return needs_kernels(pytest.mark.skipif(not INTERPRETED and not IS_HOPPER, reason="needs a Hopper GPU")(test))


# R, D, V: tiles have 64 rows and 64 columns, steps 32 of D
SHAPES = {
    "one token": (1, 8, 3),
    "five columns": (47, 16, 5),
    "odd": (67, 40, 200),
    "whole tiles": (64, 64, 128),
    "a column more": (70, 72, 129),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0, "logit_scale": 0.8},
    "bias and softcap": {"bias": True, "softcap": 2.0, "logit_scale": -0.5},
}


def make_task(
    shape: tuple[int, int, int],
    *,
    block: int,
    bias: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    size: float = 3.0,
) -> tuple[Tensor, BlockedHead, LabelledRows, Upstream]:
    num_rows, width, vocabulary = shape
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * (size / width**0.5)
    values = torch.randn(vocabulary, generator=generator).bfloat16()
    values[vocabulary // 2] = -torch.inf  # a vocabulary entry that does not exist
    head = BlockedHead(
        weight=weight.bfloat16().to(DEVICE),
        bias=values.to(DEVICE) if bias else None,
        softcap=softcap,
        logit_scale=logit_scale,
        block=block,
    )
    # At the edges of tiles, and one label that does not exist.
    edges = torch.tensor([vocabulary - 1, 0, 63, 64, 127, 128, vocabulary, -100])
    rows = LabelledRows(
        labels=edges.repeat(num_rows)[:num_rows].to(DEVICE),
        inverse_temperature=torch.linspace(0.5, 1.5, num_rows).to(DEVICE),
    )
    rows = replace(rows, labels=torch.where(rows.labels <= vocabulary, rows.labels, 1))
    pull = torch.linspace(-1.0, 2.0, num_rows).to(DEVICE)
    return hidden.bfloat16().to(DEVICE), head, rows, Upstream(logprobs=pull, entropy=pull.square())


def reference_sums(
    hidden: Tensor, head: BlockedHead, rows: LabelledRows, stored: Tensor | None, *, entropy: bool = True
) -> tuple[BlockSums, Softmax]:
    raw_logits = hidden.float() @ head.weight.float().T
    sums = BlockSums.empty(len(hidden), head.num_blocks, raw_logits, entropy=entropy)
    elementwise.reduce_tile(raw_logits, 0, head, rows, sums, stored)
    return sums, elementwise.merge(sums)


def small(parts: int) -> MatmulConfiguration:
    return MatmulConfiguration(rows=64, columns=64, depth=32, stages=2, warps=4, band=2, parts=parts)


@needs_matmuls
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ("one token", "plain"),
        ("five columns", "bias"),
        ("odd", "plain"),
        ("whole tiles", "bias"),
        ("a column more", "softcap"),
    ],
)
def test_they_are_a_matmul_and_the_elementwise_work(shape: str, form: str, parts: int) -> None:
    from padfree.head import triton_elementwise as kernels

    by = small(parts)
    hidden, head, rows, upstream = make_task(SHAPES[shape], block=by.block, **FORMS[form])
    num_rows, _, vocabulary = SHAPES[shape]
    kept = min(vocabulary, 72)
    memory = torch.full((2, num_rows, 256), 7.0, dtype=torch.float16, device=DEVICE)
    expected_stored = memory[0, :, :vocabulary]
    expected, softmax = reference_sums(hidden, head, rows, expected_stored)
    for has_entropy, stored in ((True, memory[1, :, :kept]), (False, None)):
        sums = BlockSums.empty(num_rows, head.num_blocks, expected.peak, entropy=has_entropy)
        for tensor in (sums.peak, sums.total, sums.moment):
            if tensor is not None:
                tensor.fill_(float("nan"))
        matmuls.reduce_rows(hidden, head, rows, sums, stored, by)
        for field in ("peak", "total", "moment", "target")[: 4 if has_entropy else 2]:
            torch.testing.assert_close(
                getattr(sums, field), getattr(expected, field), atol=2e-5, rtol=2e-5, equal_nan=True
            )
        merged = kernels.merge(sums)
        torch.testing.assert_close(merged.logprobs, softmax.logprobs, atol=2e-5, rtol=2e-5, equal_nan=True)
        assert (merged.entropy is None) == (not has_entropy)
        if merged.entropy is not None:
            torch.testing.assert_close(merged.entropy, softmax.entropy, atol=2e-5, rtol=2e-5)
    stored = memory[1, :, :kept].float().clamp(min=elementwise.FLOAT16_FLOOR)
    torch.testing.assert_close(stored, expected_stored[:, :kept].float(), atol=2e-3, rtol=2e-3)
    assert (memory[1, :, kept:] == 7).all()

    for up in (upstream, replace(upstream, entropy=None)):
        exact = torch.empty(num_rows, vocabulary, device=DEVICE)
        elementwise.gradient_from_raw_logits(hidden.float() @ head.weight.float().T, 0, head, rows, softmax, up, exact)
        memory = torch.full((num_rows, 256), 7.0, dtype=torch.bfloat16, device=DEVICE)
        first = min(8, vocabulary - 1)
        out = memory[:, : vocabulary - first]
        matmuls.gradient_columns(hidden, head.weight[first:], first, head, rows, softmax, up, out, by)
        torch.testing.assert_close(out.float(), exact[:, first:], atol=1e-3, rtol=1e-2, equal_nan=True)
        assert (memory[:, vocabulary - first :] == 7).all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_values_that_differ_from_step_to_step_do_not_recompile() -> None:
    """Numbers of tokens, strides equal to these numbers, and pointers to any token."""
    triton = pytest.importorskip("triton")
    from padfree.head import triton_elementwise
    from padfree.head import triton_matmuls as fused

    found = [
        kernel
        for module in (triton_elementwise, fused)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction)
    ]
    assert len(found) >= 7
    for kernel in found:
        for parameter in kernel.params:
            if parameter.name in ("num_rows", "sums_stride"):
                assert parameter.do_not_specialize, f"{kernel.__name__}: {parameter.name}"
            if parameter.name in triton_elementwise.PER_ROW:
                assert parameter.do_not_specialize_on_alignment, f"{kernel.__name__}: {parameter.name}"


HOPPER_SHARED_MEMORY = 232_448


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["reduce_kernel", "gradient_kernel"])
@pytest.mark.parametrize(("softcap", "columns"), [(None, 160), (3.0, 129)])
def test_what_is_used_fits_into_a_hopper_gpu(name: str, softcap: float | None, columns: int) -> None:
    """Compiled for Hopper: columns that end at a multiple of 16 bytes, and columns that do not."""
    triton = pytest.importorskip("triton", minversion="3.7")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from padfree.head import triton_matmuls as kernels
    from padfree.head.matmuls import _fitting, _is_cut, choose

    written = torch.empty(1, columns, dtype=torch.bfloat16)
    head = BlockedHead(weight=torch.empty(columns, 64), bias=None, softcap=softcap, logit_scale=1.0, block=256)
    by = _fitting(choose(head), written)
    constants = {
        "HAS_BIAS": False, "HAS_SOFTCAP": softcap is not None, "HAS_MOMENT": True, "HAS_ENTROPY": True,
        "HAS_STORED": True, "IS_CUT": _is_cut(written), "ROWS": by.rows, "COLUMNS": by.columns, "DEPTH": by.depth,
        "BAND": by.band, "PARTS": by.parts, "INTERPRETED": False,
    }  # fmt: skip
    types = {
        "hidden": f"tensordesc<bf16[{by.rows},{by.depth}]>",
        "weight": f"tensordesc<bf16[{by.columns},{by.depth}]>",
        "stored": f"tensordesc<fp16[{by.rows},{by.block}]>",
        "out": f"tensordesc<bf16[{by.rows},{by.block}]>",
        "labels": "*i64",
        "bias": "*bf16",
        "stored_pointer": "*fp16",
        "out_pointer": "*bf16",
        **dict.fromkeys(("logit_scale", "softcap"), "fp32"),
        **dict.fromkeys(("num_rows", "width", "vocabulary", "kept", "first_column", "num_columns"), "i32"),
        **dict.fromkeys(("stored_stride", "out_stride", "sums_stride"), "i32"),
    }
    kernel = getattr(kernels, name)
    signature = {
        each.name: "constexpr" if each.name in constants else types.get(each.name, "*fp32") for each in kernel.params
    }
    source = ASTSource(kernel, signature, {name: constants[name] for name in signature if name in constants})
    options = {"num_warps": by.warps, "num_stages": by.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert 0 < compiled.metadata.shared <= HOPPER_SHARED_MEMORY


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_kernels_are_compiled_once_for_all_numbers_of_tokens() -> None:
    if not IS_HOPPER:
        pytest.skip("no Hopper GPU")
    from padfree.head import triton_elementwise
    from padfree.head import triton_matmuls as fused

    def compiled() -> int:
        every = (fused.reduce_kernel, fused.gradient_kernel, triton_elementwise._merge_kernel)
        return sum(len(caches[0]) for kernel in every for caches in kernel.device_caches.values())

    numbers = []
    for num_rows in (47, 48, 64, 1, 128, 131):
        by = small(1)
        hidden, head, rows, upstream = make_task((num_rows, 16, 160), block=by.block)
        sums = BlockSums.empty(num_rows, head.num_blocks, rows.inverse_temperature, entropy=True)
        stored = torch.empty(num_rows, 192, dtype=torch.float16, device=DEVICE)
        matmuls.reduce_rows(hidden, head, rows, sums, stored[:, :160], by)
        softmax = elementwise.merge(sums)
        out = torch.empty(num_rows, 192, dtype=torch.bfloat16, device=DEVICE)[:, :160]
        matmuls.gradient_columns(hidden, head.weight, 0, head, rows, softmax, upstream, out, by)
        numbers.append(compiled())
    assert numbers[0] == numbers[-1] > 0


@needs_matmuls
def test_large_logits() -> None:
    """Logits of 1e4 and far apart: nothing overflows, and values below the range of float16 have no probability."""
    from padfree.head import triton_elementwise as kernels

    by = small(1)
    hidden, head, rows, upstream = make_task((5, 16, 150), block=by.block, size=1e4)
    stored = torch.empty(5, 192, dtype=torch.float16, device=DEVICE)
    sums = BlockSums.empty(5, head.num_blocks, rows.inverse_temperature, entropy=True)
    matmuls.reduce_rows(hidden, head, rows, sums, stored[:, :150], by)
    softmax = kernels.merge(sums)
    _, expected = reference_sums(hidden, head, rows, None)
    assert softmax.logprobs.isfinite().all()
    torch.testing.assert_close(softmax.logprobs, expected.logprobs, atol=1e-2, rtol=1e-5)
    gradient = stored.view(torch.bfloat16)
    kernels.gradient_from_stored(stored[:, :150], head, rows, sums.peak, softmax, upstream, gradient[:, :150])
    assert gradient[:, :150].isfinite().all()


N, D, V = 45, 40, 600
# In tiles of 128 tokens and 256 columns.
PLANS = {
    "one chunk": FusedPlan(chunk_rows=40, kept=600, shared=256),
    "chunks": FusedPlan(chunk_rows=17, kept=600, shared=256),
    "chunks, some columns twice": FusedPlan(chunk_rows=17, kept=320, shared=256),
}


def losses(inputs: dict[str, Tensor], backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Scores and gradients of `score`, then of `fused_loss`, for the same loss."""
    given = {name: value.to(DEVICE, dtype).requires_grad_() for name, value in inputs.items() if name != "labels"}
    labels = inputs["labels"].to(DEVICE)
    factors = torch.linspace(-1.0, 2.0, N, device=DEVICE)
    everything = {**options, "bias": given.get("bias"), "entropy": True, "backend": backend}
    leaves = list(given.values())

    def token_loss(logprobs: Tensor, entropy: Tensor, positions: Tensor) -> Tensor:
        return logprobs * factors[positions] - 0.1 * entropy

    scores = score(given["hidden"], given["weight"], labels, **everything)
    total = (scores.logprobs * factors - 0.1 * scores.entropy).sum()
    fused = fused_loss(given["hidden"], given["weight"], labels, token_loss, **everything)
    return [
        scores.logprobs,
        scores.entropy,
        *torch.autograd.grad(total, leaves),
        fused.logprobs,
        fused.loss,
        *torch.autograd.grad(fused.loss, leaves),
    ]


@needs_matmuls
@pytest.mark.parametrize(
    ("plan", "options"),
    [("one chunk", {}), ("chunks", {"softcap": 4.0}), ("chunks, some columns twice", {"bias": True})],
)
def test_score_and_fused_loss(plan: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ignored tokens and a temperature per token, in the default tiles."""
    if INTERPRETED:
        imitate_cuda(monkeypatch)
    monkeypatch.setattr(chunks, "plan_fused", lambda *args, **others: PLANS[plan])
    called = []
    for name in ("reduce_rows", "gradient_columns"):
        whole = getattr(matmuls, name)
        monkeypatch.setattr(matmuls, name, lambda *args, name=name, whole=whole: called.append(name) or whole(*args))
    generator = torch.Generator().manual_seed(7)
    inputs = {
        "hidden": torch.randn(N, D, generator=generator).bfloat16(),
        "weight": (3 * torch.randn(V, D, generator=generator) / D**0.5).bfloat16(),
        "labels": torch.randint(V, (N,), generator=generator),
    }
    if options.get("bias"):
        inputs["bias"] = torch.randn(V, generator=generator).bfloat16()
    inputs["labels"][::9] = -100
    options = {
        "softcap": options.get("softcap"),
        "temperature": torch.linspace(0.7, 1.4, N, device=DEVICE),
        "num_labels": 40,
    }
    expected = losses(inputs, "reference", torch.float64, **options)
    actual = losses(inputs, "triton", torch.bfloat16, **options)
    assert set(called) == {"reduce_rows", "gradient_columns"}
    for mine, right in zip(actual, expected, strict=True):
        limit = 1e-6 if mine.dtype == torch.float32 else 5e-3 if INTERPRETED else 3e-3  # it truncates
        assert (mine.double() - right).norm() <= limit * right.norm()


@needs_matmuls
def test_where_the_matmuls_cannot_be_used() -> None:
    hidden, weight = (torch.zeros(rows, 16, dtype=torch.bfloat16, device=DEVICE) for rows in (3, 5))
    assert unsupported_reason(hidden, weight, torch.bfloat16) is None
    for wrong, reason in (
        ((hidden.float(), weight.float(), torch.float32), "only bfloat16"),
        ((hidden[:, :12], weight[:, :12], torch.bfloat16), "D is not a multiple of 8"),
        ((hidden, weight.view(-1)[4:76].view(-1, 8), torch.bfloat16), "weight: its matrix rows"),
        ((hidden.T.contiguous().T, weight, torch.bfloat16), "hidden: its matrix rows"),
    ):
        assert reason in (unsupported_reason(*wrong) or ""), reason
