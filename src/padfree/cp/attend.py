"""Attention of this rank's queries to all keys that they see, some of which may be on other ranks.

The T tokens of a pack are divided over `world` ranks, so q, k and v are [T/world, ...] on each rank. With world = 1,
nothing is sent. Otherwise, the ranks exchange tensors by the context-parallel method: allgather, ring or ulysses.

`communication_bytes` counts what each rank sends for one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from padfree.arrays import need_whole
from padfree.attention import varlen_attention
from padfree.attention.prefix_attention import prefix_attention
from padfree.batch import AttnContext, Layout, need_tensor
from padfree.cp.allgather import attend_allgather
from padfree.cp.context_plan import ContextPlan, Pieces
from padfree.cp.image_blocks import attend_whole_pack
from padfree.cp.keys import key_traffic
from padfree.cp.ranges import Indices
from padfree.cp.ring import attend_ring
from padfree.cp.shard import METHODS, need_group
from padfree.cp.ulysses import attend_ulysses, check_heads
from padfree.errors import UserError
from padfree.segments import Segments

_ATTEND: dict[str, Callable[..., Tensor]] = {
    "allgather": attend_allgather,
    "ring": attend_ring,
    "ulysses": attend_ulysses,
}
assert tuple(_ATTEND) == METHODS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttnContext,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    image_blocks: bool = False,
) -> Tensor:
    """Compute attention of this rank's tokens, each of which sees only its own sample; differentiable.

    q [T/world, H, d], k [T/world, Hkv, d], v [T/world, Hkv, dv] -> [T/world, H, dv]. Sum the gradient of `sinks` [H]
    over the ranks. With `image_blocks`, the tokens of an image attend to each other.
    """
    segments = context.segments
    expected = segments.num_tokens // context.world
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        need_tensor(name, tensor)
        if tensor.shape[:1] != (expected,):
            raise UserError(
                name,
                f"has shape {tuple(tensor.shape)}, but this rank has {expected} tokens",
                "give a tensor with one element per token in its first dimension",
            )
    if window is not None:
        need_whole("window", window, 1, "give a window of 1 or more with causal=True, or window=None")
    if window is not None and window >= segments.num_positions:
        window = None  # no sample is longer than the window
    if segments.parents is not None and not causal:
        raise UserError(
            "causal", "False is not supported for samples that share prefixes", "pack with share_prefixes=False"
        )
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "backend": context.backend,
    }
    blocks = context.image_blocks if image_blocks else None
    if blocks is not None and context.layout is None:
        return attend_whole_pack(q, k, v, blocks, **options)
    if context.prefix_keys is not None and context.layout is None:
        options.pop("causal")
        return prefix_attention(q, k, v, segments, context.prefix_keys, **options)
    if context.layout is None:
        out: Tensor = varlen_attention(q, k, v, segments, segments, **options)
        return out
    if window is not None and not causal:
        raise UserError("window", f"{window} cannot be used with causal={causal}", "set causal=True, or window=None")
    if context.method not in _ATTEND:
        raise UserError("method", "is unknown", f"choose one of {', '.join(METHODS)}", value=context.method)
    plan = context.plan
    assert isinstance(plan, ContextPlan)
    return _ATTEND[context.method](q, k, v, plan, need_group(context), image_blocks=blocks, **options)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Communication:
    """The bytes that context ranks send for one attention layer. Element (i, j) of each array is the number of bytes
    that rank i sends to rank j.
    """

    forward_links: Indices  # [world, world]
    backward_links: Indices  # [world, world]

    @property
    def forward(self) -> Indices:
        """Return the bytes that each rank sends in the forward pass of the attention layer, as an array [world]."""
        sent: Indices = self.forward_links.sum(axis=1)
        return sent

    @property
    def backward(self) -> Indices:
        """Return the bytes that each rank sends in the backward pass of the attention layer, as an array [world]."""
        sent: Indices = self.backward_links.sum(axis=1)
        return sent


def communication_bytes(
    method: str,
    layout: Layout,
    segments: Segments,
    *,
    num_heads: int,
    num_key_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    element_size: int = 2,
    window: int | None = None,
) -> Communication:
    """Count the bytes that context ranks send to each other for one causal attention layer.

    `method` is the context-parallel method: allgather, ring or ulysses.
    """
    world, share = layout.world, layout.num_tokens // layout.world
    value_dim = head_dim if value_dim is None else value_dim
    key_bytes = num_key_heads * (head_dim + value_dim) * element_size
    if method == "allgather":
        # Forward: keys and values go to their readers. Backward: gradients return to the owners.
        moved = key_traffic(Pieces(layout, segments), window=window)  # [reader, owner]
        return Communication(forward_links=moved.T * key_bytes, backward_links=moved * key_bytes)
    if method == "ring":
        block = share * key_bytes
        gradient = share * num_key_heads * (head_dim + value_dim) * max(4, element_size)
        to_next = np.roll(np.eye(world, dtype=np.int64), 1, axis=1)
        # In both passes, a block in each of world - 1 steps. In backward also its gradient, in each of world steps.
        return Communication(
            forward_links=(world - 1) * block * to_next,
            backward_links=((world - 1) * block + world * gradient) * to_next,
        )
    if method == "ulysses":
        check_heads(num_heads, num_key_heads, world)
        # A rank keeps 1/world of its q, k, v and output (backward: of their gradients) and sends the rest.
        copied = max(num_key_heads, world)
        token_bytes = (
            num_heads // world * (head_dim + value_dim) + copied // world * (head_dim + value_dim)
        ) * element_size
        to_others = share * token_bytes * (1 - np.eye(world, dtype=np.int64))
        return Communication(forward_links=to_others, backward_links=to_others)
    raise UserError("method", "is unknown", f"choose one of {', '.join(METHODS)}", value=method)
