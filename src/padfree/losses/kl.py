"""Estimators of the Kullback-Leibler divergence from the log-probabilities of sampled tokens.

With x = log p(token) - log q(token) for a token sampled from p, each estimator estimates KL(p ‖ q):

    k1            x                     unbiased, any sign
    k2            x² / 2                biased, but its gradient is an unbiased estimate of the gradient of KL(p ‖ q)
    k3            exp(-x) - 1 + x       unbiased, never negative
    low_var_kl    k3, clamped to [-10, 10]

In the loss, p is the policy being trained and q the reference. The same estimates can be subtracted from the token
rewards (`advantages.token_rewards`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.choices import KLEstimator
from padfree.errors import UserError
from padfree.losses import checks

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this bound, so that exponentials do not overflow. Useful ratios are far below e²⁰."""

LOW_VARIANCE_BOUND = 10.0


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Return the estimated KL divergence [T] between two policies, from their log-probabilities [T] of the tokens.

    Differentiable in both arguments. The result is float32, or float64 if either argument is float64.
    """
    difference = checks.loss_input("logprobs", logprobs) - checks.loss_input("base_logprobs", base_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator in ("k3", "low_var_kl"):
        divergence = torch.expm1(-difference.clamp(min=-LOG_RATIO_BOUND)) + difference
        if estimator == "k3":
            return divergence
        return divergence.clamp(min=-LOW_VARIANCE_BOUND, max=LOW_VARIANCE_BOUND)
    raise UserError("kl_estimator", "is unknown", "use one of k1, k2, k3, low_var_kl", value=estimator)
