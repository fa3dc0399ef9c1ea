"""`padfree sft` and `padfree rl`: a recipe, a few overrides, and a line or a bar of progress per step.

padfree sft recipes/sft.toml model.path=Qwen/Qwen3-0.6B data.path='["train.jsonl"]'
padfree rl recipes/rl.toml loss.kind=gspo --dry-run
torchrun --nproc-per-node 8 -m padfree sft recipes/sft.toml
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from padfree.config import Config, load_config

if TYPE_CHECKING:
    from padfree.train.loop import OnStep

HELP = {
    "sft": "fine-tune on chat, prompt/response or plain text",
    "rl": "update a policy on rollout files",
}
BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in HELP.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}: settings from a TOML recipe, changed by section.name=value.",
            epilog=f"example: padfree {name} recipes/{name}.toml model.path=my-model optimizer.lr=2e-6 --dry-run",
        )
        command.add_argument("recipe", help="TOML file; recipes/ has one to start from")
        command.add_argument("overrides", nargs="*", metavar="section.name=value", help="settings to change")
        command.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")
        command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    config = load_config(settings.recipe, settings.overrides)
    if (config.loss.kind == "sft") != (settings.command == "sft"):
        other = "rl" if settings.command == "sft" else "sft"
        raise ValueError(f"loss.kind: {config.loss.kind!r} for padfree {settings.command}; use padfree {other} for it")
    first = int(os.environ.get("RANK", "0")) == 0
    if settings.dry_run:
        for line in description(config) if first else ():
            print(line)
        return

    from padfree.dist import PeerLostError
    from padfree.train.engine import NonFiniteError
    from padfree.train.loop import train

    try:
        with _progress(config.run.steps) if first else _silence() as on_step:
            result = train(config, on_step=on_step)
    except (NonFiniteError, PeerLostError) as error:
        raise ValueError(str(error)) from error
    if first:
        end = "stopped by a signal" if result.stopped else "done"
        print(f"{end} after {result.step} steps; everything is in {config.run.folder}")


@contextmanager
def _silence() -> Iterator[OnStep | None]:
    yield None


@contextmanager
def _progress(steps: int | None) -> Iterator[OnStep]:
    """A bar on a terminal, a line a step elsewhere."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise ValueError("padfree: the package rich is missing; pip install rich") from error
    console = Console()
    if not console.is_terminal:
        yield lambda metrics: print(f"step {metrics['step'] + 1}  {_shown(metrics)}", flush=True)
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps)
        yield lambda metrics: bar.update(task, completed=metrics["step"] + 1, description=_shown(metrics))


def _shown(metrics: Mapping[str, Any]) -> str:
    parts = [f"loss {metrics['loss']:.4f}", f"norm {metrics['gradient_norm']:.3f}", f"lr {metrics['lr']:.2e}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    return "  ".join([*parts, f"{metrics['tokens_per_second']:,.0f} tokens/s"])


def description(config: Config) -> Iterator[str]:
    """The settings, the layout, the memory the weights take, and the plan of the first step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from padfree.packing import CostModel, plan_step
    from padfree.train.sources import load_source, load_tokenizer, make_batcher

    tokenizer = load_tokenizer(config)
    for section, values in config.to_dict().items():
        yield f"[{section}]"
        yield from (f"  {name} = {value}" for name, value in values.items())

    processes, context, replicate = (
        int(os.environ.get("WORLD_SIZE", "1")),
        config.parallel.context,
        config.parallel.replicate,
    )
    if processes % (context * replicate):
        raise ValueError(
            f"parallel.context: {context} times parallel.replicate {replicate} does not divide {processes} processes; "
            "change one of them"
        )
    data = processes // context
    yield f"layout: {processes} processes = {replicate} replicate x {data // replicate} shard x {context} context"

    hf_config = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config)  # type: ignore[no-untyped-call]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shards = processes // replicate
    gibibytes = parameters * BYTES_PER_PARAMETER / shards / 2**30
    yield f"memory: {parameters:,} parameters, {gibibytes:.2f} GiB a device for weights, gradients and optimizer state"

    source = load_source(config, tokenizer)
    groups = next(make_batcher(config, source.samples), None)
    if groups is None:
        raise ValueError("data.path: it gave no batch; give files with at least one sample")
    lengths = [len(sample) for group in groups for sample in group]
    plan = plan_step(
        lengths,
        ranks=data,
        max_tokens=config.batch.max_tokens * context,
        cost=CostModel.from_config(hf_config),
        overlong=config.batch.overlong,
    )
    yield (
        f"first step: {len(lengths)} samples, {sum(lengths):,} tokens, {plan.num_micro_batches} micro-batches on each "
        f"of {data} data ranks, {plan.fill:.1%} full, slowest rank {plan.imbalance:.3f} of the mean"
    )
