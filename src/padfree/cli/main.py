"""`padfree COMMAND`: finds the command, turns a mistake of the user into one line, and sets the exit code.

Only the module of the command that was asked for is imported: help, and a mistake in a setting, need not wait for
torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Collection, Sequence

from padfree.warning import PadfreeWarning

COMMANDS = {
    "chat": ("padfree.cli.chat", "chat with a model, turn by turn"),
    "check": ("padfree.cli.check", "compare packed training of your model with one sample at a time"),
    "data": ("padfree.cli.data", "show rows of the data as the model sees them"),
    "demo": ("padfree.cli.demo", "plan, check, fine-tune and reinforce a tiny model, on a CPU"),
    "eval": ("padfree.cli.eval", "measure a model on held-out data, as a recipe's [eval] says"),
    "generate": ("padfree.cli.generate", "let a model answer prompts"),
    "launch": ("padfree.cli.launch", "run a command on several hosts, over ssh and torchrun"),
    "plan": ("padfree.cli.plan", "plan an epoch: packs, balance, time and memory"),
    "report": ("padfree.cli.report", "make one HTML page of a run folder, or of several"),
    "dpo": ("padfree.cli.train", "train on pairs of answers: DPO, IPO, hinge, SimPO, ORPO"),
    "reward": ("padfree.cli.train", "train a reward model on pairs of answers"),
    "sft": ("padfree.cli.train", "fine-tune on chat, prompt/response or plain text"),
    "distill": ("padfree.cli.train", "learn the distributions of a teacher"),
    "rl": ("padfree.cli.train", "update a policy on rollout files, or on its own responses"),
}
"""By name: the module that has the command, and what it does in a line."""


def parser(loaded: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The whole command line; of commands that are not `loaded` it knows the name and the line only."""
    commands = argparse.ArgumentParser(
        prog="padfree",
        description="Padding-free training of Hugging Face language models.",
        epilog="example: padfree sft recipes/sft.toml model.path=my-model data.path=rows.jsonl",
    )
    added = commands.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {COMMANDS[name][0] for name in loaded if name in COMMANDS}
    for name, (module, text) in COMMANDS.items():
        if module not in modules:
            added.add_parser(name, help=text)
        elif name not in added.choices:  # a module may have two commands
            importlib.import_module(module).add_command(added)
    return commands


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words of a command line, understood; argparse exits with 2 if they cannot be."""
    commands = parser(words[:1])
    settings, rest = commands.parse_known_args(words)
    if hasattr(settings, "prompt") and all(word == "-" or not word.startswith("-") for word in rest):
        settings.prompt = [*settings.prompt, *rest]  # prompts behind a flag, where argparse no longer takes them
        return settings
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (overrides != rest or not hasattr(settings, "overrides")):
        commands.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides:  # settings behind a flag, where argparse no longer takes them
        settings.overrides = [*settings.overrides, *overrides]
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 1 for a mistake in the input (argparse itself exits with 2)."""
    if arguments is None and not sys.warnoptions:  # this is the command itself, and nobody gave -W or PYTHONWARNINGS
        show_own_warnings_only()
    settings = parsed(list(sys.argv[1:] if arguments is None else arguments))
    try:
        settings.run(settings)
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the flush at exit
    except ValueError as error:
        print(f"padfree {settings.command}: {error}", file=sys.stderr)
        return 1
    return 0


def show_own_warnings_only() -> None:
    """Of the packages that a run imports a user can mend nothing; what padfree warns about is said once."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", PadfreeWarning)
