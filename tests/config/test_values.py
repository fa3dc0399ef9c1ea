"""A value means the same on the command line, in a recipe and in Python, whatever it looks like."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from padfree.cli.train import recipe_lines
from padfree.config import Config, config_from_dict, load_config
from padfree.config.reader import _converted, _parsed, changed_recipe
from padfree.config.recipe_files import shipped_recipes
from padfree.errors import UserError
from padfree.record.run_files import finite

Hints = list[tuple[str, Any]]
WORDS = ("none", "true", "false", "2024", "1e5", "inf", "nan", "2024-01-01", "12:30:00", "0x10", "None", "1_0", "null")
REQUIRED: dict[str, dict[str, Any]] = {
    "model": {"path": "m"},
    "data": {"path": "d", "epochs": 1},
    "batch": {"samples": 8, "max_tokens": 64},
    "run": {"folder": "r"},
}


def hints_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint):
            yield from hints_of(hint, f"{prefix}{entry.name}.")
        elif entry.metadata.get("setting", True):
            yield f"{prefix}{entry.name}", hint


HINTS: Hints = list(hints_of(Config))
STRINGS = [
    (name, hint) for name, hint in HINTS if get_origin(hint) is not dict and (hint is str or str in get_args(hint))
]


def choices_of(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for argument in get_args(hint) for choice in choices_of(argument))


def made(recipe: dict[str, Any], *overrides: str) -> Config:
    return load_config(
        None, [*(f"{a}.{b}={value}" for a, table in recipe.items() for b, value in table.items()), *overrides]
    )


def with_value(name: str, value: Any) -> dict[str, Any]:
    section, _, own = name.partition(".")
    return {**REQUIRED, section: {**REQUIRED.get(section, {}), own: value}}


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("name", "hint"), STRINGS)
@pytest.mark.parametrize("word", WORDS)
def test_a_string_setting_takes_its_text(name: str, hint: Any, word: str) -> None:
    off = word.lower() in ("none", "null") and type(None) in get_args(hint)
    if get_origin(hint) is tuple:
        expected: Any = () if word.lower() in ("none", "null") else (word,)
    else:
        choice = word in ("None", "null") and "none" in choices_of(hint)
        expected = None if off else "none" if choice else word
    assert _converted(hint, _parsed(word)) == expected


def test_there_are_many_string_settings() -> None:
    names = dict(STRINGS)
    assert {"parallel.checkpointing", "run.folder", "data.path", "track.wandb", "model.path"} <= names.keys()


@pytest.mark.parametrize(("name", "hint"), [(name, hint) for name, hint in HINTS if choices_of(hint)])
def test_every_choice_is_accepted_everywhere(name: str, hint: Any) -> None:
    """A run prints the choice that it makes for `auto` as `setting=value`; the value is also an override."""
    for choice in choices_of(hint):
        typed, written = (_converted(hint, value) for value in (_parsed(choice), choice))
        assert typed == written
        assert typed in (choice, (choice,))
        if choice == "none" and type(None) not in get_args(hint):
            assert _converted(hint, None) == "none"


@pytest.mark.parametrize("levels", ["none", "6 host, 30 none", "full"])
def test_the_levels_of_checkpointing(levels: str) -> None:
    assert made(REQUIRED, f"parallel.checkpointing={levels}").parallel.checkpointing == levels
    assert config_from_dict({**REQUIRED, "parallel": {"checkpointing": levels}}).parallel.checkpointing == levels


@pytest.mark.parametrize("name", ["eval.path", "data.sources", "data.columns", "model.freeze", "optimizer.groups"])
def test_none_switches_a_setting_off(name: str) -> None:
    empty: Any = {} if get_origin(dict(HINTS)[name]) is dict else ()
    assert value_of(made(REQUIRED, f"{name}=none"), name) == empty
    for value in (None, "none"):
        assert value_of(config_from_dict(with_value(name, value)), name) == empty


VALUES: list[tuple[str, Any, Any]] = [
    ("optimizer.lr", np.float64(1e-3), 1e-3),
    ("optimizer.lr", np.float32(0.5), 0.5),
    ("optimizer.lr", torch.tensor(0.5), 0.5),
    ("optimizer.lr", np.array(0.5), 0.5),
    ("optimizer.lr", np.int64(1), 1.0),
    ("optimizer.betas", (np.float64(0.5), np.float32(0.5)), (0.5, 0.5)),
    ("optimizer.betas", np.array([0.5, 0.25]), (0.5, 0.25)),
    ("run.steps", np.int64(3), 3),
    ("run.seed", torch.tensor(3), 3),
    ("checkpoint.export", np.bool_(False), False),
    ("run.folder", np.str_("f"), "f"),
    ("run.folder", Path("f"), "f"),
    ("data.path", [np.str_("f"), Path("g")], ("f", "g")),
    ("data.columns", {"prompt": np.str_("q")}, {"prompt": "q"}),
    ("parallel.checkpointing", np.str_("none"), "none"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_values_of_numpy_and_torch(name: str, value: Any, expected: Any) -> None:
    found = value_of(config_from_dict(with_value(name, value)), name)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(found, tuple):
        assert [type(entry) for entry in found] == [type(entry) for entry in expected]


@pytest.mark.parametrize("value", [np.float64(2.5), np.array([1, 2]), torch.tensor(True), np.bool_(True)])
def test_a_wrong_value_of_numpy_or_torch_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"^run\.steps: .*; give a whole number"):
        config_from_dict(with_value("run.steps", value))


# The printed recipe

ODD = ['"', "'", "\\", "\n", "\t", "\r", "\x01", "\x1f", "\x7f", "\x85", "\u2028", "é", "😀", "#", "=", "[a]", " "]
ODD += ["none ", "inf", "nan", "2024-01-01", "true", "{x}", "a.b", "//", "\\u0041", '"""', "'''", "%s", "$HOME"]


def odd_text(rng: random.Random) -> str:
    return "".join(rng.choices(ODD, k=rng.randint(1, 5))) or "x"


def odd_values(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Settings that accept any text, any table of texts, infinity or none."""
    table = {odd_text(rng): odd_text(rng) for _ in range(rng.randint(0, 3))}
    texts = [f"p{odd_text(rng)}" for _ in range(rng.randint(0, 3))]
    return {
        "data": {
            "path": [*texts, f"p{odd_text(rng)}"],
            "system": rng.choice([None, odd_text(rng)]),
            "columns": table,
            "chat_template": f"p{odd_text(rng)}",
            "max_length": None,
        },
        "model": {"tokenizer": f"p{odd_text(rng)}"},
        "track": {"wandb": rng.choice([None, odd_text(rng)])},
        "run": {"folder": f"p{odd_text(rng)}"},
        "optimizer": {"max_grad_norm": rng.choice([None, 1e-30, 3e38]), "lr": rng.choice([0.0, 1e-300, 0.1, 1 / 3])},
        "schedule": {"final": rng.choice([0.0, 0.25])},
    }


@pytest.mark.parametrize("recipe", shipped_recipes())
@pytest.mark.parametrize("seed", range(8))
def test_the_printed_recipe_is_the_same_recipe(recipe: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    odd = odd_values(rng)
    kind = load_config(recipe).loss.kind
    bounds = {name: {"high": math.inf} for name in ("clip", "gspo", "cispo")} if kind == "clip" else {}
    config = config_from_dict(changed_recipe(recipe, {**odd, "loss": bounds}))
    printed = tmp_path / "printed.toml"
    printed.write_text("\n".join(recipe_lines(config.to_dict())), encoding="utf-8", newline="\n")
    again = load_config(printed)
    assert again == config
    strict = json.loads(json.dumps(finite(config.to_dict()), allow_nan=False))
    assert config_from_dict(strict) == config


def test_none_is_printed_where_the_default_is_not_none(tmp_path: Path) -> None:
    config = made(REQUIRED, "optimizer.max_grad_norm=none", "data.epochs=1")
    assert config.optimizer.max_grad_norm is None
    (tmp_path / "printed.toml").write_text("\n".join(recipe_lines(config.to_dict())))
    assert load_config(tmp_path / "printed.toml").optimizer.max_grad_norm is None
