"""Read the kept sets (the token ids from which each token was sampled) that a server returns with a response.

A kept set is what top-k, top-p and min-p leave of the vocabulary. For two sampled tokens and the vocabulary 0 to 5:

    from the server    [4, 2]   [5, 4, 3, 2, 1]    the ids of each set, in any order
    KeptSets           [2, 4]   [-1]               -1 - id excludes an id: [-1] stands for all ids except 0

If `rollout.min_new_tokens` is set and no other truncation, the server need not return sets. In this case the stop
tokens are excluded for the first `min_new_tokens` tokens of a response, and nothing is excluded for later tokens.
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
