"""The Triton kernels against plain torch, on CUDA or in Triton's interpreter.

Triton decides at import whether to use its interpreter, so without CUDA these tests run in a separate process, which
`tests/test_interpreted.py` starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.head import elementwise, fused_loss, score
from padfree.head.elementwise import BlockedHead, BlockSums, LabelledRows, Upstream
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels
from tests.refused import refused

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"vocabulary": 31},
    "bias": {"vocabulary": 200, "bias": True},
    "bias and softcap": {"vocabulary": 150, "bias": True, "softcap": 3.0},
}
ROWS = 4


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_the_cpu_needs_the_interpreter() -> None:
    pytest.importorskip("triton")
    hidden, weight, labels = torch.zeros(2, 4), torch.zeros(9, 4), torch.tensor([1, 2])
    with refused("backend", "'triton' does not run on cpu"):
        score(hidden, weight, labels, backend="triton")
    with refused("backend", "'triton' does not support float64"):
        score(hidden.double(), weight.double(), labels, backend="triton")


def make_task(
    vocabulary: int, *, bias: bool = False, softcap: float | None = None
) -> tuple[Tensor, BlockedHead, LabelledRows, Upstream]:
    generator = torch.Generator().manual_seed(vocabulary)
    raw_logits = 5 * torch.randn(ROWS, vocabulary, generator=generator)
    head = BlockedHead(
        weight=torch.empty(vocabulary, 1),
        bias=torch.randn(vocabulary, generator=generator).bfloat16().to(DEVICE) if bias else None,
        softcap=softcap,
        logit_scale=0.8,
        block=64,
    )
    rows = LabelledRows(
        labels=torch.tensor([0, vocabulary - 1, 64 % vocabulary, vocabulary // 2]).to(DEVICE),
        inverse_temperature=torch.linspace(0.5, 1.5, ROWS).to(DEVICE),
    )
    pull = torch.linspace(-1.0, 2.0, ROWS).to(DEVICE)
    return raw_logits.to(DEVICE), head, rows, Upstream(logprobs=pull, entropy=pull.square())


def reduce_all(
    module: Any, task: tuple[Tensor, BlockedHead, LabelledRows, Upstream], stored: Tensor | None
) -> BlockSums:
    raw_logits, head, rows, _ = task
    sums = BlockSums.empty(ROWS, head.num_blocks, raw_logits, entropy=True)
    for first in range(0, raw_logits.shape[1], 128):
        part = None if stored is None else stored[:, first : first + 128]
        module.reduce_tile(raw_logits[:, first : first + 128].clone(), first, head, rows, sums, part)
    return sums


@needs_kernels
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kernels_are_the_steps(form: dict[str, Any]) -> None:
    from padfree.head import triton_elementwise as kernels

    vocabulary = form["vocabulary"]
    task = make_task(**form)
    raw_logits, head, rows, upstream = task
    memory = torch.zeros(2, ROWS, 256, dtype=torch.float16, device=DEVICE)
    expected_stored, stored = memory[:, :, :vocabulary]
    expected_sums = reduce_all(elementwise, task, expected_stored)
    sums = reduce_all(kernels, task, stored)
    for field in ("peak", "total", "moment", "target"):
        torch.testing.assert_close(getattr(sums, field), getattr(expected_sums, field), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stored, expected_stored, atol=2e-3, rtol=2e-3)
    assert not memory[:, :, vocabulary:].any()

    softmax = elementwise.merge(expected_sums)
    for up in (upstream, replace(upstream, entropy=None)):
        expected = torch.empty(ROWS, vocabulary, device=DEVICE)
        elementwise.gradient_from_raw_logits(raw_logits.clone(), 0, head, rows, softmax, up, expected)
        gradient = torch.full((ROWS, vocabulary), float("nan"), device=DEVICE)
        for first, last in ((0, 20), (20, vocabulary)):
            kernels.gradient_from_raw_logits(
                raw_logits[:, first:last], first, head, rows, softmax, up, gradient[:, first:last]
            )
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
        # In place: bfloat16 gradients overwrite float16 logits, as in bfloat16 training.
        in_place = memory[1].clone()
        kernels.gradient_from_stored(
            in_place[:, :vocabulary], head, rows, sums.peak, softmax, up, in_place.view(torch.bfloat16)[:, :vocabulary]
        )
        gradient = in_place.view(torch.bfloat16)[:, :vocabulary].float()
        torch.testing.assert_close(gradient, expected, atol=2e-2, rtol=1e-2)
        assert not in_place[:, vocabulary:].any()


@needs_kernels
def test_odd_values() -> None:
    """NaN affects only its token, -inf adds nothing, a label outside the vocabulary gives NaN, 1e4 is handled."""
    from padfree.head import triton_elementwise as kernels

    raw_logits, head, rows, upstream = make_task(200)
    raw_logits[1, 70] = float("nan")
    raw_logits[2, :128] = float("-inf")
    raw_logits[3, 7] = 1e4
    rows = replace(rows, labels=torch.tensor([200, 0, 150, 7]).to(DEVICE))
    sums = reduce_all(kernels, (raw_logits, head, rows, upstream), None)
    expected = reduce_all(elementwise, (raw_logits, head, rows, upstream), None)
    softmax = kernels.merge(sums)
    assert softmax.logprobs.isnan().tolist() == [True, True, False, False]
    assert softmax.entropy is not None
    assert softmax.entropy.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(
        softmax.logprobs, elementwise.merge(expected).logprobs, atol=1e-4, rtol=1e-4, equal_nan=True
    )


@needs_kernels
@pytest.mark.parametrize("factor", [1.0, -0.75, float("nan")])
def test_scale(factor: float) -> None:
    from padfree.head import triton_elementwise as kernels

    values = torch.randn(3, 3001, device=DEVICE).bfloat16()
    expected = values * factor
    kernels.scale_(values, torch.tensor(factor, device=DEVICE))
    # The interpreter rounds bfloat16 its own way.
    tolerance = 0.0 if factor == 1.0 else 1e-2
    torch.testing.assert_close(values, expected, atol=0.0, rtol=tolerance, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "memory"), [(torch.float32, "speed"), (torch.bfloat16, 2_500)], ids=["one chunk", "chunks, bfloat16"]
)
def test_score_and_fused_loss(dtype: torch.dtype, memory: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 16, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(200, 16, generator=generator).to(DEVICE, dtype)
    labels = torch.tensor([3, -100, 199, 128, 63, 64]).to(DEVICE)
    results = []
    for backend in ("reference", "triton"):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        scores = score(*leaves, labels, entropy=True, memory=memory, backend=backend)
        gradients = torch.autograd.grad((scores.logprobs * scores.entropy).sum() + scores.entropy.sum(), leaves)
        fused = fused_loss(
            *leaves,
            labels,
            lambda logprobs, entropy, positions: logprobs,  # whose gradient is one number, expanded
            entropy=True,
            memory=memory,
            backend=backend,
        )
        results.append(
            [scores.logprobs, scores.entropy, *gradients, fused.loss, *torch.autograd.grad(fused.loss, leaves)]
        )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for actual, expected in zip(results[1], results[0], strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)
