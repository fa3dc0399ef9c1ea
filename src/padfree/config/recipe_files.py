"""The recipes that come with the package, named by their files: the recipe `sft` is padfree/recipes/sft.toml."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from padfree.config.inputs import user_path

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the shipped recipes by name, in alphabetical order."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda path: path.stem)}


def recipe_path(name: str | PathLike[str]) -> Path:
    """Return the path of a recipe. `name` is a path or the name of a shipped recipe."""
    path = Path(user_path(str(name), "config"))
    return path if path.is_file() else shipped_recipes().get(str(name), path)


def summary(path: Path) -> str:
    """Return the first comment of a recipe, which says what the recipe is for."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def default_recipe(command: str) -> str | None:
    """Return the name of the recipe that `command` uses by default. Return None if the command has no default, because
    there are several recipes for it, as for `rl`.
    """
    names = [name for name in shipped_recipes() if name == command or name.startswith(f"{command}-")]
    return command if names == [command] else None
