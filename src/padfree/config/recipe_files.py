"""The recipes that come with the package: `sft` is the file padfree/recipes/sft.toml."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The paths of the recipes by name, sorted by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda path: path.stem)}


def recipe_path(name: str | PathLike[str]) -> Path:
    """The path of a recipe, given as a path or as the name of a shipped recipe. An existing file takes precedence."""
    path = Path(name)
    return path if path.is_file() else shipped_recipes().get(str(name), path)


def summary(path: Path) -> str:
    """The first comment of a recipe."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def default_recipe(command: str) -> str | None:
    """The recipe of a command that is called without one: its only recipe, or None if there are several (`rl`)."""
    names = [name for name in shipped_recipes() if name == command or name.startswith(f"{command}-")]
    return command if names == [command] else None
