"""`padfree eval`: evaluates a model on the held-out data of a recipe's `[eval]`.

padfree eval sft model.path=runs/sft/model eval.path=test.jsonl
padfree eval rl-local model.path=runs/rl/model eval.path=test.jsonl eval.greedy=false eval.samples_per_prompt=8
torchrun --nproc-per-node 8 -m padfree eval sft model.path=my-model eval.path=test.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from padfree.cli.main import COMMANDS
from padfree.cli.progress import Lines
from padfree.config import load_config
from padfree.config.hub import check_names
from padfree.config.output_sections import check_output
from padfree.config.processes import processes_of
from padfree.errors import UserError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = COMMANDS["eval"][1]
    command = commands.add_parser(
        "eval",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Nothing is trained, and the run folder is not changed.",
        epilog="example: padfree eval sft model.path=runs/sft/model eval.path=test.jsonl",
    )
    command.add_argument("recipe", help="TOML file of a run with the same data and loss")
    command.add_argument("overrides", nargs="*", metavar="section.name=value", help="settings to change")
    command.add_argument("--json", metavar="FILE", help="also write the numbers to this file")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    config = load_config(settings.recipe, settings.overrides)
    held_out = config.with_held_out_data()
    first = processes_of().is_first
    target = None if settings.json is None else Path(settings.json)
    if target is not None and first:
        check_output(target, "--json")
    # Check only the names of the held-out data, because the training data of the recipe may be missing.
    check_names(held_out)

    shown = Lines(shown=first, write=_to_stderr)  # stdout has the numbers only
    shown.activity("importing torch and transformers", 0, 0)
    with shown.heartbeat if first else nullcontext():
        from padfree.train.run import evaluate

        found = evaluate(config, on_tokenising=shown.tokenising, on_activity=shown.activity)
    if not first:
        return
    # Write the file before printing, because printing fails if the reader of the pipe has ended.
    if target is not None:
        about = {"model": config.model.path, "data": list(config.eval.path), **found}
        try:
            target.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError("--json", f"{target} cannot be written ({error.strerror})", "give another file") from None
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value:.6g}")


def _to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
