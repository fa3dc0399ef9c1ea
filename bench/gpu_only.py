"""For benchmarks that need a CUDA device: find the device, or stop with a message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine


def cuda_device() -> tuple[torch.device, dict[str, Any]]:
    """Return the CUDA device, and a dict with its name and the versions of the packages."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name}: torch {torch.__version__} finds no CUDA device, which it needs")
    device = torch.device("cuda", torch.cuda.current_device())
    return device, machine(device)
