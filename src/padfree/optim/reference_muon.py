"""Reference implementation of one Muon step on one matrix. Tests compare `padfree.optim.muon` with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from padfree.optim.muon import COEFFICIENTS, EPS


def muon_step(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    weight_decay: float = 0.0,
    update_rms: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Return the weight [A, B] and the momentum buffer [A, B] after one Muon step."""
    buffer = momentum * buffer + (1 - momentum) * gradient
    update = (1 - momentum) * gradient + momentum * buffer if nesterov else buffer
    height, width = weight.shape
    a, b, c = COEFFICIENTS
    x = update / max(float(update.norm()), EPS)
    for _ in range(steps):
        if height <= width:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        else:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
    scale = update_rms * math.sqrt(max(height, width))
    return (1 - lr * weight_decay) * weight - lr * scale * x, buffer


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Return the matrix U V^T of the singular value decomposition U S V^T, which the Newton-Schulz iteration
    approximates.
    """
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    product: Tensor = left @ right
    return product
