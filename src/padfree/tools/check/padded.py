"""Padded batches, and their loss computed by plain transformers code, for comparison with packed training.

Two samples as a padded batch:

    samples        1 2 3 | 4 5          input_ids  1 2 3    attention_mask  1 1 1    labels  - 2 3
                                                   4 5 0                    1 1 0            - 5 -      (-: IGNORE)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.batch import IGNORE
from padfree.sample import Sample


class PaddedBatch(NamedTuple):
    """A batch of B samples, padded at the end to L tokens. Each tensor is [B, L] int64."""

    input_ids: Tensor
    attention_mask: Tensor
    scored: Tensor  # 1 for trained tokens

    @property
    def labels(self) -> Tensor:
        """Return labels [B, L] for transformers, not shifted: the id of a trained token, IGNORE for other tokens."""
        return self.input_ids.where(self.scored.bool(), IGNORE)


def padded_rows(
    samples: Sequence[Sample], device: torch.device | str = "cpu", *, length: int | None = None
) -> PaddedBatch:
    """Return a batch of the samples, padded to the length of the longest one, or to `length`."""
    shape = (len(samples), length or max(len(sample) for sample in samples))
    input_ids, attention_mask, scored = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for index, sample in enumerate(samples):
        input_ids[index, : len(sample)] = sample.tokens
        attention_mask[index, : len(sample)] = 1
        scored[index, : len(sample)] = sample.mask
    return PaddedBatch(*(torch.from_numpy(array).to(device) for array in (input_ids, attention_mask, scored)))


def padded_loss(model: Any, batches: Sequence[Sequence[Sample]], count: int) -> float:
    """Run forward and backward on padded batches. Return the mean loss of all `count` trained tokens."""
    total = 0.0
    for batch in batches:
        padded = padded_rows(batch, model.device)
        logits = model(input_ids=padded.input_ids, attention_mask=padded.attention_mask, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), padded.labels[:, 1:].flatten(), reduction="sum")
        torch.autograd.backward(loss / count)
        total += float(loss.detach()) / count
    return total
