"""Distillation: the divergence between the student's and the teacher's distribution over the vocabulary.

Tokens are processed in chunks, so that only the logits of one chunk are stored at a time. The gradients are computed
together with the loss. This takes four matmuls: the logits of each model, and two gradients of the student.

Teacher and student may differ in hidden size, but must have the same vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.arrays import need_number, need_whole
from padfree.batch import LmHead, need_tensor
from padfree.choices import DivergenceKind
from padfree.errors import UserError, check_choice
from padfree.head import divergence as torch_divergence
from padfree.head import elementwise as torch_elementwise
from padfree.head.budget import Memory, plan_fused, rounded_up
from padfree.head.chunks import Gradients, WeightSums, times_weight
from padfree.head.divergence import Divergence, DivergenceWork, StoredLogits, kth_largest, token_divergence
from padfree.head.elementwise import BlockSums, LogitMatmuls, Softmax
from padfree.head.full import full_divergence, full_log_softmax
from padfree.head.fused import hand_over
from padfree.head.scores import LARGEST, SMALLEST, Backend, Call, as_head, picked, prepare
from padfree.head.tiles import ROW_NUMBERS, ScoringTask, parts_of, restore_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistillationLoss:
    """The differentiable distillation loss, and values per token [N] without gradient, such as the divergence.

    The values are 0 for tokens without a label.
    """

    loss: Tensor  # [] Σ weight · divergence
    divergences: Tensor  # [N] float32
    logprobs: Tensor  # [N] log-probabilities of the labels under the student
    teacher_logprobs: Tensor  # [N] log-probabilities of the labels under the teacher


def distillation_loss(
    hidden: Tensor,  # [N, D]
    head: Tensor | LmHead,  # weight [V, D]
    teacher_hidden: Tensor,  # [N, E]
    teacher_head: Tensor | LmHead,  # weight [V, E]
    labels: Tensor,  # [N]
    *,
    divergence: DivergenceKind = "forward-kl",
    beta: float = 0.5,
    top_k: int | None = None,
    weights: Tensor | None = None,  # [N]; None: all weights are 1
    temperature: float | Tensor = 1.0,
    num_labels: int | None = None,
    memory: Memory = "speed",
    backend: Backend = "auto",
) -> DistillationLoss:
    """Return the sum over labelled tokens of `weights` times divergence, differentiable in `hidden` and `head` (the
    student's).

    - `divergence`: "forward-kl" is KL(teacher | student), "reverse-kl" is KL(student | teacher), and "jsd" is the
      generalised Jensen-Shannon divergence.
    - `beta`: the teacher's share of the mixture of "jsd".
    - `top_k`: compare only the teacher's k most probable entries, and merge all other entries into one.
    - `temperature`: divides the logits of both models. The loss is not rescaled.

    The other arguments are those of `score`.
    """
    student, teacher = (as_head(one, bias=None, softcap=None, logit_scale=1.0) for one in (head, teacher_head))
    settings = _settings(divergence, beta, top_k)
    call = prepare(
        hidden, student, labels, temperature=temperature, entropy=False, num_labels=num_labels, memory=memory,
        backend=backend,
    )  # fmt: skip
    _check_teacher(hidden, student, teacher_hidden, teacher)
    pair = _Pair(
        call=call,
        teacher_hidden=teacher_hidden.detach(),
        teacher=replace(teacher, weight=teacher.weight.detach()),
        settings=settings,
        weights=_weights_of_labelled(weights, call, hidden),
    )
    if call.elementwise is None:
        return _reference(hidden, student, pair)
    inputs = (hidden, student.weight, student.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
            found = _Distillation.apply(*inputs, pair)  # type: ignore[no-untyped-call]
        else:
            found = pair.results(*chunked_distillation(pair, *inputs, wanted=(False, False, False))[0])
    loss, divergences, logprobs, teacher_logprobs = found
    return DistillationLoss(loss=loss, divergences=divergences, logprobs=logprobs, teacher_logprobs=teacher_logprobs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pair:
    """The checked arguments of `distillation_loss`, except the tensors that are differentiated."""

    call: Call
    teacher_hidden: Tensor  # [N, E]
    teacher: LmHead
    settings: Divergence
    weights: Tensor  # [M]

    def teacher_task(self) -> ScoringTask:
        head = self.teacher
        call = replace(self.call, softcap=head.softcap, logit_scale=head.logit_scale)
        return call.task(self.teacher_hidden, head.weight, head.bias)

    def results(self, divergences: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, ...]:
        """Return the loss, and the divergences and log-probabilities [N] of all tokens.

        The arguments are values [M] of the labelled tokens. Tokens without a label get 0.
        """
        call, loss = self.call, (self.weights * divergences).sum()
        if call.poison is not None:
            loss = loss + call.poison
        return loss, *(call.scatter(values) for values in (divergences, logprobs, teacher_logprobs))


TokenResults = tuple[Tensor, Tensor, Tensor]
"""Three tensors [M] for the labelled tokens: the divergence, the student's log-probability of the label, and the
teacher's.
"""


def chunked_distillation(
    pair: _Pair, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, wanted: tuple[bool, bool, bool]
) -> tuple[TokenResults, Gradients]:
    """Compute the divergences, and the gradients of the student's hidden states, weight and bias, chunk by chunk.

    No autograd graph is recorded. `wanted` has a bool for each of the three gradients: whether to compute it.
    """
    student, teacher = pair.call.task(hidden, weight, bias), pair.teacher_task()
    wants_hidden, wants_weight, wants_bias = wanted
    operand, vocabulary = student.operand_dtype, len(weight)
    num_rows = student.num_rows
    if not num_rows:
        zeros = (torch.zeros_like(one) if want and one is not None else None
                 for one, want in zip((hidden, weight, bias), wanted, strict=True))  # fmt: skip
        nothing = pair.weights.new_zeros(0)
        grad_hidden, grad_weight, grad_bias = zeros
        return (nothing, nothing, nothing), (grad_hidden, grad_weight, grad_bias)
    work = _work(pair.call)
    plan = plan_fused(
        num_rows,
        weight.shape[1],
        vocabulary,
        logit_bytes=2 * operand.itemsize,
        row_bytes=student.row_bytes + teacher.row_bytes,
        sum_bytes=student.sum_dtype.itemsize,
        gradient_bytes=weight.dtype.itemsize,
        budget=student.budget - student.tile_bytes(num_rows) - teacher.tile_bytes(num_rows),
        weight_gradient=wants_weight,
        keep_all=True,
    )
    grad_weight = weight.new_empty(weight.shape) if wants_weight else None
    weight_sums = None if grad_weight is None else WeightSums(grad_weight, plan, student)
    bias_sums = student.new_sums(vocabulary).zero_() if wants_bias else None
    grad_hidden = hidden.new_empty(num_rows, hidden.shape[1], dtype=operand) if wants_hidden else None
    stores = [_Store(task, plan.chunk_rows) for task in (student, teacher)]
    tile = student.tile(plan.chunk_rows)
    found: list[TokenResults] = []
    for start, end in parts_of(num_rows, plan.chunk_rows):
        stored, taught = (store.fill(start, end) for store in stores)
        gradient = stores[0].memory.view(operand)[: end - start, :vocabulary]
        rows, weights, values = student.rows.part(start, end), pair.weights[start:end], []
        for first, last in parts_of(end - start, tile.rows):
            ours, theirs = stored.part(first, last), taught.part(first, last)
            threshold = None if pair.settings.top_k is None else kth_largest(theirs, pair.settings.top_k)
            sums = work.divergence_sums(ours, theirs, pair.settings, threshold)
            token = token_divergence(sums, pair.settings, threshold)
            values.append(token.value)
            if any(wanted):
                scale = rows.inverse_temperature[first:last]
                work.divergence_gradient(
                    ours, theirs, pair.settings, token, weights[first:last], student.head, scale, gradient[first:last]
                )
        if grad_hidden is not None:
            times_weight(student, gradient, grad_hidden[start:end])
        if weight_sums is not None:
            weight_sums.add(gradient, student.hidden_rows(start, end))
        if bias_sums is not None:
            bias_sums += gradient.sum(0, dtype=student.sum_dtype)
        found.append((torch.cat(values), stored.softmax.logprobs, taught.softmax.logprobs))
    if weight_sums is not None:
        weight_sums.finish()
    divergences, logprobs, teacher_logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
    gradients = (
        None if grad_hidden is None else restore_rows(student, grad_hidden),
        grad_weight,
        None if bias_sums is None else bias_sums.to(weight.dtype),
    )
    return (divergences, logprobs, teacher_logprobs), gradients


class _Store:
    """Memory for the logits of one chunk of tokens, of the student or of the teacher."""

    def __init__(self, task: ScoringTask, num_rows: int) -> None:
        operand, columns = task.operand_dtype, rounded_up(len(task.head.weight), ROW_NUMBERS)
        dtype = torch.float16 if operand.itemsize == 2 else operand
        self.task = task
        self.matmuls: LogitMatmuls = task.matmuls(num_rows)
        self.memory = task.hidden.new_empty(num_rows, columns, dtype=dtype)

    def fill(self, start: int, end: int) -> StoredLogits:
        """Compute the logits of the tokens [start, end). They overwrite the logits of the previous chunk."""
        task, head = self.task, self.task.head
        rows = task.rows.part(start, end)
        stored = self.memory[: end - start, : len(head.weight)]
        sums = BlockSums.empty(end - start, head.num_blocks, rows.inverse_temperature, entropy=False)
        self.matmuls.reduce_rows(task.hidden_rows(start, end), head, rows, sums, stored)
        softmax: Softmax = task.elementwise.merge(sums)
        return StoredLogits(below=stored, block_peak=sums.peak, softmax=softmax, block=head.block)


def _work(call: Call) -> DivergenceWork:
    if call.elementwise is torch_elementwise:
        return torch_divergence
    from padfree.head import triton_divergence

    return triton_divergence


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, pair: _Pair) -> tuple[Tensor, ...]:
        rows, ctx.gradients = chunked_distillation(pair, hidden, weight, bias, wanted=ctx.needs_input_grad[:3])
        ctx.elementwise = pair.call.elementwise
        loss, *known = pair.results(*rows)
        ctx.mark_non_differentiable(*known)
        return loss, *known

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss: Tensor, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        return (*hand_over(ctx, grad_loss, "distillation_loss"), None)


def _reference(hidden: Tensor, head: LmHead, pair: _Pair) -> DistillationLoss:
    """Compute the distillation loss from all logits of student and teacher at once, differentiated by autograd.

    This is the reference for `distillation_loss`, which computes the loss chunk by chunk.
    """
    call, scale = pair.call, pair.call.rows.inverse_temperature
    student = full_log_softmax(picked(hidden, call.index), head, scale)
    teacher = full_log_softmax(picked(pair.teacher_hidden, call.index), pair.teacher, scale)
    divergences = full_divergence(student, teacher, pair.settings)
    labels = call.rows.labels[:, None]
    loss, *known = pair.results(divergences, student.gather(1, labels)[:, 0], teacher.gather(1, labels)[:, 0])
    values, logprobs, teacher_logprobs = (one.detach() for one in known)
    return DistillationLoss(loss=loss, divergences=values, logprobs=logprobs, teacher_logprobs=teacher_logprobs)


def _settings(kind: DivergenceKind, beta: float, top_k: int | None) -> Divergence:
    check_choice("divergence", kind, DivergenceKind)
    if kind == "jsd":
        need_number(
            "beta",
            beta,
            SMALLEST,
            1.0 - 2**-53,
            "give a number above 0 and below 1, or use a KL divergence for the limits 0 and 1",
        )
    if top_k is not None:
        need_whole("top_k", top_k, 1, "give 1 or more tokens, or None for all")
    return Divergence(kind=kind, beta=beta, top_k=top_k)


def _check_teacher(hidden: Tensor, student: LmHead, teacher_hidden: Tensor, teacher: LmHead) -> None:
    for name, tensor in (("teacher_hidden", teacher_hidden), ("teacher weight", teacher.weight)):
        need_tensor(name, tensor)
        if tensor.dtype != hidden.dtype or tensor.device != hidden.device:
            raise UserError(
                name,
                f"is {tensor.dtype} on {tensor.device}, but hidden is {hidden.dtype} on {hidden.device}",
                "use one dtype and one device for both",
            )
    rows, width = (teacher_hidden.shape, teacher.weight.shape[1:]) if teacher_hidden.ndim == 2 else ((), ())
    if rows != (len(hidden), *width):
        raise UserError(
            "teacher_hidden",
            f"has shape {tuple(teacher_hidden.shape)}, for {len(hidden)} tokens and a teacher weight of shape "
            f"{tuple(teacher.weight.shape)}",
            "give teacher_hidden [N, E] and a teacher weight [V, E]",
        )
    if len(teacher.weight) != len(student.weight):
        raise UserError(
            "teacher weight",
            f"has a vocabulary of {len(teacher.weight):,}, but the student has {len(student.weight):,}",
            "give a teacher with the student's vocabulary",
        )
    if teacher.bias is not None and teacher.bias.dtype != hidden.dtype:
        raise UserError(
            "teacher bias", f"is {teacher.bias.dtype}, but hidden is {hidden.dtype}", "use one dtype for both"
        )
    need_number("teacher softcap", teacher.softcap or 1.0, SMALLEST, LARGEST, "give a number above 0, or None")


def _weights_of_labelled(weights: Tensor | None, call: Call, hidden: Tensor) -> Tensor:
    """Return the weights [M] of the M labelled tokens. If `weights` is None, all weights are 1."""
    scale = call.rows.inverse_temperature
    if weights is None:
        return torch.ones_like(scale)
    need_tensor("weights", weights)
    if weights.shape != hidden.shape[:1] or weights.device != hidden.device:
        raise UserError(
            "weights",
            f"has shape {tuple(weights.shape)} on {weights.device} for {len(hidden)} tokens on {hidden.device}",
            "give one number per token on the device of hidden",
        )
    return picked(weights.detach().to(scale.dtype), call.index)
