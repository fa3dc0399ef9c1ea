"""Determine the role of each parameter in a model. Optimizers and sharding rules depend on the role.

    hidden      [out, in]       a linear layer inside the model, adapters included
    expert      [E, out, in]    the linear layers of E experts; [out, in] if each expert is a module
    embedding   [V, D]          tokens and positions; also a head that is tied to the embedding
    head        [V, D]          output heads, scalar heads and routers
    vector                      everything else: norms, biases, short convolutions, decay rates

Roles follow from modules and dimensions, not from the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.model.routers import routers_of
from padfree.model.scalar_head import HEAD as SCALAR_HEAD

Role = Literal["hidden", "expert", "embedding", "head", "vector"]


def roles_of(model: nn.Module) -> dict[nn.Parameter, Role]:
    """Return the role of each parameter (hidden matrix, expert, embedding, head or vector) in the model's parameter
    order.

    Parameters may be sharded.
    """
    roles: dict[nn.Parameter, Role] = {}
    heads = {*_heads(model), *(router.module for router in routers_of(model))}
    apart = {each for module in model.modules() for each in _expert_modules(module)}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and roles.get(parameter) != "embedding":  # a tied parameter is an embedding
                roles[parameter] = _role(module, parameter, is_head=module in heads, is_expert=module in apart)
    for module in _embeddings(model):
        roles |= {parameter: "embedding" for parameter in module._parameters.values() if parameter is not None}
    return roles


def _role(module: nn.Module, parameter: nn.Parameter, *, is_head: bool, is_expert: bool) -> Role:
    if parameter.ndim == 3 and parameter.shape[0] == getattr(module, "num_experts", None):
        return "expert"
    if parameter.ndim == 2 and is_head:
        return "head"
    if parameter.ndim == 2 and isinstance(module, nn.Linear | Conv1D):
        return "expert" if is_expert else "hidden"
    return "vector"


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    yield from (module for module in model.modules() if isinstance(module, nn.Embedding))
    if isinstance(model, PreTrainedModel):
        yield model.get_input_embeddings()


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None  # type: ignore[no-untyped-call]
    yield from (each for each in (head, getattr(model, SCALAR_HEAD, None)) if isinstance(each, nn.Module))


def _expert_modules(block: nn.Module) -> Iterator[nn.Module]:
    experts = getattr(block, "experts", None)
    if isinstance(experts, nn.ModuleList):
        yield from experts.modules()
