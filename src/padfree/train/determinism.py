"""Reproducible steps: torch's modes, deterministic algorithms, and the random state of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def default_modes() -> Iterator[None]:
    """Context manager: in its block torch computes as at the start of a process, also if the caller is inside
    `no_grad`, `inference_mode`, `autocast` or a default device.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Context manager: if `wanted`, use deterministic algorithms, and raise an error for operations that have none."""
    if not wanted:
        yield
        return
    # torch refuses matmuls in deterministic mode unless this variable is set. cuBLAS reads it at its first use.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
