"""Recognise which columns of a file hold which fields, such as prompt and response.

    columns of the file        Instruction, input, output, id
    field -> column            {"prompt": "Instruction", "input": "input", "response": "output"}
    unused columns             id

A field is recognised by its own name or another usual name, in upper or lower case. The setting `data.columns` maps a
column to a field or to `unused`.

Some columns change the meaning of a row, such as a `label` for bad answers. If such a column is neither used nor mapped
to `unused`, a value in it raises an error.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from padfree.data.records import RowError, shown
from padfree.errors import UserError

UNUSED = "unused"
MOST_CHOICES = 4


CONTEXT = ("input", "context", "passage")
"""Columns that may belong to a prompt. If the prompt is Alpaca's `instruction`, the column `input` is appended to it.
In all other cases, a column is appended only if `data.columns` maps it to `input`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of rows: the fields that a row must have (`needs`), and the optional fields (`may`).

    All rows of a file or none have the optional fields in `uniform`, which decide which tokens are trained.
    """

    kind: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    uniform: tuple[str, ...] = ()

    def takes(self, fields: Iterable[str]) -> bool:
        return set(fields) <= {*self.needs, *self.may}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The formats that a reader accepts, and how columns are recognised. All column names are in lower case."""

    formats: tuple[Format, ...]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> other names of its column
    hints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # field -> names that error messages suggest
    guarded: Mapping[str, str] = field(default_factory=dict)  # column that would change a row -> why it is refused
    elsewhere: tuple[tuple[frozenset[str], str], ...] = ()  # (columns, advice to use another command for such a file)
    preferred: tuple[str, ...] = ()  # kinds of formats that take precedence if a row fits several formats
    rest: str = "not used"  # what happens to columns that are not fields, for messages
    number: str | None = None  # the field whose number is stored for each row, for example a margin or a label

    @property
    def known(self) -> tuple[str, ...]:
        needed = [name for format in self.formats for name in format.needs]
        return tuple(dict.fromkeys((*needed, *(name for format in self.formats for name in format.may))))

    def names_of(self, name: str) -> tuple[str, ...]:
        return name, *self.names.get(name, ())

    def expected(self) -> str:
        return ", or ".join(" and ".join(map(repr, format.needs)) for format in self.formats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """How the rows of a file are read: the format, and the column of each field.

    `columns` maps every field of the format to a column. If the first row has no column for a field, the field maps to
    its own name.
    """

    kind: str
    columns: Mapping[str, str]
    used: tuple[str, ...] = ()  # columns of the first row that are read
    unused: tuple[str, ...] = ()  # columns of the first row that are not read
    # columns (in lower case) that must be empty, because a value would change the meaning of a row; each with a reason
    watched: Mapping[str, str] = field(default_factory=dict)
    resolved: frozenset[str] = frozenset()  # columns that `check` accepts with any value
    uniform: Mapping[str, bool] = field(default_factory=dict)  # columns that all rows have (True) or none has (False)

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns to read from a Parquet file.

        They are the columns that the format uses, and the columns that must be empty, which `check` verifies.
        """
        return (*self.used, *(column for column in self.unused if column not in self.resolved))

    def __getitem__(self, name: str) -> str:
        return self.columns[name]

    def check(self, row: Mapping[str, Any]) -> None:
        """Raise a `RowError` if a row has a value in a column that would change the meaning of the row."""
        for column in row.keys() - self.resolved:
            why = self.watched.get(column.lower())
            if why is not None and has_value(row[column]):
                value = shown(row[column])
                raise RowError(f"{column!r} is {value}, {why}; set {setting({column: UNUSED})} to ignore the column")

    def check_uniform(self, row: Mapping[str, Any]) -> None:
        """Raise a `RowError` unless the row has those columns of `uniform` that the first row of the file has."""
        for column, expected in self.uniform.items():
            if (row.get(column) is not None) != expected:
                state = "is missing" if expected else "is given"
                raise RowError(
                    f"{column!r} {state}, unlike in the first row of the file; give it in all rows or in none, because "
                    "it decides which tokens are trained"
                )


def has_value(value: object) -> bool:
    """Return whether the value of a column is not empty. False and 0 count as values."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):  # in rows from Parquet, a missing image is an object whose values are all null
        return any(inside not in (None, "", [], {}) for inside in value.values())
    return value is not None and value != []


def check_mapping(mapping: Mapping[str, str], schema: Schema) -> None:
    for column, name in mapping.items():
        if name == UNUSED:
            continue
        if name not in schema.known:
            raise UserError(
                "data.columns",
                f"is mapped to {name!r}, which is not a field",
                f"use one of {', '.join(schema.known)}, or {UNUSED}",
                value=column,
            )
        if list(mapping.values()).count(name) > 1:
            both = [other for other, target in mapping.items() if target == name]
            raise UserError(
                "data.columns",
                f"the columns {both} are all mapped to {name!r}",
                "map only one of them, as in "
                f"{_whole({other: target for other, target in mapping.items() if other not in both[1:]})}",
            )


def setting(mapping: Mapping[str, str]) -> str:
    """Format a mapping as command-line arguments: `data.columns.question=prompt data.columns.answer=response`."""
    if all(re.fullmatch(r"[\w-]+", name, re.ASCII) for name in mapping):
        return " ".join(f"data.columns.{name}={target}" for name, target in mapping.items())
    return _whole(mapping)


def _whole(mapping: Mapping[str, str]) -> str:
    """Format a mapping as one command-line argument, which replaces the whole mapping of a recipe."""
    pairs = ",".join(f"{json.dumps(name)}={json.dumps(target)}" for name, target in mapping.items())
    return f"data.columns={shlex.quote('{' + pairs + '}')}" if mapping else "data.columns=none"


def added(mapping: Mapping[str, str], more: Mapping[str, str]) -> str:
    """Return command-line arguments that map the columns `more`, in addition to those of `mapping`.

    A column of `mapping` loses its field if a column of `more` has the same field.
    """
    words, fields = setting(more), {*more.values()} - {UNUSED}
    kept = {column: name for column, name in mapping.items() if column in more or name not in fields}
    # `data.columns={...}` replaces the whole mapping, so it must contain `mapping` as well.
    return _whole({**kept, **more}) if kept != dict(mapping) or words.startswith("data.columns=") else words


def resolve(
    first: Mapping[str, Any], mapping: Mapping[str, str], schema: Schema, file: str, also: Sequence[str] = ()
) -> Fields:
    """Determine which columns of a file hold the prompt, the response and so on.

    `first`: the first row of the file. `mapping`: the setting `data.columns`. `also`: the columns that
    `data.prompt_template` names, which are read too.
    """
    for column, name in mapping.items():
        if column not in first and name != UNUSED:  # a column mapped to `unused` may occur in a later row only
            raise UserError(
                "data.columns",
                f"(mapped to {name!r}) is not a column of {file}, which has {sorted(first)}",
                "correct the name of the column, or set "
                f"{_whole({other: target for other, target in mapping.items() if other != column})}",
                value=column,
            )
    readings = [reading for format in schema.formats for reading in _readings(format, first, mapping, schema)]
    readings = _best(readings, first, schema)
    if not readings:
        raise UserError(
            "data.columns",
            f"{file} has the columns {sorted(first)}; expected {schema.expected()}",
            f"{_cure(first, mapping, schema)}",
        )
    if len(readings) > 1:
        ways = [_choice(reading, first, mapping, schema) for reading in readings[:MOST_CHOICES]]
        raise UserError("data.columns", f"{file} can be read in {len(readings)} ways", f"set {', or '.join(ways)}")
    (found,) = readings
    return _fields(found, first, mapping, schema, file, also)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """One way to interpret a file: a format, and for each field of the format a column of the file."""

    format: Format
    columns: Mapping[str, str]


def _readings(format: Format, first: Mapping[str, Any], mapping: Mapping[str, str], schema: Schema) -> list[_Reading]:
    """Return all ways to read a file in this format.

    The list is empty if some required field has no column. It has several entries if several columns fit one field.
    """
    mapped = {name: column for column, name in mapping.items() if name != UNUSED}
    if not format.takes(mapped):
        return []
    free = [column for column in first if column not in mapping]
    # If every required field has a column of exactly its name, such as `prompt` and `response`, other columns are not
    # considered. Other names can be ambiguous: a file can have `question`, `answer` and `response`.
    certain = all(name in mapped or name in free for name in format.needs) and "messages" not in format.needs
    found: dict[str, list[str]] = {}
    for name in (*format.needs, *format.may):
        if name in mapped:
            found[name] = [mapped[name]]
        elif certain and name in free:
            found[name] = [name]
        else:
            found[name] = [column for column in free if column.lower() in schema.names_of(name)]
    prompts = found.get("prompt", [])
    if len(prompts) > 1:  # `input` is the prompt only if no other column can be the prompt
        found["prompt"] = prompts = [column for column in prompts if column.lower() != "input"]
    follows = "input" in mapped or any(column.lower() == "instruction" for column in prompts)
    if "input" in found and not follows:
        found["input"] = []
    if not all(found[name] for name in format.needs):
        return []
    present = [name for name, columns in found.items() if columns]
    return [
        _Reading(format=format, columns=dict(zip(present, columns, strict=True)))
        for columns in product(*(found[name] for name in present))
    ]


def _best(readings: list[_Reading], first: Mapping[str, Any], schema: Schema) -> list[_Reading]:
    """Return the best of several ways to read a file (`readings`), or several ways if they are equally good."""
    needs = {reading.format.kind: set(reading.format.needs) for reading in readings}
    # Drop readings that use fewer fields. A row with prompt, chosen and rejected could also be read as chosen and
    # rejected only.
    found = [one for one in readings if not any(set(one.format.needs) < other for other in needs.values())]
    if len({one.format.kind for one in found}) > 1:
        # A preferred format wins if the columns of the file are named exactly like the fields that it requires.
        preferred = [
            one
            for one in found
            if one.format.kind in schema.preferred and all(one.columns[name] == name for name in one.format.needs)
        ]
        found = preferred or found
    return found


def _fields(
    reading: _Reading,
    first: Mapping[str, Any],
    mapping: Mapping[str, str],
    schema: Schema,
    file: str,
    also: Sequence[str],
) -> Fields:
    also = also if "prompt" in reading.columns else ()
    unknown = [name for name in also if name not in first and name not in reading.columns]
    if unknown:
        raise UserError(
            "data.prompt_template",
            f"names {{{unknown[0]}}}, but {file} has no such column, only {sorted(first)}",
            "correct the name of the column",
        )
    if also and not {"prompt", reading.columns["prompt"]} & set(also):
        raise UserError(
            "data.prompt_template",
            f"does not contain {{prompt}}, so that the column {reading.columns['prompt']!r} of {file} would be lost",
            "add {prompt} to the template",
        )
    used = {*reading.columns.values(), *(name for name in also if name in first)}
    ignored = {column for column, name in mapping.items() if name == UNUSED}
    left = [column for column in first if column not in used and column not in ignored]
    for column in left:
        why = schema.guarded.get(column.lower())
        if why is not None and has_value(first[column]):
            follow = f"{added(mapping, {column: 'input'})} to append it to the prompt, or "
            follow = follow if _may_follow(column, reading) else ""
            ignore = f"{added(mapping, {column: UNUSED})} to ignore it"
            raise UserError("data.columns", f"{file} has a column {column!r}, {why}", f"set {follow}{ignore}")
    # Later rows can have the optional fields of the format. Other columns with a known meaning must be empty in all
    # rows.
    optional = {name for name in reading.format.may if name != "input" or _takes_input(reading)}
    taken = (*reading.format.needs, *(name for name in reading.format.may if name in optional))
    columns = {name: reading.columns.get(name, name) for name in taken}
    unforeseen = dict.fromkeys(_all_names(schema), "which the first row of the file does not have")
    return Fields(
        kind=reading.format.kind,
        columns=columns,
        used=tuple(column for column in first if column in used),
        unused=tuple(left),
        watched={**unforeseen, **schema.guarded},
        uniform={columns[name]: first.get(columns[name]) is not None for name in reading.format.uniform},
        resolved=frozenset(
            {*used, *ignored, *optional, *(each for each in left if each.lower() not in schema.guarded)}
        ),
    )


def _takes_input(reading: _Reading) -> bool:
    return "input" in reading.columns or reading.columns.get("prompt", "").lower() == "instruction"


def _may_follow(column: str, reading: _Reading) -> bool:
    """Return whether an unused column may hold a part of the prompt, as the column `input` of Alpaca does."""
    possible = "input" in reading.format.may and "input" not in reading.columns
    return possible and column.lower() in CONTEXT


def _all_names(schema: Schema) -> set[str]:
    return {name for format in schema.formats for needed in format.needs for name in schema.names_of(needed)}


def _choice(reading: _Reading, first: Mapping[str, Any], mapping: Mapping[str, str], schema: Schema) -> str:
    """Return the `data.columns` setting that selects `reading`, one of several ways to read a file.

    It maps a column to each required field. It maps ignored columns of `Schema.guarded` to `unused`.
    """
    needed = {reading.columns[name]: name for name in reading.format.needs}
    lost = [name for name, value in first.items() if name.lower() in schema.guarded and has_value(value)]
    unused = dict.fromkeys((name for name in lost if name not in reading.columns.values()), UNUSED)
    chosen = {**needed, **unused}
    return added(mapping, {column: name for column, name in chosen.items() if mapping.get(column) != name} or chosen)


def _cure(first: Mapping[str, Any], mapping: Mapping[str, str], schema: Schema) -> str:
    """Return the advice in the error message about a file that matches none of the formats."""
    likely = _likely(first, schema)
    ways = [what for columns, what in schema.elsewhere if columns <= {name.lower() for name in first}]
    if likely is not None:
        ways.append(f"map its columns, as in {_whole(likely) if mapping else setting(likely)}")
    return "; or ".join(ways) or "add the missing columns"


def _likely(first: Mapping[str, Any], schema: Schema) -> dict[str, str] | None:
    """Guess which columns hold the fields of a format: by usual names, or else by the order of the columns.

    Return None if no guess is likely.
    """
    for format in schema.formats:
        found = {name: _hinted(name, first, schema) for name in format.needs}
        if all(found.values()) and len(set(found.values())) == len(found):
            return {str(column): name for name, column in found.items()}
    known = {*_all_names(schema), *schema.guarded}
    free = [name for name, value in first.items() if isinstance(value, str) and name.lower() not in known]
    usual = [format for format in schema.formats if format.needs in (("prompt", "response"), ("text",), ("prompt",))]
    begun = [format for format in schema.formats if any(name in first for name in format.needs)]
    for format in begun or usual:
        missing = [name for name in format.needs if name not in first]
        if len(missing) <= len(free):
            return dict(zip(free, missing, strict=False))
    return None


def _hinted(name: str, first: Mapping[str, Any], schema: Schema) -> str | None:
    """Return the column that probably holds the field `name`, or None if there is no likely column."""
    names = (*schema.names_of(name), *schema.hints.get(name, ()))
    columns = {column.lower(): column for column in reversed(list(first))}
    found = (columns[each] for each in names if each in columns)
    return next((column for column in found if name != "messages" or isinstance(first[column], list)), None)
