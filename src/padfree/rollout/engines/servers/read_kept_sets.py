"""Read the kept sets (the token ids from which each token was sampled) that a server returns with a response.

`KeptSets` stores the ids of a set in ascending order. If a set has more than half of the vocabulary, it stores the ids
outside the set instead, each as -1 - id. For example, [-1] stands for all ids except 0.

If `rollout.min_new_tokens` is the only truncation, the server need not return sets. Only stop tokens are excluded then,
and only for the first `min_new_tokens` tokens.
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
    """Return the kept set (the ids from which a token was sampled) of each of the sampled `tokens`.

    `lists`: the sets that the server returned, not used if only `rollout.min_new_tokens` truncates. Raise an
    `IncompleteError` if a list is invalid or lacks its token.
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
    """Check and sort `given`, the token ids from which the server says that it sampled token `index`.

    If these are more than half of the vocabulary, return the ids that are not in `given` instead, each as -1 - id.
    """
    ids = np.asarray(given)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise IncompleteError(f"the kept set of token {index} is not a list of token ids")
    ids = np.unique(ids)
    if ids[0] < 0 or ids[-1] >= vocabulary:
        raise IncompleteError(f"the kept set of token {index} has an id outside of 0 to {vocabulary - 1}")
    is_large = len(ids) * 2 > vocabulary
    return -1 - np.setdiff1d(np.arange(vocabulary), ids, assume_unique=True) if is_large else ids
