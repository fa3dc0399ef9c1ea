"""Truncated softmax: scores over the kept set of each token, and their gradients, against plain torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.head import fused_loss, score
from padfree.kept_sets import KeptSets
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels
from tests.refused import refused

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "bias and softcap": {"bias": True, "softcap": 3.0, "logit_scale": 0.8},
    "negative scale": {"logit_scale": -0.7},
}
LOW, HIGH = 0.8, 1.2


class Case:
    """Labelled and other tokens with sets of every kind: one id, a few, most of them, and the whole vocabulary."""

    def __init__(
        self, num_tokens: int = 23, width: int = 16, vocabulary: int = 4200, *, bias: bool = False, **head: Any
    ) -> None:
        rng = np.random.default_rng(vocabulary)
        self.head, self.vocabulary = head, vocabulary
        self.hidden = torch.from_numpy(rng.normal(size=(num_tokens, width)))
        self.weight = torch.from_numpy(2 * rng.normal(size=(vocabulary, width)) / width**0.5)
        self.bias = torch.from_numpy(rng.normal(size=vocabulary)) if bias else None
        self.labels = torch.from_numpy(rng.integers(0, vocabulary, num_tokens))
        self.labels[rng.random(num_tokens) < 0.3] = -100
        self.advantages = torch.from_numpy(rng.normal(size=num_tokens))
        self.old = torch.from_numpy(rng.normal(size=num_tokens) * 0.3)
        self.mask = torch.ones(num_tokens, vocabulary, dtype=torch.bool)
        lists: list[list[int]] = []
        for token in (self.labels >= 0).nonzero()[:, 0].tolist():
            label, kind = int(self.labels[token]), token % 5
            others = [one for one in rng.permutation(vocabulary).tolist() if one != label]
            if kind == 0:  # the whole vocabulary
                lists.append([])
            elif kind == 1:  # excluded ids
                lists.append([-1 - one for one in others[:7]])
                self.mask[token, others[:7]] = False
            else:
                lists.append([label, *others[: (0, 0, 0, 4, vocabulary // 3)[kind]]])
                self.mask[token] = False
                self.mask[token, lists[-1]] = True
        self.kept = KeptSets.of_lists(lists, "kept")

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        given = [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]
        return [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in given]

    def plain(self, *, temperature: float) -> dict[str, Tensor]:
        """All logits at once in float64, the masked ones at -inf, and autograd."""
        hidden, weight, *bias = self.tensors(torch.float64)
        logits = hidden @ weight.T + (bias[0] if bias else 0.0)
        logits = logits * self.head.get("logit_scale", 1.0)
        if (cap := self.head.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        log_p = (logits / temperature).masked_fill(~self.mask, -torch.inf).log_softmax(1)
        scored = self.labels >= 0
        logprobs = log_p.gather(1, self.labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p.masked_fill(~self.mask, 0.0)).sum(1)
        loss = grpo(logprobs, entropy, self.old + logprobs.detach(), self.advantages)[scored].sum()
        loss.backward()
        found = {"logprobs": logprobs.detach() * scored, "entropy": entropy.detach() * scored, "loss": loss.detach()}
        return found | gradients(hidden, weight, bias)

    def run(
        self, function: str, dtype: torch.dtype, *, temperature: float, device: str = "cpu", **options: Any
    ) -> dict[str, Tensor]:
        hidden, weight, *bias = self.tensors(dtype, device)
        about = {**self.head, "bias": bias[0] if bias else None, "temperature": temperature, "entropy": True}
        exact = torch.promote_types(dtype, torch.float32)  # a sum over tokens would add up roundings of bfloat16
        labels, advantages = self.labels.to(hidden.device), self.advantages.to(hidden.device, exact)
        old = self.old.to(hidden.device, exact)

        def token_loss(logprobs: Tensor, entropy: Tensor | None, index: Tensor) -> Tensor:
            assert entropy is not None
            return grpo(logprobs, entropy, old[index] + logprobs.detach(), advantages[index])

        if function == "fused":
            scores: Any = fused_loss(hidden, weight, labels, token_loss, **about, kept=self.kept, **options)
            loss = scores.loss
        else:
            scores = score(hidden, weight, labels, **about, kept=self.kept, **options)
            index = (labels >= 0).nonzero()[:, 0]
            loss = token_loss(scores.logprobs[index], scores.entropy[index], index).sum()
        loss.backward()
        found = {"logprobs": scores.logprobs.detach(), "entropy": scores.entropy.detach(), "loss": loss.detach()}
        return found | gradients(hidden, weight, bias)


def grpo(logprobs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages) - 0.01 * entropy


def gradients(hidden: Tensor, weight: Tensor, bias: list[Tensor]) -> dict[str, Tensor]:
    names = zip(("grad_hidden", "grad_weight", "grad_bias"), (hidden, weight, *bias), strict=False)
    return {name: tensor.grad for name, tensor in names if tensor.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].cpu().double(), tensor, atol=tolerance * max(1.0, float(tensor.abs().max())), rtol=0, msg=name
        )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("function", ["score", "fused"])
@pytest.mark.parametrize("memory", ["speed", 300_000])
def test_scores_are_those_of_the_truncated_distribution(head: str, backend: str, function: str, memory: Any) -> None:
    case = Case(**HEADS[head])
    expected = case.plain(temperature=0.7)
    found = case.run(function, torch.float64, temperature=0.7, backend=backend, memory=memory)
    assert_close(found, expected, 1e-12)
    single = case.run(function, torch.float32, temperature=0.7, backend=backend, memory=memory)
    assert_close(single, expected, 2e-5)


@needs_kernels
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("function", ["score", "fused"])
def test_kernels_truncate_alike(head: str, function: str) -> None:
    small = {"num_tokens": 7, "vocabulary": 300, "width": 8} if INTERPRETED else {}
    case = Case(**HEADS[head], **small)
    expected = case.plain(temperature=0.7)
    for memory in ("speed", 20_000):
        found = case.run(function, torch.float32, temperature=0.7, backend="triton", memory=memory, device=DEVICE)
        assert_close(found, expected, 5e-5)
        assert all(torch.isfinite(tensor).all() for tensor in found.values())


@pytest.mark.gpu
def test_bfloat16_on_a_gpu() -> None:
    case = Case(num_tokens=300, width=64, vocabulary=9000)
    rounded = case.run("fused", torch.bfloat16, temperature=1.0, device="cuda")
    case.hidden, case.weight = case.hidden.bfloat16().double(), case.weight.bfloat16().double()
    assert_close(rounded, case.plain(temperature=1.0), 1e-2)
    torch.testing.assert_close(
        rounded["logprobs"].cpu().double(), case.plain(temperature=1.0)["logprobs"], atol=1e-4, rtol=0
    )


def test_whole_sets_change_nothing() -> None:
    case = Case()
    case.kept = KeptSets.whole(len(case.kept))
    with_sets = case.run("fused", torch.float32, temperature=1.3)
    case.kept = None  # type: ignore[assignment]
    without = case.run("fused", torch.float32, temperature=1.3)
    assert all(torch.equal(tensor, without[name]) for name, tensor in with_sets.items())


def test_what_is_refused() -> None:
    case = Case()
    labels, kept = case.labels, case.kept

    def scored(**changed: Any) -> Any:
        return score(case.hidden, case.weight, **{"labels": labels, "kept": kept, **changed})

    with refused("kept", "sets for"):
        scored(kept=kept[1:])
    moved = labels.clone()
    row = int((labels >= 0).nonzero()[int(np.argmax(kept.counts == 1)), 0])
    moved[row] = (labels[row] + 1) % case.vocabulary
    with refused("kept", f"does not contain the token's label, {int(moved[row])}"):
        scored(labels=moved)
    with refused("kept", f"has the id {case.vocabulary} outside the vocabulary"):
        scored(kept=KeptSets.of_lists([[case.vocabulary]] * len(kept), "kept"))
