"""Samples that stay on the rank that wrote them until another one trains on them.

    rank 0 wrote  a b      rank 1 wrote  c d          every rank knows of all: lengths, masks, rewards, shared prefixes
    plan          a c on rank 1, b d on rank 0        made of that alone, the same on every rank
    arrived       a to rank 1, d to rank 0            token ids and log-probabilities, once

What every rank has in the place of the tokens is a stand-in: as long, ended by the same token, and with the same
prefixes in common with other samples. So a plan with shared prefixes needs no token ids:

    prompt p q      samples  p q 5 6 0 | p q 5 7 | p q 8 9 0       common with the one before   - 3 2
                    stand-in p q A A 0 | p q A 7 | p q C C 0       A, C: larger than any token id

Prefixes are compared on the rank that wrote the samples. Samples of a group that two ranks wrote share their prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.batch import Sample
from padfree.distributed import Mesh, exchange_rows, gather_objects
from padfree.packing.prefixes import common_length
from padfree.rollout.environment.play import Played
from padfree.rollout.environment.trajectory import Leaf

NO_TOKEN = 1 << 40
"""Larger than any token id; stand-ins count from here."""

Arrays = tuple[NDArray[Any], NDArray[np.float32]]
"""Token ids [n] and log-probabilities [n]."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of one kind."""

    length: int
    sampled: bool
    version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafFacts:
    """What every rank knows of a leaf."""

    stretches: tuple[Stretch, ...]
    last_token: int
    ended: bool
    turns: int
    text: str  # of leaves that the response log shows
    reward: float | None
    with_prompt: int  # tokens from the first on that are those of the prompt
    with_previous: int  # and those of the leaf before it, in the order of their tokens, of the same group and rank
    order: int  # its place in that order


def facts_of(played: Sequence[Played], prompt: NDArray[Any], *, shown: int | None) -> list[tuple[LeafFacts, ...]]:
    """Of the leaves of episodes of one group, which this rank has played; `shown`: the number of one with its text."""
    leaves = [(place, leaf) for place, one in enumerate(played) for leaf in one.leaves]
    order = sorted(range(len(leaves)), key=lambda index: leaves[index][1].tokens.astype(np.int64).tobytes())
    found: list[list[LeafFacts]] = [[] for _ in played]
    place_of = {index: number for number, index in enumerate(order)}
    for index, (place, leaf) in enumerate(leaves):
        number = place_of[index]
        before = None if number == 0 else leaves[order[number - 1]][1]
        found[place].append(
            LeafFacts(
                stretches=_stretches(leaf),
                last_token=int(leaf.tokens[-1]),
                ended=leaf.ended,
                turns=leaf.turns,
                text=leaf.text if played[place].number == shown else "",
                reward=leaf.reward,
                with_prompt=common_length(leaf.tokens, prompt),
                with_previous=0 if before is None else common_length(before.tokens, leaf.tokens),
                order=number,
            )
        )
    return [tuple(each) for each in found]


def _stretches(leaf: Leaf) -> tuple[Stretch, ...]:
    kinds = np.where(leaf.sampled, leaf.versions, -1)
    starts = np.flatnonzero(np.diff(kinds, prepend=kinds[0] - 1))
    lengths = np.diff(np.append(starts, len(kinds)))
    return tuple(
        Stretch(int(length), bool(leaf.sampled[start]), int(leaf.versions[start]))
        for start, length in zip(starts, lengths, strict=True)
    )


def stand_ins(facts: Sequence[LeafFacts], prompt: NDArray[Any], first: int) -> list[Leaf]:
    """Leaves of one group and rank, as other ranks know them. `first`: the number of those before."""
    found: dict[int, Leaf] = {}
    before: NDArray[np.int64] = np.zeros(0, np.int64)
    for index in sorted(range(len(facts)), key=lambda index: facts[index].order):
        one = facts[index]
        length = sum(stretch.length for stretch in one.stretches)
        tokens = np.full(length, NO_TOKEN + first + index, np.int64)
        tokens[: one.with_prompt] = prompt[: one.with_prompt]
        if one.with_previous >= one.with_prompt:
            tokens[: one.with_previous] = before[: one.with_previous]
        tokens[-1] = one.last_token
        before = tokens
        lengths = [stretch.length for stretch in one.stretches]
        found[index] = Leaf(
            tokens=tokens,
            sampled=np.repeat([stretch.sampled for stretch in one.stretches], lengths),
            logprobs=np.zeros(length, np.float32),
            versions=np.repeat([stretch.version for stretch in one.stretches], lengths),
            ended=one.ended,
            turns=one.turns,
            text=one.text,
            reward=one.reward,
        )
    return [found[index] for index in range(len(facts))]


class SampleStore:
    """The token ids and log-probabilities of a batch that are on this rank. All methods are collective."""

    def __init__(self, mesh: Mesh, owners: Sequence[int], lengths: Sequence[int], own: Mapping[int, Arrays]) -> None:
        """`owners` are the ranks that wrote each sample, `own` are this rank's by their index."""
        self._mesh, self._owners, self._lengths, self._arrays = mesh, owners, lengths, dict(own)
        self._held = [{index for index, owner in enumerate(owners) if owner == rank} for rank in range(mesh.loss.size)]
        self._data_ranks: list[int] = gather_objects(mesh.data.rank, mesh.loss.group, "the exchange of samples")
        self.received = 0  # bytes

    def fetch(self, wanted: Sequence[Iterable[int]]) -> None:
        """Have each rank hold the samples it wants, by their index; every rank says the same of all."""
        rank, size = self._mesh.loss.rank, self._mesh.loss.size
        lacking = [sorted(set(one) - held) for one, held in zip(wanted, self._held, strict=True)]
        for one, held in zip(lacking, self._held, strict=True):
            held.update(one)
        if size == 1 or not any(lacking):
            return
        leaving = [[index for index in one if self._owners[index] == rank] for one in lacking]
        arriving = [[index for index in lacking[rank] if self._owners[index] == owner] for owner in range(size)]
        pieces = [_bytes_of(self._arrays[index]) for part in leaving for index in part]
        rows = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *pieces]))
        send, receive = (
            [8 * sum(self._lengths[index] for index in part) for part in side] for side in (leaving, arriving)
        )
        arrived = exchange_rows(rows, send, receive, self._mesh.loss.group).numpy()
        self.received += len(arrived)
        start = 0
        for index in (index for part in arriving for index in part):
            end = start + 8 * self._lengths[index]
            self._arrays[index] = _arrays_of(arrived[start:end])
            start = end

    def fetch_rows(self, rows: Sequence[Sequence[NDArray[np.int64]]], indices: Sequence[int]) -> None:
        """Have each rank hold the samples of its rows: `rows[data rank]` are lists of places among `indices`."""
        places = [np.concatenate([np.zeros(0, np.int64), *each]) for each in rows]
        self.fetch([[indices[place] for place in places[data].tolist()] for data in self._data_ranks])

    def fetch_all(self, indices: Iterable[int]) -> None:
        chosen = list(indices)
        self.fetch([chosen] * self._mesh.loss.size)

    def get(self, index: int) -> Arrays | None:
        return self._arrays.get(index)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TravellingSample(Sample):
    """A stand-in for sample `index` of a store."""

    store: SampleStore
    index: int

    def itself(self) -> Sample:
        """With its tokens, if they are on this rank."""
        arrays = self.store.get(self.index)
        if arrays is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(Sample)}
        return Sample(**{**values, "tokens": arrays[0], "logprobs": arrays[1]})


def travelling(samples: Sequence[Sample], mesh: Mesh, owners: Sequence[int], own: Mapping[int, Arrays]) -> list[Sample]:
    """The same samples, whose tokens are stand-ins; the real ones of this rank are `own`. A collective."""
    store = SampleStore(mesh, owners, [len(sample) for sample in samples], own)
    return [
        TravellingSample(
            **{field.name: getattr(sample, field.name) for field in fields(Sample)}, store=store, index=index
        )
        for index, sample in enumerate(samples)
    ]


def arrived(samples: Sequence[Sample], rows: Sequence[Sequence[NDArray[np.int64]]]) -> Sequence[Sample]:
    """The same samples; those in this rank's rows have come with their tokens. A collective if any is travelling.

    `rows[data rank]` are lists of places among `samples`, as a `StepPlan` has them.
    """
    there = [sample for sample in samples if isinstance(sample, TravellingSample)]
    if not there:
        return samples
    assert len(there) == len(samples), "the samples of a batch are written together"
    there[0].store.fetch_rows(rows, [sample.index for sample in there])
    return [sample.itself() for sample in there]


def whole(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples with all tokens, for a checkpoint or a message. A collective if any is travelling."""
    there = [sample for sample in samples if isinstance(sample, TravellingSample)]
    if there:
        there[0].store.fetch_all([sample.index for sample in there])
    return [sample.itself() if isinstance(sample, TravellingSample) else sample for sample in samples]


def _bytes_of(arrays: Arrays) -> NDArray[np.uint8]:
    tokens, logprobs = arrays
    return np.concatenate([tokens.astype(np.int32).view(np.uint8), logprobs.astype(np.float32).view(np.uint8)])


def _arrays_of(received: NDArray[np.uint8]) -> Arrays:
    half = len(received) // 2
    return received[:half].copy().view(np.int32).astype(np.int64), received[half:].copy().view(np.float32)
