"""Samples whose tokens stay on the rank that sampled them until another rank trains on them.

All ranks know the lengths, masks, rewards and shared prefixes of all samples. From these, every rank computes the same
plan. Then the tokens are sent to the ranks that train on them.

Before that, placeholder ids stand for the tokens between the prompt and the last token. For example, with the prompt
p q, the samples p q 5 6 0 and p q 5 7 become p q A A 0 and p q A 7. They still share 3 tokens.

Samples of different ranks share at most the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.distributed import Mesh, exchange_rows, gather_objects
from padfree.images import Image, prefix_keys
from padfree.kept_sets import KeptSets
from padfree.packing.prefixes import common_length
from padfree.rollout.base import Gather
from padfree.rollout.group import Leaf, LeafImages, Played, RolloutGroup
from padfree.routes import Routes, route_keys
from padfree.sample import Sample

NO_TOKEN = 1 << 40
"""Ids from this number on are placeholder ids, which replace tokens that only one rank knows. Token ids are smaller."""

ROUTED = 1 << 41
"""The prompt's token ids in a placeholder sample (a sample without its real tokens) are shifted by a multiple of this
number. Each set of routes (experts of each token) has its own multiple, so that different routes share no prefix.
"""

Arrays = tuple[NDArray[Any], NDArray[np.float32], KeptSets | None, Routes | None]
"""The arrays of a sample of n tokens: token ids [n], log-probabilities [n], kept sets (ids from which each token was
sampled) [n] if the softmax was truncated, and routes (k experts of each token in R layers) [n, R, k] if recorded.
"""

RouteKind = tuple[tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a sequence that one policy version sampled, or consecutive tokens that were not sampled."""

    length: int
    sampled: bool
    version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafFacts:
    """Describes a leaf (a sequence that becomes a sample) without its tokens, so that every rank can know all leaves.

    `order`: the index of this leaf when the leaves of the same group on the same rank are sorted by token ids.
    """

    stretches: tuple[Stretch, ...]
    last_token: int
    ended: bool
    turns: int
    text: str  # empty unless the leaf is written to `rollouts.jsonl`
    reward: float | None
    with_prompt: int  # length of the prefix shared with the prompt
    with_previous: int  # length of the prefix shared with the previous leaf in sorted order, routes included
    order: int
    num_kept: int = 0  # number of ids in the kept sets
    images: LeafImages | None = None  # None: those of the prompt
    placeholder: int = 0  # the token id that stands for these images
    prompt_routes: bytes = b""  # a digest of the routes of these tokens of the prompt; empty if it has no routes


def facts_of(
    played: Sequence[Played], prompt: NDArray[Any], *, shown: int | None, images: Sequence[Image] = ()
) -> list[tuple[LeafFacts, ...]]:
    """Return for each episode in `played` the descriptions of its leaves (the sequences that become samples).

    `played`: this rank's episodes of one group. `prompt`, `images`: prompt of the group. `shown`: number of the episode
    whose text is included, or None.
    """
    leaves = [(episode, leaf) for episode, one in enumerate(played) for leaf in one.leaves]
    shown_images = [images if leaf.images is None else leaf.images.images for _, leaf in leaves]
    keys = prefix_keys([leaf.tokens for _, leaf in leaves], shown_images)
    if any(leaf.routes is not None for _, leaf in leaves):
        keys = route_keys(keys, [leaf.routes for _, leaf in leaves])
    order = sorted(range(len(leaves)), key=lambda index: keys[index].astype(np.int64).tobytes())
    facts: list[list[LeafFacts]] = [[] for _ in played]
    rank_of = {index: number for number, index in enumerate(order)}
    for index, (episode, leaf) in enumerate(leaves):
        number = rank_of[index]
        previous = None if number == 0 else order[number - 1]
        with_prompt = common_length(leaf.tokens, prompt)
        facts[episode].append(
            LeafFacts(
                stretches=_stretches(leaf),
                last_token=int(leaf.tokens[-1]),
                ended=leaf.ended,
                turns=leaf.turns,
                text=leaf.text if played[episode].number == shown else "",
                reward=leaf.reward,
                with_prompt=with_prompt,
                with_previous=0 if previous is None else common_length(keys[previous], keys[index]),
                order=number,
                num_kept=leaf.num_kept,
                images=leaf.images,
                placeholder=0 if leaf.images is None else _placeholder(leaf.tokens, leaf.images.images),
                prompt_routes=b"" if leaf.routes is None else sha256(leaf.routes[:with_prompt].tobytes()).digest(),
            )
        )
    return [tuple(each) for each in facts]


def _placeholder(tokens: NDArray[Any], images: Sequence[Image]) -> int:
    return int(tokens[images[0].positions[0]]) if images else 0


def _stretches(leaf: Leaf) -> tuple[Stretch, ...]:
    kinds = np.where(leaf.sampled, leaf.versions, -1)
    starts = np.flatnonzero(np.diff(kinds, prepend=kinds[0] - 1))
    lengths = np.diff(np.append(starts, len(kinds)))
    return tuple(
        Stretch(int(length), bool(leaf.sampled[start]), int(leaf.versions[start]))
        for start, length in zip(starts, lengths, strict=True)
    )


def placeholder_leaves(
    facts: Sequence[LeafFacts], prompt: NDArray[Any], first: int, routes: dict[bytes, int] | None = None
) -> list[Leaf]:
    """Make leaves (sequences that become samples) with placeholder ids instead of the tokens after the prompt. Leaves
    that share a prefix still share it.

    `facts`: the leaves of one group on one rank. `first`: the number of leaves made so far. `routes`: a dict that all
    calls share.
    """
    routes = {} if routes is None else routes
    leaves: dict[int, Leaf] = {}
    previous: NDArray[np.int64] = np.zeros(0, np.int64)
    for index in sorted(range(len(facts)), key=lambda index: facts[index].order):
        one = facts[index]
        length = sum(stretch.length for stretch in one.stretches)
        tokens = np.full(length, NO_TOKEN + first + index, np.int64)
        number = routes.setdefault(one.prompt_routes, len(routes))  # so that different routes share no prefix
        tokens[: one.with_prompt] = prompt[: one.with_prompt].astype(np.int64) + ROUTED * number
        if one.with_previous >= one.with_prompt:
            tokens[: one.with_previous] = previous[: one.with_previous]
        tokens[-1] = one.last_token
        for image in () if one.images is None else one.images.images:
            tokens[image.positions] = one.placeholder + ROUTED * number
        previous = tokens
        lengths = [stretch.length for stretch in one.stretches]
        leaves[index] = Leaf(
            tokens=tokens,
            sampled=np.repeat([stretch.sampled for stretch in one.stretches], lengths),
            logprobs=np.zeros(length, np.float32),
            versions=np.repeat([stretch.version for stretch in one.stretches], lengths),
            ended=one.ended,
            turns=one.turns,
            text=one.text,
            reward=one.reward,
            num_kept=one.num_kept,
            images=one.images,
        )
    return [leaves[index] for index in range(len(facts))]


def known_to_all(
    groups: Sequence[RolloutGroup], own: Mapping[int, Played], gather: Gather, *, num_shown: int
) -> tuple[dict[int, Played], dict[int, int]]:
    """Return two dicts by episode number: the episodes of all ranks, and the rank that played each episode. Collective.

    The episodes have placeholder ids. Only the first episode of each of the first `num_shown` groups has a text.
    """
    own_facts: dict[int, tuple[tuple[LeafFacts, ...], Mapping[str, float], Mapping[str, float]]] = {}
    for index, group in enumerate(groups):
        part = [own[number] for number in group.numbers if number in own]
        shown = group.first if index < num_shown else None
        facts = facts_of(part, group.prompt.tokens, shown=shown, images=group.prompt.images)
        for one, leaf_facts in zip(part, facts, strict=True):
            own_facts[one.number] = leaf_facts, one.metrics, one.counts
    played: dict[int, Played] = {}
    owners: dict[int, int] = {}
    num_leaves = 0
    routes: dict[bytes, int] = {}
    for rank, rank_facts in enumerate(gather(own_facts)):
        for group in groups:
            numbers = [number for number in group.numbers if number in rank_facts]
            group_facts = [leaf_facts for number in numbers for leaf_facts in rank_facts[number][0]]
            leaves = iter(placeholder_leaves(group_facts, group.prompt.tokens, num_leaves, routes))
            num_leaves += len(group_facts)
            for number in numbers:
                episode_facts, metrics, counts = rank_facts[number]
                own_leaves = tuple(next(leaves) for _ in episode_facts)
                played[number] = Played(number=number, leaves=own_leaves, metrics=metrics, counts=counts)
                owners[number] = rank
    return played, owners


class SampleStore:
    """Holds the tokens of the samples that this rank has sampled or fetched from other ranks.

    All methods except `get` are collective.
    """

    def __init__(
        self,
        mesh: Mesh,
        owners: Sequence[int],  # the rank that sampled each sample
        lengths: Sequence[int],  # the number of tokens of each sample
        own: Mapping[int, Arrays],  # the samples that this rank sampled, by sample index
        num_kept: Sequence[int] | None = None,  # number of ids in the kept sets of each sample; None: no kept sets
    ) -> None:
        self._mesh, self._owners, self._lengths, self._arrays = mesh, owners, lengths, dict(own)
        self._num_kept = [0] * len(lengths) if num_kept is None else num_kept
        self._held = [{index for index, owner in enumerate(owners) if owner == rank} for rank in range(mesh.loss.size)]
        own_routes = next((routes for *_, routes in own.values() if routes is not None), None)
        kind = None if own_routes is None else (own_routes.shape[1:], own_routes.dtype)
        facts = gather_objects((mesh.data.rank, kind), mesh.loss.group, "the exchange of samples")
        self._data_ranks: list[int] = [data_rank for data_rank, _ in facts]
        # The shape per token and the dtype of routes, which all samples of a run have in common; None: no routes.
        self._kind: RouteKind | None = next((one for _, one in facts if one is not None), None)
        self._route_bytes = 0 if self._kind is None else math.prod(self._kind[0]) * self._kind[1].itemsize
        self.received = 0  # bytes received from other ranks

    def fetch(self, wanted: Sequence[Iterable[int]]) -> None:
        """Send each rank the samples that it needs.

        `wanted[rank]`: the indices of the samples that a rank needs. Every rank passes the same `wanted`.
        """
        rank, size = self._mesh.loss.rank, self._mesh.loss.size
        missing = [sorted(set(one) - held) for one, held in zip(wanted, self._held, strict=True)]
        for one, held in zip(missing, self._held, strict=True):
            held.update(one)
        if size == 1 or not any(missing):
            return
        sending = [[index for index in one if self._owners[index] == rank] for one in missing]
        receiving = [[index for index in missing[rank] if self._owners[index] == owner] for owner in range(size)]
        pieces = [_bytes_of(self._arrays[index]) for part in sending for index in part]
        sent = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *pieces]))
        send_sizes, receive_sizes = (
            [sum(map(self._num_bytes, part)) for part in side] for side in (sending, receiving)
        )
        received = exchange_rows(sent, send_sizes, receive_sizes, self._mesh.loss.group).numpy()
        self.received += len(received)
        start = 0
        for index in (index for part in receiving for index in part):
            end = start + self._num_bytes(index)
            self._arrays[index] = _arrays_of(
                received[start:end], self._lengths[index], self._num_kept[index], self._kind
            )
            start = end

    def _num_bytes(self, index: int) -> int:
        """Return the number of bytes that `fetch` sends for a sample."""
        length, num_kept = self._lengths[index], self._num_kept[index]
        # 4 bytes for each token id, log-probability, size of a kept set, and id in a kept set
        return 4 * (2 * length + (length + num_kept if num_kept else 0)) + self._route_bytes * length

    def fetch_packs(self, packs: Sequence[Sequence[NDArray[np.int64]]], indices: Sequence[int]) -> None:
        """Send each rank the samples of its packs.

        `packs[d]` lists the packs of data rank d, each an array of positions in `indices`. These are indices of samples
        in this store.
        """
        positions = [np.concatenate([np.zeros(0, np.int64), *each]) for each in packs]
        self.fetch([[indices[position] for position in positions[data].tolist()] for data in self._data_ranks])

    def fetch_all(self, indices: Iterable[int]) -> None:
        chosen = list(indices)
        self.fetch([chosen] * self._mesh.loss.size)

    def get(self, index: int) -> Arrays | None:
        return self._arrays.get(index)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TravellingSample(Sample):
    """A sample with placeholder ids in place of its tokens. The real tokens are sample `index` of a `SampleStore`."""

    store: SampleStore
    index: int

    def itself(self) -> Sample:
        """Return the sample with its real tokens if this rank holds them, and otherwise with its placeholder ids."""
        arrays = self.store.get(self.index)
        if arrays is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(Sample)}
        names = ("tokens", "logprobs", "kept", "routes")
        return Sample(**{**values, **dict(zip(names, arrays, strict=True))})


def travelling(
    samples: Sequence[Sample],
    mesh: Mesh,
    owners: Sequence[int],
    own: Mapping[int, Arrays],
    num_kept: Sequence[int] | None = None,
) -> list[Sample]:
    """Return copies of the samples for which `arrived` and `whole` can fetch the real tokens. Collective.

    Until then, the copies have placeholder ids. The other arguments are those of `SampleStore`.
    """
    store = SampleStore(mesh, owners, [len(sample) for sample in samples], own, num_kept)
    return [
        TravellingSample(
            **{field.name: getattr(sample, field.name) for field in fields(Sample)}, store=store, index=index
        )
        for index, sample in enumerate(samples)
    ]


def travelling_samples(
    samples: Sequence[Sample],
    mesh: Mesh,
    groups: Sequence[RolloutGroup],
    owners: Mapping[int, int],
    own: Mapping[int, Played],
) -> list[Sample]:
    """Return copies of the samples for which `arrived` and `whole` can fetch the real tokens. Collective.

    `groups`: the groups of the samples, in order. By episode number: `owners`, the rank that played the episode, and
    `own`, the episodes of this rank with their real tokens.
    """
    # one sample per leaf
    leaves = [
        (one.number, leaf_index) for group in groups for one in group.episodes for leaf_index in range(len(one.leaves))
    ]
    arrays = {}
    for index, (number, leaf_index) in enumerate(leaves):
        if number in own:
            leaf = own[number].leaves[leaf_index]
            arrays[index] = leaf.tokens, leaf.logprobs, leaf.kept, leaf.routes
    num_kept = [leaf.num_kept for group in groups for one in group.episodes for leaf in one.leaves]
    return travelling(samples, mesh, [owners[number] for number, _ in leaves], arrays, num_kept)


def arrived(samples: Sequence[Sample], packs: Sequence[Sequence[NDArray[np.int64]]]) -> Sequence[Sample]:
    """Fetch the real tokens of the samples in this rank's packs. Other samples may keep placeholder ids.

    `packs[data rank]`: for each pack an array of indices of `samples`. Return all samples. Collective if `samples` have
    placeholder ids.
    """
    placeholders = [sample for sample in samples if isinstance(sample, TravellingSample)]
    if not placeholders:
        return samples
    assert len(placeholders) == len(samples), "a batch has only placeholders, or none"
    placeholders[0].store.fetch_packs(packs, [sample.index for sample in placeholders])
    return [sample.itself() for sample in placeholders]


def whole(samples: Sequence[Sample]) -> list[Sample]:
    """Return all samples with their real tokens, e.g. for a checkpoint.

    Collective for `TravellingSample`s, whose tokens may be on other ranks.
    """
    placeholders = [sample for sample in samples if isinstance(sample, TravellingSample)]
    if placeholders:
        placeholders[0].store.fetch_all([sample.index for sample in placeholders])
    return [sample.itself() if isinstance(sample, TravellingSample) else sample for sample in samples]


def _bytes_of(arrays: Arrays) -> NDArray[np.uint8]:
    tokens, logprobs, kept, routes = arrays
    parts = [tokens.astype(np.int32), logprobs.astype(np.float32), *(() if kept is None else (kept.counts, kept.ids))]
    if routes is not None:
        parts.append(np.ascontiguousarray(routes).reshape(-1))
    return np.concatenate([part.view(np.uint8) for part in parts])


def _arrays_of(received: NDArray[np.uint8], length: int, num_kept: int, kind: RouteKind | None) -> Arrays:
    """Undo `_bytes_of` for a sample of `length` tokens with `num_kept` ids in its kept sets.

    `kind`: the routes array's shape per token and its dtype; None: the sample has no routes (experts of each token).
    """
    numbers = 2 * length + (length + num_kept if num_kept else 0)
    front, rest = np.split(received.copy(), [4 * numbers])
    tokens, logprobs, counts, ids = np.split(front.view(np.int32), [length, 2 * length, 3 * length])
    return (
        tokens.astype(np.int64),
        logprobs.view(np.float32),
        KeptSets(counts, ids) if num_kept else None,
        None if kind is None else rest.view(kind[1]).reshape(length, *kind[0]),
    )
