"""Sample one token for each slot from the softmax of its logits, with the Gumbel noise of `sampling_rng`.

    logits [L, V] -> cap(logit_scale · (logits + bias)) / temperature = x      cap(y) = softcap · tanh(y / softcap)
    token = argmax(x + noise(key, position, token))        logprob = x[token] - logsumexp(x)       both [L]

Keys and positions are on the device, so a step needs nothing from the host. On CUDA, `sample_token` runs a Triton
kernel; on other devices it runs the reference. Both add the same float32 noise, so they sample the same token unless
the two largest sums differ by no more than rounding. The rounding differs, because only the reference subtracts
logsumexp(x) before it adds the noise.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.rollout.engines.in_process.sampled_tokens import SampledTokens
from padfree.rollout.sampling_rng import gumbel_argmax


def products(hidden: Tensor, head: LmHead) -> Tensor:
    """Return hidden @ weight.T, [L, D] -> [L, V]. On CUDA the result is float32, like the logits of the trainer."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, head.weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(hidden, head.weight)


def scaled_logits(logits: Tensor, head: LmHead, temperature: float) -> Tensor:
    """Return x [L, V] float32: the logits with bias, scale and soft cap, divided by the temperature."""
    logits = logits.float()
    if head.bias is not None:
        logits = logits + head.bias.float()
    logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / temperature


def reference(logits: Tensor, head: LmHead, keys: Tensor, positions: Tensor, temperature: float) -> SampledTokens:
    """Sample a token in each of L slots: the reference implementation.

    `logits` [L, V]: the products of the hidden states and the LM head. `keys` and `positions` [L] int64: the random key
    of each slot's response, and the position of the new token in the response.
    """
    scores = torch.log_softmax(scaled_logits(logits, head, temperature), dim=-1)
    tokens = gumbel_argmax(scores, keys, positions)
    return SampledTokens(tokens, scores.gather(1, tokens[:, None])[:, 0])


def sample_token(logits: Tensor, head: LmHead, keys: Tensor, positions: Tensor, temperature: float) -> SampledTokens:
    """Sample a token in each slot with the fastest implementation for the device. Arguments: see `reference`."""
    if logits.is_cuda and importlib.util.find_spec("triton") is not None:
        from padfree.rollout.engines.in_process.triton_sample_token import sample_token as sample_token_on_cuda

        return sample_token_on_cuda(logits, head, keys, positions, temperature)
    return reference(logits, head, keys, positions, temperature)
