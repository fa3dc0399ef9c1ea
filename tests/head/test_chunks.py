"""The chunks of `fused_loss`: where the sums are stored, and that the weight gradient is rounded once.

`imitate_cuda` runs the CUDA code path on the CPU: logits kept in float16, gradients of logits in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.head import chunks, fused_loss, score
from padfree.head.budget import FusedPlan
from tests.head.cases import imitate_cuda

N, D, V = 400, 48, 1000


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_cuda(monkeypatch)


def follow(monkeypatch: pytest.MonkeyPatch, plan: FusedPlan) -> None:
    """Make `fused_loss` follow this plan."""
    monkeypatch.setattr(chunks, "plan_fused", lambda *args, **options: plan)


def make_inputs(ignored: float = 0.2, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, advantages; logits are as large as those of a trained model."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, D, generator=generator)
    weight = torch.randn(vocabulary, D, generator=generator)
    labels = (hidden @ weight.T + 8 * torch.rand(N, vocabulary, generator=generator)).argmax(1)
    labels[torch.rand(N, generator=generator) < ignored] = -100
    return hidden.bfloat16(), weight.bfloat16(), labels, torch.randn(N, generator=generator)


def token_loss(advantages: Tensor) -> Any:
    return lambda logprobs, entropy, positions: logprobs * advantages.to(logprobs)[positions] - 0.1 * entropy


def gradients(inputs: tuple[Tensor, ...], dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, and the gradients of hidden and weight."""
    hidden, weight = (tensor.to(dtype).clone().requires_grad_() for tensor in inputs[:2])
    fused = fused_loss(hidden, weight, inputs[2], token_loss(inputs[3]), entropy=True, **options)
    fused.loss.backward()
    return fused.logprobs, hidden.grad, weight.grad


def distance(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def bfloat16_logits(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """An ordinary bfloat16 head: bfloat16 logits and gradients, matmuls accumulated in float32."""
    hidden, weight, labels, advantages = inputs
    positions = (labels != -100).nonzero()[:, 0]
    logits = (hidden[positions].float() @ weight.float().T).bfloat16().requires_grad_()
    log_p = logits.float().log_softmax(1)
    logprobs = log_p.gather(1, labels[positions, None])[:, 0]
    token_loss(advantages)(logprobs, -(log_p.exp() * log_p).sum(1), positions).sum().backward()
    grad_logits = logits.grad.float()
    grad_hidden = torch.zeros_like(hidden).index_copy(0, positions, (grad_logits @ weight.float()).bfloat16())
    all_logprobs = torch.zeros(N).index_copy(0, positions, logprobs.detach())
    return all_logprobs, grad_hidden, (grad_logits.T @ hidden[positions].float()).bfloat16()


# Blocks of V = 1000 have 128 columns; sums of half the columns fit into the gradient.
PLANS = {
    "one chunk": FusedPlan(chunk_rows=400, kept=1000, shared=448),
    "chunks": FusedPlan(chunk_rows=17, kept=1000, shared=448),
    "chunks, some columns twice": FusedPlan(chunk_rows=17, kept=640, shared=448),
    "one chunk, some columns twice": FusedPlan(chunk_rows=400, kept=256, shared=256),
}


@pytest.mark.usefixtures("like_cuda")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_further_from_float64_than_bfloat16_logits(plan: FusedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    exact = gradients(inputs, torch.float64, backend="reference")
    follow(monkeypatch, plan)
    ours = gradients(inputs, torch.bfloat16)
    others = bfloat16_logits(inputs)
    assert distance(ours[0], exact[0]) < 5e-6 < 0.01 * distance(others[0], exact[0])
    assert distance(ours[1], exact[1]) <= distance(others[1], exact[1])
    assert distance(ours[2], exact[2]) <= distance(others[2], exact[2])


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "like cuda"])
def test_the_weight_gradient_is_rounded_once(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Many chunks are as exact as one matmul over all tokens, which bfloat16 sums would not be."""
    if cuda:
        request.getfixturevalue("like_cuda")
    inputs = make_inputs()
    exact = gradients(inputs, torch.float64, backend="reference")[2]
    error = {}
    for name, plan in PLANS.items():
        follow(monkeypatch, plan)
        error[name] = distance(gradients(inputs, torch.bfloat16)[2], exact)
    for name in PLANS:
        assert error[name] <= 1.05 * error["one chunk"], name

    follow(monkeypatch, PLANS["one chunk"])
    rounded_each_time = torch.zeros_like(inputs[1])
    for positions in torch.arange(N).split(17):
        chosen = (inputs[0][positions], inputs[1], inputs[2][positions], inputs[3][positions])
        rounded_each_time += gradients(chosen, torch.bfloat16)[2]
    assert distance(rounded_each_time, exact) > 1.5 * error["one chunk"]


@pytest.mark.usefixtures("like_cuda")
@pytest.mark.parametrize("vocabulary", [63, 129, 1001])
@pytest.mark.parametrize("memory", [77_000, 100_000, 200_000, 1 << 24])
def test_odd_vocabularies_and_sizes(vocabulary: int, memory: int) -> None:
    inputs = make_inputs(vocabulary=vocabulary)
    exact = gradients(inputs, torch.float64, backend="reference")
    ours = gradients(inputs, torch.bfloat16, memory=memory)
    for actual, expected, limit in zip(ours, exact, (1e-5, 1e-2, 1e-2), strict=True):
        assert distance(actual, expected) < limit


@pytest.mark.usefixtures("like_cuda")
def test_score_like_cuda() -> None:
    inputs = make_inputs()
    exact = gradients(inputs, torch.float64, backend="reference")
    others = bfloat16_logits(inputs)
    for memory in ("low", 100_000):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in inputs[:2])
        scores = score(hidden, weight, inputs[2], entropy=True, memory=memory)
        positions = inputs[2] != -100
        token_loss(inputs[3])(scores.logprobs[positions], scores.entropy[positions], positions).sum().backward()
        assert distance(scores.logprobs.detach(), exact[0]) < 1e-5
        assert distance(hidden.grad, exact[1]) <= distance(others[1], exact[1])
        assert distance(weight.grad, exact[2]) <= distance(others[2], exact[2])
