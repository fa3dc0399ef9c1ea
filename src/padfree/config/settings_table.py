"""Every setting with its type, default, bounds, meaning, and whether it may change when a run resumes.

    batch.samples    int or none    none    1 or more    "Number of samples per step over ..."    must stay

The settings are the fields of `Config`. `padfree settings` prints them, and docs/reference/settings.md is generated
from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from padfree.config.config import Config
from padfree.config.setting import Needs, rules_of
from padfree.errors import UserError, closest

REQUIRED = "(required)"
PLAIN = {int: "int", float: "float", str: "string", bool: "bool", type(None): "none"}
PLURAL = {"int": "ints", "float": "floats", "string": "strings", "table": "tables"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingEntry:
    """One setting, as the table of settings shows it."""

    name: str  # with its section, such as `loss.clip.high`
    type: str  # such as `int or none`
    choices: tuple[str, ...]  # the words that the type allows; empty: any value of the type
    required: bool
    default: Any  # None if the default is none, and also if the setting is required
    bounds: str  # in words; empty: every value of the type
    needs: tuple[str, ...]  # settings that must be set before this one may differ from its default
    meaning: str
    resume: str
    formerly: str | None

    @property
    def section(self) -> str:
        """The section of the setting: everything before the last dot of `name`."""
        return self.name.rpartition(".")[0]

    @property
    def default_words(self) -> str:
        """The default as it is written in a recipe, such as `none`. If there is no default: `(required)`."""
        return REQUIRED if self.required else value_words(self.default)

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as a dictionary of values that JSON can represent."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionEntry:
    """A section of the settings (a TOML table in a recipe), such as `loss.clip`, and its meaning."""

    name: str
    meaning: str


def setting_entries() -> list[SettingEntry]:
    """Return every setting, in the order of the sections."""
    return [_entry(kind, entry, prefix) for kind, entry, prefix in _fields(Config, "")]


def section_entries() -> dict[str, SectionEntry]:
    """Return every section by name. The meaning of a section is the first paragraph of its dataclass's docstring."""
    found: dict[str, SectionEntry] = {}
    for kind, _, prefix in _fields(Config, ""):
        name = prefix.rstrip(".")
        text = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        found.setdefault(name, SectionEntry(name=name, meaning=text))
    return found


def matching_entries(name: str | None) -> list[SettingEntry]:
    """Return the settings that `name` selects: a section (`rollout`), one setting (`loss.kind`), or None for all.

    Raise a `UserError` for an unknown name.
    """
    entries = setting_entries()
    if name is None:
        return entries
    asked = name.strip().rstrip(".")
    found = [entry for entry in entries if f"{entry.name}.".startswith(f"{asked}.")]
    if not found:
        raise UserError("settings", "is neither a setting nor a section", _suggestion(asked, entries), value=name)
    return found


def _suggestion(asked: str, entries: Sequence[SettingEntry]) -> str:
    """Return advice for the unknown setting `asked`, such as "did you mean optimizer.lr?".

    The advice names the setting that `asked` was renamed to. If there is none, it names the settings with the same last
    part, and otherwise the setting with the most similar name.
    """
    former = [entry.name for entry in entries if entry.formerly in (asked, asked.rpartition(".")[2]) and entry.formerly]
    ends = [entry.name for entry in entries if entry.name.endswith(f".{asked}")]
    names = [name for entry in entries for name in (entry.name.partition(".")[0], entry.section, entry.name)]
    near = former or ends or [name for name in [closest(asked, list(dict.fromkeys(names)))] if name is not None]
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    sections = dict.fromkeys(entry.name.partition(".")[0] for entry in entries)
    return f"give a setting, or one of the sections {', '.join(sections)}"


def _fields(kind: type[Any], prefix: str) -> Iterator[tuple[type[Any], Field[Any], str]]:
    """Yield every setting of the dataclass `kind` and of the dataclasses nested in it.

    Each result is the dataclass and the field of a setting, and the prefix of the setting's name, such as `loss.clip.`.
    """
    nested: list[tuple[type[Any], str]] = []
    for entry in fields(kind):
        if not entry.metadata.get("setting", True):
            continue
        hint = _hints(kind)[entry.name]  # type: ignore[arg-type]
        if is_dataclass(hint):
            nested.append((hint, f"{prefix}{entry.name}."))  # type: ignore[arg-type]
            continue
        yield kind, entry, prefix
        if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
            nested.append((get_args(hint)[0], f"{prefix}{entry.name}.N."))
    for inner, name in nested:
        yield from _fields(inner, name)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _entry(kind: type[Any], entry: Field[Any], prefix: str) -> SettingEntry:
    rules, hint = rules_of(entry), _hints(kind)[entry.name]  # type: ignore[arg-type]
    required = entry.default is MISSING and entry.default_factory is MISSING
    default = None if required else entry.default if entry.default_factory is MISSING else entry.default_factory()
    return SettingEntry(
        name=f"{prefix}{entry.name}",
        type=_type_words(hint),
        choices=_choices(hint),
        required=required,
        default=default,
        bounds=rules.allowed or ("not empty" if rules.filled is not None else ""),
        needs=tuple(_need_words(need, prefix) for need in rules.needs),
        meaning=rules.about,
        resume=rules.resume,
        formerly=rules.formerly,
    )


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return tuple(choice for argument in get_args(hint) for choice in _choices(argument))
    return ()


def _type_words(hint: Any) -> str:
    """Describe a type in words: `int | None` gives "int or none", and a `Literal` gives its choices."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type_words(argument) for argument in arguments))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        if get_origin(arguments[0]) is Literal:
            return f"list of {_type_words(arguments[0])}"
        inner = "table" if is_dataclass(arguments[0]) else PLAIN[arguments[0]]
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return f"list of {count}{PLURAL[inner]}"
    if origin is dict:
        return "table of strings"
    return PLAIN[hint]


def value_words(value: Any) -> str:
    """Return a value as it is written in a recipe, but without quotes."""
    if value is None:
        return "none"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(json.dumps(each) for each in value)}]"
    if isinstance(value, dict):
        return "{}" if not value else json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _need_words(need: Needs, prefix: str) -> str:
    if need.about is not None:
        return need.about
    name = need.name if "." in need.name else f"{prefix}{need.name}"
    values = " or ".join(value_words(value) for value in need.values)
    return f"{name}={values}" if values else name


def aligned(rows: Sequence[Sequence[str]], widest: int = 36) -> str:
    """Format rows of cells as aligned columns. A cell longer than `widest` moves the rest of its row to the right."""
    columns = range(len(rows[0]) - 1)
    widths = [max((len(row[column]) for row in rows if len(row[column]) <= widest), default=0) for column in columns]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n"
        for row in rows
    )
