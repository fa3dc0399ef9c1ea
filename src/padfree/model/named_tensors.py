"""The tensors of a model by their names in Hugging Face files, and the part of each that this rank holds.

For example, two ranks hold these rows of a weight:

    weight [6, 3], FSDP2 over 2 ranks        rank 0 holds [0:3], rank 1 holds [3:6]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")
"""Parts that activation checkpointing, torch.compile and PEFT add to the names of parameters."""

Region = tuple[slice, ...]


def clean_name(name: str) -> str:
    """Return the name of a parameter in HF files, without the parts that checkpointing, torch.compile and PEFT add to
    it.
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.lstrip(".")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer of a model by its name in HF files.

    A tied tensor appears once, under the first of its names. Under FSDP2, the tensors are sharded.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves units unsharded
    tensors: dict[str, Tensor] = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[clean_name(f"{module_name}.{name}")] = buffer
    return tensors


def local_region(tensor: Tensor) -> Region:
    """Return the part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank that holds a parameter must be in the device mesh of the parameter"
    return region_of(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def region_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Region:
    """Return the part of a tensor of this shape that the rank at `coordinate` of the mesh holds.

    [5, 2] sharded in dim 0 over 2 ranks -> rows [0:3] at coordinate 0, rows [3:5] at coordinate 1.
    """
    bounds = [(0, size) for size in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        assert type(placement) is Shard, f"{placement}: only Shard and Replicate are known here"
        begin, end = bounds[placement.dim]
        part = -(-(end - begin) // size)
        bounds[placement.dim] = (min(begin + index * part, end), min(begin + (index + 1) * part, end))
    return tuple(slice(begin, end) for begin, end in bounds)


def sharded_like(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros with the given shape and dtype that is sharded like `parameter`.

    If the last dimension of `parameter` is not sharded, `shape` may have another size in this dimension.
    """
    if torch.Size(shape) == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    sizes = [part.stop - part.start for part in local_region(parameter)]
    zeros = torch.zeros(*sizes[:-1], shape[-1], dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty(*shape, device="meta")
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    ).to(parameter.device)  # offloaded parameters are on the CPU, the mesh is not


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor. The result shares the memory of the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
