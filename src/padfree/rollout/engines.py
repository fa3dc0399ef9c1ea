"""Which code samples for a `rollout.engine`, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from padfree.config import Config
from padfree.distributed import Mesh
from padfree.rollout.base import Sampler, Score

ENGINES = {
    "in_process": "padfree.rollout.in_process:make_in_process_sampler",
    "vllm": "padfree.rollout.vllm:make_vllm_sampler",
}
"""`module:function` for each engine; the function takes what `make_sampler` takes."""


def make_sampler(config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score) -> Sampler:
    """The sampler that the settings name. Every rank calls it; `trained` is the model whose weights it will get.

    With `score` it can see that they have arrived.
    """
    module, function = ENGINES[config.rollout.engine].split(":")
    sampler: Sampler = getattr(import_module(module), function)(config, mesh, trained, tokenizer, score)
    return sampler
