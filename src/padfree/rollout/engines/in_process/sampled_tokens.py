"""Definitions for decode steps, shared by the Triton kernels and the reference implementations in torch.

A slot is the place of one response in the decode batch. The tensor `slots` [F, L] holds F fields of each of L slots.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PROMPT, STORED, OWN, WRITTEN, ACTIVE = range(5)
NUM_ATTENTION_FIELDS = 5
"""Attention reads the first five rows of `slots` [F, L], a table of F fields for each of L responses.

The module docstring of `decode_attention` explains the five fields.
"""


class SampledTokens(NamedTuple):
    """The token sampled in each slot, and its log-probability."""

    tokens: Tensor  # [L] int64
    logprobs: Tensor  # [L] float32
