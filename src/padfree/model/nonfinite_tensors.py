"""Which tensors of a model hold NaN or infinity.

    weights   w0 w1 w2 ...      smallest and largest of each, on its device (NaN is both): no copy of the weights
              -> [n] flags      read by the host once, for all tensors of a device

Weights that are not finite can hide: an attention kernel may give 0 for a query whose scores are NaN, and a loss that
is a mean over few tokens may miss an embedding. So weights are looked at when they are loaded, and before they are
saved, and not only the losses that come of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def nonfinite_tensor(tensors: Mapping[str, Tensor], parameters: Collection[str] | None = None) -> str | None:
    """The first tensor of which this rank's part has a value that is not finite; None: all are finite.

    With `parameters` all other names are those of buffers, which may hold infinities (a mask), but no NaN.
    """
    flags: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in tensors.items():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if not local.is_floating_point() or local.dtype.itemsize < 2 or not local.numel():
            continue
        low, high = torch.aminmax(local)
        of_buffer = parameters is not None and name not in parameters
        wrong = low.isnan() if of_buffer else ~(low.isfinite() & high.isfinite())
        names, found = flags.setdefault(local.device, ([], []))
        names.append(name)
        found.append(wrong)
    wrongs = {
        name
        for names, found in flags.values()
        for name, wrong in zip(names, torch.stack(found).tolist(), strict=True)
        if wrong
    }
    return next((name for name in tensors if name in wrongs), None)
