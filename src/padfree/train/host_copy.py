"""A tensor on its way to the host, while the device goes on.

    host      begin A | copy A | begin B | wait for A | ...
    device    A A A A A A A A  copy  B B B B B B B B B

Without it the host would wait for everything that it has begun since, and the device for the host after that.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class HostCopy:
    """Of a tensor as it is when the device is done with what was begun before. On the CPU it is the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.arrived = tensor, cast(Any, None)  # an event with a time; None on the CPU
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.arrived.record()

    def wait(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self._tensor
