"""Rollouts: prompts, and the responses that the policy samples for them.

prompts          reads and tokenises prompts
base             Sampler: the interface between rollouts and the engine that samples
group            RolloutGroup: a prompt and its episodes (each is one response or several turns)
environment      multi-turn episodes
collect          Collector: turns groups of prompts into rewarded samples
engines          in_process: sampling in the training process; servers: sampling on inference servers
reward_workers   computes rewards with a time limit
response_log     stores responses on disk until the next checkpoint
sampling_rng     random numbers for sampling, identical on every device
truncation       top-k, top-p and min-p
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
