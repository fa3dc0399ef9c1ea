"""Definitions shared by the kernels of a decode step and their references: the fields of a slot, and sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PROMPT, STORED, OWN, WRITTEN, ACTIVE = range(5)
NUM_ATTENTION_FIELDS = 5
"""The fields of `slots` [F, L] that attention reads. The docstring of `decode_attention` explains them."""


class SampledTokens(NamedTuple):
    """The token sampled in each slot, and its log-probability."""

    tokens: Tensor  # [L] int64
    logprobs: Tensor  # [L] float32
