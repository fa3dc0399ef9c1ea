"""What the kernels of a decode step share with their references: the rows of `slots`, and what is drawn."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PROMPT, STORED, OWN, WRITTEN, ACTIVE = range(5)
NUM_ROWS = 5
"""The rows of `slots` [5 or more, L] that attention reads (`decode_attention` has the picture)."""


class SampledTokens(NamedTuple):
    """What was drawn for each lane."""

    tokens: Tensor  # [L] int64
    logprobs: Tensor  # [L] float32
