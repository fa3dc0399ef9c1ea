"""The formats of AdamW's moments: which values they can store, and how values are rounded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.optim.state_format import (
    BLOCK,
    INT8,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    RowRange,
    decode_int8,
    encode_int8,
    levels,
    mix,
    random_bits,
    round_bfloat16,
    row_range,
)
from tests.refused import refused

STEP = torch.tensor(3)
MANY = 1 << 15


def bits_of(rows: int, columns: int, *, step: Tensor = STEP, number: int = 0) -> Tensor:
    return random_bits(step, number, RowRange(0, rows, rows), slice(0, rows), columns)


def test_the_hash_is_a_bijection() -> None:
    """Of 2^20 neighbouring numbers, and of as many at the end of the range, no two have the same hash."""
    for first in (0, (1 << 32) - (1 << 20)):
        hashes = mix(torch.arange(first, first + (1 << 20)))
        assert len(hashes.unique()) == 1 << 20
        assert 0 <= int(hashes.min()) <= int(hashes.max()) < 1 << 32


def test_random_bits_look_random() -> None:
    """Both halves, for neighbouring elements, steps and parameters: means and correlations within 5 deviations."""
    n = 128 * 512
    draws = [bits_of(512, 128), bits_of(512, 128, step=STEP + 1), bits_of(512, 128, number=1)]
    halves = [half.double().reshape(-1) for each in draws for half in (each & 0xFFFF, each >> 16)]
    shifted = [*halves, halves[0].roll(1), halves[0].roll(128)]
    deviation = 65536 / math.sqrt(12)
    for number, one in enumerate(shifted):
        assert abs(one.mean() - 32767.5) < 5 * deviation / math.sqrt(n)
        for other in shifted[:number]:
            covariance = ((one - 32767.5) * (other - 32767.5)).mean()
            assert abs(covariance) < 5 * deviation**2 / math.sqrt(n)


SHARDS = [
    ((7, 5), (slice(0, 4), slice(0, 5))),
    ((7, 5), (slice(4, 7), slice(0, 5))),
    ((4, 6, 5), (slice(2, 4), slice(0, 6), slice(0, 5))),
    ((4, 6, 5), (slice(2, 4), slice(3, 6), slice(0, 5))),  # experts, divided along two dimensions
    ((4, 6, 2, 5), (slice(1, 3), slice(2, 4), slice(0, 2), slice(0, 5))),
    ((7, 5), (slice(7, 7), slice(0, 5))),
]


@pytest.mark.parametrize(("shape", "region"), SHARDS, ids=str)
def test_a_shard_has_the_bits_of_its_elements(shape: tuple[int, ...], region: tuple[slice, ...]) -> None:
    size = torch.Size(shape)
    whole = random_bits(STEP, 2, row_range(size, tuple(slice(0, n) for n in shape)), slice(0, size[:-1].numel()), 5)
    expected = whole.view(shape)[region].reshape(-1, 5)
    count = len(expected)
    found = random_bits(STEP, 2, row_range(size, region), slice(0, count), 5)
    assert torch.equal(found, expected)
    half = random_bits(STEP, 2, row_range(size, region), slice(count // 2, count), 5)
    assert torch.equal(half, expected[count // 2 :])


@pytest.mark.parametrize("region", [(slice(0, 4), slice(0, 3)), (slice(0, 4), slice(0, 6), slice(0, 2))], ids=str)
def test_parts_of_matrix_rows_are_refused(region: tuple[slice, ...]) -> None:
    with refused("optimizer.state"):
        row_range(torch.Size((4, 6, 5)[: len(region)]), region)


def test_elements_beyond_32_bits_have_their_own_bits() -> None:
    far = random_bits(STEP, 0, RowRange(1 << 32, 1, 1), slice(0, 1), 64)
    assert not torch.equal(far, random_bits(STEP, 0, RowRange(0, 1, 1), slice(0, 1), 64))
    assert int(far.max()) < 1 << 32


def test_muon_refuses_rounded_momentum() -> None:
    with refused("optimizer.state"):
        OptimizerConfig(name="muon", state="int8")


# Rounding


def neighbours(values: Tensor, kind: str, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The levels of int8 below and above each value, in float64."""
    rounding = INT8[kind]
    table = levels(torch.arange(rounding.most + 1), rounding).double() * scale
    above = torch.searchsorted(table, values.abs().double()).clamp(1, rounding.most)
    return table[above - 1], table[above]


@pytest.mark.parametrize("kind", INT8)
def test_int8_rounds_to_a_neighbour_and_keeps_the_mean(kind: str) -> None:
    values = torch.logspace(-6, 0, 64) * (1 if kind == "exp_avg_sq" else -1)
    tensor = values.repeat(MANY, 1)
    bits = bits_of(MANY, 64) & 0xFFFF
    codes, scales = encode_int8(tensor, bits, INT8[kind])
    assert scales.shape == (MANY, 1)
    assert torch.equal(scales, torch.ones(MANY, 1))
    decoded = decode_int8(codes, scales, INT8[kind]).double()
    low, high = neighbours(values, kind, torch.ones(()))
    rounding_error = 1e-6 * high  # levels are float32 products of three factors
    magnitude = decoded.abs()
    assert ((magnitude - low).abs() <= rounding_error).logical_or((magnitude - high).abs() <= rounding_error).all()
    assert ((decoded <= 0) | (values > 0)).all()
    # the random numbers have 16 bits: the mean is that much uncertain as well
    allowed = 5 * (high - low) / 2 / math.sqrt(MANY) + (high - low) * 2**-16 + rounding_error
    assert ((magnitude.mean(dim=0) - values.abs().double()).abs() <= allowed).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bfloat16_rounds_to_a_neighbour_and_keeps_the_mean(sign: float) -> None:
    values = sign * torch.logspace(-30, 30, 61)
    rounded = round_bfloat16(values.repeat(MANY, 1), bits_of(MANY, 61) >> 16).double()
    low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    high = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    spacing = (high.double() - low.double()).abs()
    allowed = 5 * spacing / 2 / math.sqrt(MANY) + spacing * 2**-16
    assert ((rounded.mean(dim=0) - values.double()).abs() <= allowed).all()


def test_representable_values_do_not_change() -> None:
    for kind, rounding in INT8.items():
        codes = torch.arange(rounding.most + 1, dtype=rounding.dtype).flip(0).view(1, -1)
        if kind == "exp_avg":
            codes = torch.cat([-codes, codes], dim=1).view(2, -1)
        for scale in (1.0, 0.37, 3e-20):
            scales = torch.full((len(codes), -(-codes.shape[1] // BLOCK)), scale)
            values = decode_int8(codes, scales, rounding)
            bits = torch.full(codes.shape, 0xFFFF - 16)
            again, _ = encode_int8(values[:, :BLOCK], bits[:, :BLOCK], rounding)
            # the scale of a block is its largest level, which may differ from the scale in the last place
            assert torch.equal(again, codes[:, :BLOCK]), (kind, scale)
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, 2.0**-130])
    assert torch.equal(round_bfloat16(values, torch.full((6,), 0xFFFF)).float(), values)


def test_small_positive_values_do_not_become_zero() -> None:
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0], values[0, 1] = 1.0, 0.0
    codes, scales = encode_int8(values, torch.full((1, BLOCK), 0xFFFF), INT8["exp_avg_sq"])
    assert codes[0].tolist() == [255, 0] + [1] * (BLOCK - 2)
    assert (decode_int8(codes, scales, INT8["exp_avg_sq"])[0, 2:] > 0).all()


@pytest.mark.parametrize("value", [0.0, SMALLEST_SCALE / 2, 1e-44, LARGEST_SCALE * 8, math.inf])
def test_extreme_blocks_stay_finite(value: float) -> None:
    for kind, rounding in INT8.items():
        codes, scales = encode_int8(torch.full((2, 3), value), torch.zeros(2, 3, dtype=torch.int64), rounding)
        decoded = decode_int8(codes, scales, rounding)
        expected = 0.0 if value < SMALLEST_SCALE else LARGEST_SCALE
        torch.testing.assert_close(decoded, torch.full((2, 3), expected), msg=f"{kind} {value}")


def test_scales_belong_to_blocks_of_a_row() -> None:
    """Rows of 128, 128 and 44 elements have three scales, and a large element changes only its own block."""
    values = torch.linspace(0.5, 1.0, 300).repeat(2, 1)
    bits = bits_of(2, 300) & 0xFFFF
    codes, scales = encode_int8(values, bits, INT8["exp_avg"])
    assert torch.equal(scales[0], values[0, [127, 255, 299]])
    values[1, 200] = 1e6
    changed, changed_scales = encode_int8(values, bits, INT8["exp_avg"])
    same = torch.ones(2, 300, dtype=torch.bool)
    same[1, 128:256] = False
    assert torch.equal(changed[same], codes[same])
    assert changed_scales[1].tolist() == [scales[1, 0], 1e6, scales[1, 2]]
