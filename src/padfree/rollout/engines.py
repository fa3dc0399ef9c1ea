"""Which code samples for a `rollout.engine`, imported when it is asked for.

in_process, vllm     padfree's own
module:function      the user's: the function takes what `make_sampler` takes, and returns a `Sampler`
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from padfree.config import Config
from padfree.config.functions import UserFunction, is_path
from padfree.distributed import Mesh
from padfree.rollout.base import Sampler, Score

ENGINES = {
    "in_process": "padfree.rollout.in_process:make_in_process_sampler",
    "vllm": "padfree.rollout.vllm:make_vllm_sampler",
}
"""`module:function` for each engine."""

USER_ENGINE = UserFunction(
    setting="rollout.engine",
    noun="sampler",
    arguments=("config", "mesh", "trained", "tokenizer", "score"),
    result="a Sampler",
)
METHODS = ("update_weights", "sample", "metrics", "close")


def check_engine_name(name: str) -> None:
    """Refuse a user's engine that cannot be found. Nothing is imported."""
    if is_path(name):
        USER_ENGINE.check(name)


def make_sampler(config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score) -> Sampler:
    """The sampler that the settings name. Every rank calls it; `trained` is the model whose weights it will get.

    With `score` it can see that they have arrived.
    """
    name = config.rollout.engine
    if is_path(name):
        sampler = USER_ENGINE.load(name)(config, mesh, trained, tokenizer, score)
        missing = [method for method in METHODS if not callable(getattr(sampler, method, None))]
        if missing:
            raise ValueError(
                f"rollout.engine: {name!r} returned {type(sampler).__name__}, which has no {missing[0]}; return a "
                "padfree.rollout.base.Sampler"
            )
        found: Sampler = sampler
        return found
    module, function = ENGINES[name].split(":")
    found = getattr(import_module(module), function)(config, mesh, trained, tokenizer, score)
    return found
