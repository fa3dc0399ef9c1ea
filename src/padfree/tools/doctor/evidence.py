"""Evidence: token ids, and the log-probabilities that a server or a rollout file gives for some of the tokens.

    sequence     7 8 9 | 4 5          a prompt of 3 tokens, a response of 2
    positions            3  4         the scored tokens, by their index in the sequence
    observed            -.2 -.9       their log-probabilities, as the server reports them

E is the number of scored tokens of all sequences. The log-probabilities of prompts are those at temperature 1. The
log-probabilities of responses are those at the temperature at which the server was asked to sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from padfree.sample import Sample

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Part = Literal["prompts", "responses"]

FLOAT32_ERROR = 2e-6
"""If all log-probabilities are within this distance of numbers with a few decimals, padfree assumes that the server
rounded them. The distance allows for the error of float32 numbers."""

MOST_BYTES = 2 << 30
"""Maximum size in bytes of the logits of all scored tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Token ids, and the log-probabilities that a server reports for some of them."""

    part: Part
    sequences: tuple[Ids, ...]
    starts: tuple[int, ...]  # the first token of the response of each sequence
    sequence: Ids  # [E] the index of the sequence of each scored token
    positions: Ids  # [E] the index of each scored token in its sequence, at least 1
    observed: Floats  # [E] the log-probability that the server reports
    temperature: float = 1.0  # the temperature of `observed`

    @staticmethod
    def of(
        part: Part,
        rows: Sequence[tuple[Sequence[int], int, Sequence[int], Sequence[float]]],
        *,
        vocabulary: int,
        temperature: float = 1.0,
    ) -> Evidence:
        """Make an `Evidence` of sequences and the log-probabilities of some of their tokens.

        `rows`: for each sequence, its token ids, the start of its response, the positions of its scored tokens, and
        their log-probabilities. If the logits would take more than `MOST_BYTES`, some evenly spaced tokens are kept.
        """
        sequence = np.concatenate([np.full(len(row[2]), number) for number, row in enumerate(rows)])
        positions = np.concatenate([np.asarray(row[2], np.int64) for row in rows])
        observed = np.concatenate([np.asarray(row[3], np.float64) for row in rows])
        most = max(1, MOST_BYTES // (4 * vocabulary))
        if len(positions) > most:
            kept = np.linspace(0, len(positions) - 1, most).round().astype(np.int64)
            sequence, positions, observed = sequence[kept], positions[kept], observed[kept]
        return Evidence(
            part=part,
            sequences=tuple(np.asarray(row[0], np.int64) for row in rows),
            starts=tuple(row[1] for row in rows),
            sequence=sequence.astype(np.int64),
            positions=positions,
            observed=observed,
            temperature=temperature,
        )

    @property
    def tokens(self) -> Ids:
        """Return the ids [E] of the tokens that have a log-probability."""
        return np.array([self.sequences[s][p] for s, p in zip(self.sequence, self.positions, strict=True)], np.int64)

    @property
    def longest(self) -> int:
        return max(len(sequence) for sequence in self.sequences)

    @property
    def resolution(self) -> float:
        """Return the mean error of the log-probabilities if the server has rounded them to four decimals or fewer.

        The result is 0 if the log-probabilities have more decimals.
        """
        for decimals in range(1, 5):
            if np.abs(self.observed - self.observed.round(decimals)).max() < FLOAT32_ERROR:
                return float(10.0**-decimals / 4)
        return 0.0

    def with_prompts(self, prompts: Sequence[Sequence[int]]) -> Evidence:
        """Return a copy in which the response of each sequence follows another prompt.

        `prompts`: the token ids of the new prompt of each sequence.
        """
        joined = [
            np.concatenate([np.asarray(prompt, np.int64), sequence[start:]])
            for prompt, sequence, start in zip(prompts, self.sequences, self.starts, strict=True)
        ]
        starts = tuple(len(prompt) for prompt in prompts)
        shift = np.array(starts, np.int64) - np.array(self.starts, np.int64)
        return replace(self, sequences=tuple(joined), starts=starts, positions=self.positions + shift[self.sequence])

    @property
    def prompts(self) -> list[list[int]]:
        return [sequence[:start].tolist() for sequence, start in zip(self.sequences, self.starts, strict=True)]

    def by_sequence(self, values: Floats) -> list[Floats]:
        """Split an array of one value per scored token [E] into one array per sequence."""
        bounds = np.searchsorted(self.sequence, np.arange(len(self.sequences) + 1))
        return [values[start:end] for start, end in pairwise(bounds)]


def evidence_of_rollouts(samples: Sequence[Sample], *, vocabulary: int, temperature: float) -> Evidence:
    """Return the token ids of rollouts, with the recorded log-probabilities of the tokens that are in the loss."""
    rows: list[tuple[Any, int, Any, Any]] = []
    for sample in samples:
        assert sample.logprobs is not None
        positions = np.flatnonzero(sample.mask & (np.arange(len(sample)) > 0))
        start = int(positions[0]) if len(positions) else len(sample)
        rows.append((sample.tokens.astype(np.int64), start, positions, sample.logprobs[positions].astype(np.float64)))
    return Evidence.of("responses", rows, vocabulary=vocabulary, temperature=temperature)
