"""Find tensors of a model that hold NaN or infinity.

The minimum and the maximum of each tensor are computed on its device. Both are NaN if any value of the tensor is NaN,
so they show whether all values are finite. The results for all tensors of a device are read in one synchronisation.

A finite loss does not prove finite weights: an attention kernel can return 0 for a query whose scores are NaN, and a
batch does not use every embedding. Weights are therefore checked when they are loaded and before they are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from padfree.model.named_tensors import clean_name, named_tensors


def nonfinite_tensor(tensors: Mapping[str, Tensor], parameters: Collection[str] | None = None) -> str | None:
    """Return the name of the first tensor with a non-finite value in this rank's part, or None if all are finite.

    `parameters` are the names of the parameters (None: all). The other tensors are buffers, which may hold infinity but
    not NaN.
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


def nonfinite_weight(model: nn.Module) -> str | None:
    """Return the name in HF files of the first tensor with a non-finite value in this rank's part, or None if all are
    finite.
    """
    return nonfinite_tensor(named_tensors(model), {clean_name(name) for name, _ in model.named_parameters()})
