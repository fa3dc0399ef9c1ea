"""The types that every part of padfree hands to the next.

    sample                 tokens[n]      5 4 3 2 1        what one document or one rollout is
    packed   input_ids     [T]            5 4 3 2 1 | 7 8 9 | 0 0 0
             position_ids  [T]            0 1 2 3 4 | 0 1 2 | 0 1 2
             labels        [T]            4 3 2 1 - | 8 9 - | - - -        (- is -100: not scored)
             sample_index  [T]            0 0 0 0 0 | 1 1 1 | 2 2 2
             cu_seqlens    [S+1]          0          5       8      11     S = B + 1: the pad is its own last segment

Letters: T tokens of one micro-batch, B samples, S segments (S = B, or B + 1 with a pad), n tokens of one sample.

Position t predicts token t + 1 of its sample. Whatever belongs to a token is moved to the position that predicts it
when the batch is made (`at_predictions`): `labels[t]`, `weights[t]` and `rollout.advantages[t]` all speak of the token
that position t predicts. From there on every per-token quantity is local, and splitting the token axis over devices is
only a permutation. `at_tokens` is the way back.

Samples may share prefixes (`Entries`). Then a row holds nodes, each token once, and what belongs to predictions has an
axis of its own: [E], one entry for each (sample, position) that has a label, sample by sample.

    row      input_ids     [T]            p p p | a a | b b b          two samples, p p p a a and p p p b b b
             position_ids  [T]            0 1 2 | 3 4 | 3 4 5
    entries  labels        [E]            a a | b b b                  of tokens that are trained: here the responses
             rows          [E]            2 3 | 2 5 6                  the hidden state that predicts each

Host arrays are numpy, device arrays are torch. Numbers a kernel launch needs on the host (`max_seqlen`, the
offsets of the segments) are kept on the host from the start, so that nobody synchronises with the device for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import float_array, integer_array, mask_array, need_whole, single_number, token_array
from padfree.config.choices import LayoutKind
from padfree.errors import UserError
from padfree.prefix_tree import check_parents, first_positions

IGNORE = -100
"""The label of a position that is not scored."""

ROLLOUT_ARRAYS = ("logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Optional per-token arrays that a rollout file may bring, entry j belonging to token j of its sample."""

TOKEN_ARRAYS = (*ROLLOUT_ARRAYS, "old_logprobs")
"""All optional per-token arrays of a sample: those, and what the trainer computes before an update."""


def need_tensor(name: str, values: object) -> None:
    """Refuse what is no tensor of real numbers."""
    if not isinstance(values, Tensor):
        raise UserError(name, f"{type(values).__name__}", f"give a tensor, such as torch.as_tensor({name})")
    if values.is_complex():
        raise UserError(name, "", f"give real numbers, such as {name}.real", value=values.dtype)


def at_predictions(values: NDArray[Any], offsets: NDArray[np.int64], *, fill: int = 0) -> NDArray[Any]:
    """[T] values of tokens, each moved to the position that predicts its token; `offsets` [B+1] bound the samples.

    tokens      a b c | d e        offsets 0 3 5
    moved       b c - | e -        the last position of a sample predicts nothing: `fill`
    """
    moved = np.empty_like(values)
    moved[:-1] = values[1:]
    moved[offsets[1:][np.diff(offsets) > 0] - 1] = fill
    return moved


def at_tokens(values: Tensor) -> Tensor:
    """[T] values of predictions, each moved to the token that is predicted: the way back from `at_predictions`.

    The last position of each sample predicts nothing and must hold 0, which goes to the first token of the next.
    """
    return values.roll(1)


def _name(uid: str | int | None) -> str:
    return "sample" if uid is None else f"sample {uid!r}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One document or one rollout, on the host.

    `loss_mask[j]` says whether token j is trained on; without a mask every token is. The first token of a sample
    has nothing before it and is never scored, whatever its mask says.
    """

    tokens: NDArray[np.integer[Any]]  # [n]
    loss_mask: NDArray[np.bool_] | None = None  # [n]; an array after construction
    logprobs: NDArray[np.float32] | None = None  # [n] what the sampler reported
    ref_logprobs: NDArray[np.float32] | None = None  # [n]
    advantages: NDArray[np.float32] | None = None  # [n]
    returns: NDArray[np.float32] | None = None  # [n]
    values: NDArray[np.float32] | None = None  # [n]
    old_logprobs: NDArray[np.float32] | None = None  # [n] the trainer's own, before the first update with the sample
    reward: float | None = None
    raw_reward: Any = None
    uid: str | int | None = None
    group: str | int | None = None
    source: str | None = None
    terms: Mapping[str, float] | None = None  # numbers that the loss of a task reads, by name: a margin, say

    def __post_init__(self) -> None:
        name = _name(self.uid)
        tokens = token_array(self.tokens, name)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_mask", mask_array(self.loss_mask, len(tokens), name))
        for field in TOKEN_ARRAYS:
            values = getattr(self, field)
            if values is not None:
                object.__setattr__(self, field, float_array(values, len(tokens), field, name))
        if self.reward is not None:
            object.__setattr__(self, "reward", single_number(self.reward, f"reward of {name}"))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """`loss_mask`, which construction has made an array."""
        assert self.loss_mask is not None
        return self.loss_mask

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[n] which tokens are scored: the trained ones, except the first, which nothing predicts."""
        return self.mask & (np.arange(len(self)) > 0)

    @property
    def num_labels(self) -> int:
        """How many tokens are scored."""
        return int(np.count_nonzero(self.mask[1:]))

    def with_numbers(self, **arrays: NDArray[Any]) -> Sample:
        """The same sample with other `TOKEN_ARRAYS`, which are checked; all else was checked before."""
        other = object.__new__(type(self))
        for about in fields(self):
            object.__setattr__(other, about.name, getattr(self, about.name))
        for field, values in arrays.items():
            assert field in TOKEN_ARRAYS, field
            object.__setattr__(other, field, float_array(values, len(self), field, _name(self.uid)))
        return other

    def truncated(self, length: int) -> Sample:
        """The first `length` tokens, with everything that belongs to them."""
        need_whole("length", length, 0, "give 0 or more tokens to keep")
        cut = {
            field: array[:length]
            for field in ("tokens", "loss_mask", *TOKEN_ARRAYS)
            if (array := getattr(self, field)) is not None
        }
        return replace(self, **cut)


def with_arrays(samples: Sequence[Sample], **arrays: Sequence[NDArray[Any]]) -> list[Sample]:
    """The same samples, each with its own entry of these lists: `with_arrays(samples, ref_logprobs=found)`."""
    found = list(samples)
    for name, values in arrays.items():
        found = [sample.with_numbers(**{name: own}) for sample, own in zip(found, values, strict=True)]
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Where the sequences of one token axis begin and end: `cu_seqlens` on the device, `offsets` on the host.

    Segment i is `[offsets[i], offsets[i + 1])`; it may be empty. With `pad_length > 0` the last one is the pad.
    Where samples share prefixes the segments are nodes (`padfree.prefix_tree`) and `num_samples` counts these.
    """

    cu_seqlens: Tensor  # [S+1] int32
    offsets: NDArray[np.int64]  # [S+1] the same numbers on the host
    max_seqlen: int
    pad_length: int = 0
    num_samples: int = 0
    parents: NDArray[np.int64] | None = None  # [S] of nodes, -1 for a root; None: every segment is a sample
    path_length: int = 0  # tokens of the longest path of nodes
    longest: Tensor | None = None  # [] `max_seqlen` for compiled code, always on the host; made if it is not given

    def __post_init__(self) -> None:
        if self.longest is None:
            object.__setattr__(self, "longest", torch.tensor(self.max_seqlen))

    @staticmethod
    def from_lengths(
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        pad_length: int = 0,
        parents: NDArray[np.integer[Any]] | None = None,
        device: torch.device | str | None = None,
    ) -> Segments:
        """Segments of these lengths, and a pad behind them: `[5, 3]`, pad 3 -> cu_seqlens `0 5 8 11`.

        `parents` [B] makes them nodes: `-1 0 0` hangs the second and the third on the first.
        """
        array = integer_array(lengths, "lengths")
        if (array < 0).any():
            raise UserError("lengths", f"{array.min()} among them", "give lengths of 0 or more")
        need_whole("pad_length", pad_length, 0, "give 0 or more")
        num_samples = len(array)
        nodes = None if parents is None else check_parents(parents, num_samples)
        if pad_length:
            array = np.append(array, pad_length)
            nodes = None if nodes is None else np.append(nodes, -1)
        offsets = np.zeros(len(array) + 1, dtype=np.int64)
        np.cumsum(array, out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise UserError("lengths", f"{offsets[-1]} tokens in one row", "split them, cu_seqlens hold 32 bits")
        return Segments(
            cu_seqlens=torch.from_numpy(offsets.astype(np.int32)).to(device=device, non_blocking=True),
            offsets=offsets,
            max_seqlen=int(array.max(initial=0)),
            pad_length=pad_length,
            num_samples=num_samples,
            parents=nodes,
            path_length=0 if nodes is None else int((first_positions(nodes, array) + array).max(initial=0)),
        )

    @property
    def num_segments(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[S] host lengths, the pad's among them."""
        return np.diff(self.offsets)

    @property
    def first_positions(self) -> NDArray[np.int64]:
        """[S] the position of the first token of each segment: 0, or how many tokens a node's ancestors have."""
        if self.parents is None:
            return np.zeros(self.num_segments, dtype=np.int64)
        return first_positions(self.parents, self.lengths)

    @property
    def num_positions(self) -> int:
        """Tokens of the longest sample, or of the pad if that is longer."""
        return self.max_seqlen if self.parents is None else self.path_length

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Segments:
        return replace(self, cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking))

    def with_pad(self, pad_length: int) -> Segments:
        """The same samples with a pad of this length (and no other) behind them."""
        samples = self.lengths[: self.num_samples]
        parents = None if self.parents is None else self.parents[: self.num_samples]
        return Segments.from_lengths(samples, pad_length=pad_length, parents=parents, device=self.cu_seqlens.device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """What came with the rollouts, shifted like the labels: entry t speaks of the token that position t predicts."""

    logprobs: Tensor | None = None  # [T] float32
    ref_logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    returns: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T]
    old_logprobs: Tensor | None = None  # [T]

    def map(self, function: Any) -> Rollout:
        """The same fields with `function` applied to each tensor that is there."""
        return Rollout(**{f: None if (v := getattr(self, f)) is None else function(v) for f in TOKEN_ARRAYS})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """What the host remembers of a packed sample. `index` is its place in the list that was packed."""

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
    """Rows of a tensor [n, ...] that are taken any number of times, `tensor[index]`, and where the copies of each lie.

    rows a b c, index 0 0 2 1 0  ->  a a c b a         places 0 1 4 3 2, begins 0 3 4 5: those of a, of b, of c
    """

    index: Tensor  # [m] int64
    places: Tensor  # [m] int64
    begins: Tensor  # [n + 1] int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """Which hidden state of a row predicts which token of which sample, where samples share prefixes. Host only.

    There is an entry for each scored token of each sample, sample by sample: E in all.
    """

    rows: NDArray[np.int64]  # [E] the token of the row that predicts it
    tokens: NDArray[np.int64]  # [E] the token that is predicted, in the samples laid end to end


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Samples laid end to end on one token axis, ready for the device. Made by `padfree.pack`.

    With `entries` samples share prefixes: labels, weights, sample_index and rollout are [E] then.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restart at 0 in every segment; go on along the path of a node
    labels: Tensor  # [T] int64, shifted inside each sample; -100 where nothing is scored
    weights: Tensor  # [T] float32, 0 where the label is -100
    sample_index: Tensor  # [T] int32, the segment of each token; the pad's is num_samples
    segments: Segments
    rollout: Rollout | None = None
    samples: tuple[SampleInfo, ...] = ()
    entries: Entries | None = None

    ROW_FIELDS: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids")
    LABEL_FIELDS: ClassVar[tuple[str, ...]] = ("labels", "weights", "sample_index")
    TOKEN_FIELDS: ClassVar[tuple[str, ...]] = (*ROW_FIELDS, *LABEL_FIELDS)

    def __post_init__(self) -> None:
        num_tokens = self.segments.num_tokens
        for field in self.TOKEN_FIELDS:
            shape = tuple(getattr(self, field).shape)
            if field in self.LABEL_FIELDS and self.entries is not None:
                assert shape == (len(self.entries.rows),), field
            elif shape != (num_tokens,):
                raise UserError(field, f"shape {shape} for {num_tokens} tokens in segments", "give one entry per token")
        if self.entries is None and len(self.samples) != self.segments.num_samples:
            raise UserError(
                "samples", f"{len(self.samples)} for {self.segments.num_samples} segments", "give one entry per sample"
            )

    @property
    def num_tokens(self) -> int:
        """T, the pad included."""
        return self.segments.num_tokens

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def pad_length(self) -> int:
        return self.segments.pad_length

    @property
    def lengths(self) -> list[int]:
        """[B] the lengths of the samples, without the pad."""
        return [info.length for info in self.samples]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> PackedBatch:
        return self._map(
            lambda tensor: tensor.to(device, non_blocking=non_blocking),
            self.segments.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory, so that `.to("cuda")` does not wait."""
        segments = replace(self.segments, cu_seqlens=self.segments.cu_seqlens.pin_memory())
        return self._map(lambda tensor: tensor.pin_memory(), segments)

    def _map(self, function: Any, segments: Segments) -> PackedBatch:
        moved = {field: function(getattr(self, field)) for field in self.TOKEN_FIELDS}
        rollout = None if self.rollout is None else self.rollout.map(function)
        return replace(self, **moved, segments=segments, rollout=rollout)

    def with_weights(self, weights: Tensor) -> PackedBatch:
        """The same batch with other token weights [T]."""
        need_tensor("weights", weights)
        return replace(self, weights=weights.to(self.weights))

    def without_pad(self) -> PackedBatch:
        return self.padded_to(self.num_tokens - self.pad_length)

    def padded_to(self, length: int) -> PackedBatch:
        """The same samples on exactly `length` tokens: ids 0, labels -100, weights 0, one pad segment at the end."""
        real = self.num_tokens - self.pad_length
        need_whole("length", length, 0, f"pad to {real} or more")
        pad = length - real
        if pad < 0:
            raise UserError("length", f"{length} for a batch of {real} tokens", f"pad to {real} or more")
        if pad == self.pad_length:
            return self
        fill = {"labels": IGNORE, "sample_index": self.num_samples}

        def lengthened(tensor: Tensor, value: int = 0) -> Tensor:
            return torch.cat([tensor[:real], tensor.new_full((pad,), value)])

        longer = self.TOKEN_FIELDS if self.entries is None else self.ROW_FIELDS  # a pad has no entries
        padded: dict[str, Any] = {field: lengthened(getattr(self, field), fill.get(field, 0)) for field in longer}
        padded["position_ids"] = torch.cat(
            [self.position_ids[:real], torch.arange(pad, dtype=torch.int64, device=self.position_ids.device)]
        )
        rollout = self.rollout
        if rollout is not None and self.entries is None:
            rollout = rollout.map(lengthened)
        return replace(self, **padded, segments=self.segments.with_pad(pad), rollout=rollout)

    def padded_to_multiple(self, multiple: int) -> PackedBatch:
        """The same samples on the next multiple of `multiple` tokens (13 for 4 -> 16, 16 for 4 -> 16)."""
        need_whole("multiple", multiple, 1, "give 1 or more")
        real = self.num_tokens - self.pad_length
        return self.padded_to(-(-real // multiple) * multiple)

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Per-sample views of any [T, ...] tensor, the pad left out.

        Of a batch with `entries` any [E, ...] tensor, laid out as it would be without: 0 where there is no label.
        """
        if not isinstance(values, Tensor):
            raise UserError("values", f"{type(values).__name__}", "give a tensor, such as torch.as_tensor(values)")
        expected = self.num_tokens if self.entries is None else len(self.entries.rows)
        if values.shape[:1] != (expected,):
            shape = tuple(values.shape)
            raise UserError("values", f"shape {shape} for {expected} tokens", "give one entry per token of the batch")
        if self.entries is not None:
            predictions = torch.from_numpy(self.entries.tokens - 1).to(values.device)
            whole = values.new_zeros(sum(self.lengths), *values.shape[1:])
            return list(torch.split(whole.index_copy(0, predictions, values), self.lengths))
        return list(torch.split(values[: self.num_tokens - self.pad_length], self.lengths))

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of a stock HF model whose own attention understands packed rows.

        Not every model does: `padfree.compat.hf.PackedCollator` tries it on a small copy.
        """
        assert self.segments.parents is None, "transformers' own attention knows of no shared prefixes"
        return pack_inputs(self.input_ids, self.position_ids, self.segments)


def pack_inputs(input_ids: Tensor, position_ids: Tensor, segments: Segments) -> dict[str, Any]:
    """What transformers' own attention needs to keep the samples of a row apart: no mask, it makes its own.

    There is no key for a mask at all: TRL takes one that is there for a tensor.
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
    """Which token ranges of a row of T tokens each context rank holds. Host only; made by `padfree.cp.make_layout`.

    Rank r holds the ranges `[starts[r][i], ends[r][i])`, T / world tokens in all, those of a segment side by side. No
    range crosses the border of a segment, so that each is one *piece*: consecutive queries of one sample.
    """

    kind: LayoutKind
    world: int
    num_tokens: int  # T
    starts: tuple[NDArray[np.int64], ...]  # per rank
    ends: tuple[NDArray[np.int64], ...]  # per rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixKeys:
    """The keys that each node of a pack with shared prefixes attends to.

    Made and read by `padfree.attention.prefix_attention`.

    Several arrays lie in one, so that compiled code sees one size, which no other size is taken for.
    """

    numbers: Tensor  # [n] int32
    sizes: Tensor  # int64, always on the host


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttnContext:
    """What attention must know of a micro-batch. It travels as an argument of the model's forward, never as a global.

    `segments` are those of the whole row. Without a layout this process holds the whole row; with one it holds its
    share, and `plan` is what `padfree.cp` prepared for it. `prefix_keys` are there if this process attends to the whole
    of a row whose samples share prefixes.
    """

    segments: Segments
    backend: str = "auto"
    method: str = "allgather"
    layout: Layout | None = None
    rank: int = 0
    group: Any = None  # torch.distributed.ProcessGroup
    plan: Any = None  # padfree.cp's own preparation for (layout, rank)
    prefix_keys: PrefixKeys | None = None

    @property
    def world(self) -> int:
        return 1 if self.layout is None else self.layout.world


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalEntries:
    """The entries that one context rank's tokens predict."""

    numbers: NDArray[np.int64]  # [e] among those of the row
    rows: Copies  # [e] of this rank's tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalBatch:
    """One context rank's tokens, `[T / world]`, and what its attention needs. Made by `padfree.cp.shard`.

    With `entries` labels, weights, sample_index and rollout are [e], as in `PackedBatch`.
    A filler is a pack of one token that is not scored: it keeps a rank in step whose plan has no samples left.
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
    num_labels: int | None = None  # positions here that have a label, where the host has counted them
    is_filler: bool = False
    batch_samples: int = 1  # of the whole global batch, for losses that weigh whole samples

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_samples(self) -> int:
        """B, of the whole row."""
        return self.context.segments.num_samples if self.entries is None else len(self.samples)

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of an HF model that `padfree.attach` has prepared."""
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "attention_mask": None,
            "use_cache": False,
            "attn_context": self.context,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LmHead:
    """How the last hidden states [.., D] become logits [.., V].

    logits = cap(logit_scale · (hidden @ weight.T + bias)),    cap(x) = softcap · tanh(x / softcap), or x without one
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    logit_scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], as the formula says."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def common_fields(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The rollout arrays these samples carry. All carry the same ones, or it is an error."""
    present: Mapping[str, list[bool]] = {f: [getattr(s, f) is not None for s in samples] for f in TOKEN_ARRAYS}
    for field, there in present.items():
        if any(there) and not all(there):
            index = there.index(False)
            name = _name(samples[index].uid)
            raise UserError(field, f"missing in {name} at index {index} but present in others", "give it for all")
    return tuple(field for field, there in present.items() if any(there))


assert {f.name for f in fields(Rollout)} == set(TOKEN_ARRAYS)
