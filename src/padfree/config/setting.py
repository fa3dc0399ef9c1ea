"""The rules and the meaning of a setting, as metadata of its dataclass field.

    lr: float = setting(1e-5, least=0, about="Base learning rate.")

The arguments of `setting`, apart from the default value, are:

    about           the meaning, for `padfree settings` and docs/reference/settings.md
    least, most     the smallest and the largest allowed number
    above, below    bounds of a number that are not allowed values themselves
    allowed         the allowed values in words, for the documentation
    needs           requirements on other settings, if the value is not the default
    formerly        the former name of the setting
    resume          whether the setting may change when a run resumes

All other rules are in the `__post_init__` of the dataclasses.
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
    """The range [low, high] of a number, both ends included. `fix`: the advice in the error message."""

    low: float
    high: float
    fix: str

    def check(self, name: str, value: object) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        need(number and self.low <= value <= self.high, name, value, self.fix)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Needs:
    """A requirement of a setting: another setting, `name`, must have one of `values`.

    If `values` is empty, `name` must only be set (not none, empty or false). A name without a dot belongs to the same
    table as the setting. A name with a dot is complete, such as `loss.kind`.
    """

    name: str
    values: tuple[Any, ...]
    fix: str
    about: str | None = None  # the requirement in words, for a name that is a property and not a setting

    def hold(self, table: Any) -> bool:
        found = table
        for part in self.name.split("."):
            found = getattr(found, part)
        return found in self.values if self.values else found not in (None, (), "", False)


@dataclass(frozen=True, slots=True)
class Rules:
    """The meaning and the rules of a setting, from the metadata of its field."""

    about: str = ""
    bounds: Bounds | None = None
    allowed: str | None = None  # the bounds in words, for documentation
    filled: str | None = None  # the fix in the error message for an empty string; None: an empty string is accepted
    needs: tuple[Needs, ...] = ()
    resume: Resume = "may change"
    formerly: str | None = None


NO_RULES = Rules()


def setting(
    default: Any = MISSING,
    *,
    about: str = "",
    factory: Any = MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    fix: str | None = None,
    allowed: str | None = None,
    filled: str | None = None,
    needs: Needs | tuple[Needs, ...] = (),
    resume: Resume = "may change",
    formerly: str | None = None,
) -> Any:
    """Return the dataclass field of a setting. The docstring of this module explains most arguments.

    `fix` is the advice in the error message for a value out of bounds, and `filled` that for an empty string. Without
    `filled`, an empty string is accepted.
    """
    bounds = None
    if (least, above, most, below) != (None, None, None, None):
        low = least if least is not None else -math.inf if above is None else math.nextafter(above, math.inf)
        high = most if most is not None else _LARGEST if below is None else math.nextafter(below, -math.inf)
        words = _range_words(least, above, most, below)
        # NaN is refused, and infinity too unless `most` is infinity.
        bounds, allowed = Bounds(max(low, -_LARGEST), high, fix or f"give {words}"), allowed or words
    several = needs if isinstance(needs, tuple) else (needs,)
    rules = Rules(about, bounds, allowed, filled, several, resume, formerly)
    if factory is not MISSING:
        return field(default_factory=factory, metadata={"rules": rules})
    return field(default=default, metadata={"rules": rules})


_LARGEST = math.nextafter(math.inf, 0.0)


def _range_words(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    """Describe a range in words: `least=0, most=1` gives "0 to 1", and `above=0` gives "more than 0"."""
    bounded = most is not None and most < math.inf
    if least is not None and least > -math.inf:
        if bounded:
            return f"{least:g} to {most:g}"
        return f"{least:g} or more" if below is None else f"{least:g} up to, but not including, {below:g}"
    if above is None:
        return "a finite number"
    if bounded:
        return f"more than {above:g}, at most {most:g}"
    return f"more than {above:g}" if below is None else f"more than {above:g}, less than {below:g}"


def need_of(name: str, *values: Any, fix: str | None = None, about: str | None = None) -> Needs:
    """Return the requirement that the setting or property `name` has one of `values`.

    Without `values`, `name` must only be set (not none, false or empty). `fix`: the advice in the error message.
    `about`: the requirement in words, if `name` is a property.
    """
    wanted = f"{name}={str(values[0]).lower()}" if values else name
    return Needs(name, values, fix or f"leave it out, or set {wanted}", about)


def rules_of(entry: Field[Any]) -> Rules:
    rules: Rules = entry.metadata.get("rules", NO_RULES)
    return rules


def check_bounds(kind: type[Any], name: str, value: object, setting: str) -> None:
    """Raise a `UserError` about `setting` if the field `name` of the dataclass `kind` does not accept `value`."""
    entry: Field[Any] = kind.__dataclass_fields__[name]
    rules, written = rules_of(entry), str(entry.type)
    if rules.filled is not None:
        need(value != "", setting, value, rules.filled)
    if rules.bounds is None or (value is None and "None" in written):
        return
    plain = written.removesuffix(" | None") in ("int", "float")
    if plain or (isinstance(value, (int, float)) and not isinstance(value, bool)):  # a word such as auto has no bounds
        rules.bounds.check(setting, value)


def check_table(table: Any, prefix: str) -> None:
    """Raise a `UserError` if a setting of `table` is out of bounds, or needs another setting of `table` to be set."""
    for entry in fields(table):
        value = getattr(table, entry.name)
        check_bounds(type(table), entry.name, value, f"{prefix}{entry.name}")
        for one in rules_of(entry).needs:
            if "." not in one.name:
                need(value == _default(entry) or one.hold(table), f"{prefix}{entry.name}", _shown(value), one.fix)


def check_needs(config: Any) -> None:
    """Raise a `UserError` if a setting differs from its default, but a requirement on another setting is not met.

    This function checks only requirements between sections: for example, a setting of `rollout` may require a certain
    `loss.kind`. `check_table` checks the requirements within a section.
    """
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
    """Return, for each setting of the dataclass `kind`, the rule for a change on resume, such as "must stay"."""
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
