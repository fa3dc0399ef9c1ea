"""The order in which epochs show the samples of a source, computed directly for any epoch.

A source has parts with weights. A part repeats its n samples endlessly in a fixed order, from which each epoch takes
the next weight * n samples. For example, with 5 samples and weight 0.5 (2 or 3 samples per epoch):

    fixed order    3 0 | 4 1 2 | 3 0 | 4 1 2 | ...    where | separates epochs

The chosen samples are then shuffled, or keep the order of the source. The result depends only on the seed, the epoch,
and the sizes and weights of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import SPLITMIX64, splitmix64
from padfree.packing.fill import Indices

PART_SEED = 0x9E3779B97F4A7C15
"""XORed with the seed to shuffle the samples inside a `SourcePart`: their order must differ from that of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePart:
    """A range of consecutive samples of a source, and its weight: how many times an epoch shows each of them."""

    size: int
    weight: Fraction

    def shown(self, epochs: int) -> int:
        """Return how many samples of this part of the source the first `epochs` epochs show, repetitions included."""
        return math.floor(epochs * self.weight * self.size)


class EpochOrder:
    """The order of the samples in each epoch. Samples are numbered through all `parts`, in order."""

    def __init__(self, parts: Sequence[SourcePart], *, shuffle: bool, seed: int) -> None:
        self.parts, self.shuffle, self.seed = tuple(parts), shuffle, seed
        self._inside: dict[int, Indices] = {}  # by number of the part: the order of its samples

    def start(self, epoch: int) -> int:
        """Return the total number of samples in all epochs before `epoch`."""
        return sum(part.shown(epoch) for part in self.parts)

    def epoch_at(self, position: int) -> int:
        """Return the epoch that contains `position`, which counts samples over all epochs. Epochs without samples are
        skipped.
        """
        low, high = 0, 1
        while self.start(high) <= position:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.start(middle) <= position else (low, middle)
        return low

    def __call__(self, epoch: int) -> Indices:
        """Return the samples of an epoch in the order in which they are trained, as indices [n] into the source."""
        first, found = 0, []
        for number, part in enumerate(self.parts):
            items = np.arange(part.shown(epoch), part.shown(epoch + 1)) % max(part.size, 1)
            if part.weight.denominator > 1:
                items = self._order_inside(number)[items]
            found.append(first + np.sort(items, kind="stable"))
            first += part.size
        chosen = np.concatenate([np.zeros(0, dtype=np.int64), *found])
        return chosen[shuffled(len(chosen), self.seed, epoch)] if self.shuffle else chosen

    def _order_inside(self, number: int) -> Indices:
        if number not in self._inside:
            size = self.parts[number].size
            own = (self.seed ^ PART_SEED) % (1 << 64)
            self._inside[number] = shuffled(size, own, number) if self.shuffle else np.arange(size)
        return self._inside[number]


def shuffled(length: int, seed: int, epoch: int) -> Indices:
    """Return a random order of `length` samples that depends only on seed and epoch.

    Samples are sorted by a hash of (seed, epoch, index), so that the order is the same with all library versions.
    """
    hashes = np.arange(length, dtype=np.uint64)
    for part in (epoch, seed):
        hashes += _hashed(np.array([part], np.uint64))
        hashes = _hashed(hashes)
    return np.argsort(hashes, kind="stable")


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each value v to the v-th number of the random sequence of splitmix64 with seed 0."""
    return splitmix64(values * np.uint64(SPLITMIX64[0]))
