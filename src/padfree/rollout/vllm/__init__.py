"""Rollouts from vLLM servers, over HTTP.

    trainer, rank 0     weights ──process group, or files──▶ server 0, server 1, ...   a canary checks that they arrived
    trainer, all ranks  prompts (token ids) ──HTTP──▶ the least loaded server ──▶ token ids, log-probabilities, version

http       one server: its routes, and a line for everything that can be wrong with an answer
pool       several servers: which one is asked next, what happens to the requests of one that fails
launch     servers that a run starts: flags, watching, restarts, the end
checks     whether a server is one for this run
keeper     the process between a run and its server: no server outlives the run, even one killed with -9
transfer   weights bucket by bucket, from a model that may be sharded
canary     whether the server's log-probabilities are those of the trainer
exchange   an exchange of weights with all servers, and its canary
sampler    all of it as a `Sampler`
plugin     the server's side of the transfer; vLLM finds it by an entry point, and it needs torch and safetensors only
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from padfree.config import Config
    from padfree.distributed import Mesh
    from padfree.rollout.base import Score
    from padfree.rollout.vllm.sampler import VllmSampler


def make_vllm_sampler(
    config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> VllmSampler:
    """Imported late: vLLM imports this package for the plugin, in an environment that need not have the rest."""
    from padfree.rollout import stop_tokens
    from padfree.rollout.vllm.sampler import VllmSampler

    return VllmSampler(config, mesh, trained, tokenizer, stops=stop_tokens(tokenizer, trained), score=score)
