"""Read the kept sets (the ids from which each token was drawn) that a server returns with a response.

    lists       [[4, 2], [5, 4, 3, 2, 1], ...]    one list of token ids per sampled token, in any order
    KeptSets    [2, 4], all but 0, ...            as `padfree.kept_sets` stores them

A server whose run truncates only by `rollout.min_new_tokens` need not return sets, because they follow from the
positions of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from padfree.kept_sets import KeptSets
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers.server_api import IncompleteError, SamplingSettings


def read_kept_sets(
    lists: Sequence[Any], tokens: Sequence[int], request: SamplingRequest, sampling: SamplingSettings
) -> KeptSets:
    """Return the kept set of each of the sampled `tokens`: the ids from which the token was drawn.

    `lists`: what the server returned. It is ignored if only `rollout.min_new_tokens` truncates the softmax, because the
    sets then follow from the positions of the tokens. An `IncompleteError` is raised if a list is invalid, or if a
    token is outside its set.
    """
    if not sampling.truncation.depends_on_logits:
        positions = request.num_earlier + np.arange(len(tokens))
        excluded = -1 - np.array(sorted(sampling.stops), np.int32)
        ends = positions >= sampling.truncation.min_new_tokens  # earlier tokens are never stop tokens
        kept = KeptSets.of_arrays([excluded[:0] if end else excluded for end in ends])
    else:
        if len(lists) != len(tokens):
            raise IncompleteError(f"{len(lists)} kept sets for {len(tokens)} tokens")
        kept = KeptSets.of_arrays([_ids(given, index, sampling.vocabulary) for index, given in enumerate(lists)])
    outside = ~kept.contain(np.array(tokens, np.int64))
    if outside.any():
        raise IncompleteError(f"token {tokens[int(outside.argmax())]} is not in its kept set")
    return kept


def _ids(given: Any, index: int, vocabulary: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the kept set `given` for token `index` as `KeptSets` stores it.

    This is the sorted list of its ids. If a set has more than half of the vocabulary, it is instead the list of the
    other ids, each as -1 - id.
    """
    ids = np.asarray(given)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise IncompleteError(f"the kept set of token {index} is not a list of token ids")
    ids = np.unique(ids)
    if ids[0] < 0 or ids[-1] >= vocabulary:
        raise IncompleteError(f"the kept set of token {index} has an id outside of 0 to {vocabulary - 1}")
    is_large = len(ids) * 2 > vocabulary
    return -1 - np.setdiff1d(np.arange(vocabulary), ids, assume_unique=True) if is_large else ids
