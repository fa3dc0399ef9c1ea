"""Canary: check after each weight sync that the server has the trainer's weights.

Server and trainer compute log-probabilities of fixed tokens, and of a few tokens that the server has sampled. The first
test limits the mean difference between server and trainer.

If a training step changes little, a server with old weights passes the first test. The second test compares changes
since the last weight sync: ds is the change of log-probabilities on the server, and dt the change in the trainer.

    canary_followed = <ds, dt> / <dt, dt>        <,>: the inner product

The ratio is about 1 with new weights, and 0 with old weights. A ratio below 1/2 is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError
from padfree.rollout.base import Score
from padfree.rollout.engines.servers.server_api import ServerApi
from padfree.sample import Sample

TEXT = (
    "The ferry leaves the harbour at a quarter past seven, and the first passengers are on deck long before that. "
    "A crate holds 24 bottles; 17 crates hold 17 * 24 = 408. If 35 of them break on the way, 408 - 35 = 373 arrive. "
    "def area(width, height):\n    return width * height\n\n"
    "Question: which is heavier, a litre of water or a litre of oil? Answer: water, since oil floats on it. "
    "Rain was forecast for Tuesday, so they moved the picnic to Wednesday and told everyone twice."
)
LENGTH, NUM_SAMPLED = 64, 4
"""Number of tokens of a fixed sequence, and number of tokens that the server samples after each fixed sequence."""
NUM_SEQUENCES = 4
LIMITS = {"float32": 2e-3, "bfloat16": 0.1}
"""Largest accepted mean difference of log-probabilities, by `model.dtype`. In float32, 1e-6 was measured."""
SIGNAL = 16.0
FOLLOWED = 0.5

Floats = NDArray[np.float64]


def canary_sequences(tokenizer: Any, *, vocabulary: int, longest: int) -> list[list[int]]:
    """Return the fixed token sequences of the canary (a check that a server has the trainer's weights).

    They are ordinary text, or random ids if the tokenizer does not fit the text. `longest`: maximum number of tokens of
    a sequence, including the tokens that the server samples after it.
    """
    if longest < NUM_SAMPLED + 2:
        raise UserError(
            "batch.max_tokens",
            f"a sample has at most {longest} tokens (batch.max_tokens, or the model's longest context), but the check "
            f"of a server needs {NUM_SAMPLED + 2}",
            f"allow samples of {NUM_SAMPLED + 2} or more tokens",
        )
    length = min(LENGTH, longest - NUM_SAMPLED)
    ids = [int(token) for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    unknown: Any = getattr(tokenizer, "unk_token_id", None)
    if len(ids) < length or max(ids) >= vocabulary or ids.count(unknown) > len(ids) // 4:
        ids = np.random.default_rng(0).integers(0, vocabulary, NUM_SEQUENCES * length).tolist()
    starts = np.linspace(0, len(ids) - length, NUM_SEQUENCES).astype(int) if len(ids) > length else [0]
    return [ids[start : start + length] for start in starts]


ScoredSequences = Sequence[tuple[Sequence[int], Sequence[float]]]
"""For each token sequence with which a server is checked: the tokens, and their log-probabilities except for the first
token.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CanaryScores:
    """Log-probabilities of the tokens with which a server is checked, concatenated over all sequences.

    A sequence has fixed tokens, which are the same in every weight sync, then tokens that the server has sampled.
    """

    fixed: Floats  # [n] of the fixed tokens
    sampled: Floats  # [m] of the sampled tokens

    @staticmethod
    def of(sequences: Sequence[Sequence[float]], num_sampled: int) -> CanaryScores:
        """Split the log-probabilities of each sequence into those of fixed tokens and those of sampled tokens.

        The last `num_sampled` tokens of a sequence were sampled.
        """
        arrays = [np.asarray(sequence, np.float64) for sequence in sequences]
        return CanaryScores(
            fixed=np.concatenate([array[: len(array) - num_sampled] for array in arrays]),
            sampled=np.concatenate([array[len(array) - num_sampled :] for array in arrays]),
        )


class Canary:
    """Verifies a weight sync: compares the log-probabilities of each server with those of the trainer.

    A second test compares the changes on server and trainer. The log-probabilities are therefore kept until the next
    weight sync.
    """

    def __init__(self, limit: float, api: type[ServerApi]) -> None:
        self.limit, self._api = limit, api
        self._previous: dict[str, tuple[CanaryScores, CanaryScores]] = {}

    def compare(
        self, scored: Mapping[str, ScoredSequences], score: Score, temperature: float, version: int
    ) -> dict[str, float]:
        """Return the metrics of this weight sync. Each metric is that of the worst server. Collective.

        Raise an error if a server does not have the trainer's weights. `scored`: tokens and log-probabilities from each
        server, by URL. `score` computes the trainer's log-probabilities of these tokens.
        """
        samples = [Sample(tokens=np.array(tokens)) for sequences in scored.values() for tokens, _ in sequences]
        if not samples:
            return {}
        plain = score(samples, 1.0)  # servers score the fixed tokens at temperature 1
        heated = plain if temperature == 1.0 else score(samples, temperature)
        trainer = [
            [*cold[1 : len(cold) - NUM_SAMPLED], *hot[len(hot) - NUM_SAMPLED :]]
            for cold, hot in zip(plain, heated, strict=True)
        ]
        metrics: dict[str, float] = {}
        for url, sequences in scored.items():
            own, trainer = trainer[: len(sequences)], trainer[len(sequences) :]
            theirs = CanaryScores.of([logprobs for _, logprobs in sequences], NUM_SAMPLED)
            for name, value in self.check(url, theirs, CanaryScores.of(own, NUM_SAMPLED), version).items():
                worse = min if name == "canary_followed" else max
                metrics[name] = worse(metrics.get(name, value), value)
        return metrics

    def check(self, url: str, server: CanaryScores, trainer: CanaryScores, version: int) -> dict[str, float]:
        """Return the metrics of the server at `url`. Raise an error if its weights are not the trainer's."""
        differences = np.abs(server.fixed - trainer.fixed)
        sampled_difference = float(np.abs(server.sampled - trainer.sampled).mean())
        metrics = {
            "canary_difference": float(differences.mean()),
            "canary_largest": float(differences.max()),
            "canary_sampled_difference": sampled_difference,
        }
        what = f"rollout.servers: {url} was sent policy version {version}"
        fix = self._api.fix_weights
        if not metrics["canary_difference"] <= self.limit:
            raise UserError.of(
                f"{what}, but its log-probabilities differ from the trainer's by {metrics['canary_difference']:.3g} "
                f"per token ({server.fixed.mean():.4f} instead of {trainer.fixed.mean():.4f}), more than "
                f"{self.limit:g}; {fix}"
            )
        # The server may report log-probabilities at another temperature, e.g. because of vLLM's `--logprobs-mode`.
        if not sampled_difference <= self.limit:
            raise UserError.of(
                f"{what}, but its log-probabilities of sampled tokens differ by {sampled_difference:.3g} per token "
                f"from the trainer's at the temperature of the run, more than {self.limit:g}; "
                f"{self._api.fix_temperature}"
            )
        followed = self._followed(url, server, trainer)
        if followed is not None:
            metrics["canary_followed"] = followed
            if followed < FOLLOWED:
                raise UserError.of(
                    f"{what}, but its log-probabilities changed by only {followed:.0%} of the trainer's change; {fix}"
                )
        self._previous[url] = server, trainer
        return metrics

    def _followed(self, url: str, server: CanaryScores, trainer: CanaryScores) -> float | None:
        """Return how far the server's log-probabilities followed the trainer's since the last weight sync.

        About 1: the server has the new weights. About 0: it has the old weights. None: this is the first weight sync,
        or the trainer's change is too small compared with rounding.
        """
        if url not in self._previous:
            return None
        server_before, trainer_before = self._previous[url]
        change = trainer.fixed - trainer_before.fixed
        rounding = np.linalg.norm(server_before.fixed - trainer_before.fixed) / np.sqrt(len(change))
        size = float(np.linalg.norm(change))
        # With correct weights, the result is then about 3/4 or more, even if rounding differs from step to step.
        if size == 0.0 or size < max(SIGNAL, 2.0 * np.sqrt(len(change))) * rounding:
            return None
        return float((server.fixed - server_before.fixed) @ change) / size**2
