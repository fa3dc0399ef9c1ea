"""Rollouts: prompts, and the responses that a policy writes to them.

prompts          read_prompts: files to prompts in tokens, each with its row for the reward
base             Sampler: the protocol between rollouts and whoever samples them
collect          Collector: groups of prompts to rewarded samples, in step with training or ahead of it
environment      episodes of several turns
engines          make_sampler: the sampler that `rollout.engine` names
  in_process     the training process samples
  servers        servers sample, whichever engine they run; vllm is one such engine
loop_thread      an event loop in a thread of its own, for episodes and for servers
noise            random numbers that follow from what they are for, on any device
"""

from padfree.rollout.base import Response, Sampler, SamplingRequest
from padfree.rollout.engines.in_process.hf_cache import stop_tokens, write_responses
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
