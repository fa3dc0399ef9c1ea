"""Which code samples for a `rollout.engine`, imported when it is asked for.

in_process, vllm     padfree's own
module:function      the user's: the function takes what `make_sampler` takes, and returns a `Sampler`
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from padfree.config import Config
from padfree.config.functions import UserFunction, is_path
from padfree.distributed import Mesh
from padfree.rollout.base import AheadSampler, Sampler, Score

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
AHEAD_METHODS = (*METHODS, "begin", "renew", "stuck", "failure")


def check_engine_name(name: str) -> None:
    """Refuse a user's engine that cannot be found. Nothing is imported."""
    if is_path(name):
        USER_ENGINE.check(name)


def make_sampler(config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score) -> Sampler:
    """The sampler that the settings name. Every rank calls it; `trained` is the model whose weights it will get.

    With `score` it can see that they have arrived.
    """
    found: Sampler = _made(METHODS, "Sampler", config, mesh, trained, tokenizer, score)
    return found


def make_ahead_sampler(
    config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> AheadSampler:
    """The same, for `rollout.staleness` above 0."""
    found: AheadSampler = _made(AHEAD_METHODS, "AheadSampler", config, mesh, trained, tokenizer, score)
    return found


def _made(methods: Sequence[str], kind: str, config: Config, *rest: Any) -> Any:
    name = config.rollout.engine
    if not is_path(name):
        module, function = ENGINES[name].split(":")
        return getattr(import_module(module), function)(config, *rest)
    sampler = USER_ENGINE.load(name)(config, *rest)
    missing = [method for method in methods if not hasattr(sampler, method)]
    if missing:
        needed = f" for rollout.staleness {config.rollout.staleness}" if config.rollout.staleness else ""
        raise ValueError(
            f"rollout.engine: {name!r} returned {type(sampler).__name__}, which has no {missing[0]}; return a "
            f"padfree.rollout.base.{kind}{needed}"
        )
    return sampler
