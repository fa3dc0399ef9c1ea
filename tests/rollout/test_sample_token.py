"""Sampling a token: it depends only on logits, key and position; the kernel samples the same as the reference.

Triton's interpreter runs them in the process that `test_decode_attention` starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.rollout.engines.in_process.sample_token import products, reference
from padfree.rollout.sampling_rng import gumbel_noise, response_keys
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

HEADS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.4, "bias": True},
    {"softcap": 5.0, "logit_scale": 2.0, "bias": True},
]


def head_of(vocabulary: int, device: str = "cpu", *, bias: bool = False, **changes: Any) -> LmHead:
    values: dict[str, Any] = {"softcap": None, "logit_scale": 1.0, **changes}
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocabulary, 8, generator=generator).to(device)
    return LmHead(
        weight=weight, bias=torch.randn(vocabulary, generator=generator).to(device) if bias else None, **values
    )


def logits_of(vocabulary: int, slots: int = 9, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(slots, vocabulary, generator=generator) * 3
    keys = torch.from_numpy(response_keys(3, 4, np.arange(slots)))
    positions = torch.arange(slots) * 7
    return logits.to(device), keys.to(device), positions.to(device)


@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_the_reference_is_the_definition(changes: dict[str, Any]) -> None:
    hidden = torch.randn(9, 8)
    _, keys, positions = logits_of(50)
    head = head_of(50, **changes)
    sampled = reference(products(hidden, head), head, keys, positions, 0.7)
    scores = torch.log_softmax(head.logits(hidden) / 0.7, dim=1)
    for slot in range(9):
        noise = gumbel_noise(keys[slot : slot + 1], int(positions[slot]), 50)[0]
        assert int(sampled.tokens[slot]) == int((scores[slot] + noise).argmax())
        assert float(sampled.logprobs[slot]) == pytest.approx(float(scores[slot, sampled.tokens[slot]]), abs=1e-5)


KERNEL_CASES = [(changes, vocabulary) for vocabulary in (1, 64, 130, 1000) for changes in HEADS]
LANES = 9
if INTERPRETED:  # the interpreter takes a second for this
    KERNEL_CASES = [*((changes, 130) for changes in HEADS), (HEADS[3], 1), (HEADS[0], 64), (HEADS[0], 300)]
    LANES = 3


@needs_kernels
@pytest.mark.parametrize(("changes", "vocabulary"), KERNEL_CASES, ids=str)
def test_the_kernel_samples_what_the_reference_samples(changes: dict[str, Any], vocabulary: int) -> None:
    from padfree.rollout.engines.in_process.triton_sample_token import sample_token

    logits, keys, positions = logits_of(vocabulary, LANES, DEVICE)
    head = head_of(vocabulary, DEVICE, **changes)
    for temperature in (0.7, 1.0):
        expected = reference(logits, head, keys, positions, temperature)
        found = sample_token(logits, head, keys, positions, temperature, block=128)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)


@needs_kernels
def test_the_noise_of_the_kernel_is_that_of_the_reference_to_the_bit() -> None:
    from padfree.rollout.engines.in_process.triton_sample_token import noise_of

    _, keys, positions = logits_of(64, device=DEVICE)
    expected = gumbel_noise(keys, positions, 4096)
    found = noise_of(keys, positions, 4096)
    assert torch.equal(found, expected)


@needs_kernels
def test_nan_and_infinite_logits_give_a_token_of_the_vocabulary() -> None:
    from padfree.rollout.engines.in_process.triton_sample_token import sample_token

    logits, keys, positions = logits_of(200, slots=3, device=DEVICE)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[1, 150] = 0.0
    sampled = sample_token(logits, head_of(200, DEVICE), keys, positions, 1.0, block=64)
    assert ((sampled.tokens >= 0) & (sampled.tokens < 200)).all()
    assert torch.isnan(sampled.logprobs[0])
    assert int(sampled.tokens[1]) == 150
    assert float(sampled.logprobs[1]) == 0.0
