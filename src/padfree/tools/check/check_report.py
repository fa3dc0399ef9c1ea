"""The report of a check: one result per comparison, and a verdict.

    what                       difference     noise   allowed       largest at
    log-probabilities             4.8e-07   7.2e-07   2.0e-05  ok   token 30 of sample 5
    gradients of layer 1          1.9e-06   1.1e-06   1.0e-04  ok   model.layers.1.mlp.up_proj.weight

The difference is between packed training and the reference (plain transformers code, one sample at a time). The noise
is the rounding error of plain transformers code in the dtype of the check. A result passes if its difference is at most
`tolerance`, or at most `FACTOR` times the noise.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from padfree.tools.check.compare import FACTOR
from padfree.tools.json_objects import read_object
from padfree.train.float8_budget import Float8Distance

MAIN = "packed"
"""The name of the main check. All other checks repeat it with another layout of the samples in packs, or with other
tokens before and after a sample."""


FLOAT8_HEADER = ("change by float8", "this layer's gradient, all in float8", "any gradient, only this in float8", "")

HEADER = ("what", "difference", "noise", "allowed", "", "largest at")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one comparison between packed training and the reference."""

    check: str  # the name of the check: packed, leak, pad, or a layout
    quantity: str  # what is compared: log-probabilities, loss, normaliser or gradients
    part: str | None = None  # part of the model, for gradients
    difference: float
    noise: float | None  # None: only the tolerance decides
    tolerance: float
    where: str = ""  # where the difference is largest

    @property
    def limit(self) -> float:
        """The largest difference that passes: the tolerance, or `FACTOR` times the noise if that is larger.

        The noise is the rounding error of plain transformers code. A noise that is not finite is ignored.
        """
        noise = self.noise if self.noise is not None and math.isfinite(self.noise) else 0.0
        return max(self.tolerance, FACTOR * noise)

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit

    @property
    def excess(self) -> float:
        """The difference divided by the largest difference that passes. Above 1, the comparison has failed."""
        return self.difference / self.limit if self.limit else (math.inf if self.difference else 0.0)

    @property
    def title(self) -> str:
        quantity = self.quantity if self.part is None else f"{self.quantity} of {self.part}"
        return quantity if self.check == MAIN else f"{self.check}: {quantity}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A variation of the check (e.g. another layout) that was not run, and the reason.

    The model, the attention backend or the number of ranks does not support this variation.
    """

    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """All results of `padfree check`, the same on every process."""

    model: str
    num_layers: int
    total_layers: int
    random_weights: bool
    dtype: str
    device: str
    backend: str
    data_ranks: int
    context_ranks: int
    samples: str  # where the samples come from
    lengths: tuple[int, ...]
    num_labels: int
    reference: str
    noise: str
    rows: tuple[CheckResult, ...]
    skipped: tuple[Skipped, ...] = ()
    float8: tuple[Float8Distance, ...] = ()  # empty: not measured
    float8_budget: float | None = None
    remark: str = ""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(row for row in self.rows if not row.passed)

    @property
    def verdict(self) -> str:
        """One line of text that says whether the check passed and, if not, which comparisons failed."""
        if self.passed:
            return "passed: packed training gives the same results as one sample at a time"
        found = {
            check: list(dict.fromkeys(row.quantity for row in rows))
            for check, rows in groupby(self.failed, key=lambda row: row.check)
        }
        listed = [
            ", ".join(quantities) if check == MAIN else f"{check} ({', '.join(quantities)})"
            for check, quantities in found.items()
        ]
        return f"FAILED: {'; '.join(listed)}" + (f" ({self.remark})" if self.remark else "")

    def heading(self) -> list[str]:
        """Return the model, samples and settings of the check, as lines of text."""
        layers = "all" if self.num_layers == self.total_layers else f"the first {self.num_layers}"
        ranks = (self.data_ranks, self.context_ranks)
        spread = "one process" if ranks == (1, 1) else f"{ranks[0]} data x {ranks[1]} context ranks, FSDP2"
        weights = ", random weights" if self.random_weights else ""
        return [
            f"model       {self.model}, {layers} of its {self.total_layers} layers{weights}",
            f"samples     {len(self.lengths)} {self.samples}, {min(self.lengths)} to {max(self.lengths)} tokens, "
            f"{sum(self.lengths)} tokens in all, {self.num_labels} trained",
            f"packed      {self.dtype} on {self.device}, attention {self.backend}, {spread}",
            f"reference   {self.reference}",
            f"allowed     the tolerance of {self.dtype}, or {FACTOR:.0f} times the noise: {self.noise}",
        ]

    def shown_rows(self) -> list[CheckResult]:
        """Return the results that the report's table shows: all results of the main check, and a few of each variation.

        For a variation (e.g. another layout of the samples), the table shows the failed results. If none failed, it
        shows the result with the largest `excess`.
        """
        shown: list[CheckResult] = []
        for check, group in groupby(self.rows, key=lambda row: row.check):
            rows = list(group)
            failed = [row for row in rows if not row.passed]
            shown += rows if check == MAIN else failed or [max(rows, key=lambda row: row.excess)]
        return shown

    def cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of comparisons as text, without the header."""
        return [
            (
                row.title,
                _number(row.difference),
                "-" if row.noise is None else _number(row.noise),
                _number(row.limit),
                "ok" if row.passed else "FAILED",
                row.where if row.difference else "",
            )
            for row in self.shown_rows()
        ]

    def float8_cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the float8 table as text, without the header.

        Each row says how much float8 changes the gradient of one layer. The table is empty if the check did not measure
        float8.
        """
        budget = math.inf if self.float8_budget is None else self.float8_budget
        return [
            (
                f"layer {each.layer}",
                _number(each.together),
                "-" if each.alone is None else _number(each.alone),
                "stays in bfloat16" if each.exceeds(budget) else "",
            )
            for each in self.float8
        ]

    def float8_line(self) -> str:
        """Return a line of text that names the layers that stay in bfloat16 in a run with this `float8_budget`."""
        if self.float8_budget is None:
            return (
                "give --float8 a number N to see which layers stay in bfloat16 in a run with parallel.float8_budget=N"
            )
        kept = [str(each.layer) for each in self.float8 if each.exceeds(self.float8_budget)]
        named = f"layers {', '.join(kept)} stay in bfloat16" if kept else "all layers multiply in float8"
        return f"parallel.float8_budget={self.float8_budget:g}: {named}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON. Non-finite differences are None."""
        rows = [
            {
                **asdict(row),
                "difference": row.difference if math.isfinite(row.difference) else None,
                "noise": row.noise if row.noise is None or math.isfinite(row.noise) else None,
                "limit": row.limit,
                "passed": row.passed,
            }
            for row in self.rows
        ]
        float8 = [
            {name: value if value is None or math.isfinite(value) else None for name, value in asdict(each).items()}
            for each in self.float8
        ]
        return {**asdict(self), "rows": rows, "float8": float8, "passed": self.passed, "verdict": self.verdict}


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def is_report(path: Path) -> bool:
    """Return whether a file holds a report as JSON, so that a new report may overwrite it."""
    return {"verdict", "rows", "passed"} <= (read_object(path) or {}).keys()
