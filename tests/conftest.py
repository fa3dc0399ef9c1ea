"""What every test shares: reproducible random numbers, few threads, and where the real data is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile(
    "default",
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")

GSM8K = Path(os.environ.get("PADFREE_GSM8K", Path(__file__).parents[2] / "shared" / "data" / "gsm8k"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The folder of the real data."""
    if not (GSM8K / "solutions.jsonl").exists():
        pytest.skip(f"GSM8K is not there ({GSM8K}); set PADFREE_GSM8K to its folder")
    return GSM8K


@pytest.fixture(scope="session")
def gsm8k_solutions(gsm8k: Path) -> list[dict[str, object]]:
    """1,319 questions with four solutions of uneven length each, and whether each is right."""
    return [json.loads(line) for line in (gsm8k / "solutions.jsonl").read_text(encoding="utf-8").splitlines()]
