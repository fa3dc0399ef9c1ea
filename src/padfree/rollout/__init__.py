"""Rollouts: prompts, and the responses that a policy writes to them.

prompts          read_prompts: files to prompts in tokens, each with its row for the reward
base             Sampler: the protocol between rollouts and whoever samples them
collect          Collector: groups of prompts to rewarded samples, in step with training or ahead of it
environment      episodes of several turns
engines          make_sampler: the sampler that `rollout.engine` names
in_process       the training process samples
  weights        PolicyModel: a model with the weights of the trained one, shared where that can be
  hf_cache       write_responses: transformers' own attention and cache, on any device
  decode         Decoder: lanes that are refilled, steps as CUDA graphs
  cached_model   an HF model whose attention keeps its keys and values in our cache
  kv_cache       the cache, and who has which part of it
  decode_attention, draw     the two kernels of a step, each with its reference; triton_* beside them
noise            random numbers that follow from what they are for, on any device
"""

from padfree.rollout.base import Response, Sampler, SamplingRequest
from padfree.rollout.hf_cache import stop_tokens, write_responses
from padfree.rollout.prompts import Prompt, Prompts, read_prompts

__all__ = [
    "Prompt",
    "Prompts",
    "Response",
    "Sampler",
    "SamplingRequest",
    "read_prompts",
    "stop_tokens",
    "write_responses",
]
