# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""`sample_token` as a Triton kernel, which reads the logits only once.

A program reads `BLOCK` logits of one response. It scales them as in `sample_token`, which gives x. It stores five
numbers for its block:

    peaks      the maximum of x
    totals     the sum of exp(x - maximum)
    bests      the maximum of x + noise
    choices    the token with this maximum of x + noise
    chosen     x of this token

Torch operations then combine the blocks. The noise equals `sampling_rng.gumbel_noise` up to rounding of the logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.arrays import SPLITMIX64
from padfree.batch import LmHead
from padfree.rollout.engines.in_process.sampled_tokens import SampledTokens
from padfree.rollout.sampling_rng import GREEDY

BLOCK = 2048
"""Number of vocabulary entries whose logits one Triton program reads."""

_INCREMENT, _FIRST, _SECOND = (tl.constexpr(number) for number in SPLITMIX64)
GREEDY_KEY = tl.constexpr(GREEDY)


@triton.jit
def _mixed(values):
    """Return the splitmix64 hashes of uint64 values."""
    values = values + _INCREMENT
    values = (values ^ (values >> 30)) * _FIRST
    values = (values ^ (values >> 27)) * _SECOND
    return values ^ (values >> 31)


@triton.jit
def _noise(key, position, token):
    """Return the float32 Gumbel noise of tokens at one position of the response with this key."""
    at_position = _mixed((key ^ position).to(tl.uint64))
    bits = (_mixed(at_position ^ token.to(tl.uint64)) >> 32).to(tl.uint32)
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    # If float64 logarithms differ in the last bit from torch's, the result differs in about one of 2**28 cases.
    return tl.where(key == GREEDY_KEY, 0.0, -(tl.log(-tl.log(uniform)).to(tl.float32)))


@triton.jit
def _noise_kernel(keys, positions, out, vocabulary, N: tl.constexpr):
    slot, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    noise = _noise(tl.load(keys + slot), tl.load(positions + slot), token)
    tl.store(out + slot * vocabulary + token, noise, mask=token < vocabulary)


@triton.jit
def _sample_kernel(
    logits, bias, keys, positions, peaks, totals, bests, choices, chosen, vocabulary, num_blocks, temperature,
    logit_scale, softcap, N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    slot, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * N + tl.arange(0, N)
    inside = token < vocabulary
    x = tl.load(logits + slot * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + token, mask=inside, other=0.0).to(tl.float32)
    x *= logit_scale
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(x / softcap))
        # This form of |softcap · tanh(x / softcap)| cannot overflow.
        magnitude = softcap * ((1.0 - small) / (1.0 + small))
        x = tl.where(x < 0.0, -magnitude, magnitude)
    x = tl.where(inside, tl.div_rn(x, temperature), float("-inf"))

    # A NaN cannot win the argmax. It stays in the sum of exponentials, so that the log-probability is NaN.
    comparable = tl.where(x == x, x, float("-inf"))
    peak = tl.max(comparable, axis=0)
    sums = comparable + _noise(tl.load(keys + slot), tl.load(positions + slot), token)
    choice = tl.argmax(sums, axis=0)
    place = slot * num_blocks + block
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    tl.store(bests + place, tl.max(sums, axis=0))
    tl.store(choices + place, block * N + choice)
    tl.store(chosen + place, tl.sum(tl.where(tl.arange(0, N) == choice, comparable, 0.0), axis=0))


def noise_of(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return the Gumbel noise [L, V] float32 that the Triton kernel adds. Tests compare it with `gumbel_noise`."""
    out = torch.empty(len(keys), vocabulary, dtype=torch.float32, device=keys.device)
    _noise_kernel[(len(keys), triton.cdiv(vocabulary, BLOCK))](keys, positions, out, vocabulary, N=BLOCK)
    return out


def sample_token(
    logits: Tensor, head: LmHead, keys: Tensor, positions: Tensor, temperature: float, *, block: int = BLOCK
) -> SampledTokens:
    """Sample the next token of each of L responses. `logits` [L, V].

    `keys` [L] int64: the random key of each response. `positions` [L] int64: the position of the new token in each
    response. `keys` and `positions` are contiguous.
    """
    num_slots, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, block)
    peaks, totals, bests, chosen = (
        torch.empty(num_slots, num_blocks, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    choices = torch.empty(num_slots, num_blocks, dtype=torch.int64, device=logits.device)
    _sample_kernel[(num_slots, num_blocks)](
        logits.contiguous(), head.bias, keys, positions, peaks, totals, bests, choices, chosen, vocabulary, num_blocks,
        temperature, head.logit_scale, 1.0 if head.softcap is None else head.softcap,
        N=block, HAS_BIAS=head.bias is not None, HAS_SOFTCAP=head.softcap is not None, num_warps=8,
    )  # fmt: skip
    winner = bests.argmax(1, keepdim=True)
    # A slot whose logits are all NaN has no winner. Its log-probability is NaN; the token must still be a valid id.
    tokens = choices.gather(1, winner)[:, 0].clamp(0, vocabulary - 1)
    peak = peaks.amax(1, keepdim=True)
    total = (totals * torch.exp(peaks - peak)).sum(1)
    return SampledTokens(tokens, chosen.gather(1, winner)[:, 0] - peak[:, 0] - torch.log(total))
