"""`padfree eval`: evaluates a model on the held-out data of a recipe's `[eval]`, or on tasks of lm-evaluation-harness.

Examples:

    padfree eval sft model.path=runs/sft/model eval.path=test.jsonl
    padfree eval my-model --tasks arc_easy,hellaswag --num-fewshot 5
    padfree eval rl-local model.path=runs/rl/model eval.path=test.jsonl eval.greedy=false eval.samples_per_prompt=8
    torchrun --nproc-per-node 8 -m padfree eval sft model.path=my-model eval.path=test.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress

from padfree.cli.json_report import json_target, write_json
from padfree.cli.main import COMMANDS
from padfree.cli.progress import Lines
from padfree.cli.talk_options import DEVICES, DTYPES
from padfree.config import EvaluationConfig, load_config
from padfree.config.hub import check_names
from padfree.config.inputs import path_word
from padfree.config.processes import processes_of
from padfree.errors import UserError, need
from padfree.tools.talk.find_model import find_model

_TASK_OPTIONS = {
    "include_path": None,
    "num_fewshot": None,
    "limit": None,
    "apply_chat_template": False,
    "system": None,
    "base": None,
    "seed": 0,
    "device": "auto",
    "dtype": "auto",
}
"""Options that need `--tasks`, and their values if they are not given."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = COMMANDS["eval"][1]
    command = commands.add_parser(
        "eval",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Nothing is trained, and the run folder is not changed.",
        epilog="example: padfree eval sft model.path=runs/sft/model eval.path=test.jsonl",
    )
    command.add_argument(
        "recipe",
        type=path_word("recipe"),
        metavar="RECIPE|MODEL",
        help="recipe, or with --tasks the folder or Hub id of a model",
    )
    command.add_argument(
        "overrides", nargs="*", metavar="section.name=value", help="settings that replace those of the recipe"
    )
    command.add_argument(
        "--json", type=path_word("--json"), metavar="FILE", help="also write the metrics to this file, as JSON"
    )
    tasks = command.add_argument_group("tasks of lm-evaluation-harness")
    tasks.add_argument("--tasks", metavar="NAME[,NAME]", help="tasks to evaluate MODEL on, without a recipe")
    tasks.add_argument(
        "--include-path",
        type=path_word("--include-path"),
        action="append",
        metavar="DIR",
        help="folder with YAML files of more tasks",
    )
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="number of solved examples before each question")
    tasks.add_argument("--limit", type=int, metavar="N", help="maximum number of rows per task (default: all)")
    tasks.add_argument("--apply-chat-template", action="store_true", help="render prompts with the chat template")
    tasks.add_argument("--system", metavar="TEXT", help="system message, with --apply-chat-template")
    tasks.add_argument(
        "--base", type=path_word("--base"), metavar="NAME", help="replaces the base model that an adapter names"
    )
    tasks.add_argument("--seed", type=int, default=0, metavar="N", help="seed of tasks that sample (default 0)")
    tasks.add_argument("--device", choices=DEVICES, default="auto", metavar="NAME", help="device: auto, cpu or cuda")
    tasks.add_argument(
        "--dtype", choices=DTYPES, default="auto", metavar="NAME", help="dtype: auto, float32, bfloat16, ..."
    )
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    if settings.tasks is not None:
        _run_tasks(settings)
        return
    for option, given in _TASK_OPTIONS.items():
        if getattr(settings, option) != given:
            raise UserError(f"--{option.replace('_', '-')}", "needs --tasks", "remove this option, or add --tasks")
    config = load_config(settings.recipe, settings.overrides, config_type=EvaluationConfig)
    held_out = config.with_held_out_data()
    first = processes_of().is_first
    target = json_target(settings.json, writes=first)
    # Check only the names of the held-out data, because the training data of the recipe may be missing.
    check_names(held_out)

    shown = Lines(shown=first, write=_to_stderr)  # stdout gets only the metrics
    shown.activity("importing torch and transformers", 0, 0)
    with shown.heartbeat if first else nullcontext():
        from padfree.train.run import evaluate

        found = evaluate(config, on_tokenising=shown.tokenising, on_activity=shown.activity)
    if not first:
        return
    # Write the file before printing, because printing fails if the reader of the pipe has ended.
    write_json(target, {"model": config.model.path, "data": list(config.eval.path), **found})
    _print(found)


def _run_tasks(settings: argparse.Namespace) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness."""
    names = tuple(filter(None, settings.tasks.split(",")))
    need(bool(names), "--tasks", settings.tasks, "give one or more names, separated by commas")
    need(
        not settings.overrides,
        "--tasks",
        settings.overrides,
        "remove these settings: with --tasks, the model is the only argument",
    )
    for option, least in (("num_fewshot", 0), ("limit", 1), ("seed", 0)):
        value = getattr(settings, option)
        need(value is None or value >= least, f"--{option.replace('_', '-')}", value, f"give {least} or more")
    alone = settings.apply_chat_template or settings.system is None
    if not alone:
        fix = "add --apply-chat-template, or leave out --system"
        raise UserError("--system", "needs the chat template", fix, value=settings.system)
    need(
        processes_of().world == 1,
        "--tasks",
        settings.tasks,
        "start padfree eval without torchrun: tasks are evaluated on one device",
    )
    target = json_target(settings.json)
    files = find_model(settings.recipe, base=settings.base)

    from padfree.tools.benchmarks.run_tasks import TaskOptions, check_harness, numbers_of, run_tasks

    check_harness()
    options = TaskOptions(
        tasks=names,
        include=tuple(settings.include_path or ()),
        fewshot=settings.num_fewshot,
        limit=settings.limit,
        chat=settings.apply_chat_template,
        system=settings.system,
        seed=settings.seed,
    )
    with redirect_stdout(sys.stderr):  # stdout gets only the metrics
        found = run_tasks(files, options, dtype=settings.dtype, device=settings.device)
    numbers = numbers_of(found)
    kept = {key: found.get(key) for key in ("n-shot", "n-samples", "versions", "higher_is_better")}
    write_json(target, {"model": settings.recipe, "tasks": list(names), **numbers, **kept})
    _print(numbers)


def _print(found: Mapping[str, float]) -> None:
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value:.6g}")


def _to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
