"""Samples in the order they are read, and the way back to any point of it.

    source       a b c d           anything with `len` and `[i]`
    position     0 1 2 3 | 4 5 6 7     counts over all epochs
    in order     a b c d | a b c d
    shuffled     c a d b | b c a d     one order per epoch, from (seed, epoch) alone

An iterable without `len` and `[i]` is read once, in order. To go back to a position it is read from its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import SPLITMIX64, need_whole, splitmix64
from padfree.packing.fill import Indices

T = TypeVar("T")


class EpochReader(Generic[T]):
    """A source read in order: `position` samples so far, over all epochs. The next one can be looked at first."""

    def __init__(self, source: Iterable[T], *, shuffle: bool, seed: int, epochs: int | None) -> None:
        random_access = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        self.length: int | None = len(source) if random_access else None  # type: ignore[arg-type]
        if self.length is None and (shuffle or epochs != 1):
            raise ValueError(
                f"source: an iterable without len and [i], with shuffle={shuffle} and epochs={epochs}; "
                f"give a sequence, or shuffle and repeat the iterable itself"
            )
        if epochs is not None:
            need_whole("epochs", epochs, 1, "give 1 or more, or None for no end")
        need_whole("seed", seed, 0, "give a whole number of 0 or more")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed: {seed}; give 0 or more, below 2**64")
        self.source, self.shuffle, self.seed, self.epochs = source, shuffle, seed, epochs
        self.position = 0
        self._iterator: Iterator[T] | None = None
        self._next: list[T] = []  # of an iterable, the sample that was looked at
        self._order: tuple[int, Indices] | None = None  # (epoch, order of its samples)

    def settings(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle, "seed": self.seed, "epochs": self.epochs, "source_length": self.length}

    @property
    def ended(self) -> bool:
        if self.length is not None:
            return not self.length or (self.epochs is not None and self.position >= self.epochs * self.length)
        if not self._next:
            if self._iterator is None:
                self._iterator = iter(self.source)
            self._next = list(islice(self._iterator, 1))
        return not self._next

    @property
    def at_epoch_end(self) -> bool:
        return self.ended if self.length is None else self.position % self.length == 0

    def index(self, position: int) -> int:
        """The place in the source of the sample that is read at this position."""
        if self.length is None:
            return position
        epoch, place = divmod(position, self.length)
        if not self.shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, shuffled(self.length, self.seed, epoch)
        return int(self._order[1][place])

    def peek(self) -> T:
        """The next sample; only before the end."""
        return self._at(self.position) if self.length is not None else self._next[0]

    def _at(self, position: int) -> T:
        sample: T = self.source[self.index(position)]  # type: ignore[index]
        return sample

    def advance(self) -> None:
        self.position += 1
        self._next = []

    def restore(self, position: int, wanted: list[int]) -> list[tuple[int, T]]:
        """Go to this position, and read the samples of the `wanted` earlier positions again."""
        if self.length is not None:
            self.position = position
            return [(earlier, self._at(earlier)) for earlier in wanted]
        fresh = iter(self.source)
        if fresh is self._iterator:
            raise ValueError("source: a one-pass iterator that was read already; load the state into a new batcher")
        self._iterator, self._next, self.position = fresh, [], 0
        keep, found = set(wanted), []
        while self.position < position and not self.ended:
            if self.position in keep:
                found.append((self.position, self._next[0]))
            self.advance()
        if self.position < position:
            raise ValueError(
                f"source: it ends after {self.position} samples, the state is at {position}; give the same source"
            )
        return found


def shuffled(length: int, seed: int, epoch: int) -> Indices:
    """An order of `length` samples from seed and epoch alone: sorted by a 64-bit hash of (seed, epoch, index).

    A resumed run sees the same order, on any version of any library.
    """
    hashes = np.arange(length, dtype=np.uint64)
    for part in (epoch, seed):
        hashes += _hashed(np.array([part], np.uint64))
        hashes = _hashed(hashes)
    return np.argsort(hashes, kind="stable")


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The number of each value in the sequence that splitmix64 begins with from 0."""
    return splitmix64(values * np.uint64(SPLITMIX64[0]))
