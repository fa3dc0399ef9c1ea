"""Episodes that are played while earlier batches are trained (`rollout.staleness`).

    put 1 2 3    begins the episodes of these batches, in this order; at most `rollout.batch` at a time
    weights      a request that is under way is cut and goes on by the new ones; an episode may be of several versions
    take 1       waits for those of batch 1

What is queued, and when a batch is trained, is as for single responses (`padfree.rollout.queue`). A checkpoint holds
the episodes that have ended. Those under way hang on an environment that no file can hold: a run that is resumed plays
them again, from the beginning.

    "episodes"            of each episode batch, number and its leaves: length, reward, text and so on
    "episodes/tokens"     [Σn]     and log-probabilities, and versions, -1 where nothing was sampled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from padfree.config import Config
from padfree.data.chat import ChatRenderer
from padfree.distributed import Mesh
from padfree.rollout.base import AheadSampler
from padfree.rollout.collect.collector import numbers_of, told
from padfree.rollout.environment.runner import Play, Played
from padfree.rollout.environment.trajectory import Leaf
from padfree.rollout.environment.writer import EpisodeWriter
from padfree.rollout.noise import response_keys
from padfree.rollout.prompts import Prompt
from padfree.rollout.queue import AheadQueue, Queued

KEY = "episodes"
NOT_SAMPLED = -1


class AheadEpisodeWriter(EpisodeWriter, AheadQueue[Played]):
    """Prompts to rewarded samples by episodes, batches ahead."""

    key = KEY
    sampler: AheadSampler

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        sampler: AheadSampler,
        tokenizer: Any,
        prompts: Sequence[Prompt] = (),
        *,
        vocabulary: int,
        chat: ChatRenderer | None = None,
    ) -> None:
        super().__init__(config, mesh, sampler, tokenizer, prompts, vocabulary=vocabulary, chat=chat)
        self._begin_queue(config)
        self.journal = self.on_sampling = None
        self._restored: dict[tuple[int, int], Played] = {}

    def _ask(self, queued: Queued[Played], groups: range) -> None:
        prompts = [prompt for group in queued.candidates.groups for prompt in group]
        numbers: list[int] = []
        for index in groups:
            own = numbers_of(queued.candidates.groups, index)
            stored = self._stored(queued, own)
            if index % self.mesh.loss.size == self.mesh.loss.rank:
                with self._change:
                    queued.written |= stored
                    queued.missing |= set(own) - stored.keys()
                numbers += [number for number in own if number not in stored]
        keys = response_keys(self.config.run.seed, queued.batch, np.array(numbers, dtype=np.int64))

        def on_played(played: Played) -> None:
            with self._change:
                queued.written[played.number] = played
                queued.missing.remove(played.number)
                self._change.notify_all()

        def on_failed(line: str) -> None:
            with self._change:
                self._failure = self._failure or line
                self._change.notify_all()

        if numbers:
            plays = [
                Play(number=number, prompt=prompts[number], key=int(key))
                for number, key in zip(numbers, keys, strict=True)
            ]
            self._runner.begin(plays, on_played, on_failed)

    def _of_all_ranks(self, queued: Queued[Played]) -> dict[int, Played]:
        return self._gathered(list(queued.written.values()))

    def _error(self) -> str | None:
        return super()._error() or self._runner.blocked()

    def _fail(self, batch: int, message: str) -> NoReturn:
        self._list_failures(batch, [{"failure": message}])
        super()._fail(batch, message)

    # Checkpoints

    def _stored(self, queued: Queued[Played], numbers: range) -> dict[int, Played]:
        """What a checkpoint had of a group, unless it is too old by now."""
        found = {
            number: self._restored.pop((queued.batch, number))
            for number in numbers
            if (queued.batch, number) in self._restored
        }
        if any((queued.version - one.versions > self.oldest).any() for one in found.values()):
            self._dropped += 1
            return {}
        return found

    def state(self) -> dict[str, Any]:
        with self._change:
            own = [(batch, one) for batch, queued in self._batches.items() for one in queued.written.values()]
        everybody = [one for part in told(own, self.mesh) for one in part]
        return stored_state([*everybody, *((batch, one) for (batch, _), one in self._restored.items())])

    def restore(self, extra: Mapping[str, Any]) -> None:
        self._restored = {(batch, one.number): one for batch, one in stored_episodes(extra)}


def stored_state(episodes: Sequence[tuple[int, Played]]) -> dict[str, Any]:
    """Episodes with the numbers of their batches, as what a checkpoint can hold."""
    episodes = sorted(episodes, key=lambda entry: (entry[0], entry[1].number))
    rows = [
        {
            "batch": batch,
            "number": one.number,
            "failure": one.failure,
            "metrics": dict(one.metrics),
            "counts": dict(one.counts),
            "leaves": [
                {
                    "length": len(leaf.tokens),
                    "ended": leaf.ended,
                    "turns": leaf.turns,
                    "text": leaf.text,
                    "reward": leaf.reward,
                }
                for leaf in one.leaves
            ],
        }
        for batch, one in episodes
    ]
    leaves = [leaf for _, one in episodes for leaf in one.leaves]
    if not leaves:
        return {KEY: rows}
    versions = [np.where(leaf.sampled, leaf.versions, NOT_SAMPLED) for leaf in leaves]
    return {
        KEY: rows,
        f"{KEY}/tokens": torch.from_numpy(np.concatenate([leaf.tokens for leaf in leaves])),
        f"{KEY}/logprobs": torch.from_numpy(np.concatenate([leaf.logprobs for leaf in leaves])),
        f"{KEY}/versions": torch.from_numpy(np.concatenate(versions)),
    }


def stored_episodes(extra: Mapping[str, Any]) -> list[tuple[int, Played]]:
    """What `stored_state` was made of; nothing, where a checkpoint has none."""
    rows = extra.get(KEY) or []
    ends = np.cumsum([about["length"] for row in rows for about in row["leaves"]])
    pieces = [
        iter(np.split(extra[f"{KEY}/{name}"].numpy(), ends[:-1])) if len(ends) else iter(())
        for name in ("tokens", "logprobs", "versions")
    ]
    found = []
    for row in rows:
        leaves = []
        for about in row["leaves"]:
            tokens, logprobs, versions = (next(piece) for piece in pieces)
            sampled = versions != NOT_SAMPLED
            leaves.append(
                Leaf(
                    tokens=tokens,
                    sampled=sampled,
                    logprobs=logprobs,
                    versions=np.where(sampled, versions, 0),
                    ended=about["ended"],
                    turns=about["turns"],
                    text=about["text"],
                    reward=about["reward"],
                )
            )
        one = Played(
            number=row["number"],
            leaves=tuple(leaves),
            failure=row["failure"],
            metrics=row["metrics"],
            counts=row["counts"],
        )
        found.append((row["batch"], one))
    return found
