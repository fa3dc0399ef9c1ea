"""Decode attention: the reference against attention over whole sequences, and the kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import varlen_attention
from padfree.rollout.engines.in_process.decode_attention import decode_attention, reference
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, NUM_ATTENTION_FIELDS, OWN, PROMPT, STORED, WRITTEN
from padfree.segments import Segments
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

PLACES = 720
STORED_KEYS = (0, 5, 5, 64, 130, 0, 3)
OWN_KEYS = (0, 3, 0, 70, 1, 129, 9)
INACTIVE = 6
LONGEST = 140
"""Maximum number of keys of a slot: one split of 192, two of 128, three of 64."""


def lanes_of(device: str) -> Tensor:
    """Slots 1 and 2 share a prompt; the last slot is inactive. Own cache ranges follow those of all prompts."""
    slots = torch.zeros(NUM_ATTENTION_FIELDS, len(STORED_KEYS), dtype=torch.int64)
    slots[PROMPT] = torch.tensor([0, 40, 40, 60, 130, 0, 0])
    slots[STORED], slots[WRITTEN] = torch.tensor(STORED_KEYS), torch.tensor(OWN_KEYS)
    slots[OWN] = torch.tensor([400, 405, 410, 420, 500, 510, 700])
    slots[ACTIVE] = torch.arange(len(STORED_KEYS)) != INACTIVE
    return slots.to(device)


def case(
    dtype: torch.dtype, device: str, *, heads: int = 4, key_heads: int = 2, size: int = 16, value_size: int = 16
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    num_slots = len(STORED_KEYS)
    shapes = (
        (num_slots, heads, size),
        (num_slots, key_heads, size),
        (num_slots, key_heads, value_size),
        (PLACES, key_heads, size),
        (PLACES, key_heads, value_size),
    )
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return (*tensors, lanes_of(device))


TOLERANCES = [(torch.float32, 2e-5)]
if not INTERPRETED:  # its tl.dot treats the bits of bfloat16 as integers
    TOLERANCES.append((torch.bfloat16, 2e-2))

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 70},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 9, "softcap": 1.5, "sinks": True},
]

KERNEL_CASES = [(options, span) for span in (64, 128, 192) for options in OPTIONS]
ODD_SPANS = (64, 192)
if INTERPRETED:  # in which a case takes a second
    KERNEL_CASES = [*((options, 64) for options in OPTIONS), *((options, 128) for options in OPTIONS[::5])]
    KERNEL_CASES.append((OPTIONS[5], 192))
    ODD_SPANS = (64,)


def call_options(heads: int, device: str, **options: Any) -> tuple[Tensor | None, float, int | None, float | None, int]:
    sinks = torch.linspace(-1.0, 2.0, heads).to(device) if options.get("sinks") else None
    return sinks, 0.3, options.get("window"), options.get("softcap"), LONGEST


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_reference_is_attention_over_each_slot_by_itself(options: dict[str, Any]) -> None:
    q, k, v, keys, values, slots = case(torch.float64, "cpu", value_size=12)
    before = keys.clone(), values.clone()
    sinks, scale, window, softcap, _ = call_options(4, "cpu", **options)
    out = reference(q, k, v, keys, values, slots, sinks, scale, window, softcap, LONGEST)
    for slot in range(len(STORED_KEYS)):
        prompt, stored, own, written, active = slots[: ACTIVE + 1, slot].tolist()
        if not active:
            stored = written = 0
        indices = [*range(prompt, prompt + stored), *range(own, own + written)]
        one_k, one_v = (
            torch.cat([cached[indices], new[slot : slot + 1]]) for cached, new in zip(before, (k, v), strict=True)
        )
        expected = varlen_attention(
            q[slot : slot + 1],
            one_k,
            one_v,
            Segments.from_lengths([1]),
            Segments.from_lengths([len(one_k)]),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            backend="reference",
        )
        torch.testing.assert_close(out[slot : slot + 1], expected, atol=1e-12, rtol=1e-12)
        if active:
            assert torch.equal(keys[own + written], k[slot])
            assert torch.equal(values[own + written], v[slot])
            before[0][own + written], before[1][own + written] = k[slot], v[slot]
    assert torch.equal(keys, before[0]), "nothing else is stored"
    assert torch.equal(values, before[1])


def test_the_operator_passes_opcheck() -> None:
    arguments = (*case(torch.float32, "cpu"), *call_options(4, "cpu", window=9, sinks=True))
    torch.library.opcheck(decode_attention, arguments)


@needs_kernels
@pytest.mark.parametrize(("options", "span"), KERNEL_CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
def test_the_kernel_equals_the_reference(
    options: dict[str, Any], span: int, dtype: torch.dtype, tolerance: float
) -> None:
    from padfree.rollout.engines.in_process.triton_decode_attention import attend

    inputs = case(dtype, DEVICE)
    again = tuple(tensor.clone() for tensor in inputs)
    expected = reference(*inputs, *call_options(4, DEVICE, **options))
    found = attend(*again, *call_options(4, DEVICE, **options), span=span)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for one, other in zip(again, inputs, strict=True):
        assert torch.equal(one, other), "the cache has the same keys and values, and nothing else has changed"


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size"), [(2, 2, 80, 80), (21, 1, 8, 24), (6, 3, 128, 64)]
)
def test_odd_shapes(heads: int, key_heads: int, size: int, value_size: int) -> None:
    from padfree.rollout.engines.in_process.triton_decode_attention import attend

    inputs = case(torch.float32, DEVICE, heads=heads, key_heads=key_heads, size=size, value_size=value_size)
    again = tuple(tensor.clone() for tensor in inputs)
    for span in ODD_SPANS:
        expected = reference(*inputs, *call_options(heads, DEVICE, sinks=True))
        found = attend(*again, *call_options(heads, DEVICE, sinks=True), span=span)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 70])
def test_the_kernel_with_the_arithmetic_of_the_trainer_equals_the_reference(window: int | None) -> None:
    from padfree.rollout.engines.in_process.triton_exact_attention import attend

    dtype, tolerance = TOLERANCES[-1]
    *inputs, slots = case(dtype, DEVICE)
    again = [tensor.clone() for tensor in inputs]
    expected = reference(*inputs, slots, *call_options(4, DEVICE, window=window))
    found = attend(*again, slots, 0.3, window)
    active = slots[ACTIVE] != 0
    torch.testing.assert_close(found[active], expected[active], atol=tolerance, rtol=tolerance)
    assert found.isfinite().all()
    for one, other in zip(again, inputs, strict=True):
        assert torch.equal(one, other), "the cache has the same keys and values, and nothing else has changed"


@needs_kernels
def test_shares_are_added_in_the_order_of_their_columns() -> None:
    from tests.rollout.triton_sums import sums_in_order

    shares = torch.rand(16, 128, generator=torch.Generator().manual_seed(0))
    before = torch.rand(16, 4, generator=torch.Generator().manual_seed(1))
    expected = before.clone()
    for column in range(128):
        expected[:, column // 2 % 4] += shares[:, column]
    assert torch.equal(sums_in_order(before.to(DEVICE), shares.to(DEVICE)).cpu(), expected)
