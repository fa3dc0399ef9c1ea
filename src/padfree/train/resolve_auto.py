"""What `auto` stands for in a run's settings: decided from the device, the model and the memory estimate.

    parallel.compile         inductor on a GPU, none on the CPU
    parallel.checkpointing   the first of none, host, selective, full (the fastest first) that fits the device; host
                             only for layers that compute for longer than their tensors travel to the host
    parallel.reshard         false (all layers stay whole) where that fits as well

What a user has set stays as it is. Every decision comes with its reason, for whoever shows or records it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.config import Config, LoraConfig, ParallelConfig
from padfree.config.choices import Checkpointing
from padfree.config.processes import processes_of
from padfree.distributed import Mesh
from padfree.estimate.memory import MemoryEstimate, estimate_memory
from padfree.layers.compile import WIDE_ROW
from padfree.model.lora import add_adapters
from padfree.model.structure import skeleton
from padfree.sizes import ModelSizes

USABLE_FRACTION = 0.9
"""Of a device's memory; the rest is left to the allocator, to collectives and to the driver."""

ASSUMED_MEMORY = 80.0 * 2**30
"""Of a GPU that is not here."""

PINNED_FRACTION = 0.5
"""Of a machine's memory, what may be page-locked for activations."""

FASTEST_FIRST: tuple[Checkpointing, ...] = ("none", "host", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAuto:
    """Settings without any `auto`, and why each of those became what it is."""

    config: Config
    reasons: dict[str, str]  # by the setting's name

    def fields(self) -> dict[str, str]:
        """Each setting that was `auto` with what it became, and its reason behind that."""
        found: dict[str, str] = {}
        for name, reason in self.reasons.items():
            found |= {name: _shown(self.config, name), f"{name} because": reason}
        return found

    def lines(self) -> list[str]:
        """`parallel.compile=inductor: on a GPU compiled layers are faster`, ..."""
        return [f"{name}={_shown(self.config, name)}: {reason}" for name, reason in self.reasons.items()]


def resolve_auto(
    config: Config,
    model: PreTrainedModel,
    *,
    processes: int,
    device_type: str,
    memory: float,
    longest: int = 0,
    prompt_tokens: int = 0,
    copied_keys: float = 0.0,
) -> ResolvedAuto:
    """Decide for devices of `memory` bytes. `model` is a `skeleton`; the rest is as for `estimate_memory`."""
    reasons: dict[str, str] = {}
    parallel = config.parallel
    if parallel.compile == "auto":
        chosen, reasons["parallel.compile"] = _compiler(device_type)
        parallel = replace(parallel, compile=chosen)
    if parallel.checkpointing == "auto" or parallel.reshard == "auto":
        if config.lora.rank:
            add_adapters(model, config.lora)  # once: each estimate would put them in again
        estimates: list[tuple[ParallelConfig, MemoryEstimate]] = []
        may_offload = device_type != "cpu" and ModelSizes.of(model.config).hidden >= WIDE_ROW
        for candidate in _candidates(parallel, may_offload):
            found = estimate_memory(
                replace(config, parallel=candidate, lora=LoraConfig()),
                model,
                processes=processes,
                device_type=device_type,
                longest=longest,
                prompt_tokens=prompt_tokens,
                copied_keys=copied_keys,
            )
            estimates.append((candidate, found))
            if (
                found.device <= USABLE_FRACTION * memory
                and found.offloaded_activations <= PINNED_FRACTION * _machine_memory()
            ):
                break
        reason = _reason(estimates, memory)
        for name in ("checkpointing", "reshard"):
            if getattr(parallel, name) == "auto":
                reasons[f"parallel.{name}"] = reason
        parallel = estimates[-1][0]
    return ResolvedAuto(config=replace(config, parallel=parallel), reasons=reasons)


def resolve_auto_on(
    config: Config, mesh: Mesh, *, longest: int = 0, prompt_tokens: int = 0, copied_keys: float = 0.0
) -> ResolvedAuto:
    """The same for the devices of this run. Every rank calls it, and all decide alike: the smallest device counts."""
    if "auto" not in (config.parallel.compile, config.parallel.checkpointing, config.parallel.reshard):
        return ResolvedAuto(config=config, reasons={})
    memory = torch.tensor(device_memory(mesh.device), dtype=torch.float64, device=mesh.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN, group=mesh.loss.group)
    return resolve_auto(
        config,
        skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code, head=config.loss.head),
        processes=mesh.loss.size,
        device_type=mesh.device.type,
        memory=float(memory),
        longest=longest,
        prompt_tokens=prompt_tokens,
        copied_keys=copied_keys,
    )


def device_memory(device: torch.device) -> float:
    """Bytes that this process can have: what the GPU has free or holds for us, or its share of the machine's memory."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return ASSUMED_MEMORY  # a dry run for another machine
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return _machine_memory()


def _machine_memory() -> float:
    """Bytes of this machine, shared among its processes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine / processes_of(meet=False).local_world


def _compiler(device_type: str) -> tuple[Literal["none", "inductor"], str]:
    if device_type != "cuda":
        return "none", "compiled layers are for GPUs"
    if importlib.util.find_spec("triton") is None:
        return "none", "the compiler needs triton, which is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "none", "the compiler needs a C compiler, and there is none (install gcc, or set CC)"
    return "inductor", "compiled layers are faster on a GPU; the first step waits for the compiler"


def _candidates(parallel: ParallelConfig, may_offload: bool) -> Iterator[ParallelConfig]:
    """What may be chosen, the fastest first. `may_offload`: whether layers take longer than the link to the host."""
    ways: tuple[Checkpointing, ...] = FASTEST_FIRST
    if not may_offload or parallel.compile == "none" or parallel.context != 1:
        ways = tuple(way for way in FASTEST_FIRST if way != "host")  # which is for whole graphs of compiled layers
    if parallel.checkpointing != "auto":
        ways = (parallel.checkpointing,)
    for way in ways:
        for reshard in (False, True) if parallel.reshard == "auto" else (parallel.reshard,):
            yield replace(parallel, checkpointing=way, reshard=reshard)


def _reason(estimates: list[tuple[ParallelConfig, MemoryEstimate]], memory: float) -> str:
    _, estimate = estimates[-1]
    needs = f"needs about {_gib(estimate.device)} of {_gib(memory)}"
    if estimate.device > USABLE_FRACTION * memory:
        return f"{needs}, more than there may be, and nothing needs less: lower batch.max_tokens if memory runs out"
    faster = [f"{_named(other)} {_gib(found.device)}" for other, found in estimates[:-1]]
    return needs if not faster else f"{needs}; {', '.join(faster)} would be faster, but not fit"


def _named(parallel: ParallelConfig) -> str:
    return parallel.checkpointing if not parallel.reshard else f"{parallel.checkpointing} with reshard"


def _shown(config: Config, name: str) -> str:
    value = getattr(config.parallel, name.rpartition(".")[2])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
