# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""`draw` as a Triton kernel: logits are read once, and neither scores nor noise are ever stored.

    grid (lane, block of the vocabulary)     a program leaves five numbers of its `BLOCK` logits
      -> peaks, totals    [L, blocks]        maximum of x, and the sum of exp(x - maximum)
      -> bests, choices   [L, blocks]        the best x + noise, and the token it belongs to
      -> chosen           [L, blocks]        x of that token
    and a few torch operations on these      token [L], logprob [L]

The noise is that of `noise.gumbel_noise`: 64-bit integers that wrap, and two logarithms in float64 that are rounded to
float32 at the end. Two libraries whose float64 logarithms differ in the last bit give the same float32 but for one case
in 2**28 or so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.model.outputs import LmHead
from padfree.rollout.draw import Drawn
from padfree.rollout.noise import FIRST_FACTOR, INCREMENT, SECOND_FACTOR

BLOCK = 2048
"""Tokens of the vocabulary for one program."""

_INCREMENT, _FIRST, _SECOND = (tl.constexpr(value) for value in (INCREMENT, FIRST_FACTOR, SECOND_FACTOR))


@triton.jit
def _mixed(values):
    """splitmix64 of uint64."""
    values = values + _INCREMENT
    values = (values ^ (values >> 30)) * _FIRST
    values = (values ^ (values >> 27)) * _SECOND
    return values ^ (values >> 31)


@triton.jit
def _draw_kernel(
    logits, bias, keys, positions, peaks, totals, bests, choices, chosen, vocabulary, num_blocks, temperature,
    logit_scale, softcap, N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * N + tl.arange(0, N)
    inside = token < vocabulary
    x = tl.load(logits + lane * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + token, mask=inside, other=0.0).to(tl.float32)
    x *= logit_scale
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(x / softcap))
        magnitude = softcap * ((1.0 - small) / (1.0 + small))  # of the tanh; this form cannot overflow
        x = tl.where(x < 0.0, -magnitude, magnitude)
    x = tl.where(inside, tl.div_rn(x, temperature), float("-inf"))

    at_position = _mixed((tl.load(keys + lane) ^ tl.load(positions + lane)).to(tl.uint64))
    bits = (_mixed(at_position ^ token.to(tl.uint64)) >> 32).to(tl.uint32)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    noise = -(tl.log(-tl.log(uniform)).to(tl.float32))

    peak = tl.max(x, axis=0)
    sums = x + noise
    choice = tl.argmax(sums, axis=0)
    place = lane * num_blocks + block
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(x - peak), axis=0))
    tl.store(bests + place, tl.max(sums, axis=0))
    tl.store(choices + place, block * N + choice)
    tl.store(chosen + place, tl.sum(tl.where(tl.arange(0, N) == choice, x, 0.0), axis=0))


def draw(
    logits: Tensor, head: LmHead, keys: Tensor, positions: Tensor, temperature: float, *, block: int = BLOCK
) -> Drawn:
    """`logits` [L, V] contiguous; `keys` and `positions` [L] int64, contiguous."""
    num_lanes, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, block)
    peaks, totals, bests, chosen = (
        torch.empty(num_lanes, num_blocks, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    choices = torch.empty(num_lanes, num_blocks, dtype=torch.int64, device=logits.device)
    _draw_kernel[(num_lanes, num_blocks)](
        logits.contiguous(), head.bias, keys, positions, peaks, totals, bests, choices, chosen, vocabulary, num_blocks,
        temperature, head.logit_scale, 1.0 if head.softcap is None else head.softcap,
        N=block, HAS_BIAS=head.bias is not None, HAS_SOFTCAP=head.softcap is not None, num_warps=8,
    )  # fmt: skip
    winner = bests.argmax(1, keepdim=True)
    # A lane of NaN has no winner within the vocabulary; its log-probability says so, and its token must be one.
    tokens = choices.gather(1, winner)[:, 0].clamp(0, vocabulary - 1)
    peak = peaks.amax(1, keepdim=True)
    total = (totals * torch.exp(peaks - peak)).sum(1)
    return Drawn(tokens, chosen.gather(1, winner)[:, 0] - peak[:, 0] - torch.log(total))
