"""Checkpoint state of the batches that are sampled ahead of training (`rollout.staleness` above 0), as a dict.

"queue" lists the finished episodes and the partial responses. Their arrays are concatenated, N tokens in total:

    "queue/tokens"     [N] token ids
    "queue/logprobs"   [N] log-probabilities
    "queue/versions"   [N] policy version that sampled each token; -1: not sampled
    "queue/routes"     [M, R, k] if recorded: k experts in each of R layers, for M of the tokens
    "queue/counts"     [N] with truncated sampling: number of ids that top-k and top-p leave for each token
    "queue/ids"        [K] with truncated sampling: these ids

"queue/of" names the environment. Unfinished episodes of an environment cannot be saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.kept_sets import KeptSets, kept_array
from padfree.rollout.base import Response
from padfree.rollout.collect.queued_batch import Stored
from padfree.rollout.group import Leaf, Played
from padfree.routes import Routes, joined_routes

KEY = "queue"
OF = f"{KEY}/of"
NOT_SAMPLED = -1
ARRAYS = ("tokens", "logprobs", "versions")
COUNTS, IDS = f"{KEY}/counts", f"{KEY}/ids"
ABOUT_LEAF = ("ended", "turns", "text", "reward", "answer")


def queue_state(stored: Sequence[Stored], environment: str) -> dict[str, Any]:
    """Convert queued episodes and partial responses to a dict, which a checkpoint stores.

    `stored_in` converts them back. `environment`: the name of the run's environment.
    """
    entries: list[dict[str, Any]] = []
    pieces: list[tuple[NDArray[Any], ...]] = []
    routes: list[Routes | None] = []
    kept: list[KeptSets | None] = []
    for batch, number, one in sorted(stored, key=lambda each: each[:2]):
        entry: dict[str, Any] = {"batch": batch, "number": number}
        if isinstance(one, Response):
            entry["begun"] = {"length": len(one.tokens), "ended": one.ended, "routes": _length(one.routes)}
            routes.append(one.routes)
            pieces.append((one.tokens, one.logprobs, one.token_versions))
            kept.append(one.kept)
        else:
            entry |= {"failure": one.failure, "metrics": dict(one.metrics), "counts": dict(one.counts), "leaves": []}
            for leaf in one.leaves:
                facts = {name: getattr(leaf, name) for name in ABOUT_LEAF}
                entry["leaves"].append({"length": len(leaf.tokens), "routes": _length(leaf.routes), **facts})
                routes.append(leaf.routes)
                pieces.append((leaf.tokens, leaf.logprobs, np.where(leaf.sampled, leaf.versions, NOT_SAMPLED)))
                kept.append(leaf.kept)
        entries.append(entry)
    tensors = {
        f"{KEY}/{name}": torch.from_numpy(np.concatenate(column))
        for name, column in zip(ARRAYS, zip(*pieces, strict=True), strict=False)
    }
    stored_routes = joined_routes(routes, [_length(one) for one in routes])
    if stored_routes is not None:
        tensors[f"{KEY}/routes"] = torch.from_numpy(stored_routes)
    if any(one is not None for one in kept):
        wholes = (KeptSets.whole(len(piece[0])) for piece in pieces)
        sets = KeptSets.joined(whole if one is None else one for one, whole in zip(kept, wholes, strict=True))
        tensors |= {COUNTS: torch.from_numpy(sets.counts), IDS: torch.from_numpy(sets.ids)}
    return {KEY: entries, OF: environment, **tensors}


def stored_in(extra: Mapping[str, Any]) -> list[Stored]:
    """Return the queued episodes and partial responses in a checkpoint's `extra` dict; an empty list if it has none."""
    entries = extra.get(KEY) or []
    all_facts = [facts for entry in entries for facts in (entry["leaves"] if "leaves" in entry else [entry["begun"]])]
    lengths = [facts["length"] for facts in all_facts]
    routes = _split_routes(extra.get(f"{KEY}/routes"), [facts.get("routes", 0) for facts in all_facts])
    ends = np.cumsum(lengths)[:-1]
    columns = [np.split(extra[f"{KEY}/{name}"].numpy(), ends) if lengths else [] for name in ARRAYS]
    kept: list[KeptSets | None] = [None] * len(lengths)
    if COUNTS in extra:
        sets = KeptSets(extra[COUNTS].numpy(), extra[IDS].numpy())
        starts = np.cumsum(lengths) - lengths
        kept = [
            kept_array(sets[start : start + length], length, KEY)
            for start, length in zip(starts.tolist(), lengths, strict=True)
        ]
    pieces = zip(*columns, kept, strict=True)
    stored: list[Stored] = []
    for entry in entries:
        if "begun" in entry:
            tokens, logprobs, versions, own_kept = next(pieces)
            one: Played | Response = Response(
                tokens=tokens,
                logprobs=logprobs,
                ended=entry["begun"]["ended"],
                version=int(versions[0]),
                versions=versions,
                routes=next(routes),
                kept=own_kept,
            )
        else:
            one = Played(
                number=entry["number"],
                leaves=tuple(_leaf(facts, next(pieces), next(routes)) for facts in entry["leaves"]),
                failure=entry["failure"],
                metrics=entry["metrics"],
                counts=entry["counts"],
            )
        stored.append((entry["batch"], entry["number"], one))
    return stored


def dropped_reason(extra: Mapping[str, Any], environment: str, staleness: int) -> str | None:
    """Return why this run cannot use the queued batches in a checkpoint; None if it can or if there are none."""
    if not (extra.get(KEY) or extra.get("episodes")):  # "episodes": an earlier format
        return None
    if not staleness:
        return "rollout.staleness is 0 now"
    return None if extra.get(OF) == environment else "the responses belong to another environment or padfree version"


def _length(routes: Routes | None) -> int:
    return 0 if routes is None else len(routes)


def _split_routes(stored: torch.Tensor | None, lengths: Sequence[int]) -> Iterator[Routes | None]:
    """Split the stored routes (the experts of each token) into those of each sequence.

    `lengths`: the number of tokens of each sequence whose routes are stored. A length of 0 gives None.
    """
    if stored is None:
        return iter([None] * len(lengths))
    parts = np.split(stored.numpy(), np.cumsum(lengths)[:-1])
    return iter([part if length else None for part, length in zip(parts, lengths, strict=True)])


def _leaf(facts: Mapping[str, Any], piece: tuple[Any, Any, Any, KeptSets | None], routes: Routes | None) -> Leaf:
    tokens, logprobs, versions, kept = piece
    sampled = versions != NOT_SAMPLED
    values = {name: facts[name] for name in ABOUT_LEAF}
    return Leaf(
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        versions=np.where(sampled, versions, 0),
        kept=kept,
        num_kept=0 if kept is None else len(kept.ids),
        routes=routes,
        **values,
    )
