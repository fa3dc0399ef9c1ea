"""Fixtures for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from padfree.distributed import Mesh
from tests.train.cases import alone


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """The mesh of this single process."""
    yield alone()
    dist.destroy_process_group()
