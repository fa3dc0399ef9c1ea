"""Read samples in a reproducible order, and return to any position in this order.

    source       a b c d           anything with `len` and `[i]`
    position     0 1 2 3 | 4 5 6 7     counts samples over all epochs
    in order     a b c d | a b c d
    shuffled     c a d b | b c a d     one order per epoch, which depends only on (seed, epoch)

A source may have parts with weights. The weight w is the number of times that an epoch shows each sample of the part,
on average. A part of n samples is repeated endlessly in one order, and epoch e takes the items from floor(e w n) up to,
but not including, floor((e + 1) w n) of this sequence:

    5 samples, weight 0.5, sequence 3 0 4 1 2 3 0 ...     epoch 0 takes 3 0, epoch 1 takes 4 1 2, epoch 2 takes 3 0, ...
    2 samples, weight 2,   sequence 0 1 0 1 ...           each epoch takes 0 1 0 1

The samples of an epoch are shown in the order of the source (0 0 1 1 in the second example), or shuffled. After any
number of epochs the counts of two samples of a part differ by at most one, and E epochs show floor(E w n) samples of a
part. The order depends only on seed, epoch, sizes and weights.

An iterable without `len` and `[i]` is read once, in order. To return to a position, it is read again from its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import SPLITMIX64, need_whole, splitmix64
from padfree.errors import UserError
from padfree.packing.fill import Indices

T = TypeVar("T")

PART_SEED = 0x9E3779B97F4A7C15
"""Combined with the seed by XOR, so that the order inside a part differs from the orders of epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePart:
    """A range of consecutive samples of a source, and the number of times that an epoch shows each of them (the
    weight).
    """

    size: int
    weight: Fraction

    def shown(self, epochs: int) -> int:
        """The number of samples of this part that the first `epochs` epochs show in total, repetitions included."""
        return math.floor(epochs * self.weight * self.size)


class EpochOrder:
    """The samples that each epoch shows, in order. The `parts`, one after the other, make up the whole source."""

    def __init__(self, parts: Sequence[SourcePart], *, shuffle: bool, seed: int) -> None:
        self.parts, self.shuffle, self.seed = tuple(parts), shuffle, seed
        self._inside: dict[int, Indices] = {}  # by part

    def start(self, epoch: int) -> int:
        """The number of samples shown before this epoch."""
        return sum(part.shown(epoch) for part in self.parts)

    def epoch_at(self, position: int) -> int:
        """The epoch that contains this position. Empty epochs, which contain no position, are skipped."""
        low, high = 0, 1
        while self.start(high) <= position:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.start(middle) <= position else (low, middle)
        return low

    def __call__(self, epoch: int) -> Indices:
        """The samples that this epoch shows, in order, as indices [n] into the source."""
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


class EpochReader(Generic[T]):
    """Reads a source in order.

    `position` counts the samples read, over all epochs, and `peek` returns the next sample.
    """

    def __init__(
        self,
        source: Iterable[T],
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None,
        parts: Sequence[SourcePart] | None = None,
    ) -> None:
        random_access = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        self.length: int | None = len(source) if random_access else None  # type: ignore[arg-type]
        if self.length is None and (shuffle or epochs != 1):
            raise UserError(
                "source",
                "is an iterable without len and [i], which is read only once and in order, "
                f"but shuffle={shuffle} and epochs={epochs}",
                "give a sequence, or shuffle and repeat the iterable itself",
            )
        if epochs is not None:
            need_whole("epochs", epochs, 1, "give 1 or more, or None for an endless stream")
        need_whole("seed", seed, 0, "give an integer of 0 or more")
        if not 0 <= seed < 1 << 64:
            raise UserError("seed", "is too large", "give an integer below 2**64", value=seed)
        # If all weights are 1, parts are ignored, so that a state saved without parts can be resumed.
        self.parts = None if parts is None or all(part.weight == 1 for part in parts) else tuple(parts)
        if self.parts is not None:
            assert sum(part.size for part in self.parts) == self.length
        whole = (SourcePart(size=self.length or 0, weight=Fraction(1)),)
        self.order = EpochOrder(self.parts or whole, shuffle=shuffle, seed=seed)
        self._end = None if epochs is None else self.order.start(epochs)
        self.source, self.shuffle, self.seed, self.epochs = source, shuffle, seed, epochs
        self.position = 0
        self._iterator: Iterator[T] | None = None
        self._next: list[T] = []  # only for an iterable: the next sample, if it has been read ahead
        self._epoch: tuple[int, Indices] | None = None  # first position of the cached epoch, and its order

    def settings(self) -> dict[str, Any]:
        parts = None if self.parts is None else [[part.size, str(part.weight)] for part in self.parts]
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epochs": self.epochs,
            "source_length": self.length,
            "parts": parts,
        }

    @property
    def ended(self) -> bool:
        if self.length is not None:
            return not self.length or (self._end is not None and self.position >= self._end)
        if not self._next:
            if self._iterator is None:
                self._iterator = iter(self.source)
            self._next = list(islice(self._iterator, 1))
        return not self._next

    @property
    def round(self) -> int:
        """A number R such that any R consecutive positions show every sample of the source at least once."""
        if self.parts is None:
            return self.length or 0
        return self.order.start(2 * max(math.ceil(1 / part.weight) for part in self.parts))

    @property
    def at_epoch_end(self) -> bool:
        if self.length is None or not self.position:
            return self.ended
        begin, order = self._epoch_at(self.position - 1)
        return self.position == begin + len(order)

    def index(self, position: int) -> int:
        """The index in the source of the sample at this position."""
        if self.length is None:
            return position
        begin, order = self._epoch_at(position)
        return int(order[position - begin])

    def _epoch_at(self, position: int) -> tuple[int, Indices]:
        """The first position of the epoch that contains `position`, and the order of its samples."""
        known = self._epoch
        if known is None or not known[0] <= position < known[0] + len(known[1]):
            epoch = self.order.epoch_at(position)
            self._epoch = known = self.order.start(epoch), self.order(epoch)
        return known

    def peek(self) -> T:
        """The next sample. Call it only if `ended` is False."""
        return self._at(self.position) if self.length is not None else self._next[0]

    def _at(self, position: int) -> T:
        sample: T = self.source[self.index(position)]  # type: ignore[index]
        return sample

    def advance(self) -> None:
        self.position += 1
        self._next = []

    def restore(self, position: int, wanted: list[int]) -> list[tuple[int, T]]:
        """Move to this position, and read the samples at the `wanted` earlier positions again.

        Returns (position, sample) for each wanted position.
        """
        if self.length is not None:
            self.position = position
            return [(earlier, self._at(earlier)) for earlier in wanted]
        fresh = iter(self.source)
        if fresh is self._iterator:
            raise UserError(
                "source", "is a one-pass iterator that was already read", "load the state into a new batcher"
            )
        self._iterator, self._next, self.position = fresh, [], 0
        keep, found = set(wanted), []
        while self.position < position and not self.ended:
            if self.position in keep:
                found.append((self.position, self._next[0]))
            self.advance()
        if self.position < position:
            raise UserError(
                "source",
                f"ends after {self.position} samples, but the state is at {position}",
                "give the source with which the state was saved",
            )
        return found


def shuffled(length: int, seed: int, epoch: int) -> Indices:
    """An order of `length` samples that depends only on seed and epoch.

    Samples are sorted by a hash of (seed, epoch, index). So a resumed run gets the same order, even with other library
    versions.
    """
    hashes = np.arange(length, dtype=np.uint64)
    for part in (epoch, seed):
        hashes += _hashed(np.array([part], np.uint64))
        hashes = _hashed(hashes)
    return np.argsort(hashes, kind="stable")


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The outputs of the random number generator splitmix64 with seed 0 at the indices `values`."""
    return splitmix64(values * np.uint64(SPLITMIX64[0]))
