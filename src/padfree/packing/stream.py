"""Form batches from a stream of samples: by a token budget, or by a fixed number of samples.

    buffer   1 2 3 4 5 6 7 8 9 10         batch  1 2 3 4 5 6 7      28 tokens
             8 9 10 11 12 ... 17                 8 9 10             27 tokens

In this example, sample i has i tokens, and the budget is 32 tokens. A batch takes samples that fit from a buffer,
oldest first. Then the buffer is refilled.

Batches do not depend on the number of ranks. The saved state holds positions only, so a resumed stream reads the
waiting samples again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from padfree.arrays import need_whole
from padfree.choices import PackOverlong
from padfree.errors import UserError, check_choice
from padfree.packing.epochs import EpochOrder, SourcePart
from padfree.packing.fill import Indices

T = TypeVar("T")


class EpochReader(Generic[T]):
    """Reads the samples of a source in the order of its epochs. `position` is the number of samples read, over all
    epochs.
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
                "is an iterable without len and [i], so it is read only once and in order, "
                f"but shuffle={shuffle} and epochs={epochs}",
                "give a sequence, or an iterable that is shuffled and repeated already",
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
        """Return a number R such that any R consecutive positions of the stream show every sample at least once."""
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
        """Return the source index of the sample at `position`. Positions count samples over all epochs."""
        if self.length is None:
            return position
        begin, order = self._epoch_at(position)
        return int(order[position - begin])

    def _epoch_at(self, position: int) -> tuple[int, Indices]:
        """Return the position of the first sample of the epoch that contains `position`, and the order of its samples.

        Positions count samples over all epochs.
        """
        known = self._epoch
        if known is None or not known[0] <= position < known[0] + len(known[1]):
            epoch = self.order.epoch_at(position)
            self._epoch = known = self.order.start(epoch), self.order(epoch)
        return known

    def peek(self) -> T:
        """Return the next sample without advancing. Must not be called if `ended` is True."""
        return self._at(self.position) if self.length is not None else self._next[0]

    def _at(self, position: int) -> T:
        sample: T = self.source[self.index(position)]  # type: ignore[index]
        return sample

    def advance(self) -> None:
        self.position += 1
        self._next = []

    def restore(self, position: int, wanted: list[int]) -> list[tuple[int, T]]:
        """Continue reading the source at `position`. Return (position, sample) for each of the earlier positions
        in `wanted`.
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


class _Batcher(Generic[T]):
    """The base class of `TokenBudgetBatcher` and `FixedSizeBatcher`, which form batches from a stream of samples.

    The class holds the source, the counters and the settings. A saved state can only be loaded into a batcher that has
    the settings with which the state was saved.
    """

    SETTINGS: ClassVar[tuple[str, ...]]

    def __init__(self, reader: EpochReader[T], length: Callable[[T], int] | None) -> None:
        self._reader = reader
        self._length: Callable[[Any], int] = length or _num_tokens
        self.step = 0
        self.num_overlong = 0
        self.indices: list[int] = []

    def __iter__(self) -> Self:
        """Return the batcher itself, so that a second loop continues where the first one stopped."""
        return self

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.SETTINGS}
        return {"batcher": type(self).__name__, **own, **self._reader.settings()}


class TokenBudgetBatcher(_Batcher[T]):
    """Yields batches: lists of samples with at most `budget` tokens in total, taken from a buffer, oldest samples
    first.

    After each batch, `indices` holds the source indices of the batch. `step` counts batches, and `num_overlong` counts
    samples longer than `budget`.
    """

    SETTINGS = ("budget", "buffer_size", "overlong")

    def __init__(
        self,
        source: Iterable[T],  # without `len` and `[i]`: only with shuffle=False and epochs=1
        *,
        budget: int,
        buffer_size: int = 256,
        shuffle: bool = False,  # a different order in each epoch, which depends only on `seed`
        seed: int = 0,
        epochs: int | None = 1,  # number of passes over the source; None: endless
        overlong: PackOverlong = "error",  # for a sample longer than `budget`; "alone": it is a batch of its own
        length: Callable[[T], int] | None = None,  # returns the number of tokens of a sample; None: `len`
        parts: Sequence[SourcePart] | None = None,  # ranges of the source, and how often an epoch shows their samples
    ) -> None:
        super().__init__(EpochReader(source, shuffle=shuffle, seed=seed, epochs=epochs, parts=parts), length)
        _check_positive(budget=budget, buffer_size=buffer_size)
        check_choice("overlong", overlong, PackOverlong)
        self.budget, self.buffer_size, self.overlong = budget, buffer_size, overlong
        self._buffer: list[_Waiting[T]] = []

    def __next__(self) -> list[T]:
        self._fill_buffer()
        if not self._buffer:
            raise StopIteration
        taken: list[_Waiting[T]] = []
        waiting: list[_Waiting[T]] = []
        free_tokens = self.budget
        for item in self._buffer:
            if taken and item.tokens > free_tokens:  # the oldest is always taken, so no sample waits forever
                waiting.append(item)
                continue
            taken.append(item)
            free_tokens -= item.tokens
        self._buffer = waiting
        self.step += 1
        self.indices = [item.source_index for item in taken]
        return [item.sample for item in taken]

    def _fill_buffer(self) -> None:
        tokens = sum(item.tokens for item in self._buffer)
        fruitless = 0
        while len(self._buffer) < self.buffer_size or tokens < self.budget:
            if self._reader.ended:
                break
            item = self._admitted(self._reader.position, self._reader.peek())
            self._reader.advance()
            if item is not None:
                self._buffer.append(item)
                tokens += item.tokens
            fruitless = 0 if item is not None and item.tokens else fruitless + 1
            # Without this check, an endless stream would search forever in a source whose samples are all empty or
            # dropped.
            if self._reader.epochs is None and fruitless > self._reader.round:
                raise UserError(
                    "source",
                    f"none of its {self._reader.length} samples has a usable token (overlong={self.overlong!r})",
                    "raise budget (in a recipe: batch.tokens), or give samples that are shorter and not empty",
                )

    def _admitted(self, position: int, sample: T, *, again: bool = False) -> _Waiting[T] | None:
        """Apply the setting `overlong` to a sample, which may be too long. Returns None if the sample is dropped.

        If `again` is True, the sample was read before and is not counted as overlong a second time.
        """
        tokens = self._length(sample)
        index = self._reader.index(position)
        if tokens <= self.budget:
            return _Waiting(position, index, sample, tokens)
        if self.overlong == "error":
            raise UserError(
                "budget",
                f"{self.budget} is less than the {tokens} tokens of sample {index} of the source",
                "raise budget, or set overlong to 'truncate', 'drop' or 'alone' (in a recipe: raise batch.tokens, or "
                "set batch.overlong=alone)",
            )
        self.num_overlong += not again
        if self.overlong == "drop":
            return None
        if self.overlong == "truncate":
            sample = _cut(sample, self.budget)
            tokens = self._length(sample)
        return _Waiting(position, index, sample, tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream between two batches, as a dict of integers, strings and lists."""
        return {
            "settings": self._settings(),
            "step": self.step,
            "num_overlong": self.num_overlong,
            "position": self._reader.position,
            "buffer": [item.position for item in self._buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream after the batch at which `state_dict` returned `state`.

        The settings and the data must be the same as when the state was saved.
        """
        _check_settings(state, self._settings())
        samples = self._reader.restore(state["position"], state["buffer"])
        admitted = [self._admitted(position, sample, again=True) for position, sample in samples]
        self._buffer = [item for item in admitted if item is not None]
        self.step, self.num_overlong, self.indices = state["step"], state["num_overlong"], []


class FixedSizeBatcher(_Batcher[T]):
    """Yields batches: lists of `batch_size` samples. The last batch of an epoch may be smaller.

    `overlong`: whether a sample longer than `max_length` raises an error or is truncated. All else works as in
    `TokenBudgetBatcher`.
    """

    SETTINGS = ("batch_size", "max_length", "overlong")

    def __init__(
        self,
        source: Iterable[T],
        *,
        batch_size: int,
        max_length: int | None = None,  # limit of the tokens of a sample
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        overlong: Literal["error", "truncate"] = "error",
        length: Callable[[T], int] | None = None,
        parts: Sequence[SourcePart] | None = None,
    ) -> None:
        super().__init__(EpochReader(source, shuffle=shuffle, seed=seed, epochs=epochs, parts=parts), length)
        _check_positive(batch_size=batch_size)
        if max_length is not None:
            _check_positive(max_length=max_length)
        check_choice("overlong", overlong, ("error", "truncate"))
        self.batch_size, self.max_length, self.overlong = batch_size, max_length, overlong
        self._batch: list[T] = []

    def __next__(self) -> list[T]:
        while not self._reader.ended:
            # If reading the next sample raises an error, `_batch` keeps the samples collected so far.
            self._batch.append(self._admitted(self._reader.peek()))
            self._reader.advance()
            if len(self._batch) == self.batch_size or self._reader.at_epoch_end:
                break
        if not self._batch:
            raise StopIteration
        batch, self._batch = self._batch, []
        self.step += 1
        end = self._reader.position
        self.indices = [self._reader.index(position) for position in range(end - len(batch), end)]
        return batch

    def _admitted(self, sample: T) -> T:
        tokens = self._length(sample)
        if self.max_length is None or tokens <= self.max_length:
            return sample
        if self.overlong == "error":
            raise UserError(
                "max_length",
                f"{self.max_length} is less than the {tokens} tokens of sample "
                f"{self._reader.index(self._reader.position)} of the source",
                "raise max_length, or set overlong to 'truncate'",
            )
        self.num_overlong += 1
        return _cut(sample, self.max_length)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream between two batches, as a dict of integers, strings and lists."""
        return {
            "settings": self._settings(),
            "step": self.step,
            "num_overlong": self.num_overlong,
            "position": self._reader.position - len(self._batch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream after the batch at which `state_dict` returned `state`.

        The settings and the data must be the same as when the state was saved.
        """
        _check_settings(state, self._settings())
        self._reader.restore(state["position"], [])
        self._batch, self.indices = [], []
        self.step, self.num_overlong = state["step"], state["num_overlong"]


class _Waiting(NamedTuple, Generic[T]):
    position: int  # index of the sample among all samples read, over all epochs
    source_index: int
    sample: T
    tokens: int


def _num_tokens(sample: Any) -> int:
    if isinstance(sample, Mapping):
        raise UserError(
            "length",
            f"is not set, and samples are dicts with the keys {', '.join(map(str, sample))}",
            "give a function, such as lambda row: len(row['input_ids'])",
        )
    return len(sample)


def _cut(sample: T, length: int) -> T:
    """Cut a sample to its first `length` tokens: with `sample.truncated(length)` if it has this method, or a slice."""
    truncated = getattr(sample, "truncated", None)
    cut: T = truncated(length) if truncated is not None else sample[:length]  # type: ignore[index]
    return cut


def _check_positive(**values: int) -> None:
    for field, value in values.items():
        need_whole(field, value, 1, "give 1 or more")


def _check_settings(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    saved = state.get("settings")
    if not isinstance(saved, Mapping):
        raise UserError(
            "state", "has no entry 'settings'", "give a dict that the state_dict method of a batcher returned"
        )
    for name, value in settings.items():
        if saved.get(name) != value:
            raise UserError(
                name,
                f"is {value!r}, but the state was saved with {saved.get(name)!r}",
                f"resume with the saved {name} or start a new run",
            )
