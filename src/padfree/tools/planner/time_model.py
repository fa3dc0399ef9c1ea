"""Estimate how long steps take: the cost of a step, divided by the cost that a device computes per second.

The cost is in the first of these units that is available:

1. Seconds, if the cost model was measured (`batch.cost`, or `padfree plan --calibrate` on this device).
2. FLOPs, if the model is given. A GPU with a known peak is assumed to reach PEAK_FRACTION of it in bfloat16. Otherwise
   the time is unknown.
3. Tokens. The time is then unknown.

Communication, compilation, checkpoints, rollouts and scoring are not included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from padfree.config import Config
from padfree.data import default_cache_folder
from padfree.data.hashing import hash_of
from padfree.errors import UserError
from padfree.estimate.cost_file import read_cost
from padfree.estimate.flops import model_cost, peak_tflops
from padfree.packing import CostModel

PEAK_FRACTION = 0.4
"""The assumed fraction of a GPU's peak FLOPs, which training of a dense model usually reaches without tuning."""

IGNORED = ("_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")
"""Entries of a config that do not change what a model computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeModel:
    """A cost model, and how many units of its cost (e.g. FLOPs) a device computes per second."""

    cost: CostModel
    per_second: float | None  # None: unknown
    source: str  # text for the output: where the cost model comes from
    measured: bool = False  # if False, FLOPs are counted and the speed is assumed

    def seconds(self, cost: float) -> float | None:
        return None if self.per_second is None else cost / self.per_second


def choose_time_model(config: Config, model_config: Any | None, gpu: str | None) -> TimeModel:
    """Return the most accurate time model that is available: seconds, else FLOPs, else tokens.

    `gpu`: the name of the GPU of the run; None: this device. Raise a `UserError` if the peak FLOP rate of `gpu` is
    needed but unknown.
    """
    if config.batch.cost is not None:
        named = config.batch.cost
        return TimeModel(cost=read_cost(named), per_second=1.0, source=f"measured, {named}", measured=True)
    if model_config is None:
        return TimeModel(cost=CostModel.tokens(), per_second=None, source="tokens; give --model to count FLOPs")
    here = device_name(config.run.device)
    is_here = gpu is None or gpu.lower() in here.lower()
    stored = cost_path(here, model_config, config)
    if is_here and stored.exists():
        return TimeModel(cost=read_cost(stored), per_second=1.0, source=f"measured on {here}, {stored}", measured=True)
    cost = model_cost(model_config, adapters=config.lora.rank > 0)
    name = gpu or here
    peak = peak_tflops(name)
    if gpu is not None and peak is None:
        raise UserError(
            "--gpu", "is not a GPU with a known peak", "give one such as H100, H200, A100, B200, or L40S", value=gpu
        )
    if peak is None:
        return TimeModel(cost=cost, per_second=None, source="FLOPs; give --gpu or --calibrate to get seconds")
    if config.model.dtype != "bfloat16":
        return TimeModel(
            cost=cost,
            per_second=None,
            source="FLOPs; set model.dtype=bfloat16 to get seconds, because GPU peaks are known for bfloat16 only",
        )
    return TimeModel(
        cost=cost,
        per_second=PEAK_FRACTION * peak * 1e12,
        source=f"assuming {PEAK_FRACTION:.0%} of the {peak:,.0f} TFLOP/s of {name}",
    )


def device_name(device: str) -> str:
    """Return the name of the device that `run.device` selects on this machine: the GPU's name, or "cpu"."""
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name()


def cost_path(device: str, model_config: Any, config: Config) -> Path:
    """Return the path of the file that stores the cost model measured for this device, model and settings."""
    values = {name: value for name, value in model_config.to_dict().items() if name not in IGNORED}
    parallel = config.parallel
    way: list[Any] = [parallel.compile, parallel.kernels, parallel.checkpointing, parallel.reshard, parallel.offload]
    way += [list(parallel.float8)] if parallel.float8 else []
    key = hash_of([device, values, config.model.dtype, way, config.lora.rank])
    words = re.sub(r"[^a-z0-9]+", "-", f"{device} {model_config.model_type} {config.model.dtype}".lower())
    return default_cache_folder() / "cost" / f"{words}-{key[:12]}.json"
