"""Accept every spelling of a setting on a command line, and convert it to the form that the command takes.

    model.path=X   --model.path X   --model.path=X   --model X        are equivalent for every command with the setting

Commands that take settings (`sft`, `eval`, `plan` ...) receive `section.name=value`. Commands that have their own flag
for a setting (`check --model`, `demo --folder`) receive that flag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from padfree.config import Config
from padfree.config.inputs import is_data_file
from padfree.config.loss import TASKS
from padfree.errors import closest

SHORT_FLAGS = {
    "model": "model.path",
    "data": "data.path",
    "folder": "run.folder",
    "tokenizer": "model.tokenizer",
    "device": "run.device",
    "steps": "run.steps",
    "lr": "optimizer.lr",
}
"""The setting that each short flag sets in training commands, `padfree eval` and `padfree data show`, e.g. `--lr 1e-5`
sets `optimizer.lr`."""

STRING_SETTINGS = ("model.path", "data.path", "eval.path", "run.folder", "model.tokenizer", "run.device")
"""Settings that short flags (`SHORT_FLAGS`) always set to a string: `--folder 1` sets `run.folder` to "1"."""

OVERRIDE = re.compile(r"\s*\w+(\.\w+)+\s*=")
OTHER_TRAINERS = {
    "learning_rate": "optimizer.lr",
    "batch_size": "batch.samples",
    "num_train_epochs": "data.epochs",
    "max_steps": "run.steps",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
}
"""Names of settings in other trainers, used for suggestions in error messages."""

TAKE_SETTINGS = (*TASKS, "eval", "data")
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
"""By command: the command's own flag for a setting, e.g. `padfree check --model` for `model.path`. An empty string
means that the setting is a positional argument, as in `padfree report FOLDER`."""


MARK = "\0"
"""Marks a word after `--` that begins with -, so that argparse does not take it for a flag. No word has this
character, because the system does not allow it."""


def with_marks(words: Sequence[str]) -> list[str]:
    """Return the words without `--`. Each later word that begins with - is marked: it is not a flag."""
    if "--" not in words or words[0] == "launch":  # `padfree launch` reads its own `--`
        return list(words)
    place = list(words).index("--")
    return [*words[:place], *(f"{MARK}{word}" if word.startswith("-") else word for word in words[place + 1 :])]


def without_mark(value: Any) -> Any:
    """Return the value of an argument (a word, or a list of words) without marks."""
    if isinstance(value, list):
        return [without_mark(entry) for entry in value]
    return value.removeprefix(MARK) if isinstance(value, str) and value.startswith(MARK) else value


def normalised_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with settings in the form that the command takes: as `section.name=value`, or
    as a flag of the command.
    """
    if not words or (words[0] not in TAKE_SETTINGS and words[0] not in OWN_FLAGS):
        return list(words)
    command, found, overrides, lists = words[0], [words[0]], list[str](), dict[str, list[str]]()
    rest = iter(words[1:] if "data.path" in OWN_FLAGS.get(command, {}) else _repeated(words[1:]))
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
                found += [word, *([value] if value else [])]  # argparse reports the missing value
                continue
        own = OWN_FLAGS.get(command, {}).get(setting)
        if own is not None:
            found += [*([own] if own else []), *_entries(value)]
        elif flag and name in SHORT_FLAGS and setting in ("data.path", "eval.path"):
            lists.setdefault(setting, []).append(value)
        else:
            overrides.append(
                f"{setting}={json.dumps(value) if name in SHORT_FLAGS and setting in STRING_SETTINGS else value}"
            )
    # The recipe must come before the overrides, because argparse takes the first word that does not belong to a flag as
    # the recipe.
    return [*found, *overrides, *(f"{setting}={json.dumps(values)}" for setting, values in lists.items())]


def _repeated(words: Sequence[str]) -> list[str]:
    """Return the words with one flag per file: `--data a.jsonl b.jsonl`, which a shell makes of `--data *.jsonl`,
    becomes `--data a.jsonl --data b.jsonl`.
    """
    found: list[str] = []
    for word in words:
        is_file = is_data_file(word) and "=" not in word and not word.startswith("-")
        if is_file and found[-2:-1] == ["--data"]:
            found.append("--data")
        found.append(word)
    return found


def _setting(command: str, name: str) -> str | None:
    """Return the setting (such as `model.path`) that the flag `name` of a command sets, or None if argparse handles the
    flag.
    """
    if "." in name:
        return name
    if command not in TAKE_SETTINGS:
        return SHORT_FLAGS["folder"] if command == "report" and name == "folder" else None
    return "eval.path" if command == "eval" and name == "data" else SHORT_FLAGS.get(name)


def _entries(value: str) -> list[str]:
    """Return the entries of `value` if it is a JSON list; otherwise a list with `value` as its only entry."""
    try:
        found = json.loads(value)
    except ValueError:
        return [value]
    return [str(entry) for entry in found] if isinstance(found, list) else [found if isinstance(found, str) else value]


def suggestion(word: str, command: str) -> str:
    """Return the end of the error message for the unknown argument `word`, which suggests the most similar setting."""
    if command not in TAKE_SETTINGS and command != "plan":
        return ""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    by_name: dict[str, str] = {}
    for setting in setting_names(Config):
        by_name.setdefault(setting.rpartition(".")[2], setting)
        by_name[setting] = setting
    by_name |= SHORT_FLAGS | OTHER_TRAINERS
    near = closest(name, list(by_name))
    if near is None:
        return "; write settings as section.name=value, such as optimizer.lr=1e-5"
    return f"; did you mean {by_name[near]}=...?"


def setting_names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings of the dataclass `kind`. `prefix`: the start of each name, e.g. "loss."."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if not entry.metadata.get("setting", True):
            continue
        if is_dataclass(hint) and isinstance(hint, type):
            yield from setting_names(hint, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"
