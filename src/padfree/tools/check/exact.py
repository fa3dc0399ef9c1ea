"""Run plain transformers code in float64, as the reference with which `padfree check` compares packed training.

float32 is not precise enough: with 30 layers, gradients in float32 (with sdpa attention) differ from gradients in
float64 by up to 1e-3. The reference therefore has float64 weights and activations, and eager attention.

transformers converts to float32 in RMSNorm, in routers and in the softmax of eager attention, whatever the model's
dtype. `float64_throughout` prevents these conversions of float64 tensors. The float32 buffers with the rotary
frequencies stay as they are, because they are part of the model's definition.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import grid_sample
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from padfree.distributed import Mesh
from padfree.host_memory import free_host_memory
from padfree.model.named_tensors import named_tensors
from padfree.sample import Sample
from padfree.sizes import ModelSizes
from padfree.train.resolve_auto import device_memory

USABLE = 0.7
"""The fraction of free memory that the float64 reference may use. If it needs more, there is no float64 reference."""

Found = TypeVar("Found")


class float64_throughout(TorchFunctionMode):  # noqa: N801  used as a block
    """Context manager in which an operation on float64 tensors stays in float64, even if it asks for float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        given = (*args, *kwargs.values())
        wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in given)
        if wide and any(value is torch.float32 for value in given):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        if wide and function is grid_sample:  # does not promote types; the tower of GLM-4.1V gives it a float32 grid
            args = tuple(value.double() if isinstance(value, Tensor) else value for value in args)
            kwargs = {name: value.double() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


@torch.no_grad()
def make_float64(model: PreTrainedModel) -> None:
    """Convert weights and persistent buffers to float64. Use the eager implementations of attention and of experts."""
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # grouped matmuls do not support float64


def float64_bytes(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """Return the estimated memory in bytes that the float64 reference needs in addition to the float32 model.

    The reference needs memory for weights, gradients, and the activations of the longest sample.
    """
    sizes, longest = ModelSizes.of(model.config), max(len(sample) for sample in samples)
    weights = sum(tensor.numel() for tensor in named_tensors(model).values()) * (4 + 8 + 8)
    activations = longest * 8 * (24 * sizes.layers * sizes.hidden + 4 * sizes.vocabulary)
    scores = longest**2 * 8 * 3 * sizes.layers * sizes.heads  # attention scores, which eager attention stores
    return float(weights + activations + scores)


def exact(
    samples: Sequence[Sample],
    mesh: Mesh,
    dtype: torch.dtype,
    load: Callable[[], PreTrainedModel],
    compute: Callable[[PreTrainedModel], Found],
) -> tuple[Found | None, str | None]:
    """Load a model, convert it to float64, and return the result of `compute` on it, and None.

    If float64 is not possible, return None and the reason as text. Collective: only rank 0 computes, and the other
    ranks get None as the result.
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
            except (RuntimeError, TypeError, NotImplementedError) as error:  # a kernel does not support float64
                obstacle = f"the model does not run in float64: {' '.join(str(error).split())[:120]}"
    del model
    gc.collect()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    box = [obstacle]
    dist.broadcast_object_list(box, src=0, group=mesh.loss.group, device=torch.device("cpu"))
    return found, box[0]


def reference_line(dtype: torch.dtype, obstacle: str | None, what: str, attention: str) -> str:
    """Return a line for the report that says how plain transformers code computed the reference results.

    `obstacle`: why the results are not in float64, or None. `what`: what one call computes, e.g. "one sample at a
    time". `attention`: the attention implementation, ignored in float64.
    """
    if obstacle is None:
        return f"transformers in float64, {what}, eager attention"
    return f"transformers in {str(dtype).removeprefix('torch.')} ({obstacle}), {what}, {attention} attention"


def _obstacle(
    model: PreTrainedModel, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> str | None:
    if device.type == "mps":
        return "the device does not support float64"
    if dtype == torch.bfloat16 and ModelSizes.of(model.config).experts:
        return "float64 would route tokens to other experts"
    needed, free = float64_bytes(model, samples), USABLE * free_memory(device)
    if needed > free:
        return f"float64 needs about {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB can be used"
    return None


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a GPU or, if the device is a CPU, of this host."""
    if device.type == "cpu":
        return free_host_memory()
    return device_memory(device)
