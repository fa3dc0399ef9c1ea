"""What a setting may be, as metadata of its field: `lr: float = setting(1e-5, least=0)`.

    bounds    least, above, most, below    checked where its section is made
    needs     other settings               a value other than the default needs them: `needs=need_of("filter", "equal")`
    formerly  its old name, which is refused with a message that gives the new one
    resume    whether it may change when a run resumes from a checkpoint (`padfree.train.resume`)

A field without any of it takes every value of its type and may change on resume. What settings cannot be together in
other ways is in the `__post_init__` of their section, or of `Config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Literal

from padfree.errors import need

Resume = Literal[
    "may change",
    "may change with batch.samples",
    "may change between rollout batches",
    "may change if the samples stay the same",
    "may change within RL",
    "must stay",
]

SAMPLES: Resume = "may change if the samples stay the same"
BETWEEN: Resume = "may change between rollout batches"
STAYS: Resume = "must stay"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a setting may be, both ends included, and what is said of others."""

    low: float
    high: float
    fix: str

    def check(self, name: str, value: object) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        need(number and self.low <= value <= self.high, name, value, self.fix)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Needs:
    """Another setting that must be one of `values`, or, without them, must be given. A name without a dot is of the
    same table; one with a dot is of the whole config."""

    name: str
    values: tuple[Any, ...]
    fix: str

    def hold(self, table: Any) -> bool:
        found = table
        for part in self.name.split("."):
            found = getattr(found, part)
        return found in self.values if self.values else found not in (None, (), "", False)


@dataclass(frozen=True, slots=True)
class Rules:
    bounds: Bounds | None = None
    filled: str | None = None  # the fix for an empty text
    needs: tuple[Needs, ...] = ()
    resume: Resume = "may change"
    formerly: str | None = None


NO_RULES = Rules()


def setting(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    fix: str | None = None,
    filled: str | None = None,
    needs: Needs | tuple[Needs, ...] = (),
    resume: Resume = "may change",
    formerly: str | None = None,
) -> Any:
    """A field with its rules. A number must be finite unless `most` is infinity; None is no number, and is right if the
    type has it. `filled`: an empty text is refused with this fix."""
    bounds = None
    if (least, above, most, below) != (None, None, None, None):
        low = least if least is not None else -_LARGEST if above is None else math.nextafter(above, math.inf)
        high = most if most is not None else _LARGEST if below is None else math.nextafter(below, -math.inf)
        bounds = Bounds(low, high, fix or _words(least, above, most, below))
    rules = Rules(bounds, filled, needs if isinstance(needs, tuple) else (needs,), resume, formerly)
    if factory is not MISSING:
        return field(default_factory=factory, metadata={"rules": rules})
    return field(default=default, metadata={"rules": rules})


_LARGEST = math.nextafter(math.inf, 0.0)


def _words(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    begin = f"{least:g} or more" if least is not None else f"more than {above:g}" if above is not None else ""
    if most is not None and most < math.inf and least is not None:
        return f"give {least:g} to {most:g}"
    if below is not None and least is not None:
        return f"give {least:g} up to, but not including, {below:g}"
    return f"give {begin}"


def need_of(name: str, *values: Any, fix: str | None = None) -> Needs:
    """The setting must have one of these values, or any if none is given."""
    given = str(values[0]).lower() if values else None
    return Needs(
        name, values, fix or (f"set {name}={given}, or leave it out" if values else f"set {name}, or leave it out")
    )


def rules_of(entry: Field[Any]) -> Rules:
    rules: Rules = entry.metadata.get("rules", NO_RULES)
    return rules


def check_bounds(kind: type[Any], name: str, value: object, setting: str) -> None:
    """Refuse a value that the field `name` of a dataclass may not have."""
    entry: Field[Any] = kind.__dataclass_fields__[name]
    rules, written = rules_of(entry), str(entry.type)
    if rules.filled is not None:
        need(value != "", setting, value, rules.filled)
    if rules.bounds is None or (value is None and "None" in written):
        return
    plain = written.removesuffix(" | None") in ("int", "float")
    if plain or (isinstance(value, (int, float)) and not isinstance(value, bool)):  # else a word, such as auto
        rules.bounds.check(setting, value)


def check_table(table: Any, prefix: str) -> None:
    """Refuse values out of their bounds, and settings that need others of the same table. `prefix` ends with a dot."""
    for entry in fields(table):
        value = getattr(table, entry.name)
        check_bounds(type(table), entry.name, value, f"{prefix}{entry.name}")
        for one in rules_of(entry).needs:
            if "." not in one.name:
                need(value == _default(entry) or one.hold(table), f"{prefix}{entry.name}", _shown(value), one.fix)


def check_needs(config: Any) -> None:
    """Refuse settings that need those of other tables."""
    for name, entry, value in _settings(config):
        for one in rules_of(entry).needs:
            if "." in one.name:
                need(value == _default(entry) or one.hold(config), name, _shown(value), one.fix)


def _settings(table: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    for entry in fields(table):
        value = getattr(table, entry.name)
        if is_dataclass(value):
            yield from _settings(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", entry, value


def resume_rules(kind: type[Any], hints: Any, prefix: str = "") -> Mapping[str, Resume]:
    """Whether each setting of a dataclass may change on resume, by its name; `hints` gives the types of a class."""
    found: dict[str, Resume] = {}
    for entry in fields(kind):
        if not entry.metadata.get("setting", True):
            continue
        hint, name = hints(kind)[entry.name], f"{prefix}{entry.name}"
        inner = (
            hint
            if is_dataclass(hint)
            else next((one for one in getattr(hint, "__args__", ()) if is_dataclass(one)), None)
        )
        if inner is not hint:
            found[name] = rules_of(entry).resume
        if inner is not None:
            found |= resume_rules(inner, hints, f"{name}.")  # type: ignore[arg-type]
    return MappingProxyType(found)


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
