"""Batches out of a stream of samples: by a budget of tokens, or by a fixed number of samples.

    budget 32, buffer of 10, sample i has i tokens

    buffer   1 2 3 4 5 6 7 8 9 10         batch  1 2 3 4 5 6 7      28 tokens; 8, 9 and 10 would exceed the budget
             8 9 10 11 12 ... 17                 8 9 10             27
             11 12 13 ... 20                     11 12              23

One rule forms a batch: the buffer is filled until it holds `buffer_size` samples and a budget's worth of tokens; its
samples are looked at from the oldest to the newest, and each that still fits is taken. The oldest is always taken, so
that no sample waits for ever. At the end of the source the buffer drains: every sample comes out once.

A batch depends on the data, the seed and the number of batches before it, never on the number of ranks. The state of a
stream is a few integers, fit for JSON: how far the source was read and which of its samples wait in the buffer. A
resumed stream reads those again: by `source[i]`, or, from an iterable, by reading it from the start to that point.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, get_args

from padfree.arrays import need_whole
from padfree.packing.source import Source
from padfree.packing.step_plan import Overlong

T = TypeVar("T")

Count = Literal["all", "trained"]


class _Batcher(Generic[T]):
    """What both kinds share: the source, the counters, and the settings that a state must agree with."""

    SETTINGS: ClassVar[tuple[str, ...]]

    def __init__(self, source: Source[T], length: Callable[[T], int] | None) -> None:
        self._source = source
        self._length: Callable[[Any], int] = length or _num_tokens
        self.step = 0
        self.num_overlong = 0
        self.indices: list[int] = []

    def __iter__(self) -> Self:
        """The batcher itself: a second loop goes on where the first one stopped."""
        return self

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.SETTINGS}
        return {"batcher": type(self).__name__, **own, **self._source.settings()}


class TokenBudgetBatcher(_Batcher[T]):
    """Iterates lists of samples of at most `budget` tokens; see the module for the rule.

    source        anything with `len` and `[i]`, or any iterable (then without shuffle, and epochs = 1)
    count         what the budget counts: "all" tokens, or only "trained" ones; the latter needs `max_tokens`, the most
                  tokens of any kind in a batch
    warmup_start  the budget grows in a line from `warmup_start` to `budget` over the first `warmup_steps` batches. A
                  sample longer than the present budget then has a batch of its own
    shuffle       another order each epoch, from `seed` alone, the same on every machine
    epochs        how often the source is read; None is without end. The buffer runs on from one epoch into the next
    overlong      what happens to a sample longer than `budget` (or `max_tokens`): "error", "truncate", "drop", or
                  "alone" in its batch. `num_overlong` counts them
    length        tokens of a sample; `trained`: how many of them are trained on (default: `sample.num_labels`)

    After each batch, `indices` are the places of its samples in the source, and `step` is the number of batches so far.
    """

    SETTINGS = ("budget", "buffer_size", "count", "max_tokens", "warmup_start", "warmup_steps", "overlong")

    def __init__(
        self,
        source: Iterable[T],
        *,
        budget: int,
        buffer_size: int = 256,
        count: Count = "all",
        max_tokens: int | None = None,
        warmup_start: int | None = None,
        warmup_steps: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        overlong: Overlong = "error",
        length: Callable[[T], int] | None = None,
        trained: Callable[[T], int] | None = None,
    ) -> None:
        super().__init__(Source(source, shuffle=shuffle, seed=seed, epochs=epochs), length)
        _check_positive(budget=budget, buffer_size=buffer_size)
        if max_tokens is not None:
            _check_positive(max_tokens=max_tokens)
        if warmup_start is not None:
            _check_positive(warmup_start=warmup_start)
        _check_choice("count", count, get_args(Count))
        _check_choice("overlong", overlong, get_args(Overlong))
        if (count == "trained") != (max_tokens is not None):
            raise ValueError(
                f'max_tokens: {max_tokens} with count={count!r}; give it with count="trained", and only then'
            )
        if warmup_steps < 0 or (warmup_steps > 0) != (warmup_start is not None):
            raise ValueError(f"warmup_steps: {warmup_steps} with warmup_start {warmup_start}; give both or neither")
        if warmup_start is not None and warmup_start > budget:
            raise ValueError(f"warmup_start: {warmup_start} is above the budget of {budget}; start at {budget} or less")
        self.budget, self.buffer_size, self.count, self.overlong = budget, buffer_size, count, overlong
        self.warmup_start, self.warmup_steps = warmup_start, warmup_steps
        self.max_tokens = budget if max_tokens is None else max_tokens
        self._trained: Callable[[Any], int] = trained or _num_labels
        self._buffer: list[_Waiting[T]] = []

    @property
    def padded_length(self) -> int:
        """The fixed length that every batch fits in, an overlong sample "alone" excepted: for `padded_to`."""
        return self.max_tokens

    @property
    def present_budget(self) -> int:
        """The budget of the next batch."""
        if self.warmup_start is None or self.step >= self.warmup_steps:
            return self.budget
        return self.warmup_start + (self.budget - self.warmup_start) * self.step // self.warmup_steps

    def __next__(self) -> list[T]:
        self._fill_buffer()
        if not self._buffer:
            raise StopIteration
        taken: list[_Waiting[T]] = []
        waiting: list[_Waiting[T]] = []
        budget, room = self.present_budget, self.max_tokens
        for item in self._buffer:
            if taken and (item.counted > budget or item.tokens > room):
                waiting.append(item)
                continue
            taken.append(item)
            budget -= item.counted
            room -= item.tokens
        self._buffer = waiting
        self.step += 1
        self.indices = [item.source_index for item in taken]
        return [item.sample for item in taken]

    def _fill_buffer(self) -> None:
        counted, tokens = sum(item.counted for item in self._buffer), sum(item.tokens for item in self._buffer)
        fruitless = 0
        while len(self._buffer) < self.buffer_size or (counted < self.present_budget and tokens < self.max_tokens):
            if self._source.ended:
                break
            item = self._admitted(self._source.position, self._source.peek())
            self._source.advance()
            if item is not None:
                self._buffer.append(item)
                counted, tokens = counted + item.counted, tokens + item.tokens
            fruitless = 0 if item is not None and item.tokens else fruitless + 1
            # without this, an endless stream over such a source would never come back
            if self._source.epochs is None and fruitless > (self._source.length or 0):
                raise ValueError(
                    f"source: none of its {self._source.length} samples gives a token (overlong={self.overlong!r}); "
                    f"raise budget (in a recipe: batch.tokens) or give other samples"
                )

    def _admitted(self, position: int, sample: T, *, again: bool = False) -> _Waiting[T] | None:
        """The sample with its sizes, after the overlong policy; None if it is dropped. `again` does not count it."""
        tokens, counted = self._sizes(sample)
        index = self._source.index(position)
        if tokens <= self.max_tokens and counted <= self.budget:
            return _Waiting(position, index, sample, tokens, counted)
        if self.overlong == "error":
            field = "budget" if counted > self.budget else "max_tokens"
            trained = f" ({counted} trained)" if self.count == "trained" else ""
            raise ValueError(
                f"{field}: {getattr(self, field)} is less than sample {index} of the source needs: "
                f"{tokens} tokens{trained}; raise it or set overlong to truncate, drop or alone "
                f"(in a recipe: batch.tokens, or batch.overlong=alone)"
            )
        self.num_overlong += not again
        if self.overlong == "drop":
            return None
        if self.overlong == "truncate":
            # the longest beginning that is within both limits
            size = min(tokens, self.max_tokens)
            if self.count == "trained":
                sizes = range(size + 1)
                size = bisect_right(sizes, self.budget, key=lambda size: self._trained(_cut(sample, size))) - 1
            sample = _cut(sample, size)
            tokens, counted = self._sizes(sample)
        return _Waiting(position, index, sample, tokens, counted)

    def _sizes(self, sample: T) -> tuple[int, int]:
        tokens = self._length(sample)
        return tokens, tokens if self.count == "all" else self._trained(sample)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, between two batches. Plain integers, strings and lists."""
        return {
            "settings": self._settings(),
            "step": self.step,
            "num_overlong": self.num_overlong,
            "position": self._source.position,
            "buffer": [item.position for item in self._buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called, with the same settings and the same data."""
        _check_settings(state, self._settings())
        samples = self._source.restore(state["position"], state["buffer"])
        admitted = [self._admitted(position, sample, again=True) for position, sample in samples]
        self._buffer = [item for item in admitted if item is not None]
        self.step, self.num_overlong, self.indices = state["step"], state["num_overlong"], []


class FixedSizeBatcher(_Batcher[T]):
    """Iterates lists of `batch_size` samples, in order or shuffled; the last of an epoch may be smaller.

    `max_length` is the most tokens a sample may have: longer ones are an error, or cut with `overlong="truncate"` and
    counted in `num_overlong`. `drop_last` leaves out an incomplete last batch and counts its samples in `num_dropped`.
    `indices`, `step`, `shuffle`, `seed`, `epochs`, `length` and the state are those of `TokenBudgetBatcher`.
    """

    SETTINGS = ("batch_size", "max_length", "drop_last", "overlong")

    def __init__(
        self,
        source: Iterable[T],
        *,
        batch_size: int,
        max_length: int | None = None,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        overlong: Literal["error", "truncate"] = "error",
        length: Callable[[T], int] | None = None,
    ) -> None:
        super().__init__(Source(source, shuffle=shuffle, seed=seed, epochs=epochs), length)
        _check_positive(batch_size=batch_size)
        if max_length is not None:
            _check_positive(max_length=max_length)
        _check_choice("overlong", overlong, ("error", "truncate"))
        self.batch_size, self.max_length, self.drop_last, self.overlong = batch_size, max_length, drop_last, overlong
        if drop_last and self._source.length is not None and self._source.length < batch_size:
            raise ValueError(
                f"drop_last: a source of {self._source.length} samples has no batch of {batch_size}; "
                f"lower batch_size or keep the last batch"
            )
        self._batch: list[T] = []
        self.num_dropped = 0

    @property
    def padded_length(self) -> int:
        """The fixed length that every batch fits in: samples per batch × most tokens of a sample."""
        if self.max_length is None:
            raise ValueError("max_length: not set; give the most tokens of a sample to pad batches to a fixed length")
        return self.batch_size * self.max_length

    def __next__(self) -> list[T]:
        while not self._source.ended:
            # what is collected outlives an error, so that no sample is lost by it
            self._batch.append(self._admitted(self._source.peek()))
            self._source.advance()
            if len(self._batch) == self.batch_size:
                break
            if self._source.at_epoch_end:
                if not self.drop_last:
                    break
                self.num_dropped += len(self._batch)
                self._batch = []
        if not self._batch:
            raise StopIteration
        batch, self._batch = self._batch, []
        self.step += 1
        end = self._source.position
        self.indices = [self._source.index(position) for position in range(end - len(batch), end)]
        return batch

    def _admitted(self, sample: T) -> T:
        tokens = self._length(sample)
        if self.max_length is None or tokens <= self.max_length:
            return sample
        if self.overlong == "error":
            raise ValueError(
                f"max_length: sample {self._source.index(self._source.position)} of the source has {tokens} tokens, "
                f"max_length is {self.max_length}; raise it or set overlong to truncate"
            )
        self.num_overlong += 1
        return _cut(sample, self.max_length)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, between two batches."""
        return {
            "settings": self._settings(),
            "step": self.step,
            "num_overlong": self.num_overlong,
            "num_dropped": self.num_dropped,
            "position": self._source.position - len(self._batch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called, with the same settings and the same data."""
        _check_settings(state, self._settings())
        self._source.restore(state["position"], [])
        self._batch, self.indices = [], []
        self.step, self.num_overlong, self.num_dropped = state["step"], state["num_overlong"], state["num_dropped"]


class _Waiting(NamedTuple, Generic[T]):
    position: int  # among all samples read, over all epochs
    source_index: int
    sample: T
    tokens: int
    counted: int  # of these, what the budget counts


def _num_tokens(sample: Any) -> int:
    if isinstance(sample, Mapping):
        raise ValueError(
            f"length: a sample is a dict of {', '.join(map(str, sample))}; "
            f"give length, such as lambda row: len(row['input_ids'])"
        )
    return len(sample)


def _num_labels(sample: Any) -> int:
    return int(sample.num_labels)


def _cut(sample: T, length: int) -> T:
    """The first `length` tokens: `sample.truncated(length)` where there is such a method, else a slice."""
    truncated = getattr(sample, "truncated", None)
    cut: T = truncated(length) if truncated is not None else sample[:length]  # type: ignore[index]
    return cut


def _check_positive(**values: int) -> None:
    for field, value in values.items():
        need_whole(field, value, 1, "give 1 or more")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}: {value!r}; give one of {', '.join(choices)}")


def _check_settings(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    saved = state.get("settings")
    if not isinstance(saved, Mapping):
        raise ValueError("state: no settings in it; give what state_dict of a batcher returned")
    for name in {**settings, **saved}:
        if saved.get(name) != settings.get(name):
            raise ValueError(
                f"{name}: the state was saved with {saved.get(name)!r}, this stream has {settings.get(name)!r}; "
                f"resume with the same {name} or start anew"
            )
