"""Read the routes (the experts that each token used) that a vLLM server returns with a completion.

vLLM returns base64 of a .npy file with unsigned integers [n + m - 1, L, k] for n prompt tokens, m sampled tokens, L
decoder layers and k experts per token. The last sampled token was never an input, so it has no routes.

vLLM returns k zeros for a token that it did not compute. No router chooses an expert twice, so routes with a repeated
expert are set to unknown.
"""

from __future__ import annotations

import io
from base64 import b64decode
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.model.routers import routers_of
from padfree.model.structure import layers_of
from padfree.routes import Routes, joined_routes, route_dtype, unknown_in

FIX = "set rollout.routing=recompute, or start a server with a supported version of vLLM"


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """Which decoder layers of the model have experts, and the number of experts in such a layer."""

    numbers: tuple[int, ...]
    num_layers: int
    num_experts: int


def routed_layers(model: PreTrainedModel) -> RoutedLayers:
    """Return the layers with experts of the trained model, in the order of its routers."""
    routers, layers = routers_of(model), layers_of(model)
    numbers = tuple(
        number for router in routers for number, layer in enumerate(layers) if router.module in set(layer.modules())
    )
    if len(numbers) != len(routers) or len({router.num_experts for router in routers}) != 1:
        raise UserError(
            "rollout.routing",
            f", but {type(model).__name__} has a router outside of the decoder layers, or routers with unequal numbers "
            "of experts",
            "set rollout.routing=recompute",
            "replay",
        )
    return RoutedLayers(numbers, len(layers), routers[0].num_experts)


def read_routed_experts(encoded: str, num_tokens: int, layers: RoutedLayers) -> Routes:
    """Return the routes [num_tokens, R, k] (the k experts of each token in R layers) of a prompt and its response.

    `encoded`: what the server returned. Raise a `UserError` if its format is wrong.
    """
    found = np.load(io.BytesIO(b64decode(encoded, validate=True)), allow_pickle=False)
    expected = (num_tokens - 1, layers.num_layers)
    if found.ndim != 3 or found.shape[:2] != expected or found.dtype.kind != "u":
        raise UserError(
            "routed_experts",
            f"is a {found.dtype} array {list(found.shape)}, but must be unsigned integers {[*expected, 'k']}",
            FIX,
        )
    top = found.shape[2]
    if top < 2:
        problem = "has one expert per token, so tokens without routes (zeros) cannot be told from tokens of expert 0"
        raise UserError("routed_experts", problem, FIX)
    chosen = found[:, list(layers.numbers)]
    if chosen.size and chosen.max() >= layers.num_experts:
        problem = f"contains expert {chosen.max()}, but the model has only {layers.num_experts} experts"
        raise UserError("routed_experts", problem, FIX)
    repeated = (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any(axis=(1, 2))
    dtype = route_dtype(layers.num_experts)
    known = np.where(repeated[:, None, None], unknown_in(dtype), chosen.astype(np.int16)).astype(dtype)
    routes = joined_routes([known, None], [len(known), 1])
    assert routes is not None
    return routes
