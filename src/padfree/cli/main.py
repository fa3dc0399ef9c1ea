"""`padfree COMMAND`: finds the command, turns a mistake of the user into one line, and sets the exit code."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from padfree.cli import check, demo, plan, report, train
from padfree.warning import PadfreeWarning


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(
        prog="padfree",
        description="Padding-free training of Hugging Face language models.",
        epilog="example: padfree sft recipes/sft.toml model.path=my-model data.path='[\"train.jsonl\"]'",
    )
    added = commands.add_subparsers(dest="command", metavar="COMMAND", required=True)
    check.add_command(added)
    demo.add_command(added)
    plan.add_command(added)
    report.add_command(added)
    train.add_commands(added)
    return commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 1 for a mistake in the input (argparse itself exits with 2)."""
    if arguments is None and not sys.warnoptions:  # this is the command itself, and nobody gave -W or PYTHONWARNINGS
        show_own_warnings_only()
    commands = parser()
    settings, rest = commands.parse_known_args(arguments)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (overrides != rest or not hasattr(settings, "overrides")):
        commands.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides:  # settings behind a flag, where argparse no longer takes them
        settings.overrides = [*settings.overrides, *overrides]
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
