"""AdamW. Each rank updates its local shards as plain tensors, not as DTensors.

AdamW is elementwise and needs no communication. DTensors would cost 20 ms of host time per step for 300 parameters. The
kernels read two values on the device: whether loss and gradients are finite, and the factor by which gradients are
multiplied.

With `optimizer.state=float32`, torch's fused kernel makes the step. For moments in bfloat16 or int8,
`padfree.optim.rounded_adamw` makes the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from padfree.optim.pieces import BLOCK, ParameterPiece, update_pieces
from padfree.optim.rounded_adamw import RoundedUpdate
from padfree.optim.rule import Group, State
from padfree.optim.state_format import new_state, state_bytes


class AdamW:
    """The AdamW update rule. The options of its parameter groups are `betas`, `eps`, `weight_decay`, `state` and
    `fused`.

    `fused` does not select a kernel here. It makes torch's `load_state_dict` move step counters to the device of the
    parameter.
    """

    remembers = "AdamW's two moments"

    @torch.no_grad()
    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not state[parameter]:
                state[parameter] |= new_state(parameter, group["state"])
        update = (
            _FusedUpdate(group, finite, scale)
            if group["state"] == "float32"
            else RoundedUpdate(group, parameters, state, finite, scale)
        )
        update_pieces(parameters, state, update, BLOCK[finite.device.type])

    def state_bytes(self, group: Group, numbers: int, columns: int) -> int:
        return state_bytes(group["state"], numbers, columns)


class _FusedUpdate:
    """Updates parameters by torch's fused AdamW kernel (`optimizer.state=float32`)."""

    def __init__(self, group: Group, finite: Tensor, scale: Tensor | None) -> None:
        self.group = group
        self.grad_scale = None if scale is None else scale.reciprocal().float()
        self.found_inf = (~finite).float()

    def __call__(self, pieces: list[ParameterPiece]) -> None:
        beta1, beta2 = self.group["betas"]
        adamw(
            [each.weight for each in pieces],
            [each.gradient for each in pieces],
            [each.state["exp_avg"] for each in pieces],
            [each.state["exp_avg_sq"] for each in pieces],
            [],
            [each.step for each in pieces],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )
