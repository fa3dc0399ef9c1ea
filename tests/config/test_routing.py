"""The setting rollout.routing."""

from __future__ import annotations

from padfree.config import config_from_dict
from tests.refused import refused

MODEL = {
    "model": {"path": "model"},
    "data": {"path": ["prompts.jsonl"]},
    "batch": {"samples": 8, "max_tokens": 64},
    "run": {"folder": "run"},
    "loss": {"kind": "clip"},
}


def test_servers_replay_whole_responses_only() -> None:
    rollout = {"reward": "exact_match", "routing": "replay"}
    served = {**rollout, "engine": "vllm", "servers": ["http://h:1"]}
    assert config_from_dict({**MODEL, "rollout": rollout}).rollout.routing == "replay"
    assert config_from_dict({**MODEL, "rollout": served}).rollout.routing == "replay"
    with refused("rollout.routing", "servers do not return the chosen experts of interrupted responses"):
        config_from_dict({**MODEL, "rollout": {**served, "staleness": 1}})
