"""Fixtures for the tests of training."""

from __future__ import annotations

import pytest

from padfree.distributed import Mesh
from tests.train.cases import alone


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """The mesh of this single process."""
    return alone()
