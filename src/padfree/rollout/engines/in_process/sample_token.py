"""Sample one token for each of L responses from the softmax of its logits, with the Gumbel noise of `sampling_rng`.

    x = cap(logit_scale · (logits + bias)) / temperature       [L, V]     cap(y) = softcap · tanh(y / softcap)
    token = argmax(x + noise(key, position, token))            [L]        key: the random key of the response
    logprob = x[token] - logsumexp(x)                          [L]        position: of the token in the response

The keys and positions are on the device, so a decode step needs nothing from the host.

On CUDA, `sample_token` runs a Triton kernel; on other devices it runs `reference`. The kernel and `reference` add the
same float32 noise, but `reference` first subtracts logsumexp(x), so the sums are rounded differently. The sampled token
can therefore differ only if the two largest sums are equal up to rounding.
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
    """Sample the next token of each of L responses: the reference implementation, in plain torch.

    `logits` [L, V]: the products of the hidden states and the LM head. `keys` [L] int64: the random key of each
    response, from which its noise is computed. `positions` [L] int64: the position of the new token in each response.
    """
    scores = torch.log_softmax(scaled_logits(logits, head, temperature), dim=-1)
    tokens = gumbel_argmax(scores, keys, positions)
    return SampledTokens(tokens, scores.gather(1, tokens[:, None])[:, 0])


def sample_token(logits: Tensor, head: LmHead, keys: Tensor, positions: Tensor, temperature: float) -> SampledTokens:
    """Sample the next token of each response, with a Triton kernel if possible. Arguments: see `reference`."""
    if logits.is_cuda and importlib.util.find_spec("triton") is not None:
        from padfree.rollout.engines.in_process.triton_sample_token import sample_token as sample_token_on_cuda

        return sample_token_on_cuda(logits, head, keys, positions, temperature)
    return reference(logits, head, keys, positions, temperature)
