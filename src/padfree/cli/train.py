"""`padfree sft`, `padfree rl` and the other ways to train: a recipe, a few overrides, and a line of progress per step.

padfree sft recipes/sft.toml model.path=Qwen/Qwen3-0.6B data.path='["train.jsonl"]'
padfree rl recipes/rl.toml loss.kind=gspo --dry-run
torchrun --nproc-per-node 8 -m padfree sft recipes/sft.toml
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from padfree.cli.main import COMMANDS
from padfree.collector import paused_collector
from padfree.config import Config, load_config
from padfree.config.hub import check_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from padfree.estimate.memory import MemoryEstimate
    from padfree.packing import StepPlan

SHOWN_STEPS = 4
"""Of so many first steps a dry run of several processes shows what they send."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, (module, text) in COMMANDS.items():
        if module != __name__:
            continue
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Settings: a TOML recipe, changed by section.name=value.",
            epilog=f"example: padfree {name} recipes/{name}.toml model.path=my-model optimizer.lr=2e-6 --dry-run",
        )
        command.add_argument("recipe", help="TOML file; recipes/ has one to start from")
        command.add_argument("overrides", nargs="*", metavar="section.name=value", help="settings to change")
        command.add_argument(
            "--dry-run", action="store_true", help="show settings, layout, memory and first step; stop"
        )
        command.add_argument(
            "--on-bad-row", choices=("error", "skip"), help="a row that cannot be used; short for data.on_bad_row=..."
        )
        command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    overrides = list(settings.overrides)
    if settings.on_bad_row is not None:
        overrides.append(f"data.on_bad_row={settings.on_bad_row}")
    config = load_config(settings.recipe, overrides)
    if config.loss.command != settings.command:
        raise ValueError(
            f"loss.kind: {config.loss.kind!r} for padfree {settings.command}; use padfree {config.loss.command} for it"
        )
    check_names(config)  # before torch is imported: a mistyped name need not wait for it
    first = int(os.environ.get("RANK", "0")) == 0
    if settings.dry_run:
        for line in description(config) if first else ():
            print(line)
        return

    with paused_collector():
        from padfree.train.failures import one_line_failures
        from padfree.train.run import train

    with one_line_failures(config), progress(config.run.steps, shown=first) as shown:
        result = train(
            config,
            on_step=shown.step,
            on_tokenising=shown.tokenising,
            on_note=shown.note,
            on_sampling=shown.sampling,
        )
    if first:
        end = "stopped by a signal" if result.stopped else "done"
        print(f"{end} after {result.step} steps; everything is in {config.run.folder}")


# Progress


class Lines:
    """A line a step, and one for every tenth of the tokenising: what a log file wants. Sampling is no line."""

    def __init__(self, *, shown: bool) -> None:
        self._shown, self._tenths = shown, 0

    def tokenising(self, done: int, total: int) -> None:
        tenths = done * 10 // total if total else 10
        if self._shown and tenths > self._tenths:
            self._tenths = tenths
            print(f"tokenising {tenths * 10} %", flush=True)

    def sampling(self, done: int, wanted: int) -> None:
        """Of the responses of a batch that the first rank has asked for."""

    def note(self, text: str) -> None:
        if self._shown:
            print(f"note: {text}", flush=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self._shown:
            print(f"step {metrics['step'] + 1}  {summary(metrics)}", flush=True)


class Bars(Lines):
    """A bar of the tokenising, if there is any to do, one of the steps, one of a batch's responses, on a terminal."""

    def __init__(self, bars: Any, steps: int | None) -> None:
        super().__init__(shown=True)
        self._bars, self._steps = bars, steps
        self._tasks: dict[str, Any] = {}

    def _show(self, name: str, done: int, total: int | None, count: str, text: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, count=count, text=text)
        self._bars.update(self._tasks[name], completed=done, total=total, count=count, text=text)

    def note(self, text: str) -> None:
        self._bars.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def tokenising(self, done: int, total: int) -> None:
        self._show("tokenising", done, total, f"{done / total:.0%}" if total else "")

    def sampling(self, done: int, wanted: int) -> None:
        self._show("responses", done, wanted, f"{done}/{wanted}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        done = metrics["step"] + 1
        count = f"{done}" if self._steps is None else f"{done}/{self._steps}"
        self._show("step", done, self._steps, count, summary(metrics))


@contextmanager
def progress(steps: int | None, *, shown: bool) -> Iterator[Lines]:
    """Bars on a terminal, lines elsewhere, nothing where not `shown`."""
    if not shown:
        yield Lines(shown=False)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise ValueError("padfree: the package rich is missing; pip install rich") from error
    console = Console()
    if not console.is_terminal:
        yield Lines(shown=True)
        return
    columns = ("{task.description}", "{task.fields[count]}", BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as bars:
        yield Bars(bars, steps)


def summary(metrics: Mapping[str, Any]) -> str:
    """The numbers of a step that are worth a line."""
    parts = [f"loss {metrics['loss']:.4f}", f"norm {metrics['gradient_norm']:.3f}", f"lr {metrics['lr']:.2e}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    if "groups_without_signal" in metrics:
        parts.append(f"no signal {metrics['groups_without_signal']}/{metrics['groups']}")
    if "version_age" in metrics:
        waited = metrics.get("seconds/waiting", 0.0)
        parts.append(f"age {metrics['version_age']:.1f}  ahead {metrics['queue_finished']:.0f}  waited {waited:.1f} s")
    elif "seconds/sampling" in metrics:
        parts.append(f"sampling {metrics['seconds/sampling']:.1f} s")
    if "sampler/canary_difference" in metrics:
        parts.append(f"canary {metrics['sampler/canary_difference']:.1e}")
    if "groups_asked" in metrics:
        parts.append(f"asked {metrics['groups_asked']:.0f} groups")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in metrics:
        parts.append(f"mfu {metrics['mfu']:.1%}")
    return "  ".join(parts)


# Dry run


def description(config: Config) -> Iterator[str]:
    """The settings as a recipe, the layout, the memory a device needs, and the plan of the first step."""
    import torch

    from padfree.estimate.memory import estimate_memory
    from padfree.model.sharing import sharing_obstacle
    from padfree.model.structure import skeleton
    from padfree.packing.collate import prefixes_of
    from padfree.packing.context_sizes import context_sizes
    from padfree.train.batches import distinct
    from padfree.train.decide import decide
    from padfree.train.row_sharing import copied_keys, run_cost
    from padfree.train.rows import GROUP_SIZES, source_shares
    from padfree.train.scorer import plan_samples
    from padfree.train.settle import device_memory, settle
    from padfree.train.training_data import make_batcher

    processes, replicate = int(os.environ.get("WORLD_SIZE", "1")), config.parallel.replicate
    context = 1 if config.parallel.context == "auto" else config.parallel.context
    contexts = context_sizes(config.parallel.most_context(processes)) if config.parallel.context == "auto" else (1,)
    device_type = config.run.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    decided = decide(config, processes=processes, device_type=device_type, dry=True)
    source, model, data = decided.source, decided.model, processes // context
    cost = run_cost(config, model)
    in_pairs = GROUP_SIZES.get(config.loss.command, 1) > 1
    sampled = config.rollout.source is not None
    # Of prompts only the lengths are known. Samples are compared as the run will compare them.
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
        raise ValueError("data.path: it gave no batch; give files with at least one sample")
    plan = plans[0]
    lengths = plan.lengths.tolist()
    widths = context if plan.widths is None else plan.widths
    facts: dict[str, Any] = {
        "longest": int((-(-plan.computed_tokens // widths)).max()),
        "prompt_tokens": max(len(sample.tokens) for sample in source.samples) if sampled else 0,
        "copied_keys": copied_keys(config, source.samples, model),
    }
    settled = settle(
        config,
        model,
        processes=processes,
        device_type=device_type,
        memory=device_memory(torch.device(device_type)),
        **facts,
    )
    asked, config = config, settled.config
    memory = estimate_memory(
        config,
        skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code, head=config.loss.head),
        processes=processes,
        device_type=device_type,
        **facts,
    )

    yield from recipe_lines(asked.to_dict())
    yield ""
    shared = f"{context}" if contexts == (1,) else f"1 to {contexts[-1]}"
    yield f"layout: {processes} processes = {replicate} replicate x {data // replicate} shard x {shared} context"
    for line in settled.lines():
        yield f"auto: {line}"
    yield from memory_lines(memory, config)
    dropped = len(source.report.skipped) + len(source.report.dropped)
    left_out = f"; {dropped} rows are skipped or dropped" if dropped else ""
    used, several = source.report.num_used, source.report.num_used < source.report.num_samples
    in_rows = f"{used:,} rows, " if several else ""
    yield f"data: {in_rows}{len(source.samples):,} {'prompts' if sampled else 'samples'}{left_out}"
    for each in source_shares(config, source.samples, source.parts):
        yield f"  {each.line()}"
    yield (
        f"first step{', if every response is as long as it may be' if sampled else ''}: {len(lengths)} samples, "
        f"{sum(lengths):,} tokens{shared_tokens(plan)}, {plan.num_micro_batches} micro-batches on each of {data} data "
        f"ranks, {plan.fill:.1%} full, slowest rank {plan.imbalance:.3f} of the mean"
    )
    if plan.widths is not None:
        rows = Counter(plan.widths[plan.is_first].tolist())
        yield "  rows: " + ", ".join(f"{count} on {width} ranks" for width, count in sorted(rows.items()))
    if processes > 1:
        yield from traffic_lines(config, model, plans, processes, device_type)
    if device_type == "cuda" and not torch.cuda.is_available():
        yield "note: run.device is cuda, and there is no such device here: the run needs one"
    for note in decided.notes:
        yield f"note: {note}"


def shared_tokens(plan: StepPlan) -> str:
    """How many tokens are computed, if samples share some."""
    computed = int(plan.computed_tokens.sum())
    return "" if plan.prefixes is None or plan.sharing == 1.0 else f" ({computed:,} computed, the rest shared)"


def traffic_lines(
    config: Config, model: PreTrainedModel, plans: Sequence[StepPlan], processes: int, device_type: str
) -> Iterator[str]:
    """Which rank is on which host, and what they send each other in the first steps."""
    from padfree.planner.traffic import Placement, shown_bytes, step_traffic

    backend: Literal["gloo", "nccl"] = "nccl" if device_type == "cuda" else "gloo"
    placement = Placement(
        ranks=processes,
        hosts=max(1, processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))),
        context=1 if config.parallel.context == "auto" else config.parallel.context,
        replicate=config.parallel.replicate,
    )
    found = [step_traffic(config, model, plan, placement, backend) for plan in plans]
    yield from placement.lines()
    yield from found[0].lines(backend)
    if len(found) > 1:
        sent = ", ".join(shown_bytes(each.of_host(0)[1]) for each in found[1:])
        yield f"  host 0 to others in the steps after it: {sent}"


def recipe_lines(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings as TOML. Those that are off have no value there, and are comments."""
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping) and name != "columns"}
    for name, value in values.items():
        if name in tables:
            continue
        yield f"# {name} = none" if value is None else f"{name} = {_toml(value)}"
    for name, table in tables.items():
        yield f"[{prefix}{name}]"
        yield from recipe_lines(table, f"{prefix}{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(entry)}" for name, entry in value.items()) + " }"
    if isinstance(value, (list, tuple)) and any(isinstance(entry, Mapping) for entry in value):
        given = [{name: each for name, each in entry.items() if each is not None} for entry in value]
        return f"[{', '.join(map(_toml, given))}]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers, true and false, and lists read the same in TOML


def memory_lines(memory: MemoryEstimate, config: Config) -> Iterator[str]:
    """What `estimate_memory` found, part by part."""
    yield (
        f"memory: about {_gib(memory.device)} on each device (an estimate, without what the allocator, collectives and "
        "the driver take)"
    )
    where = ", on the CPU" if memory.offloaded else ""
    trained = f"{memory.trained:,} trained" if memory.trained != memory.parameters else "all trained"
    parts = [
        ("weights", memory.weights, f"{memory.parameters:,} parameters, {trained}{where}"),
        ("gradients", memory.gradients, f"float32{where}"),
        ("optimizer", memory.optimizer, f"AdamW's two moments{where}"),
        ("gathered", memory.gathered, "layers while they compute"),
        (
            "activations",
            memory.activations,
            f"micro-batches of {memory.tokens:,} tokens, checkpointing {config.parallel.checkpointing}",
        ),
        ("working", memory.working, "the head's logits, or one layer's backward"),
        ("reference", memory.reference, "on the CPU while it is not asked" if memory.reference_offloaded else "frozen"),
        ("sampler", memory.sampler, "a whole copy of the model"),
        (
            "cache",
            memory.cache,
            "keys and values of the sampler" if memory.cache_stays else "keys and values while the sampler writes",
        ),
    ]
    for name, size, meaning in parts:
        if size:
            yield f"  {name:<12}{_gib(size):>12}  {meaning}"
    if memory.host:
        yield f"  and {_gib(memory.host)} of the CPU's memory for each process"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size / 2**20:.2f} MiB"
