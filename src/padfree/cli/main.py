"""`padfree COMMAND`: finds the command, turns a mistake of the user into one line, and sets the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from padfree.cli import demo, train


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(
        prog="padfree",
        description="Padding-free training of Hugging Face language models.",
        epilog="example: padfree sft recipes/sft.toml model.path=my-model data.path='[\"train.jsonl\"]'",
    )
    added = commands.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo.add_command(added)
    train.add_commands(added)
    return commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 1 for a mistake in the input (argparse itself exits with 2)."""
    settings = parser().parse_args(arguments)
    try:
        settings.run(settings)
    except ValueError as error:
        print(f"padfree {settings.command}: {error}", file=sys.stderr)
        return 1
    return 0
