"""The training commands: `padfree sft`, `padfree rl` and others. They print one line of progress per step.

A training command takes a recipe, by file or by name, and settings that replace those of the recipe. Without a recipe,
`padfree sft` uses the recipe `sft`:

    padfree sft model.path=Qwen/Qwen3-0.6B data.path='["train.jsonl"]'
    torchrun --nproc-per-node 8 -m padfree sft

The command `rl` needs a recipe, for example the recipe that is also named `rl`:

    padfree rl rl loss.kind=gspo --dry-run
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from padfree.cli.main import STOPPED
from padfree.cli.progress import Lines, progress
from padfree.cli.slurm import is_job_description, processes_of_job, recipe_script, write_recipe_script
from padfree.config import Config, load_config
from padfree.config.inputs import check_regular, path_word
from padfree.config.loss import TASKS
from padfree.config.processes import processes_of
from padfree.config.recipe_files import default_recipe, recipe_path
from padfree.data.first_look import check_inputs
from padfree.errors import UserError
from padfree.garbage_collection import paused_collector
from padfree.stop_signals import StopSignals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from padfree.estimate.memory import MemoryEstimate
    from padfree.packing import StepPlan
    from padfree.train import RunResult

SHOWN_STEPS = 4
"""A dry run shows the traffic between hosts for this many steps, counted from the first step."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, task in TASKS.items():
        text = task.help
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Settings: a TOML recipe, changed by section.name=value.",
            epilog=f"example: padfree {name} {default_recipe(name) or 'rl-local'} model.path=my-model --dry-run",
        )
        command.add_argument(
            "recipe", type=path_word("recipe"), nargs="?", help="TOML file, or a name that `padfree recipes` lists"
        )
        command.add_argument(
            "overrides", nargs="*", metavar="section.name=value", help="settings that replace those of the recipe"
        )
        command.add_argument(
            "--dry-run", action="store_true", help="show model, data, layout, memory and first step, then exit"
        )
        command.add_argument("--all", action="store_true", help="with --dry-run: also show all settings as a recipe")
        command.add_argument(
            "--on-bad-row",
            choices=("error", "skip"),
            help="what to do with an unusable row; short for data.on_bad_row=...",
        )
        command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> int:
    if settings.all and not settings.dry_run:
        raise UserError("--all", "needs --dry-run", "add --dry-run, or leave --all out")
    overrides = list(settings.overrides)
    if settings.on_bad_row is not None:
        overrides.append(f"data.on_bad_row={settings.on_bad_row}")
    config = load_config(settings.recipe, overrides, kind=TASKS[settings.command].kind)
    if config.loss.command != settings.command:
        raise UserError(
            "loss.kind",
            f"does not belong to padfree {settings.command}",
            f"use padfree {config.loss.command}",
            value=config.loss.kind,
        )
    processes = processes_of(meet=not settings.dry_run)
    check_inputs(config)  # before torch is imported, so that a mistake fails quickly
    if is_job_description(config.slurm):
        if settings.recipe is not None:
            check_regular(recipe_path(settings.recipe), "config", once=False)  # the job reads it again
        words = [settings.command, *([] if settings.recipe is None else [settings.recipe]), *overrides]
        if not settings.dry_run:
            write_recipe_script(config, words)
            return 0
        with processes_of_job(config.slurm):
            for line in description(config, all_settings=settings.all):
                print(line)
        path, script = recipe_script(config, words)
        print(f"\nbatch script {path}:\n\n{script}", end="")
        return 0
    if settings.dry_run:
        for line in description(config, all_settings=settings.all) if processes.is_first else ():
            print(line)
        return 0

    with progress(config.run.steps, shown=processes.is_first) as shown:
        result = train_with_progress(config, shown, settings.signals)
    if processes.is_first:
        print(last_line(config, result))
    return STOPPED if result.stopped else 0


def last_line(config: Config, result: RunResult) -> str:
    folder = config.run.folder
    if result.stopped:
        return f"stopped by a signal after {result.step} steps; run the same command again to resume ({folder})"
    if result.was_finished:
        more = "raise run.steps or give another run.folder"
        if result.checkpoint is None:
            more = "give another run.folder, because this one has no checkpoint to continue from"
        return (
            f"{folder} is finished: all {result.step} steps were done before, and nothing was changed; to train more, "
            f"{more}"
        )
    return f"done after {result.step} steps; everything is in {folder}"


def train_with_progress(config: Config, shown: Lines, signals: StopSignals) -> RunResult:
    """Train with the settings `config`, and report progress to `shown`.

    Raise a `UserError` for a failure that the user can fix. `signals`: the signal handlers that this command has
    installed.
    """
    shown.activity("importing torch and transformers", 0, 0)
    with paused_collector():
        from padfree.train.failures import one_line_failures
        from padfree.train.run import train

    with one_line_failures(config.batch.max_tokens):
        return train(
            config,
            on_step=shown.step,
            on_tokenising=shown.tokenising,
            on_note=shown.note,
            on_sampling=shown.sampling,
            on_activity=shown.activity,
            signals=signals,
        )


# Dry run


def description(config: Config, *, all_settings: bool = False) -> Iterator[str]:
    """Yield the lines that a dry run prints: model, data, layout, memory per device, and the plan of the first step.

    If `all_settings` is True, the lines begin with all settings, in the form of a recipe.
    """
    import torch

    from padfree.estimate.memory import estimate_memory
    from padfree.model.sharing import sharing_obstacle
    from padfree.model.structure import model_skeleton
    from padfree.packing.collate import prefixes_of
    from padfree.packing.context_sizes import context_sizes
    from padfree.train.batch_preparer import distinct
    from padfree.train.batcher import make_batcher, source_shares
    from padfree.train.disk import check_disk, disk_line
    from padfree.train.microbatch import plan_samples
    from padfree.train.preflight import preflight
    from padfree.train.resolve_auto import expected_asynchronous, resolve_auto, training_memory, whole_memory
    from padfree.train.shared_turns import copied_keys, run_cost
    from padfree.train.training_data import image_share

    processes, replicate = processes_of(meet=False).world, config.parallel.replicate
    context = 1 if config.parallel.context == "auto" else config.parallel.context
    contexts = context_sizes(config.parallel.most_context(processes)) if config.parallel.context == "auto" else (1,)
    device_type = config.run.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    preflight_result = preflight(config, processes=processes, device_type=device_type, dry=True)
    check_disk(config, preflight_result.model)
    source, model, data = preflight_result.source, preflight_result.model, processes // context
    cost = run_cost(config.batch, model)
    in_pairs = config.loss.task.group_size > 1
    sampled = config.rollout.source is not None
    # If the run samples its responses, the plan has only the prompts, so shared prefixes cannot be found yet.
    shares = not sampled and config.batch.share_prefixes is not False and sharing_obstacle(model) is None

    def planned(groups: Sequence[Any]) -> StepPlan:
        flat = list(chain.from_iterable(groups))
        samples = flat if sampled else distinct(flat)
        return plan_samples(
            samples,
            prefixes_of(samples, config.batch.share_prefixes, cost) if shares else None,
            keep_groups=in_pairs,
            ranks=data,
            max_tokens=config.batch.max_tokens * context,
            cost=cost,
            overlong=config.batch.overlong,
            contexts=contexts,
        )

    plans = [
        planned(groups)
        for groups in islice(make_batcher(config, source.samples, source.parts), SHOWN_STEPS if processes > 1 else 1)
    ]
    if not plans:
        raise UserError("data.path", "gives no batch", "give files with at least one sample")
    plan = plans[0]
    lengths = plan.lengths.tolist()
    widths = context if plan.widths is None else plan.widths
    facts: dict[str, Any] = {
        "longest": int((-(-plan.computed_tokens // widths)).max()),
        "prompt_tokens": max(len(sample.tokens) for sample in source.samples) if sampled else 0,
        "copied_keys": copied_keys(config.batch, config.loss, config.rollout, source.samples, model),
        "image_share": image_share(config.model, source.samples),
    }
    resolved = resolve_auto(
        config,
        model,
        processes=processes,
        device_type=device_type,
        memory=training_memory(config, torch.device(device_type)),
        **facts,
    )
    asked, config = config, resolved.config
    memory = estimate_memory(
        config,
        model_skeleton(config),
        processes=processes,
        device_type=device_type,
        **facts,
    )

    if all_settings:
        yield from recipe_lines(asked.to_dict())
        yield ""
    trained = "all trained" if memory.trained == memory.parameters else f"{memory.trained:,} trained"
    kind = type(model).__name__
    yield f"model: {config.model.path} ({kind}), {memory.parameters:,} parameters, {trained}, {config.model.dtype}"
    dropped = len(source.report.skipped) + len(source.report.dropped)
    left_out = f"; {dropped} rows are skipped or dropped" if dropped else ""
    used, several = source.report.num_used, source.report.num_used < source.report.num_samples
    in_rows = f"{used:,} rows, " if several else ""
    yield f"data: {in_rows}{len(source.samples):,} {'prompts' if sampled else 'samples'}{left_out}"
    for each in source_shares(config.data, config.loss, config.rollout, source.samples, source.parts):
        yield f"  {each.line()}"
    shared = f"{context}" if contexts == (1,) else f"1 to {contexts[-1]}"
    expert = config.parallel.expert
    experts = f", experts over {expert} ranks" if expert > 1 else ""
    ranks = f"{replicate} replicate x {data // replicate} shard x {shared} context"
    yield f"layout: {processes} processes = {ranks}{experts}"
    saving = expected_asynchronous(config, model, processes=processes, device_type=device_type)
    for line in (*resolved.lines(), *(() if saving is None else saving.lines())):
        yield f"auto: {line}"
    yield from memory_lines(memory, config)
    if config.rollout.colocated and device_type == "cuda":
        yield shared_memory_line(memory, config, whole_memory(torch.device(device_type)))
    yield disk_line(config, model)
    yield (
        f"first step{', if every response is as long as it may be' if sampled else ''}: {len(lengths)} samples, "
        f"{sum(lengths):,} tokens{shared_tokens(plan)}, {plan.num_micro_batches} micro-batches on each of {data} data "
        f"ranks, {plan.fill:.1%} full, work of the slowest rank {plan.imbalance:.3f} times the mean"
    )
    if plan.widths is not None:
        packs = Counter(plan.widths[plan.is_first].tolist())
        yield "  packs: " + ", ".join(f"{count} on {width} ranks" for width, count in sorted(packs.items()))
    if processes > 1:
        yield from traffic_lines(config, model, plans, processes, device_type)
    if device_type == "cuda" and not torch.cuda.is_available():
        yield "note: run.device is cuda, but this machine has no CUDA device: the run needs one"
    for note in preflight_result.notes:
        yield f"note: {note}"
    if not all_settings:
        yield "all settings: add --all"


def shared_tokens(plan: StepPlan) -> str:
    """Return text that says how many tokens of a step are computed, e.g. " (900 computed, the rest shared)".

    Return an empty string if samples share no prefixes.
    """
    computed = int(plan.computed_tokens.sum())
    return "" if plan.prefixes is None or plan.sharing == 1.0 else f" ({computed:,} computed, the rest shared)"


def traffic_lines(
    config: Config, model: PreTrainedModel, plans: Sequence[StepPlan], processes: int, device_type: str
) -> Iterator[str]:
    """Yield lines that show the host of each rank, and the traffic between hosts in the first steps.

    `plans`: the plans of these steps.
    """
    from padfree.tools.planner.traffic import Placement, shown_bytes, step_traffic

    backend: Literal["gloo", "nccl"] = "nccl" if device_type == "cuda" else "gloo"
    placement = Placement(
        ranks=processes,
        hosts=max(1, processes // processes_of(meet=False).local_world),
        context=1 if config.parallel.context == "auto" else config.parallel.context,
        replicate=config.parallel.replicate,
        expert=config.parallel.expert,
    )
    found = [step_traffic(config.parallel, config.model.dtype, model, plan, placement, backend) for plan in plans]
    yield from placement.lines()
    yield from found[0].lines(backend)
    if len(found) > 1:
        sent = ", ".join(shown_bytes(each.of_host(0)[1]) for each in found[1:])
        yield f"  sent by host 0 to other hosts in the following steps: {sent}"


def recipe_lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield settings as lines of TOML. TOML has no null, so None is written as the string "none".

    `prefix`: the start of table names, e.g. "loss." for `[loss.clip]`.
    """
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    for name, value in values.items():
        if name not in tables:
            yield f"{_toml_key(name)} = {_toml(value)}"
    for name, table in tables.items():
        yield f"[{prefix}{name}]"
        yield from recipe_lines(table, f"{prefix}{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(name)} = {_toml(entry)}" for name, entry in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # also inf, which JSON does not have
    # JSON strings, numbers and booleans are valid TOML, except that TOML does not allow the raw character U+007F.
    return json.dumps("none" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _toml(name)


def memory_lines(memory: MemoryEstimate, config: Config) -> Iterator[str]:
    """Yield the memory lines of a dry run: the total, then one line per part (weights, ...)."""
    yield (
        f"memory: about {_gib(memory.device)} on each device (an estimate without the memory of allocator, collectives "
        "and driver)"
    )
    where = ", on the CPU" if memory.offloaded else ""
    trained = f"{memory.trained:,} trained" if memory.trained != memory.parameters else "all trained"
    parts = [
        ("weights", memory.weights, f"{memory.parameters:,} parameters, {trained}{where}"),
        ("gradients", memory.gradients, f"float32{where}"),
        ("optimizer", memory.optimizer, f"{memory.optimizer_state}{where}"),
        ("gathered", memory.gathered, "layers while they compute"),
        (
            "activations",
            memory.activations,
            f"micro-batches of {memory.tokens:,} tokens, checkpointing {config.parallel.checkpointing}",
        ),
        ("working", memory.working, "temporary tensors: the head's logits, or the backward of one layer"),
        ("reference", memory.reference, "kept on the CPU between uses" if memory.reference_offloaded else "frozen"),
        ("sampler", memory.sampler, "a whole copy of the model"),
        (
            "cache",
            memory.cache,
            "KV cache of the sampler" if memory.cache_stays else "KV cache while the sampler runs",
        ),
        ("sampling", memory.sampling, "the logits of a decode step"),
    ]
    for name, size, meaning in parts:
        if size:
            yield f"  {name:<12}{_gib(size):>12}  {meaning}"
    if memory.host:
        yield f"  and {_gib(memory.host)} of CPU memory for each process"


def shared_memory_line(memory: MemoryEstimate, config: Config, whole: float) -> str:
    """Return the line of a dry run that says how much memory run and inference server need on the GPU that they share.

    `whole`: the memory of the GPU in bytes.
    """
    rollout = config.rollout
    awake = None if rollout.server_memory is None else rollout.server_memory * whole
    turns = (
        ("training", memory.device, rollout.sleeping_bytes, "sleeping server"),
        ("sampling", memory.between_steps, awake, "server"),
    )
    shown = []
    for turn, own, server, name in turns:
        if server is None:
            shown.append(f"{turn} {_gib(own)} + the {name} (set rollout.server_memory to count it)")
        else:
            fits = "" if own + server <= whole else ", which does not fit"
            shown.append(f"{turn} {_gib(own)} + {_gib(server)} of the {name}{fits}")
    return f"shared GPU of {_gib(whole)}: {'; '.join(shown)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size / 2**20:.2f} MiB"
