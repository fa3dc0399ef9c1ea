"""Attention in models in which the tokens of an image attend to each other (Gemma 3).

A token of an image also sees the later tokens of its image. With the context-parallel method `allgather`, a rank
receives the keys of these later tokens in a separate exchange. With `ulysses`, each rank has all tokens.

In this example, a star is a token of an image. Rank 0 receives the key of the third star from rank 1, because
the other two stars see it:

    token    7 * * * 9
    rank     0 0 0 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention.copies import copies_of, take_copies
from padfree.attention.later_keys import LaterKeys, attend_with_later_keys
from padfree.batch import Copies, RowExchange
from padfree.cp.context_plan import ContextPlan
from padfree.cp.ranges import Indices, segments_of, to_device
from padfree.cp.row_exchange import plan_rows, receive_rows
from padfree.errors import UserError
from padfree.prefix_tree import prefix_ranges
from padfree.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholePack:
    """The inputs of attention over a pack with images, if one rank holds the whole pack.

    Later keys are the keys after a query in the same image. If samples share prefixes, `paths` gathers the keys of each
    prefix-tree node and of the node's ancestors.
    """

    later: LaterKeys
    keys: Copies  # gathers the later keys from the keys of the pack
    segments_q: Segments
    segments_k: Segments
    paths: Copies | None


class ImageBlocks:
    """The image blocks of a pack (ranges of image tokens that attend to each other), prepared once for all layers."""

    def __init__(self, tokens: Indices, segments: Segments, device: torch.device) -> None:
        """Store the image tokens of a pack. `tokens` [M] are their indices in the pack, in ascending order."""
        self.tokens, self.segments, self.device = tokens, segments, device
        self._whole: WholePack | None = None
        self._shared_out: tuple[LaterKeys, RowExchange, Copies] | None = None

    def whole(self) -> WholePack:
        if self._whole is None:
            segments, device = self.segments, self.device
            queries, later = self._later(np.arange(segments.num_tokens), np.zeros(0, dtype=np.int64))
            lengths, paths = segments.lengths, None
            if segments.parents is not None:
                ranges = prefix_ranges(segments.parents, segments.offsets)
                lengths = ranges.lengths(len(segments.parents))
                index = concatenated_ranges(ranges.begin, ranges.end - ranges.begin)
                paths = copies_of(index, segments.num_tokens, device)
            self._whole = WholePack(
                later=queries,
                keys=copies_of(later, segments.num_tokens, device),
                segments_q=segments_of(segments.lengths, device),
                segments_k=segments_of(lengths, device),
                paths=paths,
            )
        return self._whole

    def shared_out(self, plan: ContextPlan, group: Any) -> tuple[LaterKeys, RowExchange, Copies]:
        """Return which queries of this rank see later keys, and how the rank receives and orders these keys.

        Later keys are keys that come after the query in the same image. This function is for the context-parallel
        method `allgather`.
        """
        if self._shared_out is None:
            starts, ends = plan.layout.starts, plan.layout.ends
            own = [concatenated_ranges(first, last - first) for first, last in zip(starts, ends, strict=True)]
            owner, row = np.zeros((2, plan.layout.num_tokens), dtype=np.int64)
            for rank, held in enumerate(own):
                owner[held], row[held] = rank, np.arange(len(held))
            found = [self._later(held, first) for held, first in zip(own, starts, strict=True)]
            exchange, copies = plan_rows(owner, row, [keys for _, keys in found], plan.rank, group, self.device)
            self._shared_out = found[plan.rank][0], exchange, copies
        return self._shared_out

    def _later(self, own: Indices, starts: Indices) -> tuple[LaterKeys, Indices]:
        """Return the queries among this rank's tokens `own` that see later keys of their image, and the pack indices of
        the later keys.

        `starts`: the pack indices at which the rank's pieces (ranges of one document) start.
        """
        after = np.searchsorted(self.segments.offsets, self.tokens, side="right")
        first = np.ones(len(self.tokens), dtype=np.bool_)  # whether a placeholder is the first of its block
        first[1:] = (np.diff(self.tokens) != 1) | (np.diff(after) != 0)
        block = np.full(self.segments.num_tokens, -1)
        block[self.tokens] = np.cumsum(first) - 1
        block_end = self.tokens[np.append(np.flatnonzero(first)[1:], len(self.tokens)) - 1] + 1
        held = np.flatnonzero(block[own] >= 0)  # the indices of placeholders among this rank's tokens
        token, number = own[held], block[own[held]]
        new = np.ones(len(held), dtype=np.bool_)
        new[1:] = (np.diff(held) != 1) | (np.diff(token) != 1) | (np.diff(number) != 0)
        new |= np.isin(token, starts)
        runs = np.flatnonzero(new)
        begin, local = token[runs], held[runs]
        behind = block_end[number[runs]]
        # The last token of a block sees no later key.
        end = np.minimum(begin + np.diff(np.append(runs, len(held))), behind - 1)
        seeing = end > begin
        begin, local, behind, end = begin[seeing], local[seeing], behind[seeing], end[seeing]
        queries = LaterKeys(
            queries=to_device(_descending(local, local + end - begin), self.device),
            segments_q=segments_of(end - begin, self.device),
            segments_k=segments_of(behind - 1 - begin, self.device),
        )
        return queries, _descending(begin + 1, behind)


def _descending(begin: Indices, end: Indices) -> Indices:
    """Return the integers of each range in descending order: the ranges [0, 3) and [5, 7) give [2, 1, 0, 6, 5]."""
    ascending = concatenated_ranges(begin, end - begin)
    reversed_: Indices = np.repeat(begin + end - 1, end - begin) - ascending
    return reversed_


def attend_whole_pack(q: Tensor, k: Tensor, v: Tensor, blocks: ImageBlocks, **options: Any) -> Tensor:
    """Compute attention of all T tokens of a pack with images: q [T, H, d], k [T, Hkv, d], v [T, Hkv, dv] -> [T, H,
    dv].
    """
    pack = blocks.whole()
    later_k, later_v = (take_copies(tensor, pack.keys) for tensor in (k, v))
    if pack.paths is not None:
        k, v = (take_copies(tensor, pack.paths) for tensor in (k, v))
    return attend_with_later_keys(
        q, k, v, pack.segments_q, pack.segments_k, pack.later, later_k, later_v, **checked(options)
    )


def receive_later_keys(
    k: Tensor, v: Tensor, blocks: ImageBlocks, plan: ContextPlan, group: Any
) -> tuple[LaterKeys, Tensor, Tensor]:
    """Return which queries of this rank see later keys of their image, and the later keys and values. Collective.

    This function is for the context-parallel method `allgather`.
    """
    later, exchange, copies = blocks.shared_out(plan, group)
    received = take_copies(receive_rows(torch.cat([k, v], dim=2), exchange), copies)
    later_k, later_v = torch.split_with_sizes(received, [k.shape[2], v.shape[2]], dim=2)
    return later, later_k.contiguous(), later_v.contiguous()


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Remove `causal` and `sinks` from the options of an attention call with images, and return the other options.

    Raises `UserError` if attention is not causal or has sinks.
    """
    if not options.pop("causal", True):
        raise UserError("causal", "False is not supported for image tokens", "set causal=True")
    if options.pop("sinks", None) is not None:
        raise UserError(
            "sinks",
            "attention sinks are not supported for image tokens that attend to each other",
            "train the model on text",
        )
    return options
