"""Fused AdamW. Each rank updates its local shards as plain tensors, not as DTensors.

AdamW is elementwise and needs no communication. DTensor's dispatch would cost 20 ms of host time per step for 300
parameters, so the update uses plain tensors. The fused kernel reads the finite flag and the gradient scale on the
device, as with AMP's gradient scaler.

Split weights (`padfree.model.split_weight`) are updated in blocks of at most `BLOCK` elements: a block is joined to
float32 weights in temporary memory, the fused kernel updates them, and they are split again.

    weights   | w0        | w1 | w2                     |
    blocks    | w0        | w1 | w2[0:4] | | w2[4:8] .. |       the fused kernel gets the pieces of one block
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from padfree.model.split_weight import SplitStorage, SplitWeight, aligned, is_split
from padfree.optim.rule import Group, State, local

BLOCK = {"cuda": 1 << 26, "cpu": 1 << 22}
"""For each kind of device, the number of split weights that are joined at a time. On a GPU a block takes 256 MiB, and
the kernels of a block take longer than their launches.
"""


class AdamW:
    """The AdamW update rule. The options of its groups are `betas`, `eps`, `weight_decay` and `fused`.

    The option `fused` also tells torch, when it loads the optimizer's state, to put the step counter on the device.
    """

    remembers = "AdamW's two moments"

    @torch.no_grad()
    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not state[parameter]:
                state[parameter] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        options = _Options(group, finite, scale)
        options.update([_piece(parameter, state) for parameter in parameters if not is_split(parameter)])
        splits = [parameter for parameter in parameters if is_split(parameter)]
        for block in _blocks(splits, state, BLOCK[finite.device.type]):
            first, last = block[0], block[-1]
            joined = first.storage.join(first.start, last.stop)
            options.update(
                [
                    each.piece._replace(weight=joined[each.start - first.start : each.stop - first.start])
                    for each in block
                ]
            )
            first.storage.split(joined, first.start)
            del joined  # before the next block is joined

    def state_bytes(self, numbers: int) -> int:
        return 2 * 4 * numbers


class _Piece(NamedTuple):
    """The plain tensors of a parameter, or of a range of its elements."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class _SplitPiece(NamedTuple):
    """A range of a split weight. `piece.weight` is not joined yet."""

    storage: SplitStorage
    start: int  # in the storage
    stop: int
    piece: _Piece


class _Options:
    """The arguments of the fused kernel that are the same for all parameters of a group."""

    def __init__(self, group: Group, finite: Tensor, scale: Tensor | None) -> None:
        self.group = group
        self.grad_scale = None if scale is None else scale.reciprocal().float()
        self.found_inf = (~finite).float()

    def update(self, pieces: list[_Piece]) -> None:
        beta1, beta2 = self.group["betas"]
        adamw(
            [each.weight for each in pieces],
            [each.gradient for each in pieces],
            [each.exp_avg for each in pieces],
            [each.exp_avg_sq for each in pieces],
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


def _piece(parameter: Tensor, state: State) -> _Piece:
    own = state[parameter]
    assert parameter.grad is not None
    return _Piece(local(parameter), local(parameter.grad), local(own["exp_avg"]), local(own["exp_avg_sq"]), own["step"])


def _blocks(parameters: list[SplitWeight], state: State, most: int) -> Iterator[list[_SplitPiece]]:
    """Divide split weights into blocks of at most `most` elements. A block is one range of a storage."""
    block: list[_SplitPiece] = []
    for parameter in sorted(parameters, key=lambda each: (id(each.storage_), each.start)):
        own, gradient = state[parameter], parameter.grad
        assert gradient is not None
        flat = [gradient.reshape(-1), own["exp_avg"].view(-1), own["exp_avg_sq"].view(-1)]
        for begin in range(0, parameter.numel(), most):
            end = min(begin + most, parameter.numel())
            # the kernel increments the step counter of every piece
            step = own["step"] if end == parameter.numel() else own["step"].clone()
            start, stop = parameter.start + begin, parameter.start + end
            if block and not (
                block[-1].storage is parameter.storage_
                and aligned(block[-1].stop) == start
                and stop - block[0].start <= most
            ):
                yield block
                block = []
            gradients, first, second = (each[begin:end] for each in flat)
            unjoined = gradients.new_empty(0)
            block.append(_SplitPiece(parameter.storage_, start, stop, _Piece(unjoined, gradients, first, second, step)))
    if block:
        yield block
