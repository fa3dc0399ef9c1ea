"""Rollouts in the training process: prompts, and the responses a model writes to them.

prompts   read_prompts: files to prompts in tokens, each with its row for the reward
noise     random numbers that follow from what they are for, on any device
local     write_responses: sampling from an ordinary HF model
"""

from padfree.rollout.local import Request, Response, stop_tokens, write_responses
from padfree.rollout.prompts import Prompt, Prompts, read_prompts

__all__ = [
    "Prompt",
    "Prompts",
    "Request",
    "Response",
    "read_prompts",
    "stop_tokens",
    "write_responses",
]
