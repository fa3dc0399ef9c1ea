"""Log-probabilities and entropies of labels, computed without storing all logits.

    logits = cap(logit_scale · (hidden @ weight.T + bias)) / temperature        cap(y) = softcap · tanh(y / softcap)

For N = 16,384 tokens and V = 151,936 vocabulary entries, autograd would store 37 GiB in several tensors [N, V]. `score`
computes only a tile of the logits at a time, for some tokens and some of the vocabulary. The backward pass computes
each tile again.

`fused_loss` computes the logits only once, but the loss of a token may not depend on other tokens.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.arrays import need_number, need_whole
from padfree.batch import IGNORE, LmHead, need_tensor
from padfree.errors import UserError
from padfree.head import elementwise as torch_elementwise
from padfree.head import matmuls
from padfree.head.budget import Memory, block_columns, budget_bytes, usable_budget
from padfree.head.elementwise import BlockedHead, Elementwise, LabelledRows, Softmax, Upstream
from padfree.head.full import full_scores
from padfree.head.kept_rows import KeptRows
from padfree.head.tiles import ScoringTask, restore_rows, tiled_gradients, tiled_softmax
from padfree.kept_sets import KeptSets

SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max
Backend = Literal["auto", "reference", "chunked", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """The log-probability and the entropy of each token, [N] each; 0 for tokens without a label."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor | None = None  # [N] float32, of the whole distribution, or of the distribution over the kept set


def score(
    hidden: Tensor,  # [N, D]
    weight: Tensor | LmHead,  # [V, D]
    labels: Tensor,  # [N] integers
    *,
    temperature: float | Tensor = 1.0,  # one number, or [N]; gets no gradient
    bias: Tensor | None = None,  # [V]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    num_labels: int | None = None,
    kept: KeptSets | None = None,
    memory: Memory = "low",
    backend: Backend = "auto",
) -> Scores:
    """Return the log-probability of each label, and on request the entropy. Differentiable in hidden, weight and bias.

    - `weight`: the weight [V, D], or the head of a model, `lm_head_of(model)`.
    - `labels`: -100 for tokens that are not scored.
    - `num_labels`: the number of labelled tokens. Without it, the host synchronises with the GPU.
    - `kept`: for each labelled token, the vocabulary ids that its softmax covers. They must include the label.
    - `memory`: "low" (1 GiB), "speed" (4 GiB) or a number of bytes, in addition to the returned gradients.
    - `backend`: "reference" stores all logits at once, "chunked" is plain torch, "triton" needs CUDA.

    On a GPU, a wrong `num_labels` or a label outside the vocabulary gives NaN. On the CPU, either mistake raises a
    `UserError`.
    """
    head = as_head(weight, bias=bias, softcap=softcap, logit_scale=logit_scale)
    call = prepare(
        hidden, head, labels, temperature=temperature, entropy=entropy, num_labels=num_labels, kept=kept,
        memory=memory, backend=backend,
    )  # fmt: skip
    if call.elementwise is None:
        return full_logits_scores(hidden, head, call)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _Score.apply(hidden, head.weight, head.bias, call)  # type: ignore[no-untyped-call]
    return Scores(logprobs=logprobs, entropy=entropies)


def as_head(weight: Tensor | LmHead, *, bias: Tensor | None, softcap: float | None, logit_scale: float) -> LmHead:
    """Return `weight` if it is an `LmHead`. Otherwise make an `LmHead` from weight, bias, softcap and logit_scale.

    An `LmHead` has its own bias, softcap and logit_scale. If `weight` is an `LmHead`, the other arguments must be None,
    None and 1.0.
    """
    if not isinstance(weight, LmHead):
        return LmHead(weight=weight, bias=bias, softcap=softcap, logit_scale=logit_scale)
    given = {"bias": bias is not None, "softcap": softcap is not None, "logit_scale": logit_scale != 1.0}
    for name, is_given in given.items():
        if is_given:
            raise UserError(name, f"cannot be given with an LmHead, which has its own {name}", f"leave out {name}")
    return weight


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The checked arguments of `score` or `fused_loss`, except the differentiable tensors."""

    num_tokens: int  # N
    index: Tensor | None  # [M] int64, the labelled tokens; None: all
    rows: LabelledRows  # [M]
    softcap: float | None
    logit_scale: float
    entropy: bool
    budget: int  # bytes
    elementwise: Elementwise | None  # None: the reference
    poison: Tensor | None  # a scalar that is added to every score: 0, or NaN if `num_labels` is wrong

    def task(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> ScoringTask:
        """Return the `ScoringTask` for the given hidden states, weight and bias. Gradients flow to all three."""
        assert self.elementwise is not None
        sum_bytes = self.rows.inverse_temperature.element_size()
        head = BlockedHead(
            weight=weight,
            bias=None if bias is None else bias.contiguous(),
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            block=block_columns(len(weight)),
        )
        task = ScoringTask(
            hidden=hidden,
            index=self.index,
            rows=self.rows,
            head=head,
            elementwise=self.elementwise,
            fused=None,
            entropy=self.entropy,
            budget=usable_budget(self.budget, len(self.rows.labels), hidden.shape[1], sum_bytes=sum_bytes),
        )
        return task if self.elementwise is torch_elementwise else _with_fused_matmuls(task)

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter the values [M] of the labelled tokens to all tokens [N]. The other tokens get 0."""
        zeros = values.new_zeros(self.num_tokens)
        if self.poison is not None:
            values, zeros = values + self.poison, zeros + self.poison
        return values.clone() if self.index is None else zeros.index_copy(0, self.index, values)


def _with_fused_matmuls(task: ScoringTask) -> ScoringTask:
    """Return a copy of `task` that computes logits with the fused matmuls (`matmuls.py`).

    If the fused matmuls do not support `task`, return `task` itself.
    """
    if task.rows.kept is not None:  # the fused matmuls do not read the mask of a tile
        return task
    if matmuls.unsupported_reason(task.hidden, task.head.weight, task.operand_dtype) is not None:
        return task
    return replace(task, head=replace(task.head, block=matmuls.choose(task.head).block), fused=matmuls)


def full_logits_scores(hidden: Tensor, head: LmHead, call: Call) -> Scores:
    """Compute log-probabilities and entropies with all logits in memory at once (the reference backend)."""
    logprobs, entropy = full_scores(
        picked(hidden, call.index),
        head,
        call.rows.labels,
        call.rows.inverse_temperature,
        entropy=call.entropy,
        kept=call.rows.kept,
    )
    return Scores(logprobs=call.scatter(logprobs), entropy=None if entropy is None else call.scatter(entropy))


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        softmax = tiled_softmax(call.task(hidden, weight, bias))
        ctx.save_for_backward(hidden, weight, bias, softmax.peak, softmax.log_total, softmax.logprobs, softmax.entropy)
        return call.scatter(softmax.logprobs), None if softmax.entropy is None else call.scatter(softmax.entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias, peak, log_total, logprobs, entropy = ctx.saved_tensors
        call: Call = ctx.call
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_weight = weight.new_empty(weight.shape) if wants_weight else None
        grad_bias = weight.new_empty(len(weight)) if wants_bias else None
        task = call.task(hidden, weight, bias)
        grad_hidden = task.new_sums(task.num_rows, hidden.shape[1]) if wants_hidden else None
        upstream = Upstream(
            logprobs=torch.zeros_like(peak) if grad_logprobs is None else picked(grad_logprobs, call.index),
            entropy=None if grad_entropy is None else picked(grad_entropy, call.index),
        )
        with torch.autocast(hidden.device.type, enabled=False):
            tiled_gradients(
                task,
                Softmax(peak=peak, log_total=log_total, logprobs=logprobs, entropy=entropy),
                upstream,
                grad_hidden=grad_hidden,
                grad_weight=grad_weight,
                grad_bias=grad_bias,
            )
        return None if grad_hidden is None else restore_rows(task, grad_hidden), grad_weight, grad_bias, None


def picked(values: Tensor, index: Tensor | None) -> Tensor:
    """Select the labelled tokens of `values` [N, ...].

    `index` holds the indices of these tokens; None means that all tokens have a label.
    """
    return values.contiguous() if index is None else values[index]


def prepare(
    hidden: Tensor,
    head: LmHead,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    entropy: bool,
    num_labels: int | None,
    kept: KeptSets | None = None,
    memory: Memory,
    backend: Backend,
) -> Call:
    """Check the arguments of `score` or `fused_loss`, and find the labelled tokens."""
    for name, tensor in (("hidden", hidden), ("weight", head.weight), ("labels", labels), ("bias", head.bias)):
        if tensor is not None:
            need_tensor(name, tensor)
    _check_shapes(hidden, head.weight, labels, head.bias)
    if head.softcap is not None:
        need_number("softcap", head.softcap, SMALLEST, LARGEST, "give a number above 0, or None for no cap")
    need_number("logit_scale", head.logit_scale, -LARGEST, LARGEST, "give a finite number")
    if num_labels is not None:
        need_whole("num_labels", num_labels, 0, f"give the number of labels other than {IGNORE}")
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    inverse_temperature = _inverse_temperature(temperature, hidden, dtype)
    index, poison = _labelled_tokens(labels, num_labels)
    rows = LabelledRows(
        labels=picked(labels, index).to(torch.int64), inverse_temperature=picked(inverse_temperature, index)
    )
    if labels.device.type == "cpu":
        _check_labels(labels, rows.labels, len(head.weight))
    if kept is not None:
        rows = _with_kept(rows, kept, len(head.weight))
    return Call(
        num_tokens=len(labels),
        index=index,
        rows=rows,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        entropy=entropy,
        budget=budget_bytes(memory),
        elementwise=_choose_elementwise(backend, hidden),
        poison=poison,
    )


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise UserError("hidden", "is not supported", "give bfloat16, float32 or float64", value=hidden.dtype)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not len(weight):
        raise UserError(
            "hidden, weight",
            f"have shapes {tuple(hidden.shape)} and {tuple(weight.shape)}",
            "give hidden [N, D] and weight [V, D]",
        )
    if labels.shape != hidden.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(
            "labels",
            f"is {labels.dtype} of shape {tuple(labels.shape)}, but there are {len(hidden)} tokens",
            "give one integer per token",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(
            "bias",
            f"has shape {tuple(bias.shape)}, but the vocabulary has {len(weight)} entries",
            "give one number per vocabulary entry",
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise UserError(name, f"is {tensor.dtype}, but hidden is {hidden.dtype}", "use one dtype for both")
    for name, tensor in (("weight", weight), ("labels", labels), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise UserError(
                name, f"is on {tensor.device}, but hidden is on {hidden.device}", f"move it to {hidden.device}"
            )


def _inverse_temperature(temperature: float | Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / temperature of each token, as [N]."""
    if not isinstance(temperature, Tensor):
        need_number(
            "temperature",
            temperature,
            SMALLEST,
            LARGEST,
            "give a number above 0, or a tensor with one number per token",
        )
        return hidden.new_full((len(hidden),), 1 / temperature, dtype=dtype)
    need_tensor("temperature", temperature)
    if temperature.shape != hidden.shape[:1] or temperature.requires_grad:
        raise UserError(
            "temperature",
            f"has shape {tuple(temperature.shape)} and requires_grad={temperature.requires_grad} "
            f"for {len(hidden)} tokens",
            "give one number, or a tensor with one number per token that requires no gradient",
        )
    if temperature.device.type == "cpu" and not (temperature > 0).all():
        raise UserError("temperature", f"is {temperature.min().item()} for a token", "give numbers above 0")
    return temperature.to(dtype).reciprocal()


def _labelled_tokens(labels: Tensor, num_labels: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices [M] of the labelled tokens, and a scalar "poison" that is added to every score.

    The indices are None if all tokens have a label. The poison is None without `num_labels`, 0 if `num_labels` is
    right, and NaN if it is wrong.
    """
    labelled = labels != IGNORE
    if num_labels is None:
        index = labelled.nonzero()[:, 0]
        return (None if len(index) == len(labels) else index), None
    count = labelled.sum()
    if not 0 <= num_labels <= len(labels) or (labels.device.type == "cpu" and int(count) != num_labels):
        raise UserError(
            "num_labels",
            f"{num_labels} is not the number of labelled tokens among these {len(labels)} tokens",
            f"give the number of labels other than {IGNORE}",
        )
    poison = torch.where(count == num_labels, 0.0, float("nan"))
    if num_labels == len(labels):
        return None, poison
    # A stable sort puts the labelled tokens first. Unlike nonzero(), it has an output of known size, so the host does
    # not wait for the GPU.
    return (~labelled).to(torch.uint8).argsort(stable=True)[:num_labels], poison


def _check_labels(labels: Tensor, picked_labels: Tensor, vocabulary: int) -> None:
    outside = (picked_labels < 0) | (picked_labels >= vocabulary)
    if outside.any():
        label = int(picked_labels[outside][0])
        token = int((labels == label).nonzero()[0, 0])
        raise UserError(
            "labels", f"{label} at token {token} is outside the vocabulary", f"give labels from 0 to {vocabulary - 1}"
        )


def _with_kept(rows: LabelledRows, kept: KeptSets, vocabulary: int) -> LabelledRows:
    """Add the kept sets (ids that the softmax covers) to the labelled tokens `rows`.

    On the CPU, a label outside its kept set raises a `UserError`. On a GPU, the log-probability of such a label is NaN.
    """
    if len(kept) != len(rows.labels):
        raise UserError(
            "kept",
            f"has {len(kept)} kept sets for {len(rows.labels)} labelled tokens",
            "give one kept set per labelled token",
        )
    found = KeptRows.of_sets(kept, vocabulary, rows.labels.device)
    is_kept = found.contains(rows.labels)
    if rows.labels.device.type == "cpu" and not is_kept.all():
        row = int((~is_kept).nonzero()[0, 0])
        raise UserError(
            "kept",
            f"the kept set (allowed token ids) of labelled token {row} does not contain the token's label, "
            f"{int(rows.labels[row])}",
            "give the sets from which the labels were sampled, in the order of the labelled tokens",
        )
    return replace(rows, labels=torch.where(is_kept, rows.labels, vocabulary), kept=found)


def _choose_elementwise(backend: Backend, hidden: Tensor) -> Elementwise | None:
    """Return the elementwise functions (soft cap, softmax sums, gradients) of a backend, or None for the reference
    backend.
    """
    is_cuda = hidden.device.type == "cuda"
    if backend == "auto":
        can = is_cuda and hidden.dtype != torch.float64 and importlib.util.find_spec("triton") is not None
        backend = "triton" if can else "chunked"
    if backend == "reference":
        return None
    if backend == "chunked":
        return torch_elementwise
    if backend != "triton":
        raise UserError("backend", "is unknown", "give 'auto', 'reference', 'chunked' or 'triton'", value=backend)
    if importlib.util.find_spec("triton") is None:
        raise UserError("backend", "is 'triton', which is not installed", "install triton or use 'chunked'")
    if hidden.dtype == torch.float64:
        raise UserError("backend", "'triton' does not support float64", "use 'chunked'")
    from padfree.head import triton_elementwise as kernels

    if not is_cuda and not kernels.is_interpreted():
        raise UserError(
            "backend", f"'triton' does not run on {hidden.device.type}", "use 'chunked', or set TRITON_INTERPRET=1"
        )
    return kernels
