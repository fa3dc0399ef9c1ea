"""Find the tensors of a server that are stale, i.e. from older weights or from an adapter's base model.

The search stops at the first of these steps that explains the server's log-probabilities:

1. Replace a group of tensors by older ones: all tensors, a layer, or one kind of tensor in all layers.
2. Replace all tensors except one group.
3. Fit by least squares which tensors (in a large model, which layers) are stale. This assumes that their effects on
   log-probabilities add up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.tools.doctor.evidence import Floats
from padfree.tools.doctor.hypothesis import Case, Hypothesis, OlderWeights, Proposal, Proposals, residual
from padfree.tools.doctor.rescoring import rescored, variant
from padfree.tools.doctor.sampling_hypotheses import smallest

MOST_UNITS = 64
"""If the model and the older weights differ in more tensors than this, the search for stale tensors tests whole layers
instead of single tensors."""
ROUNDS, GAIN = 3, 0.7
"""`ROUNDS`: the maximum number of passes that improve the set of tensors assumed to be stale (older on the server).
`GAIN`: passes end if the set leaves more than this fraction of the difference between server and model unexplained."""
STALE = "sync the weights again, and restart the server if that does not help"
ADAPTER = "load the adapter in the server, and name it in the requests"

Names = frozenset[str]


class Replacements:
    """Computes log-probabilities with models in which some tensors are replaced by older ones."""

    def __init__(self, case: Case, older: OlderWeights) -> None:
        self.case, self.older = case, older
        own = case.model.state_dict()
        self.names = sorted(
            name for name, tensor in older.tensors.items() if not torch.equal(tensor, own[name].to(tensor.dtype))
        )
        self.tied = bool(getattr(case.model.config, "tie_word_embeddings", False))
        self.score = cache(self._score)

    def model(self, names: Collection[str]) -> PreTrainedModel:
        """Return the model with the tensors `names` replaced by older ones.

        A head that is tied to the embeddings is untied, so that one can be replaced without the other.
        """
        changes = {"tie_word_embeddings": False} if self.tied else None
        return variant(self.case.model, changes, tensors={name: self.older.tensors[name] for name in names})

    def _score(self, names: Names) -> Floats:
        return rescored(self.model(names), self.case.evidence)

    def residual(self, names: Names) -> float:
        return residual(self.case.observed, self.score(names))


def groups_of(names: Collection[str]) -> dict[str, Names]:
    """Return groups of tensor names, keyed by a description.

    A group is a layer, a kind of tensor in all layers (e.g. all `q_proj`), or a single tensor outside the layers.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        match = re.search(r"(?:^|\.)(\d+)\.(.+)$", name)
        if match is None:
            found.setdefault(name, set()).add(name)
            continue
        found.setdefault(f"layer {match[1]}", set()).add(name)
        kind = match[2]
        found.setdefault(f"{kind} of all layers", set()).add(name)
        block = kind.partition(".")[0]
        found.setdefault(f"{block} of all layers", set()).add(name)
        for word, parts in (("fused QKV", ("q_proj", "k_proj", "v_proj")), ("fused gate and up", ("gate_", "up_"))):
            if any(part in kind for part in parts):
                found.setdefault(f"{word} projections of all layers", set()).add(name)
        if "norm" in kind:
            found.setdefault("norms of all layers", set()).add(name)
    return {label: frozenset(members) for label, members in found.items()}


def stale(case: Case) -> Proposals:
    for older in case.older:
        tried = Replacements(case, older)
        if not tried.names:
            continue
        everything = frozenset(tried.names)
        labels = {members: label for label, members in groups_of(tried.names).items()}
        groups = {label: members for members, label in labels.items() if members < everything}
        found = dict.fromkeys([everything, *groups.values()])
        rest = {everything - members for members in groups.values() if len(members) == 1 or len(groups) <= MOST_UNITS}
        if min(tried.residual(names) for names in found) > case.limit:
            found |= dict.fromkeys(rest)
        if min(tried.residual(names) for names in found) > case.limit:
            found[search(tried, units_of(tried.names, groups))] = None
        whole = "all tensors" if len(tried.names) == len(older.tensors) else f"all {len(tried.names)} that differ"
        labels.setdefault(everything, whole)
        for names in sorted(found, key=tried.residual)[:4]:
            if names:
                yield _proposal(tried, names, labels.get(names), everything)
        if older.is_base and min(tried.residual(names) for names in found) > case.limit:
            yield from _scaled_adapter(tried)


def units_of(names: Collection[str], groups: Mapping[str, Names]) -> list[Names]:
    """Return the units (sets of tensors) among which the search looks for stale ones.

    Each unit is a single tensor if there are at most `MOST_UNITS` tensors. Otherwise the units are whole layers, and
    single tensors outside the layers.
    """
    if len(names) <= MOST_UNITS:
        return [frozenset([name]) for name in names]
    return [members for label, members in groups.items() if not label.endswith(" of all layers")]


def search(tried: Replacements, units: list[Names]) -> Names:
    """Return the names of the tensors that are probably stale (older on the server than in the model).

    Choose among `units` (sets of tensors) by least squares. Then add or remove units as long as this improves the
    agreement with the server.
    """
    expected = tried.score(frozenset())
    effects = np.stack([tried.score(unit) - expected for unit in units], axis=1)  # [E, units]
    shares = np.linalg.lstsq(effects, tried.case.observed - expected, rcond=None)[0]
    chosen = {number for number, share in enumerate(shares) if share > 0.5}

    def union(numbers: Collection[int]) -> Names:
        return frozenset().union(*(units[number] for number in numbers))

    best, before = tried.residual(union(chosen)), tried.residual(frozenset())
    for _ in range(ROUNDS):
        if best <= tried.case.limit or best > GAIN * before:
            break
        for number in np.argsort(np.abs(shares - 0.5)):
            other = chosen ^ {int(number)}
            if (value := tried.residual(union(other))) < best:
                chosen, best = other, value
    return union(chosen)


def _proposal(tried: Replacements, names: Names, label: str | None, everything: Names) -> Proposal:
    older = tried.older
    listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    if label is None and len(everything - names) < len(names):
        kept = sorted(everything - names)
        listed = f"all tensors but {', '.join(kept[:4])}" + (f" and {len(kept) - 4} more" if len(kept) > 4 else "")
    what = listed if label is None or len(names) == 1 else f"{label}, {len(names)} tensors"
    what = "all tensors" if label == "all tensors" else what
    if older.is_base:
        cause = "adapter not loaded" if names == everything else "adapter partly loaded"
        says = f"the server has the weights of the base model {older.name} ({what})"
    else:
        cause = "stale weights"
        says = f"the server has weights of {older.name} ({what})"
    return Proposal(
        cause=cause,
        says=says,
        fix=ADAPTER if older.is_base else STALE,
        logprobs=tried.score(names),
        fitted=0 if names == everything else 1,
        model=partial(tried.model, names),
    )


def _scaled_adapter(tried: Replacements) -> Iterator[Proposal]:
    """Yield a possible fault: the server scales the adapter by a wrong factor.

    The server's weights are then base + factor * (model - base). The factor is fitted to the log-probabilities that
    the server reports.
    """
    own = tried.case.model.state_dict()

    def scaled(factor: float) -> dict[str, Tensor]:
        older = tried.older.tensors
        return {name: older[name] + factor * (own[name] - older[name]) for name in tried.names}

    def score(factor: float) -> Floats:
        return rescored(variant(tried.case.model, tensors=scaled(factor)), tried.case.evidence)

    factor = smallest(lambda value: residual(tried.case.observed, score(value)), 0.05, 20.0, points=13, steps=30)
    if abs(factor - 1) > 1e-3:
        yield Proposal(
            cause="adapter scale",
            says=f"the server scales the adapter by {factor:.3g} times its alpha / rank",
            fix="compare lora_alpha, r and use_rslora of adapter_config.json with what the server loads",
            logprobs=score(factor),
            fitted=1,
        )


WEIGHT_HYPOTHESES = (Hypothesis(cause="stale weights", propose=stale),)
