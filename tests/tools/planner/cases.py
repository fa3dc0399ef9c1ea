"""Shared by the planner's tests: settings of a run, and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.config import Config, config_from_dict


def config_of(**sections: dict[str, Any]) -> Config:
    """Settings with these sections changed."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "none"},
        "data": {"path": ["none"]},
        "batch": {"samples": 8, "max_tokens": 512},
        "run": {"folder": "runs"},
        "parallel": {"compile": "none", "checkpointing": "none", "reshard": True},  # not auto
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def log_normal(count: int, longest: int, seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(longest / 16), 1.0, count), 4, longest).astype(np.int64)
