"""Encoded differences of bits, and checksums that a single wrong bit changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.rollout.engines.servers.differences import BIT_DTYPES, apply, bits_of, checksum, encode

ODD_SIZES = (1, 3, 7, 8, 31, 123)


def changed_bits(number: int, dtype: torch.dtype, share: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    kept = torch.randint(0, 100, (number,), generator=generator).to(dtype)
    chosen = torch.rand(number, generator=generator) < share
    return kept, torch.where(chosen, kept + 1, kept)


@pytest.mark.parametrize("dtype", BIT_DTYPES.values(), ids=str)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1, 0.5, 1.0])
def test_a_difference_gives_the_new_bits(dtype: torch.dtype, share: float) -> None:
    for number in (*ODD_SIZES, 300_007):
        kept, new = changed_bits(number, dtype, share)
        encoding, positions, values = encode(kept, new)
        assert positions.nbytes + values.nbytes <= new.nbytes, "a difference is never larger than the region"
        found = kept.clone()
        apply(found, encoding, positions, values)
        assert torch.equal(found, new), (number, encoding)


def test_the_encoding_is_the_smallest() -> None:
    sizes = {}
    for share in (0.0005, 0.01, 0.3, 1.0):
        encoding, positions, _ = encode(*changed_bits(300_007, torch.int16, share))
        sizes[encoding] = positions.nbytes
    assert list(sizes) == ["gaps16", "gaps8", "bitmap", "whole"]
    assert sizes["gaps8"] < 1.2 * 0.01 * 300_007
    assert sizes["bitmap"] == -(-300_007 // 8)
    assert sizes["whole"] == 0


def test_gaps_at_the_limits_of_a_code() -> None:
    for gap in (0, 1, 254, 255, 256, 509, 510, 65_534, 65_535, 65_536, 131_070, 131_071):
        kept = torch.zeros(gap + 200_000, dtype=torch.int16)
        new = kept.clone()
        new[gap] = new[-1] = 7
        encoding, positions, values = encode(kept, new)
        apply(kept, encoding, positions, values)
        assert torch.equal(kept, new), gap


def test_one_bit_changes_the_checksum() -> None:
    for number in (1, 3, 4, 5, 47):
        bits = torch.arange(number, dtype=torch.int16)
        found = {checksum(bits)}
        for element in range(number):
            for bit in range(16):
                other = bits.clone()
                other[element] ^= -(1 << 15) if bit == 15 else 1 << bit
                found.add(checksum(other))
        assert len(found) == 1 + 16 * number


def test_the_order_of_elements_changes_the_checksum() -> None:
    bits = torch.arange(40, dtype=torch.int16)
    assert len({checksum(bits.roll(shift)) for shift in range(40)}) == 40
    words = bits.view(torch.int64).roll(1).view(torch.int16)
    assert checksum(words) != checksum(bits)


def test_the_checksum_of_a_view_is_that_of_a_copy() -> None:
    """Rows of an odd number of bfloat16 elements do not begin at multiples of 8 bytes. Sums do not depend on chunks."""
    weight = torch.randn(1001, 607).bfloat16()
    for begin in range(5):
        rows = bits_of(weight[begin:])
        assert checksum(rows) == checksum(rows.clone())


@pytest.mark.gpu
def test_bits_and_checksums_on_a_gpu() -> None:
    for share in (0.0005, 0.01, 0.3, 1.0):
        kept, new = changed_bits(300_007, torch.int16, share)
        encoding, positions, values = encode(kept.cuda(), new.cuda())
        expected = encode(kept, new)
        assert encoding == expected[0]
        assert torch.equal(positions.cpu(), expected[1])
        assert torch.equal(values.cpu(), expected[2])
        found = kept.cuda()
        apply(found, encoding, positions, values)
        assert torch.equal(found.cpu(), new)
        assert checksum(found) == checksum(new)
