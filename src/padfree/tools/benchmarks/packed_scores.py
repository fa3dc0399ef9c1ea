"""Compute the log-likelihood of continuations (a context's next tokens), with many texts in one pack.

In this example, a pack of 13 tokens holds three texts, each a context (c) and its continuation (x):

    ids      c c c x x   c x x x x   c c x
    scored         ^ ^     ^ ^ ^ ^       ^

The score of a text has two parts: the sum of the log-probabilities of its x tokens, and whether greedy decoding would
generate them, that is, whether every x is the most likely token at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from padfree.cp import shard
from padfree.head import matches, score
from padfree.losses import segment_sum
from padfree.model import hidden_states, lm_head_of
from padfree.packing.collate import collate
from padfree.sample import Sample

PACK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sequence of token ids, of which the last `scored` ones are scored. The first token is never scored."""

    ids: Sequence[int]
    scored: int

    @property
    def sample(self) -> Sample:
        tokens = np.array(self.ids, np.int64)
        return Sample(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(tokens) - self.scored)


Score = tuple[float, bool]
"""The log-likelihood of a continuation, and whether greedy decoding would generate this continuation."""


@torch.no_grad()
def packed_scores(
    model: PreTrainedModel,
    continuations: Sequence[Continuation],
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Score]:
    """Return the score of each continuation, in order. Log-probabilities are summed in float64.

    `model` must be attached (`padfree.attach`). `on_progress` is called with the number of continuations scored so far.
    """
    head = lm_head_of(model)
    found: dict[int, Score] = {}
    for numbers in packs([len(one.ids) for one in continuations]):
        batch = shard(collate([continuations[number].sample for number in numbers]).to(model.device))
        hidden = hidden_states(model, batch)
        scores = score(hidden, head, batch.labels, num_labels=batch.num_labels)
        each = torch.stack([scores.logprobs.double(), matches(hidden, head, batch.labels).double()], 1)
        sums = segment_sum(each, batch.sample_index, batch.num_samples).tolist()
        for number, (logprob, top) in zip(numbers, sums, strict=True):
            found[number] = logprob, round(top) == continuations[number].scored
        on_progress(len(found))
    return [found[number] for number in range(len(continuations))]


def packs(lengths: Sequence[int], most: int = PACK_TOKENS) -> Iterator[list[int]]:
    """Divide sequences into packs of at most `most` tokens, longest first. A longer sequence gets a pack of its own."""
    pack: list[int] = []
    size = 0
    for number in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if pack and size + lengths[number] > most:
            yield pack
            pack, size = [], 0
        pack.append(number)
        size += lengths[number]
    if pack:
        yield pack
