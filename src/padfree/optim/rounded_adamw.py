"""AdamW with moments that are stored in bfloat16 or int8.

reference_adamw     the update in plain PyTorch, for the CPU
triton_adamw        the same update as one Triton kernel, for GPUs
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from padfree.optim.pieces import ParameterPiece
from padfree.optim.reference_adamw import Moment, ParameterRows, Step, update_reference
from padfree.optim.rule import Group, State
from padfree.optim.state_format import INT8, rows_of

Update = Callable[[ParameterRows, Step], None]


class RoundedUpdate:
    """The AdamW update of a group of parameters whose moments are bfloat16 or int8 (`optimizer.state`)."""

    def __init__(
        self, group: Group, parameters: list[Tensor], state: State, finite: Tensor, scale: Tensor | None
    ) -> None:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        grad_scale = None if scale is None else scale.float()
        self.options = Step(finite, grad_scale, group["lr"], beta1, beta2, group["eps"], decay)
        self.numbers = {parameter: number for number, parameter in enumerate(group["params"])}
        if not parameters:
            return
        counters = [state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(counters, finite.float())
        steps = torch.stack(counters).double()
        rate = group["lr"] / (1 - beta1**steps)
        correction = (1 - beta2**steps).rsqrt()
        factors = torch.stack([rate, correction], dim=1).float()
        self.factors = dict(zip(parameters, factors.unbind(), strict=True))
        self.steps = dict(zip(parameters, steps.long().unbind(), strict=True))

    def __call__(self, pieces: list[ParameterPiece]) -> None:
        for piece in pieces:
            self._update(piece)

    def _update(self, piece: ParameterPiece) -> None:
        if not piece.weight.numel():
            return
        columns = piece.parameter.shape[-1]
        moments = [
            Moment(piece.state[kind].view(-1, columns), _rows_like(piece.state.get(f"{kind}_scale"))) for kind in INT8
        ]
        rows = ParameterRows(
            weight=piece.weight.view(-1, columns),
            gradient=piece.gradient.reshape(-1, columns),
            exp_avg=moments[0],
            exp_avg_sq=moments[1],
            range=rows_of(piece.parameter).after(piece.first),
            factors=self.factors[piece.parameter],
            step=self.steps[piece.parameter],
            number=self.numbers[piece.parameter],
        )
        _implementation(piece.weight.device)(rows, self.options)


def _rows_like(scales: Tensor | None) -> Tensor | None:
    return None if scales is None else scales.view(-1, scales.shape[-1])


def _implementation(device: torch.device) -> Update:
    if device.type != "cuda" or find_spec("triton") is None:
        return update_reference
    from padfree.optim import triton_adamw

    return triton_adamw.update
