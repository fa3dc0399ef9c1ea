"""Which columns of a file hold which fields.

    file       question, answer, difficulty          columns={"question": "prompt", "answer": "response"}
    kind       "pair"
    fields     {"prompt": "question", "response": "answer", ...}      field -> column of this file

A kind is a set of fields that together make a sample. Exactly one kind must be there: a file with `messages` and `text`
could be meant either way, and a column mapping (`{"text": "text"}`) says which.
Rows keep their own column names, so that an error names what stands in the file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SFT_KINDS = {"messages": ("messages",), "pair": ("prompt", "response"), "text": ("text",)}
SFT_OPTIONAL = ("tools",)
USUAL_NAMES = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "response": ("answer", "output", "completion", "solution", "target", "reply"),
    "messages": ("conversations", "conversation", "dialogue", "chat"),
    "text": ("content", "document", "body"),
    "tokens": ("input_ids", "token_ids"),
    "prompt_tokens": ("prompt_ids", "prompt_token_ids"),
    "response_tokens": ("response_ids", "completion_ids", "response_token_ids"),
}
"""Columns that many files have for a field: what a hint names first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The kinds of sample a reader takes and the fields that may come with any of them."""

    kinds: Mapping[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()  # kinds that win over the others where both are there

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(field for needed in self.kinds.values() for field in needed), *self.optional)))

    def expected(self) -> str:
        return ", or ".join(" and ".join(map(repr, needed)) for needed in self.kinds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """What `resolve` found: the kind, and the column of every known field (its own name where it is not mapped)."""

    kind: str
    columns: Mapping[str, str]

    def __getitem__(self, field: str) -> str:
        return self.columns[field]


PAIR_SCHEMA = Schema(kinds={"preference": ("prompt", "chosen", "rejected")}, optional=("tools",))
REWARD_SCHEMA = Schema(kinds=PAIR_SCHEMA.kinds, optional=("tools", "margin"))
SFT_SCHEMA = Schema(kinds=SFT_KINDS, optional=SFT_OPTIONAL)


def check_mapping(mapping: Mapping[str, str], schema: Schema) -> None:
    for column, field in mapping.items():
        if field not in schema.known:
            raise ValueError(
                f"data.columns: {column!r} is mapped to {field!r}, which is no field; use one of "
                f"{', '.join(schema.known)}"
            )
        if list(mapping.values()).count(field) > 1:
            both = [name for name, target in mapping.items() if target == field]
            raise ValueError(
                f"data.columns: {both} are all mapped to {field!r}; map one, as in {setting({both[0]: field})}"
            )


def setting(mapping: Mapping[str, str]) -> str:
    """A mapping as it is written on a command line: `data.columns='{question="prompt"}'`."""
    keys = {name: name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name) for name in mapping}
    pairs = ",".join(f"{keys[name]}={json.dumps(field)}" for name, field in mapping.items())
    return f"data.columns={shlex.quote('{' + pairs + '}')}"


def _likely(names: Sequence[str], schema: Schema) -> dict[str, str] | None:
    """A mapping that makes a kind of sample of these columns, by their usual names, else in their order; None: none."""
    free = [name for name in names if name not in schema.known]
    for needed in schema.kinds.values():
        found = {field: _named(field, names) for field in needed}
        if all(found.values()):
            return {column: field for field, column in found.items() if column is not None and column != field}
    usual = [kind for kind in (("prompt", "response"), ("text",), ("prompt",)) if kind in schema.kinds.values()]
    begun = [kind for kind in schema.kinds.values() if any(field in names for field in kind)]
    for kind in begun or [*usual, *schema.kinds.values()]:
        missing = [field for field in kind if field not in names]
        if len(missing) <= len(free):
            return dict(zip(free, missing, strict=False))
    return None


def _named(field: str, names: Sequence[str]) -> str | None:
    return next((name for name in (field, *USUAL_NAMES.get(field, ())) if name in names), None)


def resolve(available: Iterable[str], mapping: Mapping[str, str], schema: Schema, file: str) -> Fields:
    """The kind of sample in a file with these columns. No kind, or more than one, is refused."""
    available = list(available)
    names = sorted(available)
    for column, field in mapping.items():
        if column not in names:
            raise ValueError(
                f"data.columns: {column!r} (for {field!r}) is not in {file}, which has {names}; correct the name"
            )
    columns = {field: field for field in schema.known} | {field: column for column, field in mapping.items()}
    found = [kind for kind, needed in schema.kinds.items() if all(columns[field] in names for field in needed)]
    # A mapping speaks for the kinds that need what it names.
    if asked := [kind for kind in schema.kinds if set(schema.kinds[kind]) & set(mapping.values())]:
        found = [kind for kind in found if kind in asked]
    if len(found) > 1 and (preferred := [kind for kind in found if kind in schema.preferred]):
        found = preferred
    if not found:
        likely = _likely(available, schema)
        cure = "add what is missing" if likely is None else f"say which they are, as in {setting(likely)}"
        raise ValueError(f"data.columns: {file} has {names}; expected {schema.expected()}; {cure}")
    if len(found) > 1:
        choices = [" and ".join(map(repr, schema.kinds[kind])) for kind in found]
        first = schema.kinds[found[0]][0]
        raise ValueError(
            f"data.columns: {file} has {' and also '.join(choices)}; "
            f"say which is meant, as in {setting({columns[first]: first})}"
        )
    return Fields(kind=found[0], columns=columns)
