"""Top-1 accuracy without storing all logits, for evaluation.

    hidden [N, D], labels [N]  ->  [N] float32: 1 if the label has the largest logit, else 0; 0 if there is no label

Soft cap, scale and temperature do not change which logit is the largest, so they are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import IGNORE, LmHead

CHUNK_BYTES = 1 << 27
"""The maximum size of the logits that are stored at a time, in bytes."""


@torch.no_grad()
def matches(hidden: Tensor, head: LmHead, labels: Tensor) -> Tensor:
    """Return, for each of N tokens with hidden states [N, D], 1 if its label is the most probable token, else 0."""
    assert head.logit_scale > 0, "a negative scale reverses the order"
    found = torch.zeros(len(labels), dtype=torch.float32, device=labels.device)
    labelled = (labels != IGNORE).nonzero()[:, 0]
    for chosen in torch.split(labelled, max(1, CHUNK_BYTES // (4 * len(head.weight)))):
        logits = _products(hidden[chosen], head.weight)
        if head.bias is not None:
            logits = logits + head.bias.to(logits.dtype)
        found[chosen] = (logits.argmax(1) == labels[chosen]).float()
    return found


def _products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits [c, V] as hidden @ weight.T.

    On a GPU the logits are float32, because rounding to bfloat16 could make different logits equal.
    """
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, weight)
