"""Resolve `auto` settings from the device, the model and the memory estimate.

    parallel.compile          inductor on a GPU with triton and a C compiler, else none
    parallel.checkpointing    the least recomputation that fits the device; each layer gets its own level if possible
    parallel.reshard          false if the gathered weights fit the device
    checkpoint.asynchronous   true if the copies of a checkpoint fit into the free host memory
    rollout.exact             true if every operator of the model allows it on this device

Values that the user sets are kept. Each chosen value has a reason, which the run prints and logs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.checkpoint.background import RankCopy, WriteChoice, choose_write
from padfree.choices import Checkpointing, LayerLevel
from padfree.config import Config, LoraConfig, ParallelConfig
from padfree.config.checkpointing import is_by_layer, text_of
from padfree.config.processes import processes_of
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.estimate.activations import levels_by_layer
from padfree.estimate.layer_options import COMPILED, PLAIN, layer_options, limits, repeated_share
from padfree.estimate.levels import choose_levels
from padfree.estimate.memory import NUMBER_BYTES, MemoryEstimate, estimate_memory
from padfree.host_memory import free_host_memory
from padfree.layers.compile import WIDE_ROW
from padfree.model.lora import add_adapters
from padfree.model.structure import layers_of, model_skeleton
from padfree.rollout.engines.in_process import exact_operators
from padfree.sizes import ModelSizes
from padfree.train.disk import disk_use

USABLE_FRACTION = 0.9
"""Usable fraction of a device's memory. The allocator, collectives and the driver need the rest."""

ASSUMED_MEMORY = 80.0 * 2**30
"""Memory in bytes that a dry run assumes for a GPU if this machine has none."""

PINNED_FRACTION = 0.5
"""Fraction of the host's memory that may be pinned for offloaded activations."""

VERBS = {
    "full": "keep their input",
    "host": "offload",
    "selective": "keep attention's output",
    "attention": "keep the matmuls around attention",
    "none": "keep everything",
}

ADAMW = ("adamw", "float32")
"""The optimizer and the dtype of its state for which padfree may suggest a smaller state, such as int8."""

SMALLER_STATES = {"bfloat16": 0.5, "int8": 0.26}
"""The size of the optimizer state of a weight matrix in each smaller dtype, relative to its size in float32."""

WORTH_SAYING = 0.01
"""Padfree suggests a smaller optimizer state only if it saves at least this fraction of a step's FLOPs.

It saves FLOPs because layers can keep activations in the freed memory instead of recomputing them.
"""

FASTEST_FIRST: tuple[Checkpointing, ...] = ("none", "host", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedAuto:
    """The settings after every `auto` is replaced by a value, and the reason for each value."""

    config: Config
    reasons: dict[str, str]  # the reason for each resolved setting, by name

    def fields(self) -> dict[str, str]:
        """Return two entries per resolved setting NAME: its value under `NAME`, and the reason under `NAME because`."""
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
    image_share: float = 0.0,
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
            add_adapters(model, config.lora)  # add the adapters once, because otherwise every estimate would add them
        estimates: list[tuple[ParallelConfig, MemoryEstimate]] = []
        # Offload activations only if computing a layer takes longer than copying its activations.
        may_offload = device_type != "cpu" and ModelSizes.of(model.config).hidden >= WIDE_ROW
        whole = _whole_graphs(parallel) and config.rollout.routing == "recompute"
        # If False, all layers get the same level.
        by_layer = parallel.checkpointing == "auto" and device_type != "cpu" and whole

        def estimate(candidate: ParallelConfig) -> MemoryEstimate:
            return estimate_memory(
                replace(config, parallel=candidate, lora=LoraConfig()),
                model,
                processes=processes,
                device_type=device_type,
                longest=longest,
                prompt_tokens=prompt_tokens,
                copied_keys=copied_keys,
                image_share=image_share,
            )

        for candidate in _candidates(parallel, may_offload, by_layer, processes, whole=whole):
            found = estimate(candidate)
            if by_layer and candidate.checkpointing == "full":  # "full" needs least memory: now choose levels by layer
                levels = _levels(config, model, found, memory, may_offload and candidate.compile != "none")
                if levels is not None:
                    candidate = replace(candidate, checkpointing=_setting_of(levels))
                    found = estimate(candidate)
            estimates.append((candidate, found))
            if (
                found.device <= USABLE_FRACTION * memory
                and found.offloaded_activations <= PINNED_FRACTION * _machine_memory()
            ):
                break
        if estimates[-1][1].device > USABLE_FRACTION * memory:  # no candidate fits: take the one that needs least
            estimates.sort(key=lambda each: -each[1].device)
        reason = _reason(estimates, memory)
        if by_layer:
            reason += _faster_states(config, model, *estimates[-1], memory, may_offload)
        for name in ("checkpointing", "reshard"):
            if getattr(parallel, name) == "auto":
                reasons[f"parallel.{name}"] = reason
        parallel = estimates[-1][0]
    return ResolvedAuto(config=replace(config, parallel=parallel), reasons=reasons)


def resolve_auto_on(config: Config, mesh: Mesh, **facts: Any) -> ResolvedAuto:
    """Replace each `auto` in the settings by a value for the devices of this run. All ranks must call this.

    All ranks use the memory of the smallest device. `facts`: arguments of `estimate_memory` that describe the data.
    """
    parallel = config.parallel
    samples = config.rollout.source is not None and config.rollout.exact is not False
    if not samples and "auto" not in (parallel.compile, parallel.checkpointing, parallel.reshard):
        return ResolvedAuto(config=config, reasons={})
    memory = torch.tensor(training_memory(config, mesh.device), dtype=torch.float64, device=mesh.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN, group=mesh.loss.group)
    model = model_skeleton(config)
    found = resolve_auto(
        config,
        model,
        processes=mesh.loss.size,
        device_type=mesh.device.type,
        memory=float(memory),
        **facts,
    )
    return with_exact(found, model, mesh.device) if samples else found


def with_exact(resolved: ResolvedAuto, model: PreTrainedModel, device: torch.device) -> ResolvedAuto:
    """Resolve `rollout.exact=auto`: true if all operations of the model give the same bits in sampler and trainer.

    Raise a `UserError` if `rollout.exact` is true although some operation may give other bits. `model`: without
    weights.
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
    reason = problem or "every operator gives the same bits in the sampler and in the trainer"
    changed = replace(config, rollout=replace(config.rollout, exact=problem is None))
    return replace(resolved, config=changed, reasons={**resolved.reasons, "rollout.exact": reason})


def with_asynchronous(config: Config, choice: WriteChoice) -> ResolvedAuto:
    """Return the settings with `choice` as the value of `checkpoint.asynchronous`, and the reason for the choice."""
    changed = replace(config, checkpoint=replace(config.checkpoint, asynchronous=choice.background))
    return ResolvedAuto(config=changed, reasons={"checkpoint.asynchronous": choice.reason})


def expected_asynchronous(
    config: Config, model: PreTrainedModel, *, processes: int, device_type: str
) -> ResolvedAuto | None:
    """Return the value of `checkpoint.asynchronous=auto`, as if all hosts had the free memory of this host.

    Return None if the setting is not "auto", or if no checkpoints are saved. `model`: on the meta device, no adapters.
    """
    use = disk_use(config, model)
    if config.checkpoint.asynchronous != "auto" or not use.saves:
        return None
    writers = processes // config.parallel.replicate  # the ranks of the first replica
    copy = RankCopy(
        host=socket.gethostname(),
        size=-(-use.checkpoint // writers),
        free=free_host_memory(),
        on_cpu=device_type == "cpu" or config.parallel.offload,
    )
    return with_asynchronous(config, choose_write([copy] * min(writers, processes_of(meet=False).local_world)))


def device_memory(device: torch.device) -> float:
    """Return the number of bytes that this process can use on the device.

    On a GPU, this is the free memory plus what the process has reserved. On a CPU, it is the machine's memory divided
    by the number of processes on the machine.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return ASSUMED_MEMORY  # a dry run for another machine
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return _machine_memory()


def training_memory(config: Config, device: torch.device) -> float:
    """Return the number of bytes that this process can use on the device while it trains.

    With `rollout.colocated`, this is the memory of the whole GPU minus the memory that a sleeping server keeps.
    """
    if not config.rollout.colocated or device.type != "cuda":
        return device_memory(device)
    # The free memory does not matter here, because the server may be awake now.
    return whole_memory(device) - config.rollout.sleeping_bytes


def whole_memory(device: torch.device) -> float:
    """Return the total memory of the GPU in bytes, or the memory that a dry run assumes if this machine has no GPU."""
    return float(torch.cuda.mem_get_info(device)[1]) if torch.cuda.is_available() else ASSUMED_MEMORY


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


def _whole_graphs(parallel: ParallelConfig) -> bool:
    """Return whether each compiled layer is one graph. Communication inside attention or experts breaks the graph."""
    return parallel.compile == "none" or (parallel.context == 1 and parallel.expert == 1)


def _levels(
    config: Config, model: PreTrainedModel, memory: MemoryEstimate, device_memory: float, may_offload: bool
) -> tuple[LayerLevel, ...] | None:
    """Choose a checkpointing level for each layer, so that a step fits the device and recomputes as little as possible.

    Return None if no choice fits. `memory`: a memory estimate; its levels are ignored. `device_memory`: in bytes.
    """
    levels = COMPILED if memory.compiled else PLAIN
    if not may_offload:
        levels = tuple(level for level in levels if level != "host")
    size = NUMBER_BYTES[config.model.dtype]
    chosen = choose_levels(
        layer_options(model, memory, size, levels),
        limits(
            model,
            memory,
            size,
            device=USABLE_FRACTION * device_memory,
            host=PINNED_FRACTION * _machine_memory(),
        ),
    )
    return None if chosen is None else tuple(option.level for option in chosen)


def _faster_states(
    config: Config,
    model: PreTrainedModel,
    parallel: ParallelConfig,
    estimate: MemoryEstimate,
    device_memory: float,
    may_offload: bool,
) -> str:
    """Return a hint about smaller optimizer states, e.g. `; optimizer.state would save FLOPs: int8 3%`.

    A smaller state leaves memory for activations, so fewer activations are recomputed. The hint is empty if this would
    save almost nothing.
    """
    optimizer, size = config.optimizer, NUMBER_BYTES[config.model.dtype]
    if parallel.checkpointing == "none" or estimate.offloaded or (optimizer.name, optimizer.state) != ADAMW:
        return ""
    own = repeated_share(model, estimate, size, levels_by_layer(parallel.checkpointing, len(layers_of(model))))
    found = []
    for state, share in SMALLER_STATES.items():
        saved = estimate.optimizer * (1 - share)
        levels = _levels(config, model, estimate, device_memory + saved / USABLE_FRACTION, may_offload)
        faster = 0.0 if levels is None else (own - repeated_share(model, estimate, size, levels)) / (1 + own)
        if faster >= WORTH_SAYING:
            found.append(f"{state} {faster:.0%}")
    return f"; optimizer.state would save FLOPs: {', '.join(found)}" if found else ""


def _setting_of(levels: Sequence[LayerLevel]) -> str:
    """Return the value of `parallel.checkpointing` that gives layer i the level `levels[i]`."""
    return str(levels[0]) if set(levels) in ({"full"}, {"selective"}) else text_of(levels)


def _candidates(
    parallel: ParallelConfig, may_offload: bool, by_layer: bool, processes: int, *, whole: bool
) -> Iterator[ParallelConfig]:
    """Yield the values to try for `parallel.checkpointing` and `parallel.reshard`, fastest first.

    `may_offload`: whether offloading a layer's activations is fast enough. `whole`: whether each compiled layer is one
    graph, as offloading requires. With `by_layer`, "full" means that the caller chooses a level for each layer.
    """
    ways: tuple[Checkpointing, ...] = FASTEST_FIRST
    if not may_offload or parallel.compile == "none" or not whole:
        ways = tuple(way for way in FASTEST_FIRST if way != "host")  # offloading needs each layer as one compiled graph
    if parallel.checkpointing != "auto":
        ways = (cast(Checkpointing, parallel.checkpointing),)
    reshard = (False, True) if parallel.reshard == "auto" else (parallel.reshard,)
    tried = [(way, each) for way in ways for each in reshard]
    if by_layer:
        # For one process, try resharding last: it saves almost no memory there.
        order: list[tuple[Checkpointing, bool]] = [("none", False), ("full", False), ("full", True)]
        if processes > 1:
            order = [("none", False), ("none", True), ("full", True)]
        if parallel.reshard != "auto":
            order = [("none", parallel.reshard), ("full", parallel.reshard)]
        tried = order
    for way, each in tried:
        yield replace(parallel, checkpointing=way, reshard=each)


def _reason(estimates: list[tuple[ParallelConfig, MemoryEstimate]], memory: float) -> str:
    parallel, estimate = estimates[-1]
    needs = f"{_counted(parallel.checkpointing)}needs about {_gib(estimate.device)} of {_gib(memory)}"
    if estimate.device > USABLE_FRACTION * memory:
        return f"{needs}, which may not fit, and no other choice needs less: lower batch.max_tokens if memory runs out"
    faster = [f"{_named(other)} {_gib(found.device)}" for other, found in estimates[:-1]]
    return needs if not faster else f"{needs}; {', '.join(faster)} would be faster, but would not fit"


def _named(parallel: ParallelConfig) -> str:
    return parallel.checkpointing if not parallel.reshard else f"{parallel.checkpointing} with reshard"


def _counted(checkpointing: str) -> str:
    """Return how many layers have each checkpointing level, e.g. `6 layers offload, 30 keep everything; `."""
    if not is_by_layer(checkpointing):
        return ""
    counts: Counter[str] = Counter()
    for part in checkpointing.split(", "):
        count, _, level = part.partition(" ")
        counts[level] += int(count)
    words = [f"{count} {VERBS[level]}" for level, count in counts.items()]
    first, _, rest = words[0].partition(" ")
    return ", ".join([f"{first} layers {rest}", *words[1:]]) + "; "


def _shown(config: Config, name: str) -> str:
    section, _, setting = name.partition(".")
    value = getattr(getattr(config, section), setting)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
