"""The divergence between the student's and the teacher's softmax for each token, and its gradient, in plain torch.

With top-k, the teacher's k most probable entries keep their probabilities. All other entries are merged into one, "the
rest". For example, with k = 2:

    teacher   .5 .3 .1 .1   becomes   .5 .3 .2
    student   .4 .2 .3 .1   becomes   .4 .2 .4

If several entries tie for rank k, all of them keep their probabilities.

`triton_divergence` implements these functions with Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from padfree.choices import DivergenceKind
from padfree.head.elementwise import FLOAT16_FLOOR, BlockedHead, Softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The kind of divergence, and its parameters."""

    kind: DivergenceKind
    beta: float  # the teacher's share in the mixture of jsd
    top_k: int | None  # compare only the teacher's k most probable vocabulary entries; None: all entries


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredLogits:
    """The logits of one model (student or teacher) for R tokens and V vocabulary entries, and their softmax.

    The vocabulary is divided into K blocks of columns.
    """

    below: Tensor  # [R, V] x - peak of the block
    block_peak: Tensor  # [R, K]
    softmax: Softmax  # [R]
    block: int  # columns per block

    def part(self, start: int, end: int) -> StoredLogits:
        return StoredLogits(
            below=self.below[start:end],
            block_peak=self.block_peak[start:end],
            softmax=self.softmax.part(start, end),
            block=self.block,
        )

    def below_peak(self, start: int, end: int) -> Tensor:
        """Return the logits [R, W] of the columns [start, end), minus the largest logit of each token over the
        vocabulary.

        The columns must lie inside one block of the vocabulary.
        """
        index = start // self.block
        below = self.below[:, start:end].to(self.block_peak.dtype)
        if self.below.dtype == torch.float16:  # the fused matmuls store lower values as -inf
            below = below.clamp(min=FLOAT16_FLOOR)
        return below + (self.block_peak[:, index] - self.softmax.peak)[:, None]

    def log_p(self, start: int, end: int) -> Tensor:
        return self.below_peak(start, end) - self.softmax.log_total[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenDivergence:
    """The divergence of each of R tokens, and the values that its gradient needs."""

    value: Tensor  # [R] the divergence
    mean: Tensor  # [R] number that is subtracted from every log-ratio, so that the gradient sums to 0
    rest: Tensor | None  # [R] the factor c in the gradient s_j · c of an entry j of the rest
    threshold: Tensor | None  # [R] an entry belongs to the rest if the teacher's y - peak is below this threshold


class DivergenceWork(Protocol):
    """The interface of the functions that compute divergences, in plain torch or with Triton."""

    def divergence_sums(
        self, student: StoredLogits, teacher: StoredLogits, settings: Divergence, threshold: Tensor | None
    ) -> Tensor: ...

    def divergence_gradient(
        self,
        student: StoredLogits,
        teacher: StoredLogits,
        settings: Divergence,
        token: TokenDivergence,
        factor: Tensor,
        head: BlockedHead,
        inverse_temperature: Tensor,
        out: Tensor,
    ) -> None: ...


def kth_largest(teacher: StoredLogits, k: int) -> Tensor:
    """Return the threshold of the teacher's top k entries for each of R tokens: the k-th largest logit minus the
    largest.
    """
    vocabulary = teacher.below.shape[1]
    whole = teacher.block_peak.new_empty(teacher.below.shape)
    for start, end in _columns(vocabulary, teacher.block):
        whole[:, start:end] = teacher.below_peak(start, end)
    return whole.topk(min(k, vocabulary), dim=1, sorted=True).values[:, -1].contiguous()


def token_divergence(sums: Tensor, settings: Divergence, threshold: Tensor | None) -> TokenDivergence:
    """Return the divergence of each token, computed from `sums` [4, R], the result of `divergence_sums`."""
    first, second, student_rest, teacher_rest = sums
    rest = None
    beta = settings.beta
    if threshold is not None:
        tiny = torch.finfo(sums.dtype).tiny  # a lower bound, so that an empty rest adds 0 and causes no division by 0
        s, t = student_rest.clamp(min=tiny), teacher_rest.clamp(min=tiny)
        if settings.kind == "forward-kl":
            first = first + t * (t / s).log()
            rest = 1 - t / s
        elif settings.kind == "reverse-kl":
            ratio = (s / t).log()
            first = first + s * ratio
            rest = ratio - first
        else:
            mixed = beta * t + (1 - beta) * s
            ratio = (s / mixed).log()
            first, second = first + s * ratio, second + t * (t / mixed).log()
            rest = (1 - beta) * (ratio - first)
    value = (1 - beta) * first + beta * second if settings.kind == "jsd" else first
    return TokenDivergence(value=value, mean=first.contiguous(), rest=rest, threshold=threshold)


def divergence_sums(
    student: StoredLogits, teacher: StoredLogits, settings: Divergence, threshold: Tensor | None
) -> Tensor:
    """Return four sums over the vocabulary for each of R tokens, as [4, R].

    - Sum 0: the divergence; for jsd KL(student | mixture).
    - Sum 1: KL(teacher | mixture) for jsd, otherwise 0.
    - Sums 2 and 3: the total probability of the rest (the entries outside the top k) under student and teacher, 0
      without top-k.

    Sums 0 and 1 leave out the rest.
    """
    vocabulary = student.below.shape[1]
    sums = student.block_peak.new_zeros(4, len(student.below))
    for start, end in _columns(vocabulary, min(student.block, teacher.block)):
        below = teacher.below_peak(start, end)
        log_s, log_t = student.log_p(start, end), below - teacher.softmax.log_total[:, None]
        s, t = log_s.exp(), log_t.exp()
        if threshold is not None:
            is_rest = below < threshold[:, None]
            sums[2] += torch.where(is_rest, s, 0.0).sum(1)
            sums[3] += torch.where(is_rest, t, 0.0).sum(1)
            s, t = s.masked_fill(is_rest, 0.0), t.masked_fill(is_rest, 0.0)
        if settings.kind == "forward-kl":
            sums[0] += (t * (log_t - log_s)).sum(1)
        elif settings.kind == "reverse-kl":
            sums[0] += (s * (log_s - log_t)).sum(1)
        else:
            log_m = _log_mixture(log_s, log_t, settings.beta)
            sums[0] += (s * (log_s - log_m)).sum(1)
            sums[1] += (t * (log_t - log_m)).sum(1)
    return sums


def divergence_gradient(
    student: StoredLogits,
    teacher: StoredLogits,
    settings: Divergence,
    token: TokenDivergence,
    factor: Tensor,
    head: BlockedHead,
    inverse_temperature: Tensor,
    out: Tensor,
) -> None:
    """Write the gradient of the divergence with respect to the student's raw logits into `out` [R, V].

    Raw logits are the logits before bias, scale, cap and temperature. `factor` [R] multiplies the gradient of each
    token. `out` may overwrite the student's stored logits.
    """
    vocabulary = student.below.shape[1]
    scale = (factor * inverse_temperature * head.logit_scale)[:, None]
    for start, end in _columns(vocabulary, min(student.block, teacher.block)):
        below = teacher.below_peak(start, end)
        log_s, log_t = student.log_p(start, end), below - teacher.softmax.log_total[:, None]
        s = log_s.exp()
        if settings.kind == "forward-kl":
            gradient = s - log_t.exp()
        elif settings.kind == "reverse-kl":
            gradient = s * ((log_s - log_t) - token.mean[:, None])
        else:
            log_m = _log_mixture(log_s, log_t, settings.beta)
            gradient = (1 - settings.beta) * s * ((log_s - log_m) - token.mean[:, None])
        if token.threshold is not None:
            assert token.rest is not None
            gradient = torch.where(below < token.threshold[:, None], s * token.rest[:, None], gradient)
        gradient = gradient * scale
        if head.softcap is not None:
            logits = student.below_peak(start, end) + student.softmax.peak[:, None]
            gradient = gradient * (1 - (logits / (inverse_temperature * head.softcap)[:, None]).square())
        out[:, start:end] = gradient


def _log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Compute log(βt + (1−β)s) from log_s and log_t without underflow."""
    tiny = torch.finfo(log_s.dtype).tiny
    return (beta * log_t.exp() + (1 - beta) * log_s.exp()).clamp(min=tiny).log()


def _columns(vocabulary: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, vocabulary)) for start in range(0, vocabulary, block)]
