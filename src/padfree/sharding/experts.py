"""Expert parallelism: the ranks of a group hold different experts, and exchange the hidden states of tokens.

In each forward pass of a layer, a rank does the following:

    sort       sort hidden states by expert, with one copy for each expert that a token chose
    send       send each copy to the rank of its expert (all-to-all)
    compute    apply the experts of this rank, with the module's own forward
    return     send each output to the rank of its token (all-to-all)
    combine    sum the outputs of each token, weighted by the router

Nothing is padded or dropped. All ranks of a group must call each layer equally often.

The weights [E, ...] of E experts are divided along dimension 0 over a group. FSDP2 shards another dimension over the
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from padfree.distributed import exchange_rows
from padfree.model.stacked_experts import stacked_experts, undivided
from padfree.sharding.rules import Rule


def divide_experts(model: nn.Module, mesh: DeviceMesh, *, recompute: bool = False) -> list[Rule]:
    """Divide the experts of a model over the dimension `expert` of `mesh`, in place.

    Return the rule by which FSDP2 shards experts over the other dimensions, or [] if the experts cannot be divided.
    `mesh`: [fsdp, expert] or [replicate, fsdp, expert]. `recompute`: recompute the experts in backward.
    """
    over, rest = mesh["expert"], mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "expert")]
    if undivided(model, over.size(), mesh["fsdp"].size()) is not None:
        return []
    divided = stacked_experts(model)
    for module in divided:
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                part = distribute_tensor(parameter.detach(), over, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        forward = partial(divided_forward, module, group=over.get_group(), recompute=recompute)
        object.__setattr__(module, "forward", forward)
    found = set(divided)
    return [Rule("experts", lambda info: info.module in found, rest, split=over)]


class LocalExperts:
    """A view of a module with experts, in which weights contain only the experts of this rank."""

    def __init__(self, module: nn.Module, ranks: int) -> None:
        self._module = module
        self.num_experts = int(module.num_experts) // ranks  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


@torch.compiler.disable(reason="the host reads how many hidden states each rank sends")  # type: ignore[no-untyped-call, untyped-decorator]
def divided_forward(
    module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor, *, group: ProcessGroup, recompute: bool = False
) -> Tensor:
    """Compute experts that are divided over `group`: hidden [T, D], choices [T, k] and weights [T, k] -> [T, D].

    `choices` are the k experts of each token, and `weights` their router weights.
    """
    if recompute and torch.is_grad_enabled():
        return cast(Tensor, checkpoint(_forward, module, hidden, choices, weights, group, use_reentrant=False))
    return _forward(module, hidden, choices, weights, group)


def _forward(module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    local = LocalExperts(module, group.size())
    routes = exchange_routes(choices, local.num_experts, group)
    arrived = exchange(hidden[routes.order // choices.shape[1]], routes.send, routes.receive, group)
    computed = _compute(module, local, arrived, routes.experts)
    returned = exchange(computed, routes.receive, routes.send, group)
    back = torch.empty_like(routes.order)
    back[routes.order] = torch.arange(len(back), device=back.device)
    outputs = returned[back].view(*choices.shape, -1)
    return (outputs * weights[..., None]).sum(1).to(hidden.dtype)


def _compute(module: nn.Module, local: LocalExperts, rows: Tensor, experts: Tensor) -> Tensor:
    """Apply the experts of this rank to R hidden states: `rows` [R, D] -> [R, D]. `experts` [R] has the expert of each
    row.
    """
    own_forward = type(module).forward
    if len(rows) == 0:
        # A rank without rows computes one row of zeros. Its weights then get gradients of 0, and it takes part in the
        # exchanges of backward.
        row = rows.sum(0, keepdim=True)
        first = experts.new_zeros(1, 1)
        return cast(Tensor, own_forward(cast(nn.Module, local), row, first, row.new_ones(1, 1)))[:0]
    ones = rows.new_ones(len(rows), 1)
    return cast(Tensor, own_forward(cast(nn.Module, local), rows, experts[:, None], ones))


class Routes(NamedTuple):
    """Which rows (hidden states) this rank sends to each rank, and how many rows it receives from each."""

    order: Tensor  # [T k] indices of the flattened choices [T, k], sorted by expert and so by rank
    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each rank
    experts: Tensor  # [sum(receive)] index of each received row's expert among the experts of this rank


@torch.no_grad()
def exchange_routes(choices: Tensor, local: int, group: ProcessGroup) -> Routes:
    """Find which hidden states go to which rank. All ranks must call this.

    `choices` [T, k]: the experts that each token chose. `local`: the number of experts on each rank. The host
    synchronises with the device once.
    """
    ranks, flat = group.size(), choices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    bounds = torch.arange(local * ranks + 1, device=flat.device)
    counts = torch.searchsorted(flat[order], bounds).diff()  # [E] rows to each expert
    arriving = exchange_rows(counts, [local] * ranks, [local] * ranks, group).view(ranks, local)
    send, receive = torch.stack([counts.view(ranks, local).sum(1), arriving.sum(1)]).tolist()
    numbers = torch.arange(local, device=flat.device).repeat(ranks)
    experts = numbers.repeat_interleave(arriving.reshape(-1), output_size=sum(receive))
    return Routes(order, send, receive, experts)


class _Exchange(torch.autograd.Function):
    """`exchange_rows` with autograd: backward sends the gradients in the opposite direction."""

    @staticmethod
    def forward(context: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        context.send, context.receive, context.group = send, receive, group
        return exchange_rows(rows, send, receive, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return exchange_rows(gradient, context.receive, context.send, context.group), None, None, None


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send hidden states to all ranks, with autograd: [sum(send), D] -> [sum(receive), D], in rank order.

    `send[r]` hidden states go to rank r, and `receive[r]` come from it. All ranks must call this.
    """
    return cast(Tensor, _Exchange.apply(rows, send, receive, group))  # type: ignore[no-untyped-call]
