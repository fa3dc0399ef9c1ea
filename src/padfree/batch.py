"""Packed batches, and other types that the parts of padfree pass to each other.

A pack holds the T tokens of one micro-batch in S segments: samples, then padding. In this pack of the samples 5 4 3 and
7 8, - stands for the label -100 (no loss):

    input_ids      [T]      5 4 3 | 7 8 | 0
    labels         [T]      4 3 - | 8 - | -
    cu_seqlens     [S+1]    0 3 5 6

The values of a token, such as its label and weight, are stored at the position before the token. That position predicts
the token.

Arrays that stay on the host are numpy arrays, and arrays for the device are torch tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import need_whole
from padfree.choices import LayoutKind
from padfree.errors import UserError
from padfree.kept_sets import KeptSets
from padfree.sample import TOKEN_ARRAYS
from padfree.segments import Segments

IGNORE = -100
"""The label of a position that is not scored."""


def need_tensor(name: str, values: object) -> None:
    """Raise `UserError` unless `values` is a tensor of real numbers."""
    if not isinstance(values, Tensor):
        raise UserError(name, f"got a {type(values).__name__}", f"give a tensor, such as torch.as_tensor({name})")
    if values.is_complex():
        raise UserError(name, "is a complex dtype", f"give real numbers, such as {name}.real", value=values.dtype)


def at_predictions(values: NDArray[Any], offsets: NDArray[np.int64], *, fill: int = 0) -> NDArray[Any]:
    """Move [T] values of tokens to the positions that predict the tokens. `offsets` [B+1] delimit the samples.

    For example, a b c | d e becomes b c - | e -. The last position of a sample predicts nothing and gets `fill`, shown
    as -.
    """
    moved = np.empty_like(values)
    moved[:-1] = values[1:]
    moved[offsets[1:][np.diff(offsets) > 0] - 1] = fill
    return moved


def at_tokens(values: Tensor) -> Tensor:
    """Move [T] values from the positions that predict tokens to the tokens: the inverse of `at_predictions`.

    The last position of each sample predicts nothing and must hold 0.
    """
    return values.roll(1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """The rollout arrays of a pack, such as advantages, shifted like the labels.

    Element t of an array describes the token that position t predicts.
    """

    logprobs: Tensor | None = None  # [T] float32
    ref_logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    returns: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]
    old_logprobs: Tensor | None = None  # [T]

    def map(self, function: Any) -> Rollout:
        """Return a copy with `function` applied to each tensor that is not None."""
        return Rollout(**{f: None if (v := getattr(self, f)) is None else function(v) for f in TOKEN_ARRAYS})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """Data about a packed sample that stay on the host. `index` is the sample's index in the list that was packed."""

    index: int
    length: int
    uid: str | int | None = None
    group: str | int | None = None
    source: str | None = None
    reward: float | None = None
    raw_reward: Any = None
    terms: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """The index arrays of a gather `tensor[index]` that may copy an element several times.

    For example, the index 0 0 2 1 0 copies a b c to a a c b a. Then `copy_index` is 0 1 4 3 2: the positions of a, b
    and c in the result. `offsets` is 0 3 4 5.
    """

    index: Tensor  # [m] int64, the element that is copied to each position of the result
    copy_index: Tensor  # [m] int64, the positions in the result, grouped by element
    offsets: Tensor  # [n + 1] int64, where the group of each element begins in `copy_index`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """The E labels (tokens with a loss) of a pack whose samples share prefixes, ordered by sample.

    For example, the samples p p p a a and p p p b b b, with labels for a and b, share the pack p p p a a b b b. Then
    `positions` is 2 3 2 5 6: position 2 (the last p) predicts the first a and the first b.
    """

    # Both arrays stay on the host.
    positions: NDArray[np.int64]  # [E] index in the pack of the position that predicts the token
    tokens: NDArray[np.int64]  # [E] index of the predicted token in the concatenated samples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedImages:
    """The distinct images of a pack, and which image feature belongs to each placeholder token.

    For example, three images have 3, 3 and 2 placeholders (M = 8), and the first two images are equal. The vision tower
    encodes F = 5 features, and `index` is 0 1 2 0 1 2 3 4.
    """

    inputs: Mapping[str, Tensor]  # the tower's inputs of all distinct images, concatenated along the first axis
    tokens: NDArray[np.int64]  # [M] ascending indices of the placeholders in the pack; host only
    index: NDArray[np.int64]  # [M] for each placeholder, the index of its feature; host only
    counts: tuple[int, ...]  # number of features of each distinct image; they sum to F
    rows: Mapping[str, tuple[int, ...]]  # number of rows of each distinct image in each input
    placeholder: int  # the id of the placeholder token

    @property
    def num_features(self) -> int:
        """Return F, the number of features of all distinct images."""
        return sum(self.counts)

    @property
    def patches(self) -> tuple[int, ...]:
        """Return the number of patches or tiles (rows of `pixel_values`) of each distinct image."""
        return self.rows["pixel_values"]

    def inputs_of(self, images: Sequence[int]) -> dict[str, Tensor]:
        """Return the inputs that the vision tower needs to encode the given distinct images."""
        parts = {name: torch.split(tensor, list(self.rows[name])) for name, tensor in self.inputs.items()}
        return {name: torch.cat([part[image] for image in images]) for name, part in parts.items()}

    def map(self, function: Any) -> PackedImages:
        """Return a copy of the images with `function` applied to each tensor that the vision tower reads."""
        return replace(self, inputs={name: function(tensor) for name, tensor in self.inputs.items()})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedKept:
    """The kept sets of a pack's M labels: the token ids that sampling could choose after top-p, top-k and min-p. The
    sets stay on the host.
    """

    positions: NDArray[np.int64]  # [M] ascending indices of the labels in `PackedBatch.labels`
    sets: KeptSets  # [M]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Samples concatenated along one token axis, ready for the device. Made by `padfree.pack`.

    If `entries` is set, samples share prefixes. Labels, weights, sample_index and rollout then have shape [E]: one
    element for each token with a label.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every sample; with shared prefixes a node continues after its parent
    labels: Tensor  # [T] int64, shifted inside each sample; -100 if not scored
    weights: Tensor  # [T] float32, 0 where the label is -100
    sample_index: Tensor  # [T] int32, the segment of each token; num_samples for the pad
    segments: Segments
    rollout: Rollout | None = None
    samples: tuple[SampleInfo, ...] = ()
    entries: Entries | None = None
    images: PackedImages | None = None
    rotary_positions: Tensor | None = None  # [P, T] int64, if they are not `position_ids`
    routes: Tensor | None = None  # [T, R, k] uint8 or int16, experts that the sampler chose: `padfree.routes`
    kept: PackedKept | None = None  # None: every label was sampled from the whole vocabulary

    PACK_FIELDS: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids")
    LABEL_FIELDS: ClassVar[tuple[str, ...]] = ("labels", "weights", "sample_index")
    TOKEN_FIELDS: ClassVar[tuple[str, ...]] = (*PACK_FIELDS, *LABEL_FIELDS)

    def __post_init__(self) -> None:
        num_tokens = self.segments.num_tokens
        for field in self.TOKEN_FIELDS:
            shape = tuple(getattr(self, field).shape)
            if field in self.LABEL_FIELDS and self.entries is not None:
                assert shape == (len(self.entries.positions),), field
            elif shape != (num_tokens,):
                raise UserError(field, f"has shape {shape} for {num_tokens} tokens", "give one value per token")
        if self.entries is None and len(self.samples) != self.segments.num_samples:
            raise UserError(
                "samples",
                f"has {len(self.samples)} entries for {self.segments.num_samples} segments",
                "give one SampleInfo per segment",
            )

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens, including the pad."""
        return self.segments.num_tokens

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def pad_length(self) -> int:
        return self.segments.pad_length

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the B samples, [B], without the pad."""
        return [info.length for info in self.samples]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> PackedBatch:
        return self._map(
            lambda tensor: tensor.to(device, non_blocking=non_blocking),
            self.segments.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedBatch:
        """Return the same batch in page-locked memory, from which `.to("cuda")` copies asynchronously."""
        segments = replace(self.segments, cu_seqlens=self.segments.cu_seqlens.pin_memory())
        return self._map(lambda tensor: tensor.pin_memory(), segments)

    def _map(self, function: Any, segments: Segments) -> PackedBatch:
        moved = {field: function(getattr(self, field)) for field in self.TOKEN_FIELDS}
        rollout = None if self.rollout is None else self.rollout.map(function)
        images = None if self.images is None else self.images.map(function)
        rotary = None if self.rotary_positions is None else function(self.rotary_positions)
        routes = None if self.routes is None else function(self.routes)
        return replace(
            self, **moved, segments=segments, rollout=rollout, images=images, rotary_positions=rotary, routes=routes
        )

    def with_weights(self, weights: Tensor) -> PackedBatch:
        """Return the same batch with other token weights [T]."""
        need_tensor("weights", weights)
        return replace(self, weights=weights.to(self.weights))

    def without_pad(self) -> PackedBatch:
        return self.padded_to(self.num_tokens - self.pad_length)

    def padded_to(self, length: int) -> PackedBatch:
        """Return the same samples with a pad to exactly `length` tokens.

        The pad is one segment with token ids 0, labels -100 and weights 0.
        """
        real = self.num_tokens - self.pad_length
        need_whole("length", length, 0, f"pad to {real} or more")
        pad = length - real
        if pad < 0:
            raise UserError("length", f"{length} is less than the {real} tokens of the batch", f"pad to {real} or more")
        if pad == self.pad_length:
            return self
        fill = {"labels": IGNORE, "sample_index": self.num_samples}

        def lengthened(tensor: Tensor, value: int = 0) -> Tensor:
            return torch.cat([tensor[:real], tensor.new_full((pad,), value)])

        longer = self.TOKEN_FIELDS if self.entries is None else self.PACK_FIELDS  # a pad predicts nothing
        padded: dict[str, Any] = {field: lengthened(getattr(self, field), fill.get(field, 0)) for field in longer}
        positions = torch.arange(pad, dtype=torch.int64, device=self.position_ids.device)
        padded["position_ids"] = torch.cat([self.position_ids[:real], positions])
        if self.rotary_positions is not None:
            of_pad = positions.expand(len(self.rotary_positions), pad)
            padded["rotary_positions"] = torch.cat([self.rotary_positions[:, :real], of_pad], dim=1)
        if self.routes is not None:
            of_pad = self.routes.new_full(
                (pad, *self.routes.shape[1:]), 255 if self.routes.dtype == torch.uint8 else -1
            )
            padded["routes"] = torch.cat([self.routes[:real], of_pad])
        rollout = self.rollout
        if rollout is not None and self.entries is None:
            rollout = rollout.map(lengthened)
        return replace(self, **padded, segments=self.segments.with_pad(pad), rollout=rollout)

    def padded_to_multiple(self, multiple: int) -> PackedBatch:
        """Return the same samples with a pad (padding tokens at the end of the pack), so that the length of the pack is
        a multiple of `multiple`: with 4, a pack of 13 tokens gets 3 padding tokens.
        """
        need_whole("multiple", multiple, 1, "give 1 or more")
        real = self.num_tokens - self.pad_length
        return self.padded_to(-(-real // multiple) * multiple)

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Split values [T, ...] into one view per sample, without padding.

        If samples share prefixes, give one value per label, [E, ...]. Each result then has one value per position of
        its sample, which is 0 at positions without a label.
        """
        if not isinstance(values, Tensor):
            raise UserError(
                "values", f"got a {type(values).__name__}", "give a tensor, such as torch.as_tensor(values)"
            )
        expected = self.num_tokens if self.entries is None else len(self.entries.positions)
        if values.shape[:1] != (expected,):
            shape = tuple(values.shape)
            raise UserError(
                "values", f"has shape {shape} for {expected} tokens", "give one value per token of the pack"
            )
        if self.entries is not None:
            predictions = torch.from_numpy(self.entries.tokens - 1).to(values.device)
            whole = values.new_zeros(sum(self.lengths), *values.shape[1:])
            return list(torch.split(whole.index_copy(0, predictions, values), self.lengths))
        return list(torch.split(values[: self.num_tokens - self.pad_length], self.lengths))

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for a Hugging Face model that runs a pack with its own attention, not padfree's.

        Whether the model's own attention keeps packed samples apart is not checked here.
        `padfree.compat.hf.PackedCollator` tests this on a small copy of the model.
        """
        assert self.segments.parents is None, "transformers' own attention does not support shared prefixes"
        if self.images is not None:
            raise UserError("images", "cannot be packed with transformers' own attention", "use padfree.attach")
        return pack_inputs(self.input_ids, self.position_ids, self.segments)


def pack_inputs(input_ids: Tensor, position_ids: Tensor, segments: Segments) -> dict[str, Any]:
    """Return the keyword arguments with which transformers' own attention keeps packed samples apart.

    There is no key `attention_mask`, not even with the value None, because TRL would treat the value as a tensor.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": segments.cu_seqlens,
        "cu_seq_lens_k": segments.cu_seqlens,
        "max_length_q": segments.max_seqlen,
        "max_length_k": segments.max_seqlen,
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """How `world` context ranks divide the T tokens of a pack. Made by `padfree.cp.make_layout`.

    Rank r holds the token ranges `[starts[r][i], ends[r][i])`, which have T / world tokens in total. Each range lies
    within one segment of the pack.
    """

    kind: LayoutKind
    world: int
    num_tokens: int  # T
    starts: tuple[NDArray[np.int64], ...]  # per rank; the ranges of one segment have adjacent indices
    ends: tuple[NDArray[np.int64], ...]  # per rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixKeys:
    """Index arrays that say which keys each node of a pack with shared prefixes attends to.

    All arrays are concatenated in one tensor, `numbers`. If two separate tensors had equal sizes, the compiler would
    assume that their sizes are always equal.
    """

    numbers: Tensor  # [n] int32
    sizes: Tensor  # int64, always on the host: the length of each array in `numbers`, then other sizes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttnContext:
    """What attention needs to know about a micro-batch. The model's forward takes this object as an argument.

    `segments` describes the whole pack. Without context parallelism, `layout` and `plan` are None, and `prefix_keys` is
    set if samples share prefixes.
    """

    segments: Segments
    backend: str = "auto"
    method: str = "allgather"
    layout: Layout | None = None
    rank: int = 0
    group: Any = None  # torch.distributed.ProcessGroup
    plan: Any = None  # what padfree.cp has prepared for this layout and rank
    prefix_keys: PrefixKeys | None = None
    routes: Tensor | None = None  # [T/world, R, k] experts that the sampler chose for this shard: `padfree.routes`
    image_blocks: Any = None  # padfree.cp.image_blocks.ImageBlocks, if the pack has images

    @property
    def world(self) -> int:
        return 1 if self.layout is None else self.layout.world


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalEntries:
    """The entries of one context rank, for a pack whose samples share prefixes.

    An entry is a token to score. A rank has the entries that are predicted by positions on this rank.
    """

    numbers: NDArray[np.int64]  # [e] index of each entry among the entries of the pack
    positions: Copies  # [e] gathers the hidden state of each entry from this rank's tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowExchange:
    """How the ranks of a group exchange rows of a tensor: which rows each rank sends to each rank.

    Made by `padfree.cp.row_exchange`.
    """

    leaving: Copies  # gathers the rows to send from this rank's rows: the rows for rank 0, then for rank 1, ...
    send: tuple[int, ...]  # [world] number of rows to each rank
    receive: tuple[int, ...]  # [world] number of rows from each rank
    group: Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalImages:
    """The distinct images that one context rank encodes, and the features that belong to its placeholder tokens.

    The context ranks divide the distinct images of the pack. Then they exchange features: each rank receives the
    features of its own placeholder tokens.
    """

    inputs: Mapping[str, Tensor]  # the tower's inputs of the images of this rank; empty if it encodes none
    counts: tuple[int, ...]  # number of features of each image of this rank
    patches: tuple[int, ...]  # number of patches or tiles of each image of this rank
    placeholder: int  # the id of the placeholder token
    tokens: Tensor  # [m] int64 indices of the placeholders of images among this rank's tokens
    features: Copies  # [m] gathers, for each placeholder, its feature from the features that this rank has
    exchange: RowExchange | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalBatch:
    """The tokens of a pack that one context rank holds. Made by `padfree.cp.shard`.

    Arrays have shape [T / world]. If samples share prefixes, labels, weights, sample_index and rollout have shape [e]:
    one element for each label that this rank predicts.
    """

    input_ids: Tensor  # [T/world]
    position_ids: Tensor
    labels: Tensor
    weights: Tensor
    sample_index: Tensor
    context: AttnContext
    rollout: Rollout | None = None
    samples: tuple[SampleInfo, ...] = ()
    entries: LocalEntries | None = None
    num_labels: int | None = None  # labelled positions on this rank, if the host has counted them
    is_filler: bool = False  # a pack of one token without a label, so that all ranks make the same number of passes
    batch_samples: int = 1  # samples in the global batch, for losses that weight whole samples
    images: LocalImages | None = None
    rotary_positions: Tensor | None = None  # [P, T/world]
    kept: KeptSets | None = None  # one set for each labelled position on this rank, in order; stays on the host

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_samples(self) -> int:
        """Return B, the number of samples of the whole pack."""
        return self.context.segments.num_samples if self.entries is None else len(self.samples)

    @property
    def positions(self) -> Tensor:
        """Return the positions for the model: [1, T/world], or [P, 1, T/world] for rotary positions in P dimensions."""
        return self.position_ids[None] if self.rotary_positions is None else self.rotary_positions[:, None]

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for a Hugging Face model to which `padfree.attach` was applied.

        Raises `UserError` for a batch with images, because the arguments do not include their features.
        """
        if self.images is not None:
            raise UserError(
                "images", "cannot be passed as arguments of a model", "call padfree.hidden_states(model, batch)"
            )
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.positions,
            "attention_mask": None,
            "use_cache": False,
            "attn_context": self.context,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LmHead:
    """The language model head: how the last hidden states [..., D] become logits [..., V] for V token ids.

    logits = cap(logit_scale · (hidden @ weight.T + bias))
    cap(x) = softcap · tanh(x / softcap), or x if `softcap` is None
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., V] of hidden states [..., D]."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


assert {f.name for f in fields(Rollout)} == set(TOKEN_ARRAYS)
