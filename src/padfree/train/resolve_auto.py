"""Resolve `auto` settings from the device, the model and the memory estimate.

    parallel.compile         inductor on a GPU, none on the CPU
    parallel.checkpointing   the first of none, host, selective, full (fastest first) that fits the device; `host` is
                             tried only if computing a layer takes longer than copying its activations to the host
    parallel.reshard         false (layers stay gathered between forward and backward) if this also fits, else true
    rollout.exact            true if every operator of the model allows it on this device, else false

Values that the user sets are kept. Each resolved value comes with its reason, for display and for the event log.
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

from padfree.choices import Checkpointing
from padfree.config import Config, LoraConfig, ParallelConfig
from padfree.config.processes import processes_of
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.estimate.memory import MemoryEstimate, estimate_memory
from padfree.layers.compile import WIDE_ROW
from padfree.model.lora import add_adapters
from padfree.model.structure import skeleton
from padfree.rollout.engines.in_process import exact_operators
from padfree.sizes import ModelSizes

USABLE_FRACTION = 0.9
"""Usable fraction of a device's memory; the rest is for the allocator, collectives and the driver."""

ASSUMED_MEMORY = 80.0 * 2**30
"""Assumed memory, in bytes, of a GPU that this machine does not have."""

PINNED_FRACTION = 0.5
"""Fraction of the machine's memory that may be pinned for activations."""

FASTEST_FIRST: tuple[Checkpointing, ...] = ("none", "host", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAuto:
    """A config in which every `auto` is replaced by a value, and the reason for each of these values."""

    config: Config
    reasons: dict[str, str]  # the reason for each resolved setting, by name

    def fields(self) -> dict[str, str]:
        """Return two entries per resolved setting: its value under its name, and the reason under `NAME because`."""
        found: dict[str, str] = {}
        for name, reason in self.reasons.items():
            found |= {name: _shown(self.config, name), f"{name} because": reason}
        return found

    def lines(self) -> list[str]:
        """Return one text per resolved setting, e.g. `parallel.compile=none: layers are compiled only on a GPU`."""
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
    """Replace each `auto` in the settings by a value for devices with `memory` bytes of memory.

    `model`: the model without weights (`skeleton`). Other arguments: see `estimate_memory`.
    """
    reasons: dict[str, str] = {}
    parallel = config.parallel
    if parallel.compile == "auto":
        chosen, reasons["parallel.compile"] = _compiler(device_type)
        parallel = replace(parallel, compile=chosen)
    if parallel.checkpointing == "auto" or parallel.reshard == "auto":
        if config.lora.rank:
            add_adapters(model, config.lora)  # add them once here; otherwise each estimate would add them again
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
    """Replace each `auto` in the settings by a value for the devices of this run. Collective.

    All ranks use the memory of the smallest device. Other arguments: see `estimate_memory`.
    """
    parallel = config.parallel
    samples = config.rollout.source is not None and config.rollout.exact is not False
    if not samples and "auto" not in (parallel.compile, parallel.checkpointing, parallel.reshard):
        return ResolvedAuto(config=config, reasons={})
    memory = torch.tensor(device_memory(mesh.device), dtype=torch.float64, device=mesh.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN, group=mesh.loss.group)
    model = skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code, head=config.loss.head)
    found = resolve_auto(
        config,
        model,
        processes=mesh.loss.size,
        device_type=mesh.device.type,
        memory=float(memory),
        longest=longest,
        prompt_tokens=prompt_tokens,
        copied_keys=copied_keys,
    )
    return with_exact(found, model, mesh.device) if samples else found


def with_exact(resolved: ResolvedAuto, model: PreTrainedModel, device: torch.device) -> ResolvedAuto:
    """Resolve `rollout.exact` of a run that samples. Raise a `UserError` if it is true but not possible.

    `resolved`: all other settings are resolved. `model`: the model without weights.
    """
    config = resolved.config
    problem = exact_operators.problem(
        model,
        device,
        rollout=config.rollout,
        parallel=config.parallel,
        lora=config.lora,
        dtype=getattr(torch, config.model.dtype),
        attention=config.model.attention,
    )
    if config.rollout.exact is True and problem is not None:
        raise UserError("rollout.exact", f"true, but {problem}", "set rollout.exact=auto or false")
    if config.rollout.exact != "auto":
        return resolved
    reason = problem or "every operator of the sampler and of the trainer has the same bits"
    changed = replace(config, rollout=replace(config.rollout, exact=problem is None))
    return replace(resolved, config=changed, reasons={**resolved.reasons, "rollout.exact": reason})


def device_memory(device: torch.device) -> float:
    """Return the number of bytes that this process can use on the device.

    On a GPU, this is the free memory plus the memory that the process has already reserved. On a CPU, it is the
    machine's memory divided by the number of processes on it.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return ASSUMED_MEMORY  # a dry run for another machine
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return _machine_memory()


def _machine_memory() -> float:
    """Return the machine's memory divided by the number of processes on it, in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine / processes_of(meet=False).local_world


def _compiler(device_type: str) -> tuple[Literal["none", "inductor"], str]:
    if device_type != "cuda":
        return "none", "layers are compiled only on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "none", "the compiler needs triton, which is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "none", "the compiler needs a C compiler, and none was found (install gcc, or set CC)"
    return "inductor", "compiled layers are faster on a GPU; the first step waits for the compiler"


def _candidates(parallel: ParallelConfig, may_offload: bool) -> Iterator[ParallelConfig]:
    """Yield the settings to try for checkpointing and resharding, fastest first.

    `may_offload`: whether computing a layer takes longer than copying its activations to the host.
    """
    ways: tuple[Checkpointing, ...] = FASTEST_FIRST
    if not may_offload or parallel.compile == "none" or parallel.context != 1 or parallel.expert != 1:
        ways = tuple(way for way in FASTEST_FIRST if way != "host")  # "host" needs whole graphs of compiled layers
    if parallel.checkpointing != "auto":
        ways = (parallel.checkpointing,)
    for way in ways:
        for reshard in (False, True) if parallel.reshard == "auto" else (parallel.reshard,):
            yield replace(parallel, checkpointing=way, reshard=reshard)


def _reason(estimates: list[tuple[ParallelConfig, MemoryEstimate]], memory: float) -> str:
    _, estimate = estimates[-1]
    needs = f"needs about {_gib(estimate.device)} of {_gib(memory)}"
    if estimate.device > USABLE_FRACTION * memory:
        return f"{needs}, which may not fit, and no other choice needs less: lower batch.max_tokens if memory runs out"
    faster = [f"{_named(other)} {_gib(found.device)}" for other, found in estimates[:-1]]
    return needs if not faster else f"{needs}; {', '.join(faster)} would be faster, but would not fit"


def _named(parallel: ParallelConfig) -> str:
    return parallel.checkpointing if not parallel.reshard else f"{parallel.checkpointing} with reshard"


def _shown(config: Config, name: str) -> str:
    section, _, setting = name.partition(".")
    value = getattr(getattr(config, section), setting)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
