"""Padded rows and their loss by plain transformers code: what packing is compared with.

samples        1 2 3 | 4 5          input_ids  1 2 3    attention_mask  1 1 1    labels  - 2 3
                                               4 5 0                    1 1 0            - 5 -
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.batch import IGNORE, Sample


class PaddedBatch(NamedTuple):
    """Each [B, L] int64; shorter samples have pads behind them."""

    input_ids: Tensor
    attention_mask: Tensor
    scored: Tensor  # 1 where a token is trained on

    @property
    def labels(self) -> Tensor:
        """[B, L] the trained tokens, in their own places, as transformers wants them."""
        return self.input_ids.where(self.scored.bool(), IGNORE)


def padded_rows(
    samples: Sequence[Sample], device: torch.device | str = "cpu", *, length: int | None = None
) -> PaddedBatch:
    """One row a sample, as long as the longest, or as `length` says."""
    shape = (len(samples), length or max(len(sample) for sample in samples))
    input_ids, attention_mask, scored = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample)] = sample.tokens
        attention_mask[row, : len(sample)] = 1
        scored[row, : len(sample)] = sample.mask
    return PaddedBatch(*(torch.from_numpy(array).to(device) for array in (input_ids, attention_mask, scored)))


def padded_loss(model: Any, batches: Sequence[Sequence[Sample]], count: int) -> float:
    """The token mean over `count` scored tokens, with its gradient."""
    total = 0.0
    for batch in batches:
        rows = padded_rows(batch, model.device)
        logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels[:, 1:].flatten(), reduction="sum")
        torch.autograd.backward(loss / count)
        total += float(loss.detach()) / count
    return total
