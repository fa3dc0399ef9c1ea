"""Plain HF code in float64: what the true numbers are, as far as a check can tell.

    float32, sdpa, 30 layers      gradients are up to 1e-3 away from float64: as a reference it would blame us for that
    float64, eager                weights and activations in float64, the weights being those of the files

transformers computes parts of a model in float32 whatever the model is in: RMSNorm, the softmax of eager attention,
routers. In a model of float64 that would be a loss, so inside `float64_throughout` an operation on a float64 tensor
that asks for float32 stays in float64. Rotary angles are part of the model's definition and stay what they are: their
buffers are float32, and are not touched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.distributed import Mesh
from padfree.model.load import named_tensors
from padfree.sizes import ModelSizes
from padfree.train.resolve_auto import device_memory

USABLE = 0.7
"""Of the memory that is free, what the reference may take."""

Found = TypeVar("Found")


class float64_throughout(TorchFunctionMode):  # noqa: N801  used as a block
    """A block in which operations on float64 tensors are not computed in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        given = (*args, *kwargs.values())
        wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in given)
        if wide and any(value is torch.float32 for value in given):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


@torch.no_grad()
def make_float64(model: PreTrainedModel) -> None:
    """Weights in float64, eager attention and eager experts; buffers that no file holds stay as they are."""
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # grouped matmuls have no float64


def float64_bytes(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """About what float64 takes besides the model in float32: weights, gradients, and the pass of the longest sample."""
    sizes, longest = ModelSizes.of(model.config), max(len(sample) for sample in samples)
    weights = sum(tensor.numel() for tensor in named_tensors(model).values()) * (4 + 8 + 8)
    activations = longest * 8 * (24 * sizes.layers * sizes.hidden + 4 * sizes.vocabulary)
    scores = longest**2 * 8 * 3 * sizes.layers * sizes.heads  # which eager attention keeps
    return float(weights + activations + scores)


def exact(
    samples: Sequence[Sample],
    mesh: Mesh,
    dtype: torch.dtype,
    load: Callable[[], PreTrainedModel],
    compute: Callable[[PreTrainedModel], Found],
) -> tuple[Found | None, str | None]:
    """What `compute` finds on rank 0 with the model of `load`, made float64; None on the other ranks.

    The text is why there is no float64 reference: no memory for it, or a model that does not run in it. Every rank
    calls it, and gets the same text.
    """
    found, obstacle = None, None
    model = load()
    if mesh.loss.rank == 0:
        obstacle = _obstacle(model, samples, mesh.device, dtype)
        if obstacle is None:
            make_float64(model)
            try:
                with float64_throughout():
                    found = compute(model)
            except (RuntimeError, TypeError, NotImplementedError) as error:  # a kernel or a cast that has no float64
                obstacle = f"float64 does not run: {' '.join(str(error).split())[:120]}"
    del model
    gc.collect()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    box = [obstacle]
    dist.broadcast_object_list(box, src=0, group=mesh.loss.group, device=torch.device("cpu"))
    return found, box[0]


def reference_line(dtype: torch.dtype, obstacle: str | None, what: str, attention: str) -> str:
    """Of the report: which reference was used, and why if it is not float64."""
    if obstacle is None:
        return f"transformers in float64, {what}, eager attention"
    return f"transformers in {str(dtype).removeprefix('torch.')} ({obstacle}), {what}, {attention} attention"


def _obstacle(
    model: PreTrainedModel, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> str | None:
    if device.type == "mps":
        return "the device has no float64"
    if dtype == torch.bfloat16 and ModelSizes.of(model.config).experts:
        return "in float64 other experts would be chosen"
    needed, free = float64_bytes(model, samples), USABLE * free_memory(device)
    if needed > free:
        return f"float64 needs about {needed / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB may be used"
    return None


def free_memory(device: torch.device) -> float:
    """Bytes that are free: on the GPU, or, as Linux says, on this machine."""
    if device.type == "cpu":
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                found = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
            return float(found) * 1024
        except (OSError, StopIteration, ValueError):
            pass  # another system: take what the machine has
    return device_memory(device)
