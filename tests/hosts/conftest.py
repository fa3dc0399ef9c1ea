"""Hosts, and a small model that they can all read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from padfree.testing.models import save_with_tokenizer
from tests.hosts.network import Host, connected_hosts, no_hosts_reason


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if reason := no_hosts_reason():
        pytest.skip(reason)
    with connected_hosts(3) as found:
        yield found


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True)
