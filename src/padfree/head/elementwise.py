"""The elementwise work on a tile of logits (soft cap, softmax sums, gradients), in plain torch.

The vocabulary is divided into blocks of columns. Before exponentiation, the largest logit of the token and block is
subtracted. So blocks can be merged without overflow.

Logits that are stored for the gradient are stored after this subtraction. In bfloat16 training they are stored in
float16, which is more precise than bfloat16 near 0, where the probable entries are.

`triton_elementwise` implements the same functions with Triton kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.head.kept_rows import KeptRows

FLOOR = -1e30
"""The lower bound of logits. A smaller logit, such as -inf from a bias, is replaced by it: the probability is then 0,
and no NaN can arise. Ids that truncated sampling (top-p, top-k, min-p) excludes also get this logit.
"""

LOWEST_TANH = -2.0
"""The lower bound of logit / softcap, which is the tanh in the gradient of the soft cap. Without it, the square of this
ratio would overflow for excluded logits (-1e30), and their gradient would be NaN instead of 0.
"""

FLOAT16_FLOOR = -65504.0
"""The lowest finite float16 number. Its exp() is 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockedHead(LmHead):
    """An `LmHead` that computes logits for one block of the vocabulary after the other."""

    block: int  # tokens of the vocabulary per block, a power of two

    @property
    def num_blocks(self) -> int:
        return -(-len(self.weight) // self.block)

    def sums_bytes(self, *, entropy: bool, itemsize: int) -> int:
        """Return the size in bytes of the `BlockSums` of one token: per vocabulary block two numbers, or three with the
        entropy.
        """
        return self.num_blocks * (3 if entropy else 2) * itemsize


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelledRows:
    """The label and the inverse temperature (1 / temperature) of each of R scored tokens.

    `kept` holds the kept set of each token (the vocabulary ids that its softmax covers), or None for the whole
    vocabulary.
    """

    labels: Tensor  # [R] int64
    inverse_temperature: Tensor  # [R]
    kept: KeptRows | None = None  # R sets

    def part(self, start: int, end: int) -> LabelledRows:
        return LabelledRows(
            labels=self.labels[start:end],
            inverse_temperature=self.inverse_temperature[start:end],
            kept=None if self.kept is None else self.kept.part(start, end),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockSums:
    """Softmax statistics of R tokens for each of K vocabulary blocks, and the logits of the labels."""

    peak: Tensor  # [R, K] the largest logit x
    total: Tensor  # [R, K] Σ exp(x − peak)
    moment: Tensor | None  # [R, K] Σ exp(x − peak) · (x − peak), for the entropy; None if no entropy is wanted
    target: Tensor  # [R] logit of the label, NaN until its column is computed; a label outside the vocabulary stays NaN

    @staticmethod
    def empty(num_rows: int, num_blocks: int, like: Tensor, *, entropy: bool) -> BlockSums:
        # Allocated as [K, R] and transposed, so that the sums of one block are adjacent in memory.
        peak = like.new_empty(num_blocks, num_rows).T
        return BlockSums(
            peak=peak,
            total=torch.empty_like(peak),
            moment=torch.empty_like(peak) if entropy else None,
            target=like.new_full((num_rows,), float("nan")),
        )

    def part(self, start: int, end: int) -> BlockSums:
        return BlockSums(
            peak=self.peak[start:end],
            total=self.total[start:end],
            moment=None if self.moment is None else self.moment[start:end],
            target=self.target[start:end],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Softmax:
    """The softmax of each of R tokens, and the log-probability of each token's label.

    A vocabulary entry with logit x has the log-probability (x − peak) − log_total.
    """

    peak: Tensor  # [R]
    log_total: Tensor  # [R]
    logprobs: Tensor  # [R]
    entropy: Tensor | None  # [R]

    def part(self, start: int, end: int) -> Softmax:
        return Softmax(
            peak=self.peak[start:end],
            log_total=self.log_total[start:end],
            logprobs=self.logprobs[start:end],
            entropy=None if self.entropy is None else self.entropy[start:end],
        )

    @staticmethod
    def join(parts: Sequence[Softmax]) -> Softmax:
        return Softmax(
            peak=torch.cat([part.peak for part in parts]),
            log_total=torch.cat([part.log_total for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            entropy=_join([part.entropy for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Upstream:
    """The gradient of the loss with respect to the log-probability and the entropy of each token."""

    logprobs: Tensor  # [R]
    entropy: Tensor | None  # [R]

    def part(self, start: int, end: int) -> Upstream:
        return Upstream(
            logprobs=self.logprobs[start:end], entropy=None if self.entropy is None else self.entropy[start:end]
        )

    @staticmethod
    def join(parts: Sequence[Upstream]) -> Upstream:
        return Upstream(
            logprobs=torch.cat([part.logprobs for part in parts]), entropy=_join([part.entropy for part in parts])
        )


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    assert len(there) in (0, len(parts)), "only some chunks have an entropy"
    return torch.cat(there) if there else None


class Elementwise(Protocol):
    """The interface of the elementwise work on logits (soft cap, softmax sums, gradients), in plain torch or with
    Triton.
    """

    def reduce_tile(
        self,
        raw_logits: Tensor,
        first: int,
        head: BlockedHead,
        rows: LabelledRows,
        sums: BlockSums,
        stored: Tensor | None,
    ) -> None: ...

    def merge(self, sums: BlockSums) -> Softmax: ...

    def gradient_from_raw_logits(
        self,
        raw_logits: Tensor,
        first: int,
        head: BlockedHead,
        rows: LabelledRows,
        softmax: Softmax,
        upstream: Upstream,
        out: Tensor,
    ) -> None: ...

    def gradient_from_stored(
        self,
        stored: Tensor,
        head: BlockedHead,
        rows: LabelledRows,
        peak: Tensor,
        softmax: Softmax,
        upstream: Upstream,
        out: Tensor,
    ) -> None: ...

    def scale_(self, values: Tensor, factor: Tensor) -> None: ...


class LogitMatmuls(Protocol):
    """The interface for computing logits by matmuls, together with the elementwise work on the logits (softmax sums or
    gradients).
    """

    def reduce_rows(
        self, hidden: Tensor, head: BlockedHead, rows: LabelledRows, sums: BlockSums, stored: Tensor | None
    ) -> None: ...

    def gradient_columns(
        self,
        hidden: Tensor,
        weight: Tensor,
        first: int,
        head: BlockedHead,
        rows: LabelledRows,
        softmax: Softmax,
        upstream: Upstream,
        out: Tensor,
    ) -> None: ...


def reduce_tile(
    raw_logits: Tensor, first: int, head: BlockedHead, rows: LabelledRows, sums: BlockSums, stored: Tensor | None
) -> None:
    """Write the softmax statistics of a tile of raw logits [R, W] (hidden @ weight.T) into `sums`. Overwrite
    `raw_logits`.

    `first`: the first vocabulary column of the tile, a multiple of the block size. `stored` [R, W] receives each logit
    minus the largest logit of its token and block.
    """
    num_columns = raw_logits.shape[1]
    logits = _logits_(raw_logits, first, head, rows)
    here = _is_here(rows.labels, first, num_columns)
    target = logits.gather(1, _column(rows.labels, first, num_columns))[:, 0]
    sums.target.copy_(torch.where(here, target, sums.target))
    for start in range(0, num_columns, head.block):
        end = min(start + head.block, num_columns)
        index = (first + start) // head.block
        peak = logits[:, start:end].amax(1)
        below = logits[:, start:end].sub_(peak[:, None])
        sums.peak[:, index] = peak
        exponentials = below.exp()
        sums.total[:, index] = exponentials.sum(1)
        if sums.moment is not None:
            sums.moment[:, index] = exponentials.mul_(below).sum(1)
        if stored is not None:
            stored[:, start:end] = below.clamp_(min=FLOAT16_FLOOR) if stored.dtype == torch.float16 else below


def _sum_of_rows(values: Tensor) -> Tensor:
    """Sum [R, K] over K, in the same order for every token.

    `values` is the transpose of a [K, R] tensor. PyTorch would sum some tokens of a transposed tensor in another order,
    so this function makes a contiguous copy first.
    """
    return values.contiguous().sum(1)


def merge(sums: BlockSums) -> Softmax:
    """Merge the sums of all vocabulary blocks into the softmax of each token."""
    peak = sums.peak.amax(1)
    shift = sums.peak - peak[:, None]
    share = shift.exp()
    total = _sum_of_rows(sums.total * share)
    log_total = total.log()
    entropy = None
    if sums.moment is not None:
        entropy = log_total - _sum_of_rows(share * (sums.moment + sums.total * shift)) / total
    return Softmax(peak=peak, log_total=log_total, logprobs=(sums.target - peak) - log_total, entropy=entropy)


def gradient_from_raw_logits(
    raw_logits: Tensor,
    first: int,
    head: BlockedHead,
    rows: LabelledRows,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
) -> None:
    """Write the gradient of the loss with respect to a tile of raw logits (hidden @ weight.T) into `out` [R, W].

    The tile holds the vocabulary columns [first, first + W). `raw_logits` [R, W] is used as scratch memory.
    """
    logits = _logits_(raw_logits, first, head, rows)
    log_p = (logits - softmax.peak[:, None]).sub_(softmax.log_total[:, None])
    _gradient(log_p, logits, first, head, rows, softmax, upstream, out)


def gradient_from_stored(
    stored: Tensor,
    head: BlockedHead,
    rows: LabelledRows,
    peak: Tensor,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
) -> None:
    """Write the gradient of the loss with respect to the raw logits (hidden @ weight.T) into `out` [R, V].

    `stored` [R, V] and `peak` [R, K] are results of `reduce_tile`. `out` may overwrite `stored`.
    """
    for index, start in enumerate(range(0, stored.shape[1], head.block)):
        end = min(start + head.block, stored.shape[1])
        below = stored[:, start:end].to(peak.dtype)
        base = (peak[:, index] - softmax.peak) - softmax.log_total
        logits = below + peak[:, index, None]
        _gradient(below + base[:, None], logits, start, head, rows, softmax, upstream, out[:, start:end])


def scale_(values: Tensor, factor: Tensor) -> None:
    """Multiply the contiguous tensor `values` by the scalar tensor `factor`, in place."""
    values.mul_(factor)


def _gradient(
    log_p: Tensor,
    logits: Tensor,
    first: int,
    head: BlockedHead,
    rows: LabelledRows,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
) -> None:
    """Write the gradient of the loss with respect to the raw logits (hidden @ weight.T) into `out`."""
    # Logit j has the gradient g·[j = label] − p_j·(g + h·(log p_j + entropy)), with g and h from `upstream`.
    pull = upstream.logprobs[:, None]
    if upstream.entropy is not None:
        assert softmax.entropy is not None, "the gradient of the entropy needs the values of the entropy"
        pull = pull + upstream.entropy[:, None] * (log_p + softmax.entropy[:, None])
    gradient = log_p.exp().mul_(pull).neg_()
    num_columns = gradient.shape[1]
    here = _is_here(rows.labels, first, num_columns)
    gradient.scatter_add_(
        1, _column(rows.labels, first, num_columns), torch.where(here, upstream.logprobs, 0.0)[:, None]
    )
    gradient.mul_((rows.inverse_temperature * head.logit_scale)[:, None])
    if head.softcap is not None:
        tanh = (logits / (rows.inverse_temperature * head.softcap)[:, None]).clamp_(min=LOWEST_TANH)
        gradient.mul_(1 - tanh.square())
    out.copy_(gradient)


def _logits_(raw_logits: Tensor, first: int, head: BlockedHead, rows: LabelledRows) -> Tensor:
    """Turn the raw logits [R, W] (hidden @ weight.T) into logits in place: add the bias, scale, cap, divide by the
    temperature.
    """
    if head.bias is not None:
        raw_logits.add_(head.bias[first : first + raw_logits.shape[1]])
    if head.softcap is None:
        raw_logits.mul_((rows.inverse_temperature * head.logit_scale)[:, None])
    else:
        raw_logits.mul_(head.logit_scale / head.softcap).tanh_()
        raw_logits.mul_((rows.inverse_temperature * head.softcap)[:, None])
    if rows.kept is not None:
        raw_logits.masked_fill_(~rows.kept.tile(first, raw_logits.shape[1]), FLOOR)
    return raw_logits.clamp_(min=FLOOR)


def _is_here(labels: Tensor, first: int, num_columns: int) -> Tensor:
    return (labels >= first) & (labels < first + num_columns)


def _column(labels: Tensor, first: int, num_columns: int) -> Tensor:
    return (labels - first).clamp(0, num_columns - 1)[:, None]
