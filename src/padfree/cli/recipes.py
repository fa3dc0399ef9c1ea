"""`padfree recipes`: the recipes that come with the package.

Examples:

    padfree recipes                      one line per recipe
    padfree recipes sft > my.toml        a copy to edit
"""

from __future__ import annotations

import argparse

from padfree.config.recipe_files import shipped_recipes, summary
from padfree.errors import UserError, closest


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "recipes",
        help="list the recipes that come with padfree, or print one",
        description="List the recipes that come with padfree, or print one of them.",
        epilog="example: padfree recipes sft > my.toml",
    )
    command.add_argument("name", nargs="?", help="the recipe to print")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> int:
    recipes = shipped_recipes()
    if settings.name is None:
        width = max(map(len, recipes))
        for name, path in recipes.items():
            print(f"{name:{width}}  {summary(path)}")
    elif settings.name in recipes:
        print(recipes[settings.name].read_text(encoding="utf-8"), end="")
    else:
        near = closest(settings.name, list(recipes))
        fix = f"use {near}" if near else f"give one of {', '.join(recipes)}"
        raise UserError("recipes", "is not the name of a recipe", fix, value=settings.name)
    return 0
