"""Whether a server has the weights it was given: its log-probabilities are compared with the trainer's.

    fixed sequences     t t t t t t | d d d     given tokens, scored at temperature 1; then a few that the server draws
    server   s          . s s s s s | s s s     at the temperature of the run
    trainer  t          . t t t t t | t t t     its own log-probabilities of the same tokens

    difference   mean |s - t|                                       more than the limit: the weights did not arrive
    followed     <s - s', t - t'> / <t - t', t - t'>                s', t' of the exchange before; 1 where the server
                                                                    changed as the trainer did, 0 where it did not

A step of training may change less than bfloat16 rounds, so that old weights pass the first test. The second one sees
them, because the rounding of the same kernels on the same tokens is much the same before and after. It is made where
the trainer's change, over all tokens, stands out SIGNAL times from the difference that the exchange before had left.

The drawn tokens show that the server reports log-probabilities at the temperature, which is an option of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.batch import Sample
from padfree.errors import UserError
from padfree.rollout.base import Score
from padfree.rollout.engines.servers.server_api import ServerApi

TEXT = (
    "The ferry leaves the harbour at a quarter past seven, and the first passengers are on deck long before that. "
    "A crate holds 24 bottles; 17 crates hold 17 * 24 = 408. If 35 of them break on the way, 408 - 35 = 373 arrive. "
    "def area(width, height):\n    return width * height\n\n"
    "Question: which is heavier, a litre of water or a litre of oil? Answer: water, since oil floats on it. "
    "Rain was forecast for Tuesday, so they moved the picnic to Wednesday and told everyone twice."
)
LENGTH, DRAWN = 64, 4
NUM_SEQUENCES = 4
LIMITS = {"float32": 2e-3, "bfloat16": 0.1}
"""Mean difference at most, by `model.dtype`. Measured: 1e-6 in float32."""
SIGNAL = 16.0
FOLLOWED = 0.5

Floats = NDArray[np.float64]


def canary_sequences(tokenizer: Any, *, vocabulary: int, longest: int) -> list[list[int]]:
    """Of ordinary text, where the tokenizer makes enough of it; else of token ids from all of the vocabulary."""
    length = max(2, min(LENGTH, longest - DRAWN))
    ids = [int(token) for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    unknown: Any = getattr(tokenizer, "unk_token_id", None)
    if len(ids) < length or max(ids) >= vocabulary or ids.count(unknown) > len(ids) // 4:
        ids = np.random.default_rng(0).integers(0, vocabulary, NUM_SEQUENCES * length).tolist()
    starts = np.linspace(0, len(ids) - length, NUM_SEQUENCES).astype(int) if len(ids) > length else [0]
    return [ids[start : start + length] for start in starts]


Rows = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Of each sequence its tokens, and the log-probabilities of all but the first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CanaryScores:
    """Log-probabilities of all sequences end to end."""

    given: Floats  # [n] of the tokens that every exchange scores
    drawn: Floats  # [m]

    @staticmethod
    def of(rows: Sequence[Sequence[float]], num_drawn: int) -> CanaryScores:
        """From those of all tokens but the first, the last `num_drawn` of each row being drawn."""
        arrays = [np.asarray(row, np.float64) for row in rows]
        return CanaryScores(
            given=np.concatenate([row[: len(row) - num_drawn] for row in arrays]),
            drawn=np.concatenate([row[len(row) - num_drawn :] for row in arrays]),
        )


class Canary:
    """Remembers what each server and the trainer gave at the last exchange."""

    def __init__(self, limit: float, api: type[ServerApi]) -> None:
        self.limit, self._api = limit, api
        self._before: dict[str, tuple[CanaryScores, CanaryScores]] = {}

    def compare(self, rows: Mapping[str, Rows], score: Score, temperature: float, version: int) -> dict[str, float]:
        """The numbers of this exchange, the worst of all servers; a UserError if one has other weights.

        `rows` are what servers have scored, by address. All ranks call it alike, since `score` is collective.
        """
        samples = [Sample(tokens=np.array(tokens)) for found in rows.values() for tokens, _ in found]
        if not samples:
            return {}
        plain = score(samples, 1.0)
        heated = plain if temperature == 1.0 else score(samples, temperature)
        trainer = [
            [*cold[1 : len(cold) - DRAWN], *hot[len(hot) - DRAWN :]] for cold, hot in zip(plain, heated, strict=True)
        ]
        numbers: dict[str, float] = {}
        for url, found in rows.items():
            own, trainer = trainer[: len(found)], trainer[len(found) :]
            theirs = CanaryScores.of([logprobs for _, logprobs in found], DRAWN)
            for name, value in self.judge(url, theirs, CanaryScores.of(own, DRAWN), version).items():
                worse = min if name == "canary_followed" else max
                numbers[name] = worse(numbers.get(name, value), value)
        return numbers

    def judge(self, url: str, server: CanaryScores, trainer: CanaryScores, version: int) -> dict[str, float]:
        """The numbers of this exchange; a line if the weights are not those of the trainer."""
        apart = np.abs(server.given - trainer.given)
        drawn_apart = float(np.abs(server.drawn - trainer.drawn).mean())
        found = {
            "canary_difference": float(apart.mean()),
            "canary_largest": float(apart.max()),
            "canary_drawn_difference": drawn_apart,
        }
        what = f"rollout.servers: {url} was given policy version {version}"
        cure = self._api.cure_weights
        if not found["canary_difference"] <= self.limit:
            raise UserError.of(
                f"{what}, but its log-probabilities differ from the trainer's by {found['canary_difference']:.3g} a "
                f"token ({server.given.mean():.4f} instead of {trainer.given.mean():.4f}), over {self.limit:g}; {cure}"
            )
        if not drawn_apart <= self.limit:
            raise UserError.of(
                f"{what}, but the log-probabilities of drawn tokens differ by {drawn_apart:.3g} from the trainer's at "
                f"the temperature of the run, over {self.limit:g}; {self._api.cure_temperature}"
            )
        followed = self._followed(url, server, trainer)
        if followed is not None:
            found["canary_followed"] = followed
            if followed < FOLLOWED:
                raise UserError.of(
                    f"{what}, but its log-probabilities changed by {followed:.0%} of what the trainer's did; {cure}"
                )
        self._before[url] = server, trainer
        return found

    def _followed(self, url: str, server: CanaryScores, trainer: CanaryScores) -> float | None:
        """None: this cannot be told, there is no exchange before, or the change is lost in the rounding."""
        if url not in self._before:
            return None
        server_before, trainer_before = self._before[url]
        change = trainer.given - trainer_before.given
        noise = np.linalg.norm(server_before.given - trainer_before.given) / np.sqrt(len(change))
        size = float(np.linalg.norm(change))
        if size == 0.0 or size < SIGNAL * noise:
            return None
        return float((server.given - server_before.given) @ change) / size**2
