"""AdamW, and the norm of a gradient that is spread over ranks.

Weight decay falls on parameters of two dimensions and more (projections, embeddings, the head) and not on vectors
(norms, biases): pulling a norm's scale to 0 is no regularisation.

The gradient of a sharded parameter is a DTensor, of which each rank of the shard group has a part. The squares of
their norms are added up over that group once, in float64; replicas hold the same numbers and are not counted again.

With `parallel.offload` gradients are on the CPU and the optimizer steps there; norms are still added up on the device
of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from padfree.distributed import Mesh
from padfree.errors import UserError


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("model", f"{type(model).__name__} has no parameter that requires a gradient", "unfreeze some")
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return LocalAdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True)


class LocalAdamW(torch.optim.AdamW):
    """Fused AdamW that steps each rank's own part of sharded parameters as the plain tensor it is.

    AdamW works on each number by itself and needs no other rank. Through DTensor's dispatch a step of 300 parameters
    takes the host 20 ms.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            parameters, gradients, means, squares, largest, steps = ([_local(each) for each in some] for some in lists)
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                gradients,
                means,
                squares,
                largest,
                steps,
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_if(optimizer: torch.optim.Optimizer, finite: Tensor, factor: Tensor | None = None) -> None:
    """`optimizer.step()` with gradients times `factor` [] where `finite` [] is true, and nothing where not, without
    waiting for the device to say.

    Fused optimizers look at a flag on the device, and divide gradients by a number there as they read them (AMP's
    gradient scaler uses both). For others the host asks, and gradients are multiplied before.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Moved here and not by the optimizer, which would not wait for a flag that goes from the GPU to the CPU.
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = (~finite).float().to(device)  # type: ignore[attr-defined]
        optimizer.grad_scale = None if factor is None else factor.reciprocal().float().to(device)  # type: ignore[attr-defined]
        optimizer.step()
    elif finite.item():
        if factor is not None:
            scale_gradients((each for group in optimizer.param_groups for each in group["params"]), factor)
        optimizer.step()


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """[] float64: the norm of the whole gradient, the same on every rank."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shares = [_local(gradient) for gradient in gradients if isinstance(gradient, DTensor)]
    wholes = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    total = _sum_of_squares(shares, mesh)
    if shares:
        dist.all_reduce(total, group=mesh.fsdp.get_group(mesh.fsdp.ndim - 1))
    return (total + _sum_of_squares(wholes, mesh)).sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """All gradients times `factor` []."""
    shares = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if shares:
        torch._foreach_mul_(shares, factor.to(shares[0]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(tensors: list[Tensor], mesh: Mesh) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum().to(mesh.device)
