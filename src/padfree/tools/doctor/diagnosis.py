"""Decide which fault of a server explains the log-probabilities that it reports.

A proposal is a possible fault, e.g. "the server uses temperature 0.7". Three mean differences of log-probabilities
decide:

    before    between the server and the model
    after     between the server and what a server with the proposed fault would report
    limit     the largest difference that rounding explains

The server is healthy if `before` is within the limit. A proposal explains the log-probabilities if `after` is within
the limit and at most half of `before`. The proposal with the smallest `after` is reported. Of nearly equal proposals,
the one with the fewest fitted values (e.g. a temperature) is reported first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from padfree.tools.doctor.evidence import Evidence, Floats, Part
from padfree.tools.doctor.hypothesis import Case, Hypothesis, Proposal, Untested, difference, residual
from padfree.tools.doctor.model_hypotheses import MODEL_HYPOTHESES
from padfree.tools.doctor.prompt_hypotheses import PROMPT_HYPOTHESES
from padfree.tools.doctor.rescoring import exact_scores, in_dtype, logprobs_of, plain_logits, rescored, variant
from padfree.tools.doctor.sampling_hypotheses import SAMPLING_HYPOTHESES
from padfree.tools.doctor.weight_hypotheses import WEIGHT_HYPOTHESES

FACTOR = 4.0
"""A mean difference between the log-probabilities of server and model counts as rounding if it is at most this many
times the measured rounding error.
"""
SIGNIFICANT = 3.0  # standard errors by which `after` of a tied proposal may exceed that of the best one
HALF = 0.5
DTYPE_GAIN = 0.9
"""A wrong dtype counts as the server's fault only if running the model in that dtype reduces the mean difference from
the server to at most this fraction. It is near 1, because server and model round differently even in the same dtype.
"""
COARSE_GAIN = 0.25  # with the limit of bfloat16, the largest `after` as a share of `before`
NUM_CLOSEST, CLOSE = 3, 0.8
"""If no possible fault explains the server's log-probabilities, the report lists up to `NUM_CLOSEST` faults that come
close. Giving the model such a fault reduces its mean difference from the server to at most `CLOSE` times the original.
"""

HYPOTHESES: tuple[Hypothesis, ...] = (
    *SAMPLING_HYPOTHESES,
    *PROMPT_HYPOTHESES,
    *WEIGHT_HYPOTHESES,
    *MODEL_HYPOTHESES,
)

State = Literal["healthy", "explained", "unexplained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The mean differences of log-probabilities that rounding causes in correct implementations, by dtype.

    They are measured on the tokens whose log-probabilities a server or a rollout file gives.
    """

    float32: float
    bfloat16: float
    float16: float
    between: dict[torch.dtype, float]  # mean difference of padfree's packs from plain transformers, in the same dtype

    def of(self, dtype: torch.dtype) -> float:
        """Return the mean error that rounding causes in the log-probabilities of a server that computes in `dtype`."""
        return {torch.bfloat16: self.bfloat16, torch.float16: self.float16}.get(dtype, self.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """How well a possible fault of the server (`proposal`) explains the log-probabilities that the server reports.

    `after` and `largest`: the mean and the largest difference of a token's log-probability between the server and the
    prediction for a server with this fault.
    """

    proposal: Proposal
    after: float
    largest: float

    @property
    def cause(self) -> str:
        return self.proposal.cause


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finding:
    """The conclusion from one piece of evidence: whether the server is healthy, and if not, which proposals (possible
    faults) explain the evidence.
    """

    part: Part
    state: State
    num_tokens: int
    before: float
    largest: float
    limit: float
    best: Measured | None = None
    tied: tuple[Measured, ...] = ()
    closest: tuple[Measured, ...] = ()  # if nothing explains the evidence
    coarse: bool = False  # the difference that remains is as large as the rounding of bfloat16
    untested: tuple[Untested, ...] = ()

    @property
    def cause(self) -> str:
        return self.state if self.best is None else self.best.cause


def measure_noise(model: PreTrainedModel, evidence: Evidence) -> Noise:
    """Measure the rounding error of log-probabilities in float32, bfloat16 and float16.

    Compare padfree's packed model and plain transformers code with plain transformers code in float64. If float64 is
    impossible, compare with the packed model in float32.
    """
    packed = rescored(model, evidence)
    plain = logprobs_of(plain_logits(variant(model, attached=False), evidence), evidence)
    exact = exact_scores(model, evidence)
    reference = packed if exact is None else exact
    rounding = float(np.finfo(np.float32).eps) * float(np.abs(packed).mean())  # if all sums happen to be equal
    single = max(residual(packed, plain), residual(reference, plain), residual(reference, packed), rounding)
    noise: dict[torch.dtype, float] = {}
    between: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float16):
        low = rescored(in_dtype(model, dtype), evidence)
        other = logprobs_of(plain_logits(in_dtype(model, dtype, attached=False), evidence), evidence)
        finite = [values for values in (low, other) if np.isfinite(values).all()]
        noise[dtype] = max([single, *(residual(reference, values) for values in finite)])
        between[dtype] = max(residual(low, other) if len(finite) == 2 else 0.0, single)
    return Noise(float32=single, bfloat16=noise[torch.bfloat16], float16=noise[torch.float16], between=between)


def diagnose(
    case: Case, noise: Noise, dtype: torch.dtype, *, hypotheses: Sequence[Hypothesis], say: Callable[[str], None]
) -> Finding:
    """Find out why the log-probabilities that a server reports differ from those of the model that it should serve.

    `dtype`: the dtype in which the server is meant to compute.
    """
    expected = case.expected
    gaps = difference(case.observed, expected)
    finding = Finding(
        part=case.evidence.part,
        state="healthy",
        num_tokens=len(gaps),
        before=float(gaps.mean()),
        largest=float(gaps.max()),
        limit=case.limit,
    )
    if finding.before <= case.limit:
        return finding
    measured, untested = _measured(case, hypotheses, say)
    finding = replace(finding, untested=tuple(untested))
    fitting = [each for each in measured if _explains(each, finding.before, case, noise)]
    coarse = False
    if not fitting and dtype == torch.float32:  # the server may also compute in bfloat16
        limit = FACTOR * noise.bfloat16 + case.evidence.resolution
        fitting = [
            each
            for each in measured
            if each.proposal.dtype is None and each.after <= min(limit, COARSE_GAIN * finding.before)
        ]
        coarse = bool(fitting)
    if not fitting:
        near = (each for each in measured if each.after <= CLOSE * finding.before)
        closest = sorted(near, key=_after)[:NUM_CLOSEST]
        return replace(finding, state="unexplained", closest=tuple(closest))
    best = min(fitting, key=_after)
    ties = sorted(
        (each for each in fitting if each is best or _tied(each, best, case.observed, noise)),
        key=lambda each: (each.proposal.fitted, _is_last_resort(each)),
    )
    others = {each.cause: each for each in reversed(ties[1:]) if each.cause != ties[0].cause}
    return replace(finding, state="explained", best=ties[0], tied=tuple(reversed(others.values())), coarse=coarse)


def _after(each: Measured) -> float:
    return each.after


def _is_last_resort(each: Measured) -> bool:
    return each.proposal.dtype is not None


def _measured(
    case: Case, hypotheses: Sequence[Hypothesis], say: Callable[[str], None]
) -> tuple[list[Measured], list[Untested]]:
    found: list[Measured] = []
    untested: list[Untested] = []
    for hypothesis in hypotheses:
        if case.evidence.part not in hypothesis.parts:
            continue
        say(f"{case.evidence.part}: {hypothesis.cause}")
        for proposal in hypothesis.propose(case):
            if isinstance(proposal, Untested):
                untested.append(proposal)
                continue
            gaps = difference(case.observed, proposal.logprobs)
            after = residual(case.observed, proposal.logprobs)
            found.append(Measured(proposal=proposal, after=after, largest=float(gaps.max()) if len(gaps) else after))
    return found, untested


def _explains(each: Measured, before: float, case: Case, noise: Noise) -> bool:
    dtype = each.proposal.dtype
    if dtype is None:
        return each.after <= min(case.limit, HALF * before)
    limit = FACTOR * noise.between[dtype] + case.evidence.resolution
    return each.after <= min(limit, DTYPE_GAIN * before)


def _tied(each: Measured, best: Measured, observed: Floats, noise: Noise) -> bool:
    """Return whether proposal `each` (a possible fault of the server) predicts the `observed` log-probabilities as well
    as proposal `best`, or so nearly that chance or rounding can explain the difference.
    """
    covered = ~np.isnan(each.proposal.logprobs) & ~np.isnan(best.proposal.logprobs)
    seen = observed[covered]
    paired = difference(seen, each.proposal.logprobs[covered]) - difference(seen, best.proposal.logprobs[covered])
    error = float(paired.std()) / max(len(paired), 1) ** 0.5
    return bool(paired.mean() <= max(SIGNIFICANT * error, noise.float32))


def limit_of(noise: Noise, dtype: torch.dtype, evidence: Evidence) -> float:
    """Return the largest mean difference between the log-probabilities of server and model that rounding explains.

    `dtype`: the dtype in which the server is meant to compute.
    """
    return FACTOR * noise.of(dtype) + evidence.resolution


def explained_model(case: Case, finding: Finding) -> PreTrainedModel | None:
    """Return a model that computes the same log-probabilities as the server.

    If a fault was found, this is a model with the same fault. Return None if the server's log-probabilities are
    unexplained, or if the fault is not in the model (e.g. a wrong temperature).
    """
    if finding.state == "healthy":
        return case.model
    if finding.best is None or finding.coarse:
        return None
    make = finding.best.proposal.model
    return None if make is None else make()
