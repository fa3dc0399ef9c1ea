"""Hypotheses (possible faults) about how a server samples and what it then reports: temperature, truncation, penalties.

Each fault is tested on the model's logits [E, V] for E tokens, without a new forward pass:

- A server at temperature t reports log softmax(logits / t). The t that fits best is tested.
- A server with top-k, top-p or min-p reports log-probabilities that are larger by -log(total probability of the kept
  tokens). The difference shows how many tokens were kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.tools.doctor.evidence import Floats
from padfree.tools.doctor.hypothesis import Case, Hypothesis, Proposal, Proposals, residual
from padfree.tools.doctor.rescoring import chosen, logprobs_of

COLDEST, HOTTEST = 0.05, 20.0
LEAST_PENALTY, LARGEST_PENALTY = 0.5, 2.0
GOLDEN = (math.sqrt(5) - 1) / 2


def smallest(loss: Callable[[float], float], low: float, high: float, *, points: int = 25, steps: int = 36) -> float:
    """Return the number from `low` to `high` at which `loss` is smallest.

    The search tries a logarithmic grid of `points` numbers, then `steps` steps of golden-section search. It rounds the
    result to few decimals if this hardly changes the loss.
    """
    grid = np.geomspace(low, high, points)
    best = int(np.argmin([loss(value) for value in grid]))
    a, b = math.log(grid[max(best - 1, 0)]), math.log(grid[min(best + 1, points - 1)])
    for _ in range(steps):
        left, right = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        if loss(math.exp(left)) <= loss(math.exp(right)):
            b = right
        else:
            a = left
    found = math.exp((a + b) / 2)
    best_loss = loss(found)
    for digits in range(1, 4):  # prefer a number with few decimals if it fits as well
        rounded = round(found, digits)
        if rounded > 0 and loss(rounded) <= 1.02 * best_loss + 1e-9:
            return rounded
    return found


def temperature(case: Case) -> Proposals:
    asked = case.evidence.temperature
    fix = "start the server with --logprobs-mode processed_logprobs, and send the temperature with every request"
    if asked != 1.0:
        yield Proposal(
            cause="temperature",
            says=f"the server reports log-probabilities at temperature 1, but {asked:g} was asked for",
            fix=fix,
            logprobs=logprobs_of(case.logits, case.evidence, 1.0),
        )
    found = smallest(lambda t: residual(case.observed, logprobs_of(case.logits, case.evidence, t)), COLDEST, HOTTEST)
    if abs(found / asked - 1) > 1e-3:
        yield Proposal(
            cause="temperature",
            says=f"the server uses the temperature {found:.4g}, but {asked:g} was asked for",
            fix=fix if case.evidence.part == "responses" else "start the server without scaling of its logits",
            logprobs=logprobs_of(case.logits, case.evidence, found),
            fitted=1,
        )


# Truncation


def truncated(scaled: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return the log-probabilities [E, V] after truncation by top-k, top-p and min-p; -inf for dropped tokens.

    `scaled`: the logits [E, V] of E positions and V token ids, divided by the temperature.
    """
    log_p, order = scaled.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    p = log_p.exp()
    number = torch.arange(p.shape[1])
    kept = torch.ones_like(p, dtype=torch.bool)
    if top_k:
        kept &= number < top_k
    if top_k and top_p < 1:
        p = p * kept / (p * kept).sum(-1, keepdim=True)
    kept &= p.cumsum(-1) - p < top_p
    kept &= p >= min_p * p[:, :1]
    log_p = log_p.masked_fill(~kept, -torch.inf)
    return torch.empty_like(log_p).scatter_(-1, order, log_p - log_p.logsumexp(-1, keepdim=True))


def agreeing(low: Floats, high: Floats) -> float | None:
    """Return a value that lies in as many of the intervals (low, high] as possible; None if there are no intervals."""
    ends = sorted([(value, 1) for value in low.tolist()] + [(value, -1) for value in high.tolist()])
    count = most = 0
    found = None
    for index, (value, step) in enumerate(ends[:-1]):
        count += step
        if count > most:
            most, found = count, (value + ends[index + 1][0]) / 2
    return found


def truncation(case: Case) -> Proposals:
    asked = case.evidence.temperature
    temperatures = [asked] if asked == 1.0 else [asked, 1.0]
    for t in temperatures:
        yield from _truncated_at(case, t)


def _truncated_at(case: Case, t: float) -> Iterator[Proposal]:
    scaled = case.logits / t
    lifted = case.observed - logprobs_of(case.logits, case.evidence, t)  # [E], -log of the kept mass
    margin = 2 * case.limit
    informative = lifted > margin
    if not informative.any() or (lifted < -10 * margin).mean() > 0.1:
        return
    p = scaled[torch.from_numpy(informative)].double().softmax(-1).sort(-1, descending=True).values
    mass, row = p.cumsum(-1).numpy(), p.numpy()
    gap = np.abs(-np.log(mass) - lifted[informative][:, None])
    kept = gap.argmin(-1)  # the index of the last kept token of each distribution
    each = np.arange(len(kept))
    after = row[each, np.minimum(kept + 1, row.shape[1] - 1)]
    suffix = "" if t == case.evidence.temperature else f" at temperature {t:g}"
    fix = "send top_p=1, top_k=0 and min_p=0 with every request, or start vLLM with --generation-config vllm"
    k = round(float(np.median(kept))) + 1
    top_p = agreeing(mass[each, kept] - row[each, kept], mass[each, kept])
    min_p = agreeing(after / row[:, 0], row[each, kept] / row[:, 0])
    options: list[tuple[str, str, dict[str, Any]]] = [("top-k", f"top_k={k}", {"top_k": k})]
    if top_p is not None:
        options.append(("top-p", f"top_p={_short(top_p)}", {"top_p": top_p}))
    if min_p is not None:
        options.append(("min-p", f"min_p={_short(min_p)}", {"min_p": min_p}))
    for cause, words, values in options:
        predicted = chosen(truncated(scaled, **values), case.evidence)
        yield Proposal(
            cause=cause,
            says=f"the server reports log-probabilities of the distribution truncated by {words}{suffix}",
            fix=fix,
            logprobs=predicted,
            fitted=1,
        )


def _short(value: float) -> str:
    return f"about {value:.3g}"


def generation_config(case: Case) -> Proposals:
    """Yield a possible fault: the server samples with the model's generation_config.json, as vLLM does by default."""
    given = getattr(case.model, "generation_config", None)
    t = float(getattr(given, "temperature", None) or 1.0)
    cut: dict[str, Any] = {
        "top_k": int(getattr(given, "top_k", None) or 0),
        "top_p": float(getattr(given, "top_p", None) or 1.0),
        "min_p": float(getattr(given, "min_p", None) or 0.0),
    }
    penalty = float(getattr(given, "repetition_penalty", None) or 1.0)
    if t in (1.0, case.evidence.temperature) and cut == {"top_k": 0, "top_p": 1.0, "min_p": 0.0} and penalty == 1.0:
        return
    log_p = truncated(_penalised(case, penalty) / t, **cut)
    words = ", ".join(f"{name}={value:g}" for name, value in cut.items())
    yield Proposal(
        cause="generation config",
        says=(
            f"the server samples with the settings of generation_config.json (temperature={t:g}, {words}, "
            f"repetition_penalty={penalty:g})"
        ),
        fix="start vLLM with --generation-config vllm, or send these settings with every request",
        logprobs=chosen(log_p, case.evidence),
    )


def repetition_penalty(case: Case) -> Proposals:
    def score(value: float) -> Floats:
        return logprobs_of(_penalised(case, value), case.evidence)

    found = smallest(lambda value: residual(case.observed, score(value)), LEAST_PENALTY, LARGEST_PENALTY, points=16)
    if abs(found - 1) > 1e-3:
        yield Proposal(
            cause="repetition penalty",
            says=f"the server uses a repetition penalty of {found:.4g}",
            fix="send repetition_penalty=1 with every request, or start vLLM with --generation-config vllm",
            logprobs=score(found),
            fitted=1,
        )


def _penalised(case: Case, value: float) -> Tensor:
    """Return the logits [E, V] for E scored tokens, with a repetition penalty on the ids before each such token."""
    evidence, logits = case.evidence, case.logits
    if value == 1.0:
        return logits
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for number, (sequence, position) in enumerate(zip(evidence.sequence, evidence.positions, strict=True)):
        seen[number, torch.from_numpy(evidence.sequences[sequence][:position])] = True
    return torch.where(seen, torch.where(logits > 0, logits / value, logits * value), logits)


def shifted(case: Case) -> Proposals:
    """Yield two possible faults: the log-probability reported for a token is that of the next or previous token."""
    for step, side in ((1, "next"), (-1, "previous")):
        predicted = []
        for values in case.evidence.by_sequence(case.expected):
            moved = np.full(len(values), np.nan)
            if step == 1:
                moved[:-1] = values[1:]
            else:
                moved[1:] = values[:-1]
            predicted.append(moved)
        yield Proposal(
            cause="shifted log-probabilities",
            says=f"the server reports, for each token, the log-probability of the {side} token",
            fix="align the log-probabilities with the tokens: entry j belongs to token j",
            logprobs=np.concatenate(predicted),
        )


SAMPLING_HYPOTHESES = (
    Hypothesis(cause="generation config", propose=generation_config, parts=("responses",), sampling=True),
    Hypothesis(cause="temperature", propose=temperature, sampling=True),
    Hypothesis(cause="truncation", propose=truncation, parts=("responses",), sampling=True),
    Hypothesis(cause="repetition penalty", propose=repetition_penalty, parts=("responses",), sampling=True),
    Hypothesis(cause="shifted log-probabilities", propose=shifted, sampling=True),
)
