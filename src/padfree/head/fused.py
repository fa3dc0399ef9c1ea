"""A loss and its gradient in one pass over the logits, with three matmuls.

The loss of a token may depend only on the token's own log-probability and entropy, as in SFT. So the gradient can be
computed while the logits are in memory. A loss that needs whole sequences, such as GSPO, uses `score`, which computes
the logits twice.

Scale the loss inside `token_loss`. A later factor that is not a power of two rounds a bfloat16 gradient a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.batch import LmHead
from padfree.errors import UserError
from padfree.head.budget import Memory
from padfree.head.chunks import Gradients, chunked_gradients
from padfree.head.elementwise import Softmax, Upstream
from padfree.head.scores import Backend, Call, as_head, full_logits_scores, prepare
from padfree.head.tiles import tiled_softmax
from padfree.kept_sets import KeptSets

TokenLoss = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""A function of (logprobs [c], entropy [c] or None, positions [c]) that returns c losses."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedLoss:
    """The result of `fused_loss`: the differentiable loss, and the detached log-probabilities and entropies of the
    tokens.
    """

    loss: Tensor  # [] the sum of all tokens' losses
    logprobs: Tensor  # [N] float32, 0 for tokens without a label
    entropy: Tensor | None  # [N] float32, 0 for tokens without a label; None if the entropy was not requested


def fused_loss(
    hidden: Tensor,
    weight: Tensor | LmHead,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    num_labels: int | None = None,
    kept: KeptSets | None = None,
    memory: Memory = "speed",
    backend: Backend = "auto",
) -> FusedLoss:
    """Return the sum of `token_loss` over all labelled tokens, differentiable in hidden, weight and bias.

    `token_loss(logprobs, entropy, positions)` returns the losses of a chunk of tokens. `positions` are indices into
    `hidden`, as in `advantages[positions]`. A token's loss may depend only on the log-probability and entropy of this
    token. Tensors that `token_loss` captures get no gradient.

    The other arguments are those of `score`.
    """
    if not callable(token_loss):
        raise UserError(
            "token_loss", "is not callable", "give a function of (logprobs, entropy, positions)", value=token_loss
        )
    head = as_head(weight, bias=bias, softcap=softcap, logit_scale=logit_scale)
    call = prepare(
        hidden, head, labels, temperature=temperature, entropy=entropy, num_labels=num_labels, kept=kept,
        memory=memory, backend=backend,
    )  # fmt: skip
    terms = _Terms(call, token_loss)
    if call.elementwise is None:
        return _reference(hidden, head, call, terms)
    inputs = (hidden, head.weight, head.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
            loss, logprobs, entropies = _FusedLoss.apply(*inputs, call, terms)  # type: ignore[no-untyped-call]
        else:
            softmax = tiled_softmax(call.task(*inputs))
            terms.evaluate(softmax.logprobs, softmax.entropy, 0)
            loss, logprobs, entropies = terms.results(softmax.logprobs, softmax.entropy)
    return FusedLoss(loss=loss, logprobs=logprobs, entropy=entropies)


class _Terms:
    """Calls the user's `token_loss` for each chunk and collects the losses."""

    def __init__(self, call: Call, token_loss: TokenLoss) -> None:
        self.call = call
        self.token_loss = token_loss
        self.losses: list[Tensor] = []

    def evaluate(self, logprobs: Tensor, entropy: Tensor | None, start: int) -> Tensor:
        """Call `token_loss` for the chunk at token `start`, check its losses, and store them detached."""
        end = start + len(logprobs)
        index = self.call.index
        positions = torch.arange(start, end, device=logprobs.device) if index is None else index[start:end]
        losses: object = self.token_loss(logprobs, entropy, positions)
        if not isinstance(losses, Tensor):
            raise UserError(
                "token_loss", f"returned a {type(losses).__name__}", "return a tensor with one loss per token"
            )
        if losses.shape != logprobs.shape:
            raise UserError(
                "token_loss",
                f"returned a tensor of shape {tuple(losses.shape)} for {len(logprobs)} tokens",
                "return one loss per token",
            )
        self.losses.append(losses.detach())
        return losses

    def score_gradient(self, softmax: Softmax, start: int) -> Upstream:
        """Return the gradient of a chunk's losses with respect to the log-probability and the entropy of each of its
        tokens.

        The chunk begins at labelled token `start`.
        """
        with torch.enable_grad():
            leaves = [softmax.logprobs.detach().requires_grad_()]
            if softmax.entropy is not None:
                leaves.append(softmax.entropy.detach().requires_grad_())
            losses = self.evaluate(leaves[0], leaves[1] if len(leaves) > 1 else None, start)
            if not losses.requires_grad:
                raise UserError(
                    "token_loss",
                    "returned a tensor without gradient",
                    "compute the loss from logprobs without detaching",
                )
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        # The gradient of a sum is one number expanded to all tokens, but kernels need one number per token in memory.
        logprobs, *entropy = (gradient.contiguous() for gradient in gradients)
        return Upstream(logprobs=logprobs, entropy=entropy[0] if entropy else None)

    def results(self, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the scalar loss, and the log-probabilities and entropies of all N tokens (0 for tokens without a
        label).
        """
        call = self.call
        loss = torch.cat(self.losses).sum()
        if call.poison is not None:
            loss = loss + call.poison
        return loss, call.scatter(logprobs), None if entropy is None else call.scatter(entropy)


def _reference(hidden: Tensor, head: LmHead, call: Call, terms: _Terms) -> FusedLoss:
    scores = full_logits_scores(hidden, head, call)
    index = slice(None) if call.index is None else call.index
    entropy = None if scores.entropy is None else scores.entropy[index]
    loss = terms.evaluate(scores.logprobs[index], entropy, 0).sum()
    return FusedLoss(
        loss=loss,
        logprobs=scores.logprobs.detach(),
        entropy=None if scores.entropy is None else scores.entropy.detach(),
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        task = call.task(hidden, weight, bias)
        if task.num_rows:
            softmax, ctx.gradients = chunked_gradients(task, terms.score_gradient, ctx.needs_input_grad[:3])
        else:
            softmax = tiled_softmax(task)
            terms.evaluate(softmax.logprobs, softmax.entropy, 0)
            ctx.gradients = tuple(
                torch.zeros_like(tensor) if wanted and tensor is not None else None
                for tensor, wanted in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
            )
        ctx.elementwise = call.elementwise
        loss, logprobs, entropy = terms.results(softmax.logprobs, softmax.entropy)
        ctx.mark_non_differentiable(logprobs, *(() if entropy is None else (entropy,)))
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_loss: Tensor, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        return (*hand_over(ctx, grad_loss, "fused_loss"), None, None)


def hand_over(ctx: Any, grad_loss: Tensor, name: str) -> Gradients:
    """Return the gradients that the forward pass stored, multiplied by the scalar `grad_loss` (the gradient of the
    loss).
    """
    if ctx.gradients is None:
        raise RuntimeError(f"{name}: backward was called a second time; set retain_graph=True in the first call")
    grad_hidden, grad_weight, grad_bias = ctx.gradients
    if torch._C._autograd._get_current_graph_task_keep_graph():
        grad_hidden, grad_weight, grad_bias = (
            None if gradient is None else gradient.clone() for gradient in ctx.gradients
        )
    else:
        # Return the stored gradients without a copy. They are not needed again, and a copy could take more memory than
        # everything else.
        ctx.gradients = None
    for gradient in (grad_hidden, grad_weight, grad_bias):
        if gradient is not None:
            ctx.elementwise.scale_(gradient, grad_loss)
    return grad_hidden, grad_weight, grad_bias
