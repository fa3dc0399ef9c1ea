"""One spelling of settings for all commands.

    model.path=X   --model.path X   --model.path=X   --model X        are the same, for every command with that setting

Commands that take settings (`sft`, `eval`, `plan` ...) are given `section.name=value`. Commands that have a flag of
their own for a setting (`check --model`, `demo --folder`) are given that flag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from padfree.config import Config
from padfree.config.loss import TASKS
from padfree.errors import closest

SHORT = {
    "model": "model.path",
    "data": "data.path",
    "folder": "run.folder",
    "tokenizer": "model.tokenizer",
    "device": "run.device",
    "steps": "run.steps",
    "lr": "optimizer.lr",
}
"""Short names, for commands that have no flag of the same name."""

TEXTS = ("model.path", "data.path", "eval.path", "run.folder", "model.tokenizer", "run.device")
"""Of these, a short name's value is text: `--folder 1` is a folder."""

OVERRIDE = re.compile(r"\s*\w+(\.\w+)+\s*=")
ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "batch_size": "batch.samples",
    "num_train_epochs": "data.epochs",
    "max_steps": "run.steps",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
}
"""Names that other trainers have for a setting: only for the message that refuses them."""

TAKE_SETTINGS = (*TASKS, "eval")
OWN_FLAGS = {
    "check": {
        "model.path": "--model",
        "model.tokenizer": "--tokenizer",
        "model.attention": "--backend",
        "model.dtype": "--dtype",
        "run.device": "--device",
        "data.path": "--data",
    },
    "demo": {"run.folder": "--folder"},
    "report": {"run.folder": ""},
    "plan": {},
}
"""By command: the flag that stands for a setting; empty: a word without a flag."""


def understood(words: Sequence[str]) -> list[str]:
    """The words of a command line, settings in the form that the command takes."""
    if not words or (words[0] not in TAKE_SETTINGS and words[0] not in OWN_FLAGS):
        return list(words)
    command, found, overrides, lists = words[0], [words[0]], list[str](), dict[str, list[str]]()
    rest = iter(words[1:])
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        flag = word.startswith("--")
        setting = _setting(command, name) if flag else name
        if not flag and command in TAKE_SETTINGS and OVERRIDE.match(word):
            overrides.append(word)
            continue
        if setting is None or (not flag and (not equals or setting not in OWN_FLAGS.get(command, {}))):
            found.append(word)
            continue
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                found += [word, *([value] if value else [])]  # argparse refuses it
                continue
        own = OWN_FLAGS.get(command, {}).get(setting)
        if own is not None:
            found += [*([own] if own else []), *_entries(value)]
        elif flag and name in SHORT and setting in ("data.path", "eval.path"):
            lists.setdefault(setting, []).append(value)
        else:
            overrides.append(f"{setting}={json.dumps(value) if name in SHORT and setting in TEXTS else value}")
    # Behind the recipe, wherever they stood: the first word without a flag is the recipe.
    return [*found, *overrides, *(f"{setting}={json.dumps(values)}" for setting, values in lists.items())]


def _setting(command: str, name: str) -> str | None:
    """The setting that a flag names; None: it is for argparse."""
    if "." in name:
        return name
    if command not in TAKE_SETTINGS:
        return SHORT["folder"] if command == "report" and name == "folder" else None
    return "eval.path" if command == "eval" and name == "data" else SHORT.get(name)


def _entries(value: str) -> list[str]:
    """The words of a value, which may be a list as in a recipe."""
    try:
        found = json.loads(value)
    except ValueError:
        return [value]
    return [str(entry) for entry in found] if isinstance(found, list) else [found if isinstance(found, str) else value]


def meant(word: str, command: str) -> str:
    """What to say of a word that nobody knows: the setting or flag that is nearest to it."""
    if command not in TAKE_SETTINGS and command != "plan":
        return ""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    by_name: dict[str, str] = {}
    for setting in setting_names(Config):
        by_name.setdefault(setting.rpartition(".")[2], setting)
        by_name[setting] = setting
    by_name |= SHORT | ELSEWHERE
    near = closest(name, list(by_name))
    if near is None:
        return "; write settings as section.name=value, such as optimizer.lr=1e-5"
    return f"; did you mean {by_name[near]}=...?"


def setting_names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Every setting by its dotted name."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if not entry.metadata.get("setting", True):
            continue
        if is_dataclass(hint) and isinstance(hint, type):
            yield from setting_names(hint, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"
