"""KL estimators: the formulas, the definition they estimate, and their ends."""

from __future__ import annotations

import pytest
import torch

from padfree.losses import kl_divergence
from tests.refused import refused


def test_formulas() -> None:
    x = torch.tensor([-3.0, -0.1, 0.0, 0.2, 4.0], dtype=torch.float64)
    base = torch.full_like(x, -2.0)
    for estimator, expected in {
        "k1": x,
        "k2": x**2 / 2,
        "k3": torch.exp(-x) - 1 + x,
        "low_var_kl": (torch.exp(-x) - 1 + x).clamp(max=10.0),
    }.items():
        torch.testing.assert_close(kl_divergence(base + x, base, estimator), expected)  # type: ignore[arg-type]


def test_k1_and_k3_are_unbiased() -> None:
    p, q = torch.softmax(torch.randn(2, 50, dtype=torch.float64), dim=-1)
    exact = (p * (p.log() - q.log())).sum()
    for estimator in ("k1", "k3"):
        expectation = (p * kl_divergence(p.log(), q.log(), estimator)).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(expectation, exact)


def test_small_differences_keep_their_digits() -> None:
    x = torch.tensor([1e-3], dtype=torch.float32)
    torch.testing.assert_close(kl_divergence(x, torch.zeros(1), "k3"), x**2 / 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_gradient(estimator: str) -> None:
    logprobs = torch.randn(6, dtype=torch.float64, requires_grad=True)
    base = torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_divergence(x, base, estimator), (logprobs,))  # type: ignore[arg-type]


def test_unknown_estimator() -> None:
    with refused("kl_estimator"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
