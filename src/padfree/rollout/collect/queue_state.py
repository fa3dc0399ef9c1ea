"""What a checkpoint holds of batches that are not trained yet (`rollout.staleness`).

    "queue"            of each episode batch, number, failure and its leaves (length, reward, text and so on);
                       of a response under way "begun": its length
    "queue/tokens"     [Σn]     of all leaves and responses under way, end to end; and log-probabilities, and versions,
                                -1 where nothing was sampled
    "queue/of"         the environment: episodes of another one are played again

Episodes under way are not in it: no file can hold what their tools hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.rollout.base import Response
from padfree.rollout.environment.play import Played
from padfree.rollout.environment.trajectory import Leaf

KEY = "queue"
OF = f"{KEY}/of"
NOT_SAMPLED = -1
ARRAYS = ("tokens", "logprobs", "versions")
ABOUT_LEAF = ("ended", "turns", "text", "reward", "answer")

Stored = tuple[int, int, Played | Response]
"""Batch, number, and the episode or the part of a response that is there."""


def queue_state(stored: Sequence[Stored], environment: str) -> dict[str, Any]:
    """As what a checkpoint can hold."""
    rows: list[dict[str, Any]] = []
    pieces: list[tuple[NDArray[Any], ...]] = []
    for batch, number, one in sorted(stored, key=lambda each: each[:2]):
        row: dict[str, Any] = {"batch": batch, "number": number}
        if isinstance(one, Response):
            row["begun"] = {"length": len(one.tokens), "ended": one.ended}
            pieces.append((one.tokens, one.logprobs, one.token_versions))
        else:
            row |= {"failure": one.failure, "metrics": dict(one.metrics), "counts": dict(one.counts), "leaves": []}
            for leaf in one.leaves:
                about = {name: getattr(leaf, name) for name in ABOUT_LEAF}
                row["leaves"].append({"length": len(leaf.tokens), **about})
                pieces.append((leaf.tokens, leaf.logprobs, np.where(leaf.sampled, leaf.versions, NOT_SAMPLED)))
        rows.append(row)
    tensors = {
        f"{KEY}/{name}": torch.from_numpy(np.concatenate(column))
        for name, column in zip(ARRAYS, zip(*pieces, strict=True), strict=False)
    }
    return {KEY: rows, OF: environment, **tensors}


def stored_in(extra: Mapping[str, Any]) -> list[Stored]:
    """What `queue_state` was made of; nothing if a checkpoint has no queue."""
    rows = extra.get(KEY) or []
    lengths = [about["length"] for row in rows for about in (row["leaves"] if "leaves" in row else [row["begun"]])]
    ends = np.cumsum(lengths)[:-1]
    columns = [np.split(extra[f"{KEY}/{name}"].numpy(), ends) if lengths else [] for name in ARRAYS]
    pieces = zip(*columns, strict=True)
    found: list[Stored] = []
    for row in rows:
        if "begun" in row:
            tokens, logprobs, versions = next(pieces)
            one: Played | Response = Response(
                tokens=tokens,
                logprobs=logprobs,
                ended=row["begun"]["ended"],
                version=int(versions[0]),
                versions=versions,
            )
        else:
            one = Played(
                number=row["number"],
                leaves=tuple(_leaf(about, *next(pieces)) for about in row["leaves"]),
                failure=row["failure"],
                metrics=row["metrics"],
                counts=row["counts"],
            )
        found.append((row["batch"], row["number"], one))
    return found


def dropped_reason(extra: Mapping[str, Any], environment: str, staleness: int) -> str | None:
    """Why what a checkpoint has ahead cannot be used; None: it can, or there is nothing."""
    if not (extra.get(KEY) or extra.get("episodes")):  # "episodes": an earlier format
        return None
    if not staleness:
        return "rollout.staleness is 0 now"
    return None if extra.get(OF) == environment else "they are of another environment or version of padfree"


def _leaf(about: Mapping[str, Any], tokens: Any, logprobs: Any, versions: Any) -> Leaf:
    sampled = versions != NOT_SAMPLED
    named = {name: about[name] for name in ABOUT_LEAF}
    return Leaf(tokens=tokens, sampled=sampled, logprobs=logprobs, versions=np.where(sampled, versions, 0), **named)
