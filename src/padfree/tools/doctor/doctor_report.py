"""The result of `padfree doctor`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from padfree.tools.doctor.diagnosis import Finding, Measured
from padfree.tools.doctor.hypothesis import Untested

NAMES = {"prompts": "prompts", "responses": "responses"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFinding:
    """The result of comparing the token ids that the server makes of texts or chat messages with the expected ids."""

    what: str  # "plain text" or "chat messages"
    cause: str | None  # None: the ids are right
    says: str = ""
    fix: str = ""
    by: str = "token ids"  # what showed the cause; "log-probabilities" if the server returns no ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DoctorReport:
    """The results of `padfree doctor` for a server or a rollout file."""

    model: str
    subject: str  # the URL or the file
    dtype: str  # the dtype that the server is meant to compute in
    noise: str
    findings: tuple[Finding, ...]
    texts: tuple[TextFinding, ...] = ()
    untested: tuple[Untested, ...] = ()

    @property
    def healthy(self) -> bool:
        return all(each.state == "healthy" for each in self.findings) and all(each.cause is None for each in self.texts)

    @property
    def causes(self) -> list[str]:
        """Return the names of the faults that explain differences from the expected log-probabilities or token ids.

        If no fault explains a difference, the list contains "unexplained". If the server is healthy, the list is empty.
        """
        found = [each.cause for each in self.findings if each.state != "healthy"]
        return [*found, *(each.cause for each in self.texts if each.cause is not None)]

    def lines(self) -> Iterator[str]:
        yield f"model     {self.model}"
        yield f"compared  {self.subject}"
        yield f"noise     {self.noise}"
        for each in self.findings:
            yield ""
            yield from _lines_of(each)
        for text in self.texts:
            yield ""
            if text.cause is None:
                yield f"{text.what}: ok, the same token ids"
            else:
                yield f"{text.what}: {text.cause}: {text.says} (shown by {text.by})"
                yield f"  fix: {text.fix}"
        if self.untested:
            yield ""
            for untested in self.untested:
                yield f"not tested: {untested.cause} ({untested.reason})"
        yield ""
        yield self.verdict

    @property
    def verdict(self) -> str:
        if self.healthy:
            return "healthy: all differences are the size of rounding"
        causes = list(dict.fromkeys(self.causes))
        if causes == ["unexplained"]:
            return "unexplained: the log-probabilities differ, and no hypothesis explains it"
        return f"differs: {', '.join(causes)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "subject": self.subject,
            "dtype": self.dtype,
            "healthy": self.healthy,
            "causes": self.causes,
            "findings": [_as_dict(each) for each in self.findings],
            "texts": [
                {"what": each.what, "cause": each.cause, "says": each.says, "fix": each.fix} for each in self.texts
            ],
            "untested": [{"cause": each.cause, "reason": each.reason} for each in self.untested],
        }


def _size(mean: float, largest: float) -> str:
    return f"mean {mean:.2e}, largest {largest:.2e}"


def _lines_of(finding: Finding) -> Iterator[str]:
    head = f"{NAMES[finding.part]}: {finding.num_tokens} tokens, |difference| {_size(finding.before, finding.largest)}"
    if finding.state == "healthy":
        yield f"{head}; ok, rounding explains a mean of up to {finding.limit:.2e}"
        return
    yield f"{head}; rounding explains a mean of up to {finding.limit:.2e}"
    if finding.best is None:
        yield "  unexplained: no hypothesis explains the difference; to test for stale weights, give --previous FOLDER"
        for each in finding.closest:
            yield f"  closest: {each.cause}: {each.proposal.says}; leaves {_size(each.after, each.largest)}"
        return
    best = finding.best
    yield f"  {best.cause}: {best.proposal.says}"
    yield f"  if the model gets the same fault, |difference| {_size(best.after, best.largest)}"
    if finding.coarse:
        yield "  the remaining difference is the size of bfloat16 rounding: the server seems to compute in bfloat16"
    yield f"  fix: {best.proposal.fix}"
    for each in finding.tied:
        yield f"  other explanation: {each.cause}: {each.proposal.says}; leaves {_size(each.after, each.largest)}"


def _as_dict(finding: Finding) -> dict[str, Any]:
    def one(each: Measured) -> dict[str, Any]:
        return {
            "cause": each.cause,
            "says": each.proposal.says,
            "fix": each.proposal.fix,
            "mean": each.after,
            "largest": each.largest,
        }

    return {
        "part": finding.part,
        "state": finding.state,
        "tokens": finding.num_tokens,
        "mean": finding.before,
        "largest": finding.largest,
        "limit": finding.limit,
        "best": None if finding.best is None else one(finding.best),
        "tied": [one(each) for each in finding.tied],
        "closest": [one(each) for each in finding.closest],
        "bfloat16": finding.coarse,
    }
