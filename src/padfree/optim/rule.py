"""The interface of an update rule, which updates the parameters of a group and defines their optimizer state."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

Group = dict[str, Any]
"""`params`, the current `lr`, and the options of the rule: plain values, which a checkpoint writes as JSON."""

State = MutableMapping[Tensor, dict[str, Any]]
"""The state of each parameter: tensors that are sharded like the parameter, or scalars, by name."""


class UpdateRule(Protocol):
    """A rule is stateless: everything that it needs is in the group and in the state."""

    remembers: str
    """A description of the state, for users."""

    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        """Update the parameters of the group that have a gradient, with the gradient times `scale` []. Collective.

        If `finite` [] is false, neither parameters nor state change. `finite` and `scale` are on the device of the
        parameters; the host must not synchronise to read them.
        """
        ...

    def state_bytes(self, numbers: int) -> int:
        """Bytes of the state of a float32 parameter, or of a shard, with this number of elements."""
        ...


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor. It shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
