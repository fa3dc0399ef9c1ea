"""Convert TOML and `section.name=value` overrides to a checked `Config`."""

from __future__ import annotations

import codecs
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from padfree.config.config import Config
from padfree.config.inputs import check_regular
from padfree.config.loss import BOUNDS
from padfree.config.recipe_files import recipe_path
from padfree.config.rollout import UNSUPPORTED
from padfree.config.setting import rules_of
from padfree.errors import UserError, closest, need

LONGEST_RECIPE = 1 << 20
"""Maximum size of a recipe in bytes. A larger file is refused."""

LARGEST_FLOAT = 3.4e38
"""Maximum value of a float setting: the largest float32."""

LARGEST_COUNT = (1 << 53) - 1
"""Maximum value of an int setting. Up to here, a float64 represents every integer exactly."""


def load_config(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    kind: str | None = None,
    config_type: type[Config] = Config,
) -> Config:
    """Read a TOML file, apply `section.name=value` overrides, and return the checked settings.

    If `path` is None, there are only overrides and defaults. `kind`: the default of `loss.kind`. `config_type`:
    `EvaluationConfig` if nothing will be trained.
    """
    values: dict[str, Any] = {} if path is None else read_recipe(path)
    kind_in_file = _loss_of(values).get("kind")
    for override in overrides:
        _override(values, override)
    if path is not None:
        said = {override.partition("=")[0].strip() for override in overrides}
        _check_bounds_are_meant(values, kind_in_file, said, path)
    if kind is not None and isinstance(loss := values.setdefault("loss", {}), dict):
        loss.setdefault("kind", kind)
    return config_from_dict(values, config_type=config_type)


def read_recipe(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a TOML file or a shipped recipe, and return its tables. The values are not checked."""
    path = recipe_path(path)
    check_regular(path, "config")
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST_RECIPE + 1)
        if len(content) > LONGEST_RECIPE:
            raise UserError("config", f"{path} has more than {LONGEST_RECIPE:,} bytes", "give a TOML file of settings")
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError("config", f"{path} is UTF-16", "save it as UTF-8")
        # Some editors begin a UTF-8 file with a byte order mark, or write Windows line endings.
        return tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n"))
    except OSError as error:
        raise UserError(
            "config",
            f"{path} cannot be read ({error.strerror})",
            "give a TOML file, or a name from `padfree recipes`",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError("config", f"{path} is not TOML: {_line(error)}", "correct the file") from None
    except RecursionError:
        raise UserError("config", f"{path} is nested too deeply", "give a TOML file of settings") from None


def changed_recipe(path: str | PathLike[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a TOML file, updated with `changes`. The values are not checked."""
    values = read_recipe(path)
    kind, said = _loss_of(values).get("kind"), {f"loss.{name}" for name in _loss_of(changes)}
    values = {**values, **{name: _merged(values.get(name), value) for name, value in changes.items()}}
    _check_bounds_are_meant(values, kind, said, path)
    return values


def _merged(before: Any, changes: Any) -> Any:
    """Return `before` updated with `changes`. Tables are merged, and any other value is replaced."""
    if not isinstance(before, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**before, **{name: _merged(before.get(name), value) for name, value in changes.items()}}


def _check_bounds_are_meant(
    values: Mapping[str, Any], kind: Any, said: Collection[str], path: str | PathLike[str]
) -> None:
    """Raise a `UserError` if an override changes `loss.kind`, but the file sets a clip bound for the former kind.

    `values`: the settings after the overrides. `kind`: the `loss.kind` in the file. `said`: the names of the overridden
    settings.
    """
    loss = _loss_of(values)
    for name in BOUNDS:
        inherited = loss.get(name) is not None and f"loss.{name}" not in said
        if inherited and kind is not None and loss.get("kind") != kind:
            raise UserError(
                f"loss.{name}",
                f"in {path} is for loss.kind {kind!r}, not {loss.get('kind')!r}",
                f"set loss.{name}=none, or move it to [loss.{kind}] in the file",
                value=loss[name],
            )


def _loss_of(values: Mapping[str, Any]) -> dict[str, Any]:
    loss = values.get("loss")
    return loss if isinstance(loss, dict) else {}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def config_from_dict(values: Mapping[str, Any], *, config_type: type[Config] = Config) -> Config:
    """Build a `Config` from nested plain values, and check every value. `config_type`: as for `load_config`."""
    given: set[str] = set()
    config = _build(config_type, values, "", given)
    assert isinstance(config, Config)
    return replace(config, given=frozenset(given))


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise UserError(
            "override",
            "",
            "write section.name=value, such as optimizer.lr=1e-5, with quotes around a value that has spaces",
            value=override,
        )
    place: Any = values
    for part in parts[:-1]:
        if isinstance(place, dict) and _plain(place.get(part)) is None:
            place[part] = {}
        place = _entry(place, part, override) if isinstance(place, list) else place[part]
        if not isinstance(place, (dict, list)):
            raise UserError(
                "override",
                f"treats {part!r} as a table, but {part!r} already has a plain value",
                "write section.name=value",
                value=override,
            )
    if isinstance(place, list):
        _entry(place, parts[-1], override)
        place[int(parts[-1])] = _parsed(text.strip())
    else:
        place[parts[-1]] = _parsed(text.strip())


def _entry(entries: list[Any], part: str, override: str) -> Any:
    """Return the entry of the list `entries` at the index `part`, such as "0" in "data.sources.0.weight=2"."""
    if not re.fullmatch("[0-9]{1,6}", part) or int(part) >= len(entries):
        known = f"has the entries 0 to {len(entries) - 1}" if entries else "is empty"
        raise UserError(
            "override",
            f"asks for entry {part!r} of a list, but the list {known}",
            "give the index of an existing entry",
            value=override,
        )
    return entries[int(part)]


@dataclass(frozen=True, slots=True)
class _Typed:
    """The value of an override that may be meant as a string, such as 2024 in `run.folder=2024`."""

    text: str
    value: Any


def _parsed(text: str) -> Any:
    """Parse the value of an override as TOML. Text that is not TOML is a string, and `none` is None.

    Numbers, dates, true, false and none keep their text, because a string setting takes it.
    """
    if text.lower() in ("none", "null"):
        return _Typed(text, None)
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = found["value"] if found.keys() == {"value"} else text
    return value if isinstance(value, (str, list, dict)) else _Typed(text, value)


def _build(kind: type[Any], values: Any, prefix: str, named: set[str]) -> Any:
    """Build an object of the dataclass `kind` from the table `values`. `prefix`: the table's name with a dot.

    The names of all settings that have a value other than None are added to `named`.
    """
    values = _plain(values)
    if not isinstance(values, Mapping):
        raise UserError(
            f"{prefix.rstrip('.')}", "is not a table", f"write [{prefix.rstrip('.')}] and its settings", value=values
        )
    hints = _hints(kind)  # type: ignore[arg-type]
    names: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind) if entry.metadata.get("setting", True)}
    renamed = {formerly: name for name, entry in names.items() if (formerly := rules_of(entry).formerly)}
    for name in values:
        if name in renamed:
            raise UserError(f"{prefix}{name}", "has a new name", f"write {prefix}{renamed[name]}")
        if f"{prefix}{name}" in UNSUPPORTED:
            problem, fix = UNSUPPORTED[f"{prefix}{name}"]
            raise UserError(f"{prefix}{name}", problem, fix)
        if name not in names:
            raise UserError(f"{prefix}{name}", "no such setting", _closest(name, tuple(names), renamed, prefix))
    given: dict[str, Any] = {}
    for name, entry in names.items():
        hint = hints[name]
        if name in values and not is_dataclass(hint) and not _is_none(_plain(values[name])):
            named.add(f"{prefix}{name}")
        if name in values and is_dataclass(hint):
            given[name] = _build(hint, values[name], f"{prefix}{name}.", named)  # type: ignore[arg-type]
        elif name in values and get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
            given[name] = _tables(get_args(hint)[0], values[name], f"{prefix}{name}")
        elif name in values:
            given[name] = _value(hint, values[name], f"{prefix}{name}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            if is_dataclass(hint):
                given[name] = _build(hint, {}, f"{prefix}{name}.", named)  # type: ignore[arg-type]
            else:
                raise UserError(f"{prefix}{name}", "missing", f"give {_words(hint)}, as in {prefix}{name}=...")
    made = kind(**given)  # the constructor of each section checks its settings
    for name, value in given.items():
        if not prefix.startswith("data.sources."):  # `[data]` checks its sources itself
            _check_numbers(value, f"{prefix}{name}")
    return made


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _tables(kind: type[Any], values: Any, name: str) -> tuple[Any, ...]:
    """Build an object of the dataclass `kind` from each table (dict) in `values`, which is a list of tables or a single
    table.
    """
    values = _plain(values)
    if _is_none(values):
        return ()
    entries = list(values) if isinstance(values, (list, tuple)) else [values]
    for entry in entries:
        if not isinstance(entry, Mapping):
            first = next(iter(fields(kind))).name
            example = f"{name}='[{{{first}=\"...\"}}]'"
            raise UserError(name, "is not a table", f"give a list of tables, as in {example}", value=entry)
    return tuple(_build(kind, entry, f"{name}.{number}.", set()) for number, entry in enumerate(entries))


def _closest(name: str, names: Sequence[str], renamed: Mapping[str, str], prefix: str) -> str:
    """Return the fix for the unknown setting `name`. `renamed` maps former names of settings to their names today."""
    near = closest(name, (*names, *renamed))
    if near is not None:
        return f"did you mean {prefix}{renamed.get(near, near)}?"
    return f"choose one of {', '.join(prefix + each for each in names)}"


def _value(hint: Any, value: Any, name: str) -> Any:
    """Check that `value` has the type `hint`, and return it, converted if necessary (an int to a float)."""
    converted = _converted(hint, value)
    value = _plain(value)
    if isinstance(value, str) and "\0" in value:
        raise UserError(name, "", "remove the null character", value=value)
    if converted is _WRONG and get_origin(hint) is dict and isinstance(value, str):
        raise UserError(
            name, "is a table whose quotes the shell has removed", f"{_table_fix(name, value)}", value=value
        )
    if converted is _WRONG:
        choices = _choices(hint)
        fix = f"give {_words(hint)}"
        if isinstance(value, str) and (near := closest(value, choices)) is not None:
            fix = f"did you mean {near!r}? {fix}"
        raise UserError(name, "", fix, value=value)
    return converted


def _check_numbers(value: Any, name: str) -> None:
    """Raise a `UserError` for a number above the largest float32, or an int above 2**53 - 1.

    A setting of the section `loss` may be infinite, which means that there is no bound.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            need(name.startswith("loss.") and number > 0, name, number, "give a finite number")
        elif isinstance(number, float):
            need(abs(number) <= LARGEST_FLOAT, name, number, "give a number that fits float32, at most 3.4e38")
        if type(number) is int and not name.endswith(".seed"):
            need(abs(number) <= LARGEST_COUNT, name, number, f"give at most {LARGEST_COUNT} (2**53 - 1)")


def _table_fix(name: str, value: str) -> str:
    """Return advice on how to write a TOML table in a shell, which expands braces and removes quotes."""
    pairs = [pair.partition("=") for pair in value.strip("{} ").split(",")]
    named = [(key.strip(), text.strip().strip("\"'")) for key, equals, text in pairs if equals]
    entries = named if named and all(key and text for key, text in named) else [("question", "prompt")]
    apart = " ".join(f"{name}.{key}={text}" for key, text in entries)
    together = ",".join(f'{key}="{text}"' for key, text in entries)
    return f"write {apart}, or quote it: {name}='{{{together}}}'"


def _plain(value: Any) -> Any:
    """Return the value without its text on the command line, a path as a string, and numpy or torch values as plain
    ones.
    """
    if isinstance(value, _Typed):
        return value.value
    if isinstance(value, PathLike):
        return fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _is_none(value: Any) -> bool:
    """Return whether the value switches a setting off: TOML has no null, but the string "none"."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


_WRONG = object()


def _converted(hint: Any, value: Any) -> Any:
    if isinstance(value, _Typed):
        found = _converted(hint, value.value)
        return _converted(hint, value.text) if found is _WRONG else found
    value = _plain(value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if type(None) in arguments and _is_none(value):
            return None
        for argument in arguments:
            if (found := _converted(argument, value)) is not _WRONG:
                return found
        return _WRONG
    if origin is Literal:
        if value is None and "none" in arguments:
            return "none"
        return value if isinstance(value, str) and value in arguments else _WRONG
    if origin is tuple:
        repeated = arguments[-1] is Ellipsis
        if repeated and _is_none(value):
            return ()
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if not repeated and len(entries) != len(arguments):
            return _WRONG
        kinds = [arguments[0]] * len(entries) if repeated else arguments
        found = tuple(_converted(kind, entry) for kind, entry in zip(kinds, entries, strict=True))
        return _WRONG if any(entry is _WRONG for entry in found) else found
    if origin is dict:
        if _is_none(value):
            return {}
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        found = {_converted(str, key): _converted(str, entry) for key, entry in pairs}
        return _WRONG if _WRONG in found or _WRONG in found.values() else found
    if hint is type(None):
        return None if value is None else _WRONG
    if hint is float and value in ("inf", "-inf"):  # JSON, the format of config.json, has no infinity
        return float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1 << 1000 else _WRONG
    return value if type(value) is hint else _WRONG


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for argument in get_args(hint) for choice in _choices(argument))


def _words(hint: Any) -> str:
    """Describe a type in words, for the fix in an error message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is tuple:
        return f"a list in which each entry is {_words(arguments[0])}"
    if origin is dict:
        return "a table of strings"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): '"none"'}
    return names[hint]
