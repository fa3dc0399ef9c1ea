"""The interface of an update rule, such as AdamW or Muon: it updates the parameters of a group and defines their
optimizer state.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

Group = dict[str, Any]
"""A parameter group: `params`, the current `lr`, and the options of the update rule. The options are plain values,
which a checkpoint writes as JSON.
"""

State = MutableMapping[Tensor, dict[str, Any]]
"""The optimizer state.

The state of a parameter is a dict of scalars and of tensors that are sharded like the parameter.
"""


class UpdateRule(Protocol):
    """The interface of an update rule, such as AdamW or Muon, for a group of parameters.

    A rule is stateless: the group and the optimizer state hold everything that it needs.
    """

    remembers: str
    """A description of the optimizer state, for messages to users."""

    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        """Update the group's parameters that have a gradient. Gradients are multiplied by `scale`. Collective.

        If `finite` is false, neither parameters nor state change. `finite` and `scale` are scalar tensors on the
        device, so that the host need not synchronise.
        """
        ...

    def state_bytes(self, group: Group, numbers: int, columns: int) -> int:
        """Return the size in bytes of the optimizer state of float32 weights.

        `numbers` is the number of weights, and `columns` is the number of weights in each matrix row.
        """
        ...


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor that shares its memory. A plain tensor is returned
    unchanged.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
