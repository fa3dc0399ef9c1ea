"""Rollouts: prompts, and the responses that the policy samples for them.

prompts          read_prompts: reads files and returns tokenised prompts, each with the data row that its reward needs
base             Sampler: the interface between rollouts and the engine that samples
group            RolloutGroup: a prompt, its episodes (each is one response or several turns), and their samples
collect          Collector: turns groups of prompts into rewarded samples, synchronously or ahead of training
environment      multi-turn episodes
engines          make_sampler: makes the sampler that `rollout.engine` names
  in_process     sampling in the training process
  servers        sampling on inference servers, independent of the engine that they run; vllm is one engine
response_log     stores on disk the responses that were sampled since the last checkpoint
sampling_rng     counter-based random numbers for sampling, identical on every device
truncation       top-k, top-p and min-p
token_ids        checks token ids and responses from user code and servers
loop_thread      an asyncio event loop in its own thread, for episodes and for servers
reward_workers   computes rewards with a time limit: in threads or processes, or by a model
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
