"""Random packed batches for the tests of losses, and a loop over samples as reference, which the losses avoid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.losses import LossInputs

LENGTHS = (5, 1, 9, 3, 7)
"""The fourth sample (3 tokens) has no scored token; the second (1 token) cannot have one."""

FIELDS = (
    "logprobs",
    "entropy",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "old_values",
    "returns",
)


def random_inputs(
    rng: np.random.Generator,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    pad: int = 2,
    spread: float = 0.4,
    constant_advantages: bool = False,
) -> LossInputs:
    """Float64 inputs with every field; positions without a label hold NaN in fields that a loss must not read there."""
    sample_index = np.repeat(np.arange(len(lengths) + 1), (*lengths, pad))
    num_tokens = len(sample_index)
    mask = rng.random(num_tokens) < 0.7
    ends = np.cumsum(lengths)
    mask[ends - 1] = False
    mask[ends[-1] :] = False
    if len(lengths) > 3:
        mask[sample_index == 3] = False
    mask[0] = True  # a finite value
    old = -rng.exponential(1.0, num_tokens)
    columns = {
        "logprobs": old + rng.normal(0, spread, num_tokens),
        "old_logprobs": old,
        "rollout_logprobs": old + rng.normal(0, spread, num_tokens),
        "ref_logprobs": old + rng.normal(0, spread, num_tokens),
        "entropy": rng.exponential(1.0, num_tokens),
        "advantages": rng.normal(0, 1, num_tokens),
        "values": rng.normal(0, 1, num_tokens),
        "old_values": rng.normal(0, 1, num_tokens),
        "returns": rng.normal(0, 1, num_tokens),
    }
    if constant_advantages:
        columns["advantages"] = rng.normal(0, 1, len(lengths) + 1)[sample_index]
    weights = (rng.random(len(lengths) + 1) + 0.1)[sample_index] * mask
    return LossInputs(
        mask=torch.from_numpy(mask),
        weights=torch.from_numpy(weights),
        sample_index=torch.from_numpy(sample_index.astype(np.int32)),
        num_samples=len(lengths),
        **{name: torch.from_numpy(np.where(mask, values, np.nan)) for name, values in columns.items()},
    )


def with_grad(inputs: LossInputs, *names: str) -> tuple[LossInputs, list[Tensor]]:
    """The same inputs with leaves that collect gradients."""
    leaves = [getattr(inputs, name).clone().requires_grad_() for name in names]
    return replace(inputs, **dict(zip(names, leaves, strict=True))), leaves


def by_sample(inputs: LossInputs) -> Iterator[dict[str, Any]]:
    """The scored values of every field, one sample after the other."""
    for sample in range(inputs.num_samples):
        here = (inputs.sample_index == sample) & inputs.mask
        yield {
            "weights": inputs.weights[here],
            **{name: values[here] for name in FIELDS if (values := getattr(inputs, name)) is not None},
        }


def select_tokens(inputs: LossInputs, chosen: Tensor) -> LossInputs:
    """Some of the tokens, as a context rank holds them."""
    columns = {name: values[chosen] for name in FIELDS if (values := getattr(inputs, name)) is not None}
    return replace(
        inputs,
        mask=inputs.mask[chosen],
        weights=inputs.weights[chosen],
        sample_index=inputs.sample_index[chosen],
        **columns,
    )
