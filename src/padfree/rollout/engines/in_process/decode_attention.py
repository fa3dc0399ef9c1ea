"""Decode attention: one new token in each slot attends to the earlier keys, and its own key and value are cached.

A slot holds one response that is being sampled. Two slots with the same prompt:

    slot                              0                1
    prompt's keys: start, number      7, 3             7, 3
    response's keys: start, number    20, 2            40, 0
    cache indices of earlier keys     7 8 9 20 21      7 8 9
    cache index of the new key        22               40

    q [L, H, d]   k [L, Hkv, d]   v [L, Hkv, dv]   keys [M, Hkv, d]   values [M, Hkv, dv]   ->   out [L, H, dv]

`slots` [F, L]: start and number of the prompt's keys, start and number of the response's keys, and whether the slot is
active. `longest`: maximum number of earlier keys of a slot.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    longest: int,
) -> Tensor:
    """Reference implementation of `decode_attention`, in plain torch."""
    active = slots[ACTIVE] != 0
    stored, written = (torch.where(active, slots[field], 0) for field in (STORED, WRITTEN))
    new = (slots[OWN] + written)[active]
    keys[new], values[new] = k[active], v[active]
    before = stored + written  # [L] number of keys before the new one
    position = torch.arange(int(before.max()), device=q.device)  # [N]
    indices = torch.where(
        position < stored[:, None], slots[PROMPT][:, None] + position, _own_indices(slots, stored, position)
    )
    seen = position < before[:, None]  # [L, N]
    if window is not None:
        seen &= position > before[:, None] - window
    indices = torch.where(seen, indices, 0)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    all_keys, all_values = (
        torch.cat([cached[indices], one[:, None]], dim=1).to(dtype) for cached, one in ((keys, k), (values, v))
    )  # [L, N + 1, Hkv, d]
    heads = k.shape[1]
    grouped = q.to(dtype).view(len(q), heads, -1, q.shape[2])  # [L, Hkv, G, d]
    scores = torch.einsum("lhgd,lnhd->lhgn", grouped, all_keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.cat([seen, torch.ones_like(seen[:, :1]) if seen.shape[1] else seen.new_ones(len(q), 1)], dim=1)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, heads, -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, column], dim=3)
    probabilities = torch.softmax(scores, dim=3)[..., : seen.shape[1]]
    out = torch.einsum("lhgn,lnhd->lhgd", probabilities, all_values)
    return out.reshape(len(q), q.shape[1], v.shape[2]).to(q.dtype)


def _own_indices(slots: Tensor, stored: Tensor, position: Tensor) -> Tensor:
    return slots[OWN][:, None] + position - stored[:, None]


@torch.library.custom_op("padfree::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor | None,  # [H] learned scores in the softmax
    scale: float,
    window: int | None,  # number of keys that a token sees, including its own; None: all keys
    softcap: float | None,  # bound of the scores; None: no bound
    longest: int,
) -> Tensor:
    """Attend from the new token in each of L slots. Store k and v in the cache. Return the output [L, H, dv].

    The module docstring explains the tensors and `longest`.
    """
    if q.is_cuda and q.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from padfree.rollout.engines.in_process.triton_decode_attention import attend

        return attend(q, k, v, keys, values, slots, sinks, scale, window, softcap, longest)
    return reference(q, k, v, keys, values, slots, sinks, scale, window, softcap, longest)


@decode_attention.register_fake
def _shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    longest: int,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])
