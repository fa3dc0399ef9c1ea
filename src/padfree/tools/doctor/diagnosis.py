"""Decide which hypothesis explains the log-probabilities that a server reports (the evidence).

A hypothesis makes proposals, e.g. "the temperature is 0.7", and each proposal predicts the log-probabilities. Three
mean differences decide:

    before   mean |observed - expected|     expected: as the model computes them
    after    mean |observed - predicted|    predicted: as a server with the proposed fault would compute them
    limit    FACTOR times the noise         the noise of rounding: two correct implementations against float64

The server is healthy if `before` is within the limit. Otherwise, a proposal explains the evidence if `after` is within
the limit and at most half of `before`. The proposal with the smallest `after` is the best one.

A proposal is tied with the best one if its mean |observed - predicted| is larger by at most `SIGNIFICANT` standard
errors, or by at most the noise of float32. Among tied proposals, the one with the fewest fitted numbers is reported
first.

A server that is meant to compute in float32 may have a fault and also compute in bfloat16. If no proposal explains the
evidence of such a server, the proposals are judged once more with the limit of bfloat16.
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
"""A mean difference of up to this many times the measured noise counts as rounding, as in `padfree check`."""
SIGNIFICANT = 3.0
HALF = 0.5
DTYPE_GAIN = 0.9
"""The proposal that the server computes in another dtype explains the evidence if it reduces the mean difference to at
most this fraction. The fraction is near 1, because the server rounds in another order, which leaves a difference."""
COARSE_GAIN = 0.25  # with the limit of bfloat16, the largest `after` as a share of `before`
NUM_CLOSEST, CLOSE = 3, 0.8
"""If no proposal explains the evidence, the report lists up to `NUM_CLOSEST` proposals that reduce the mean difference
to at most `CLOSE` times its size."""

HYPOTHESES: tuple[Hypothesis, ...] = (
    *SAMPLING_HYPOTHESES,
    *PROMPT_HYPOTHESES,
    *WEIGHT_HYPOTHESES,
    *MODEL_HYPOTHESES,
)

State = Literal["healthy", "explained", "unexplained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Mean differences of log-probabilities that rounding causes, measured on the tokens whose log-probabilities a
    server or a rollout file gives (the evidence).
    """

    float32: float
    bfloat16: float
    float16: float
    between: dict[torch.dtype, float]  # mean difference of padfree's packs from plain transformers, in the same dtype

    def of(self, dtype: torch.dtype) -> float:
        """Return the mean difference of log-probabilities that rounding causes in a server that computes in `dtype`."""
        return {torch.bfloat16: self.bfloat16, torch.float16: self.float16}.get(dtype, self.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """A proposal (a possible fault of the server), and the mean and largest |observed - predicted|.

    `observed`: the log-probabilities that the server reports. `predicted`: those of a server with the proposed fault.
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
    """Measure the log-probability differences that rounding causes, for each dtype.

    Two correct implementations, packs and plain transformers code, are compared with plain transformers code in
    float64. If there is not enough memory for float64, they are compared with packs in float32.
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
    """Find the cause of the differences between the evidence and the model's log-probabilities.

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
    if not fitting and dtype == torch.float32:
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
    """Return whether proposal `each` fits the evidence as well as `best`, up to chance and rounding."""
    covered = ~np.isnan(each.proposal.logprobs) & ~np.isnan(best.proposal.logprobs)
    seen = observed[covered]
    paired = difference(seen, each.proposal.logprobs[covered]) - difference(seen, best.proposal.logprobs[covered])
    error = float(paired.std()) / max(len(paired), 1) ** 0.5
    return bool(paired.mean() <= max(SIGNIFICANT * error, noise.float32))


def limit_of(noise: Noise, dtype: torch.dtype, evidence: Evidence) -> float:
    """Return the largest mean difference between the model's log-probabilities and those of a healthy server.

    `dtype`: the dtype in which the server is meant to compute.
    """
    return FACTOR * noise.of(dtype) + evidence.resolution


def explained_model(case: Case, finding: Finding) -> PreTrainedModel | None:
    """Return a model that computes like the server, including its fault.

    Return None if the fault is unknown, or is not a fault of the model.
    """
    if finding.state == "healthy":
        return case.model
    if finding.best is None or finding.coarse:
        return None
    make = finding.best.proposal.model
    return None if make is None else make()
