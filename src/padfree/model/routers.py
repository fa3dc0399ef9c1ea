"""Find the routers of a mixture of experts, and record their choices.

    router(hidden [T, D]) -> logits [T, E], weights [T, k], choices [T, k]        as in transformers

There are T tokens, E experts and k chosen experts per token. A router is a module next to `experts`, with one weight
vector per expert. A forward hook records its calls while a `RouterRecorder` is on. The hook also works in compiled and
recomputed layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from padfree.errors import UserError

BIASES = ("e_score_correction_bias", "expert_bias")
"""The names of buffers [E] that are added to the scores of the E experts when experts are chosen, but not to the
weights of the chosen experts.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    module: nn.Module
    num_experts: int
    owner: nn.Module | None  # the module that has the bias: the router or its parent; None if there is no bias
    bias: str  # the name of the bias in `owner`; "" if there is none

    @property
    def by_sigmoid(self) -> bool:
        """Return whether the router scores each expert with a sigmoid, as routers with a bias do.

        Routers without a bias use a softmax over all experts.
        """
        return self.bias != ""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities [T, E] of the experts for each token, in float32. The probabilities of a token sum
        to 1.
        """
        if not self.by_sigmoid:
            return logits.float().softmax(-1)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def routers_of(model: nn.Module) -> list[Router]:
    """Return all routers of the model, in the order of its modules. The list is empty if the model has no experts."""
    found = []
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        count = len(experts) if isinstance(experts, nn.ModuleList) else int(getattr(experts, "num_experts", 0))
        for name, child in block.named_children():
            weight = getattr(child, "weight", None)
            if name != "experts" and isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == count:
                found.append(_router(child, block, count))
    return found


def _router(module: nn.Module, block: nn.Module, num_experts: int) -> Router:
    for owner in (module, block):
        for bias in BIASES:
            if isinstance(owner._buffers.get(bias), Tensor):
                return Router(module=module, num_experts=num_experts, owner=owner, bias=bias)
    return Router(module=module, num_experts=num_experts, owner=None, bias="")


class RouterRecorder:
    """Records the calls of a model's routers while `on` is True.

    If `own` is True, the recorded choices are those of the routers themselves, even if route replay replaces these
    choices.
    """

    def __init__(self, routers: list[Router], *, own: bool = False) -> None:
        self.on, self._own = False, own
        # (index of the router, logits [T, E], choices [T, k]) of each call
        self.calls: list[tuple[int, Tensor, Tensor]] = []
        for number, router in enumerate(routers):
            router.module.register_forward_hook(self._hook(number, router.num_experts))

    def record(self, on: bool) -> None:
        """Start recording if `on` is True, else stop."""
        self.on = on

    def clear(self) -> None:
        self.calls.clear()

    def _hook(self, number: int, num_experts: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self.on:
                logits, choices = _parts(module, output, num_experts, own=self._own)
                self.calls.append((number, logits, choices))

        return keep


def _parts(module: nn.Module, output: Any, num_experts: int, *, own: bool) -> tuple[Tensor, Tensor]:
    """Return the logits [T, E] and the choices [T, k] that are among the outputs of a router.

    Under route replay, `own` selects the choices that the router would make itself, instead of the replayed ones.
    """
    tensors = [each for each in output if isinstance(each, Tensor)] if isinstance(output, tuple) else []
    choices = [each for each in tensors if not each.dtype.is_floating_point and each.dtype != torch.bool]
    logits = [each for each in tensors if each.dtype.is_floating_point and each.shape[-1] == num_experts]
    if not choices or not logits:
        raise UserError(
            "loss.load_balancing",
            f"is not supported for {type(module).__name__}, which does not return router logits and chosen experts",
            "remove loss.load_balancing and loss.router_bias",
        )
    chosen: Tensor = getattr(choices[0], "own_choices", choices[0]) if own else choices[0]
    return logits[0].reshape(-1, num_experts), chosen.reshape(-1, chosen.shape[-1])
