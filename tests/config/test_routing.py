"""The setting rollout.routing."""

from __future__ import annotations

import pytest

from padfree.config import config_from_dict
from padfree.errors import UserError


def test_servers_do_not_replay() -> None:
    rollout = {"reward": "exact_match", "routing": "replay"}
    assert config_from_dict({"rollout": rollout}).rollout.routing == "replay"
    with pytest.raises(
        UserError, match=r"rollout.routing: 'replay'; set rollout.routing=recompute: padfree does not read"
    ):
        config_from_dict({"rollout": {**rollout, "engine": "vllm", "servers": ["http://h:1"]}})
