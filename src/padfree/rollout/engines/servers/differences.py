"""Weight sync by differences: send only the elements of a tensor that have changed since the last weight sync.

    server      3 3 3 3 3 3 3 3
    trainer     3 3 7 3 3 3 9 3     elements 2 and 6 have changed

The trainer sends the new bits (7 9) and the encoded positions. `encode` chooses the smallest encoding:

    encoding    positions     meaning
    "gaps8"     2 3           the number of unchanged elements before each changed element, as a byte
    "gaps16"    2 3           the same, as two bytes
    "bitmap"    0b01000100    one bit per element
    "whole"     none          all elements are sent

If 1% of the elements of a bfloat16 tensor change, the data sent is 1.5% of the tensor's bytes.

The server imports this module too. Its environment has torch, but not all dependencies of padfree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each size of a tensor element in bytes: the integer dtype of that size, as which the tensor's bits are viewed."""

_GAP_DTYPES = {"gaps8": torch.uint8, "gaps16": torch.int16}
# A gap code of this value stands for as many unchanged elements without a changed one behind them.
_LONGEST = {"gaps8": 255, "gaps16": 65535}

_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24  # words of 8 bytes that the checksum processes at once: those of the CPU fit
# into its cache
_STEP, *_FACTORS = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionDifference:
    """Describes a changed region of a tensor. Positions and new values of the changed elements are sent separately.

    `start`: the index at which the region begins. `encoding`: the encoding of the positions. `checksum`: the checksum
    of the whole region after the change.
    """

    name: str
    start: Sequence[int]
    shape: Sequence[int]
    encoding: str
    checksum: int

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers [n]. For a contiguous tensor, the result is a view and not a copy."""
    return tensor.detach().contiguous().view(-1).view(BIT_DTYPES[tensor.element_size()])


def encode(kept: Tensor, new: Tensor) -> tuple[str, Tensor, Tensor]:
    """Encode the change from the integers `kept` [n] to the integers `new` [n], in as few bytes as possible.

    Return the name of the encoding, the encoded positions of the changed elements, and their new values.
    """
    changed = kept != new
    size, number = new.element_size(), int(changed.count_nonzero())
    # Because of "whole", the data sent is never larger than the region.
    sizes = {"whole": new.numel() * size, "bitmap": -(-new.numel() // 8) + number * size}
    gaps = None
    if number * size < sizes["whole"] and number < sizes["bitmap"]:  # a gap takes at least one byte
        positions = changed.nonzero().squeeze(1)
        gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        for encoding, longest in _LONGEST.items():
            codes = number + int((gaps // longest).sum())
            sizes[encoding] = codes * _GAP_DTYPES[encoding].itemsize + number * size
    encoding = min(sizes, key=lambda name: sizes[name])
    if encoding == "whole":
        return encoding, new.new_empty(0, dtype=torch.uint8), new
    if encoding == "bitmap":
        return encoding, _packed_bits(changed), new[changed]
    assert gaps is not None
    return encoding, _gap_codes(gaps, encoding), new[positions]


def apply(flat: Tensor, encoding: str, positions: Tensor, values: Tensor) -> None:
    """Overwrite the changed elements of the integers `flat` [n] with their new values, in place.

    `encoding`, `positions`, `values`: the encoded change that `encode` returned.
    """
    if encoding == "whole":
        flat.copy_(values)
    elif encoding == "bitmap":
        flat[_unpacked_bits(positions, flat.numel())] = values
    else:
        flat[_positions_of(positions, encoding)] = values


def _gap_codes(gaps: Tensor, encoding: str) -> Tensor:
    longest = _LONGEST[encoding]
    ends = (1 + gaps // longest).cumsum(0)
    codes = gaps.new_full((int(ends[-1]) if len(gaps) else 0,), longest)
    codes[ends - 1] = gaps % longest
    return codes.to(_GAP_DTYPES[encoding])  # in int16, codes above 32767 become negative numbers


def _positions_of(codes: Tensor, encoding: str) -> Tensor:
    longest = _LONGEST[encoding]
    gaps = codes.to(torch.int64) & longest
    before = (gaps != longest).nonzero().squeeze(1)  # the codes behind which there is a changed element
    return gaps.cumsum(0)[before] + torch.arange(len(before), device=codes.device)


def _packed_bits(mask: Tensor) -> Tensor:
    padded = mask.new_zeros(-(-len(mask) // 8) * 8)
    padded[: len(mask)] = mask
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded.view(-1, 8).to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)


def _unpacked_bits(packed: Tensor, number: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 1).view(-1)[:number].bool()


def checksum(bits: Tensor) -> int:
    """Return a 64-bit checksum of the integers `bits` [n], equal on every device."""
    data = bits.contiguous().view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()  # a view as int64 must be aligned
    last = data.new_zeros(8)
    last[: data.numel() - whole] = data[whole:]
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    words = data[:whole].view(torch.int64)
    chunk = _CPU_CHUNK if data.device.type == "cpu" else _GPU_CHUNK
    for begin in range(0, len(words), chunk):
        total += _mixed(words[begin : begin + chunk], begin)
    return int(total + _mixed(last.view(torch.int64), len(words)))


def _mixed(words: Tensor, begin: int) -> Tensor:
    """Return the sum modulo 2^64 of the hashes of the 64-bit words [n]. Word i has the position `begin` + i.

    For each position, the hash (splitmix64) is a bijection. A change of one word therefore always changes the sum.
    """
    mixed = torch.arange(begin, begin + len(words), device=words.device).mul_(_STEP).add_(words)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).sum()


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Shift 64-bit words to the right and fill with zeros (torch repeats the sign bit)."""
    return (words >> shift).bitwise_and_((1 << 64 - shift) - 1)
