"""Sample one token for each of L responses from the softmax of its logits.

    x = cap(logit_scale · (logits + bias)) / temperature     [L, V]     cap(y) = softcap · tanh(y / softcap)
    token = argmax(x + noise)                                [L]        noise: Gumbel noise of `sampling_rng`
    logprob = x[token] - logsumexp(x)                        [L]

The noise is computed on the device from the random key of the response, the position and the token.

On CUDA, a Triton kernel samples; other devices use `reference`. Kernel and `reference` can sample different tokens only
if the two largest values of x + noise are equal up to rounding.
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
    """Sample the next token of each of L responses, in plain torch.

    `logits` [L, V]: the products of hidden states and LM head. `keys` [L] int64: the random key of each response.
    `positions` [L] int64: the index of the new token in its response.
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
