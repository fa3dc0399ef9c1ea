"""Pack samples into few bins by best-fit decreasing. No bin exceeds its capacity in tokens.

The longest sample is placed first, and each sample into the fullest bin where it fits. For example, samples of lengths
5 3 5 2 2 7 are packed into bins of capacity 8 as 7 | 5 3 | 5 2 | 2.

Many samples of equal length are placed in one step, so 10 million samples take hardly more steps than 1 million.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padfree.arrays import concatenated_ranges, integer_array, need_whole
from padfree.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Bins(Sequence[Indices]):
    """The sample indices of each bin, stored in two flat arrays: bin b is `indices[offsets[b]:offsets[b + 1]]`,
    ascending.
    """

    indices: Indices  # [n] each sample once
    offsets: Indices  # [bins + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Indices: ...
    @overload
    def __getitem__(self, index: slice) -> list[Indices]: ...
    def __getitem__(self, index: int | slice) -> Indices | list[Indices]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"bin {index} does not exist: there are {len(self)} bins")
        index %= len(self)
        return self.indices[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Indices]:
        for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            yield self.indices[start:end]

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of `values` [n] over the samples of each bin, [bins]. No bin may be empty."""
        return np.add.reduceat(values[self.indices], self.offsets[:-1]) if len(self) else values[:0]


def fill(lengths: ArrayLike, capacity: int) -> Bins:
    """Assign every sample to a bin of at most `capacity` tokens by best-fit decreasing.

    Bins are in the order in which they were opened. Samples of length 0 go into the last bin.
    """
    array = checked_lengths(lengths)
    need_whole("capacity", capacity, 1, "give 1 or more tokens")
    if array.size and array.max() > capacity:
        index = int(array.argmax())
        raise UserError(
            "lengths",
            f"sample {index} has {array[index]} tokens, but capacity is {capacity}",
            f"raise capacity to {array[index]} or cut the sample",
        )
    order, values, counts = _longest_first(array)
    bins = _bin_of_each(*_best_fit_decreasing(values, counts, capacity))
    empty = np.full(len(array) - len(bins), bins.max(initial=0))
    return _grouped(order, np.concatenate([bins, empty]))


def checked_lengths(lengths: ArrayLike, field: str = "lengths") -> Indices:
    """Check sample lengths and return them as a flat int64 array. Error messages name `field` and the sample."""
    array = integer_array(lengths, field)
    if array.min(initial=0) < 0:
        index = int(array.argmin())
        raise UserError(field, f"is {array[index]} for sample {index}", "give lengths of 0 or more")
    return array


def _longest_first(lengths: Indices) -> tuple[Indices, list[int], list[int]]:
    """Return sample indices by falling length, the distinct lengths above 0 (falling), and the count of each length.

    Samples of equal length keep their order.
    """
    top = int(lengths.max(initial=0))
    if top <= max(len(lengths), 1 << 16):
        codes, counts = lengths, np.bincount(lengths, minlength=1)
        values = np.arange(len(counts))
    else:
        values, codes, counts = np.unique(lengths, return_inverse=True, return_counts=True)
        top = len(values) - 1
    # numpy uses radix sort for 16-bit keys, which is several times as fast as sorting wider keys
    keys = np.subtract(top, codes).astype(np.uint16 if top < 1 << 16 else np.int64)
    there = (counts > 0) & (values > 0)
    return np.argsort(keys, kind="stable"), values[there][::-1].tolist(), counts[there][::-1].tolist()


class _Step(NamedTuple):
    """One step of best-fit decreasing: each of `num_bins` bins takes `per_bin` samples of one length.

    Each of these bins has `free_tokens` free tokens before the step and `left` free tokens after it.
    """

    free_tokens: int
    left: int
    per_bin: int
    num_bins: int
    taken: int  # index in the queue of `free_tokens` where the first of these bins was
    put: int  # index in the queue of `left` where the first of these bins is put


def _best_fit_decreasing(values: list[int], counts: list[int], capacity: int) -> tuple[list[_Step], dict[int, int]]:
    """Pack `counts[i]` samples of each length `values[i]`, longest first, by best-fit decreasing.

    Bins with the same number of free tokens wait in one queue. Returns the steps, and how many bins joined each queue
    in total.
    """
    steps: list[_Step] = []
    free_sizes: list[int] = []  # the distinct numbers of free tokens of the waiting bins, ascending
    # A number of free tokens -> how many bins have joined the queue of this number so far (put) or left it (taken).
    put: defaultdict[int, int] = defaultdict(int)
    taken: defaultdict[int, int] = defaultdict(int)
    for length, count in zip(values, counts, strict=True):
        while count:
            index = bisect_left(free_sizes, length)
            free_tokens = free_sizes[index] if index < len(free_sizes) else capacity
            # A bin that has taken a sample is the fullest, so best fit gives it the next sample too, if it fits.
            per_bin = min(free_tokens // length, count)
            num_bins = count // per_bin
            if free_tokens < capacity:
                waiting = put[free_tokens] - taken[free_tokens]
                num_bins = min(num_bins, waiting)
                if num_bins == waiting:
                    del free_sizes[index]
            left = free_tokens - per_bin * length
            if left >= values[-1] and put[left] == taken[left]:
                insort(free_sizes, left)
            steps.append(_Step(free_tokens, left, per_bin, num_bins, taken[free_tokens], put[left]))
            taken[free_tokens] += num_bins
            put[left] += num_bins
            count -= per_bin * num_bins
    return steps, {capacity: taken[capacity], **put}


def _bin_of_each(steps: list[_Step], sizes: dict[int, int]) -> Indices:
    """Return the bin number of each sample, for the samples from longest to shortest.

    `steps` and `sizes` are the results of `_best_fit_decreasing`.
    """
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    source = np.array([starts[step.free_tokens] + step.taken for step in steps], dtype=np.int64)
    target = np.array([starts[step.left] + step.put for step in steps], dtype=np.int64)
    num_bins = np.array([step.num_bins for step in steps], dtype=np.int64)
    per_bin = np.array([step.per_bin for step in steps], dtype=np.int64)

    # All queues are laid out one after the other, first that of the empty bins: bin i is at index i there. `origin`
    # maps an index to the one where the bin was before, and after the loop to the number of the bin.
    used = concatenated_ranges(source, num_bins)
    origin = np.arange(sum(sizes.values()))
    origin[concatenated_ranges(target, num_bins)] = used
    while not np.array_equal(origin, further := origin[origin]):
        origin = further
    return np.repeat(origin[used], np.repeat(per_bin, num_bins))


def _grouped(order: Indices, bins: Indices) -> Bins:
    """Group samples by bin, with ascending indices in each bin.

    The (bin, index) pairs are packed into one integer each and sorted in place.
    """
    offsets = np.zeros(int(bins.max(initial=-1)) + 2, np.int64)
    np.cumsum(np.bincount(bins), out=offsets[1:])
    shift = len(order).bit_length()
    bins <<= shift
    bins |= order
    bins.sort()
    bins &= (1 << shift) - 1
    return Bins(bins, offsets)
