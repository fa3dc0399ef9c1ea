"""Canary: compare a server's log-probabilities with the trainer's, to verify that a weight sync reached the server.

A canary sequence has fixed tokens, which the server scores at temperature 1, and then a few tokens that the server
samples at the temperature of the run. The trainer computes log-probabilities of the same tokens.

The first test is the mean absolute difference between the log-probabilities of server and trainer. If it is above the
limit for the fixed tokens, the server does not have the weights. If it is above the limit for the sampled tokens, the
server reports log-probabilities at another temperature than that of sampling; vLLM's option `--logprobs-mode` decides
this.

If a training step changes the log-probabilities by less than bfloat16 rounding, a server with old weights passes the
first test. The second test (`canary_followed`) detects such a server. For the fixed tokens, it compares the server's
change ds of log-probabilities since the previous weight sync with the trainer's change dt:

    followed = <ds, dt> / <dt, dt>        <,>: the inner product

The ratio is about 1 if the server has the new weights, and 0 if it still has the old weights. The server fails if the
ratio is below 1/2. The test runs only if the trainer's change is large enough compared with rounding.
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
    """Return the fixed token sequences with which the canary checks weight syncs, each of at most `longest` tokens.

    The sequences are tokens of ordinary text. They are random ids instead if the tokenizer gives too few tokens for the
    text, too many unknown tokens, or ids that are not in the model's vocabulary.
    """
    length = max(2, min(LENGTH, longest - NUM_SAMPLED))
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

    A second test compares the change of the log-probabilities since the previous weight sync, on the server and in the
    trainer. The log-probabilities of a weight sync are therefore kept until the next one.
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
        plain = score(samples, 1.0)
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
        """Return the ratio by which the server's log-probabilities followed the trainer's since the last weight sync.

        The result is about 1 if the server has the new weights, and about 0 if it has the old weights. Return None at
        the first weight sync, or if the trainer's change is too small compared with rounding.
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
