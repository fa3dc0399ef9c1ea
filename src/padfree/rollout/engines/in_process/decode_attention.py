"""Attention of one new token in each lane to the keys before it, and the place of its own keys in the cache.

    lane             0                1                     a lane is a row of the decode step
    prompt, stored   7, 3             7, 3                  the prompt's keys are at places 7 8 9, for both
    own, written     20, 2            40, 0                 the lane's own keys are at 20 21, and none yet
    query sees       7 8 9 20 21 *    7 8 9 *               *: the new token, whose key goes to place 22, and to 40

    q [L, H, d]   k [L, Hkv, d]   v [L, Hkv, dv]   keys [M, Hkv, d]   values [M, Hkv, dv]   ->   out [L, H, dv]

`slots` [5 or more, L] holds these numbers in its rows, on the device: a step needs nothing from the host, and one CUDA
graph is right for all of them. A lane that is not active stores nothing and sees its own token alone. The host says
only how many keys in front of the new one a lane can have at most (`longest`).

`decode_attention` is an operator, so that a compiled layer around it stays one graph. On CUDA it is a Triton kernel
(`triton_decode_attention`); elsewhere, and in float64, it is the reference below.
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
    """[L, H, dv]; stores k and v in the cache."""
    active = slots[ACTIVE] != 0
    stored, written = (torch.where(active, slots[row], 0) for row in (STORED, WRITTEN))
    new = (slots[OWN] + written)[active]
    keys[new], values[new] = k[active], v[active]
    before = stored + written  # [L] keys in front of the new one
    number = torch.arange(int(before.max()), device=q.device)  # [N]
    places = torch.where(number < stored[:, None], slots[PROMPT][:, None] + number, _own_places(slots, stored, number))
    seen = number < before[:, None]  # [L, N]
    if window is not None:
        seen &= number > before[:, None] - window
    places = torch.where(seen, places, 0)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    all_keys, all_values = (
        torch.cat([cached[places], one[:, None]], dim=1).to(dtype) for cached, one in ((keys, k), (values, v))
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


def _own_places(slots: Tensor, stored: Tensor, number: Tensor) -> Tensor:
    return slots[OWN][:, None] + number - stored[:, None]


@torch.library.custom_op("padfree::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
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
    """[L, H, dv]; stores k and v in the cache."""
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
