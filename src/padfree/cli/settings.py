"""`padfree settings`: every setting of a recipe with its type, default and meaning.

padfree settings                     a table of all settings
padfree settings rollout             the settings of a section
padfree settings loss.kind --json    all facts about one setting, e.g. whether it may change on resume
"""

from __future__ import annotations

import argparse
import json

from padfree.config.settings_table import aligned, matching_entries


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "settings",
        help="list the settings of a recipe, with types, defaults and meanings",
        description="List the settings of a recipe: name, type, default and meaning.",
        epilog="example: padfree settings rollout",
    )
    command.add_argument("name", nargs="?", help="a section such as rollout, or a setting such as loss.kind")
    command.add_argument("--json", action="store_true", help="print all facts about each setting as JSON")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> int:
    entries = matching_entries(settings.name)
    if settings.json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2, ensure_ascii=False))
    else:
        rows = [("setting", "type", "default", "meaning")]
        rows += [(entry.name, entry.type, entry.default_words, entry.meaning) for entry in entries]
        print(aligned(rows), end="")
    return 0
