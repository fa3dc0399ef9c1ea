"""Hypotheses: possible causes of different log-probabilities.

A `Hypothesis` has the name of a cause, e.g. "temperature". Its function `propose(case)` gets the log-probabilities [E]
that a server reports for E tokens. It yields objects of two classes:

    Proposal    e.g. "the server uses temperature 0.7", and the log-probabilities [E] that it would then report
    Untested    why the reported log-probabilities cannot show the cause

`Proposal.fitted` is the number of values, such as a temperature, that were fitted to the reported log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.tools.doctor.evidence import Evidence, Floats, Part
from padfree.tools.doctor.rescoring import logprobs_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OlderWeights:
    """Weights that the server may hold by mistake: those of another folder, or of the model without its adapter."""

    name: str
    tensors: dict[str, Tensor]  # by the names of the model's state
    is_base: bool  # whether these are the weights of the base model, without the adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """What is needed to test a hypothesis (a possible fault of a server): the log-probabilities that the server reports
    (the evidence), the model that it should serve, and this model's logits for the same tokens.
    """

    model: PreTrainedModel  # attached, float32
    evidence: Evidence
    logits: Tensor  # [E, V] of the model
    limit: float  # the largest mean difference that rounding explains
    older: Sequence[OlderWeights] = ()
    tokenizer: Any = None
    stored: dict[str, Tensor] | None = None  # tensors of the weight files that the model replaces by tied ones

    @property
    def observed(self) -> Floats:
        return self.evidence.observed

    @property
    def expected(self) -> Floats:
        """Return the model's log-probabilities [E] of the E tokens. A server without faults would report the same."""
        return logprobs_of(self.logits, self.evidence)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Proposal:
    """A possible fault of a server.

    `logprobs`: the log-probabilities that a server with this fault would report; NaN for tokens for which the fault
    does not determine the log-probability.
    """

    cause: str
    says: str
    fix: str
    logprobs: Floats  # [E]
    fitted: int = 0
    dtype: torch.dtype | None = None  # set if the cause is this dtype; its rounding limits how well it can fit
    model: Callable[[], PreTrainedModel] | None = None  # the model that the server seems to have


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Untested:
    """A possible fault of a server that the reported log-probabilities can neither confirm nor rule out."""

    cause: str
    reason: str


Proposals = Iterable[Proposal | Untested]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hypothesis:
    cause: str
    propose: Callable[[Case], Proposals]
    parts: tuple[Part, ...] = ("prompts", "responses")
    sampling: bool = False  # about how a server samples; if prompts were examined, responses test only these causes


def difference(observed: Floats, predicted: Floats) -> Floats:
    """Return the absolute difference of observed and predicted log-probabilities, where the prediction is not NaN.

    The difference is infinite if the predicted log-probability is -inf.
    """
    covered = ~np.isnan(predicted)
    with np.errstate(invalid="ignore"):
        gaps: Floats = np.abs(observed[covered] - predicted[covered])
    return np.where(np.isnan(gaps), np.inf, gaps)


def residual(observed: Floats, predicted: Floats) -> float:
    """Return the mean |observed - predicted|; infinite if the prediction is NaN for more than half of the tokens."""
    gaps = difference(observed, predicted)
    return float(gaps.mean()) if 2 * len(gaps) >= len(observed) else float("inf")
