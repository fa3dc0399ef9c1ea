"""Whether the label is the likeliest token, without stored logits: for evaluation, so there is no gradient.

    hidden [N, D], labels [N]  ->  [N] float32: 1 where the largest logit is the label's, else 0; 0 without a label

Soft cap, scale and temperature change no order, so that the matmul and the bias are all that is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import IGNORE, LmHead

CHUNK_BYTES = 1 << 27
"""Of logits that are there at a time."""


@torch.no_grad()
def matches(hidden: Tensor, head: LmHead, labels: Tensor) -> Tensor:
    """[N] for the hidden states [N, D] that the head scores."""
    assert head.logit_scale > 0, "a negative scale turns the order round"
    found = torch.zeros(len(labels), dtype=torch.float32, device=labels.device)
    rows = (labels != IGNORE).nonzero()[:, 0]
    for chosen in torch.split(rows, max(1, CHUNK_BYTES // (4 * len(head.weight)))):
        logits = _products(hidden[chosen], head.weight)
        if head.bias is not None:
            logits = logits + head.bias.to(logits.dtype)
        found[chosen] = (logits.argmax(1) == labels[chosen]).float()
    return found


def _products(hidden: Tensor, weight: Tensor) -> Tensor:
    """[c, V]; in float32 where a GPU can do that, since neighbours that bfloat16 cannot tell apart are ties."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, weight)
