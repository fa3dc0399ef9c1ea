"""What an update rule is: how the parameters of a group are stepped, and what it remembers of each."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

Group = dict[str, Any]
"""`params`, the present `lr`, and the options of the rule; plain values, which a checkpoint writes as JSON."""

State = MutableMapping[Tensor, dict[str, Any]]
"""By parameter: tensors that are sharded as the parameter is, or have no dimensions."""


class UpdateRule(Protocol):
    """A rule keeps nothing itself: what it needs is in the group and in the state."""

    remembers: str
    """What the state is, in words for a user."""

    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        """Step the parameters of the group that have a gradient, with the gradient times `scale` [].

        Neither parameters nor state change if `finite` [] is false. The host must not wait for the device to find out.
        Both are on the device of the parameters. All ranks call it alike.
        """
        ...

    def state_bytes(self, numbers: int) -> int:
        """Of the state of a float32 parameter, or of a shard of one, with so many numbers."""
        ...


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
