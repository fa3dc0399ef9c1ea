"""The sources of a mixture, `[[data.sources]]`: what one has, and what several cannot be together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from padfree.config.model_sections import expand_home
from padfree.config.setting import SAMPLES, STAYS, setting
from padfree.errors import need

MOST_WEIGHT = 1000.0
"""An epoch lists every sample that it shows; more repetitions than this are for `data.epochs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One source of a mixture. `columns`, `split` and `subset` are those of `[data]` unless they are given here."""

    path: tuple[str, ...] = setting(resume=SAMPLES)
    weight: float = setting(1.0, resume=STAYS)  # how many times an epoch shows each row
    name: str | None = setting(
        None, resume=SAMPLES
    )  # in metrics and messages; None: the name of the first file or folder
    columns: dict[str, str] | None = setting(None, resume=SAMPLES)
    split: str | None = setting(None, resume=SAMPLES)  # of a Hub id
    subset: str | None = setting(None, resume=SAMPLES)  # of a Hub id

    def __post_init__(self) -> None:
        expand_home(self, "path")

    @property
    def label(self) -> str:
        """The name of the source."""
        return self.name if self.name is not None else Path(self.path[0]).name

    @property
    def exact_weight(self) -> Fraction:
        """The weight as it was written: 0.1 is a tenth."""
        return Fraction(repr(self.weight))


def check_sources(sources: Sequence[DataSource]) -> None:
    """Refuse sources that cannot be mixed; the messages name them by number, as an override does."""
    names: dict[str, int] = {}
    for number, source in enumerate(sources):
        where = f"data.sources.{number}"
        paths = list(source.path)
        need(len(paths) > 0 and all(paths), f"{where}.path", paths, "give one file, folder or Hub id, or more")
        cure = (
            "give how many times an epoch shows each row: more than 0, at most 1000; leave out a source you do not want"
        )
        need(0 < source.weight <= MOST_WEIGHT, f"{where}.weight", source.weight, cure)
        plain = bool(source.label) and not set(source.label) & set("/:\\") and source.label.isprintable()
        cure = "give a name without / and :, such as math"
        need(plain, f"{where}.name", source.label, cure)
        for field in ("split", "subset"):
            value = getattr(source, field)
            need(value != "", f"{where}.{field}", value, "give a name, or leave it out")
        first = names.setdefault(source.label, number)
        cure = f"data.sources.{first} has this name, too; set {where}.name to another"
        need(first == number, f"{where}.name", source.label, cure)
        for earlier, other in enumerate(sources[:number]):
            _check_apart(source, other, where, f"data.sources.{earlier}")


def _check_apart(source: DataSource, other: DataSource, where: str, there: str) -> None:
    """The same rows under two weights are a mistake, unless other columns make other samples of them."""
    if (source.columns, source.split, source.subset) != (other.columns, other.split, other.subset):
        return
    for path in source.path:
        for known in other.path:
            mine, yours = Path(path).resolve(), Path(known).resolve()
            inside = mine == yours or any(
                folder in file.parents and folder.is_dir() for folder, file in ((mine, yours), (yours, mine))
            )
            cure = f"{there} reads {known}; give its rows once, with a larger weight to show them more often"
            need(not inside, f"{where}.path", path, cure)
