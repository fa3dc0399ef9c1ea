"""The sources of a mixture, `[[data.sources]]`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from padfree.config.inputs import has_splits, is_hub_id
from padfree.config.model_sections import expand_home
from padfree.config.setting import SAMPLES, STAYS, setting
from padfree.errors import need

MOST_WEIGHT = 1000.0
"""Maximum weight of a source. The weight is the number of times that an epoch shows each row of the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One source of a mixture of training data. `columns`, `split` and `subset` default to those of `[data]`."""

    path: tuple[str, ...] = setting(
        about="Files, folders or Hub ids of this source.", allowed="one name or more", resume=SAMPLES
    )
    weight: float = setting(
        1.0,
        about="Number of times that an epoch shows each row of this source.",
        allowed=f"more than 0, at most {MOST_WEIGHT:g}",
        resume=STAYS,
    )
    name: str | None = setting(
        None,
        about="Name in metrics and messages; if none, the name of the first file or folder.",
        resume=SAMPLES,
    )
    columns: dict[str, str] | None = setting(
        None,
        about="Renames columns of this source, in place of data.columns. With the default, none, data.columns applies.",
        resume=SAMPLES,
    )
    split: str | None = setting(
        None,
        about="The split of this source, in place of data.split. With the default, none, data.split applies.",
        resume=SAMPLES,
    )
    subset: str | None = setting(
        None,
        about="The subset of this source, in place of data.subset. With the default, none, data.subset applies.",
        resume=SAMPLES,
    )

    def __post_init__(self) -> None:
        expand_home(self, "data.sources.", "path")

    @property
    def label(self) -> str:
        """The name of the source."""
        return self.name if self.name is not None else Path(self.path[0]).name

    @property
    def exact_weight(self) -> Fraction:
        """The weight of the source as an exact fraction: 0.1 becomes 1/10."""
        return Fraction(repr(self.weight))


def check_sources(sources: Sequence[DataSource], columns: Mapping[str, str], split: str, subset: str | None) -> None:
    """Raise a `UserError` that names the source, such as `data.sources.0`, if the sources cannot be mixed.

    `columns`, `split`, `subset`: the settings of `[data]`, for sources without their own.
    """
    ways = [
        (columns if one.columns is None else one.columns, one.split or split, one.subset or subset) for one in sources
    ]
    names: dict[str, int] = {}
    for number, source in enumerate(sources):
        where = f"data.sources.{number}"
        paths = list(source.path)
        need(len(paths) > 0 and all(paths), f"{where}.path", paths, "give one or more files, folders or Hub ids")
        fix = (
            "give more than 0 and at most 1000, the number of times that an epoch shows each row, or remove the source"
        )
        need(0 < source.weight <= MOST_WEIGHT, f"{where}.weight", source.weight, fix)
        plain = bool(source.label) and not set(source.label) & set("/:\\") and source.label.isprintable()
        fix = "give a name without / or :, such as math"
        need(plain, f"{where}.name", source.label, fix)
        for field in ("split", "subset"):
            value = getattr(source, field)
            need(value != "", f"{where}.{field}", value, "give a name, or leave it out")
        first = names.setdefault(source.label, number)
        fix = f"set {where}.name to another name: data.sources.{first} has this one"
        need(first == number, f"{where}.name", source.label, fix)
        for earlier, other in enumerate(sources[:number]):
            _check_apart((source, ways[number]), (other, ways[earlier]), where, f"data.sources.{earlier}")


_Way = tuple[DataSource, tuple[Mapping[str, str], str, str | None]]
"""A source with the columns, the split and the subset with which it is read."""


def _check_apart(source: _Way, other: _Way, where: str, there: str) -> None:
    """Raise a `UserError` if two sources read the same data.

    `where`, `there`: the names of `source` and `other` in messages, such as `data.sources.0`.
    """
    (columns, split, subset), (other_columns, other_split, other_subset) = source[1], other[1]
    if columns != other_columns:
        return
    for path in source[0].path:
        # The split and the subset of a file have no effect.
        if (has_splits(path) and split != other_split) or (is_hub_id(path) and subset != other_subset):
            continue
        for known in other[0].path:
            mine, yours = Path(path).resolve(), Path(known).resolve()
            inside = mine == yours or any(
                folder in file.parents and folder.is_dir() for folder, file in ((mine, yours), (yours, mine))
            )
            fix = f"list this data once, and raise its weight to show it more often: {there} already reads {known}"
            need(not inside, f"{where}.path", path, fix)
