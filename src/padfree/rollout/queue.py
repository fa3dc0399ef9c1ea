"""Batches that are sampled and rewarded while earlier ones are trained (`rollout.staleness`).

    main thread    put 1 2 3 | take 1 | train 1 ............ | weights | put 4 | take 2 | train 2 .....
    sampler          1 1 1 1 2 2 2 2 3 3 3 3 ...   3 3       |  cut    | 3 3 4 4 4 ...
    rewards              1 1 1 1 2 2 2 2 3 3 3 ...

A batch's groups are known when it is put in, and it is trained when its turn comes: what is trained, and in which
order, does not depend on who is fast. Group i of a batch is sampled and rewarded by rank i modulo their number, whole,
by threads that no collective waits for. Ranks talk to each other in `put`, `take` and `state` only.

A checkpoint holds every response of the queue: finished ones with their rewards, and those under way as far as they
were when weights were exchanged last. A run that is resumed puts the same batches in and asks for the rest. A group
with a token that would be older than `staleness` batches when it is trained is dropped, counted, and asked for anew:
that happens where the setting was lowered. Episodes of environments are queued in the same way (`AheadQueue`,
`padfree.rollout.environment.ahead`), those under way being played again.

    "queue"            batch, number, length, ended and reward of each response; without a reward it is unfinished
    "queue/tokens"     [Σm]     and its log-probabilities and the versions of its tokens
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.rollout.base import AheadSampler, Response
from padfree.rollout.candidates import Candidates, Group, SparePrompts
from padfree.rollout.journal import Journal
from padfree.rollout.prompts import Prompt
from padfree.rollout.within import DaemonPool
from padfree.rollout.writer import OnSampling, Rewarded, RolloutWriter, Written, numbers_of, signals, told

KEY = "queue"
ARRAYS = {"tokens": np.int64, "logprobs": np.float32, "versions": np.int64}
REWARD_THREADS = 64
POLL = 0.2
"""Seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A response of the queue; without a reward it may lack tokens."""

    batch: int
    number: int
    response: Response
    reward: float | None


class Dated(Rewarded, Protocol):
    """What was written under a number of a batch, and what it has earned."""

    @property
    def versions(self) -> NDArray[np.int64]:
        """[m] of the weights that wrote each of its tokens."""


Item = TypeVar("Item", bound=Dated)


@dataclass(kw_only=True, slots=True, eq=False)
class Queued(Generic[Item]):
    """A batch between `put` and `take`; what is written is this rank's, by number."""

    batch: int
    candidates: Candidates
    version: int  # optimizer steps that will have been made when it is trained
    missing: set[int] = field(default_factory=set)  # without a reward
    begun: dict[int, Response] = field(default_factory=dict)  # of missing responses, those that have tokens
    written: dict[int, Item] = field(default_factory=dict)


class AheadQueue(ABC, Generic[Item]):
    """Batches between `put` and `take`, whatever their samples are made of: what is the same for all that write ahead.

    It stands behind a writer among the bases of a class, and uses its attributes.
    """

    key: ClassVar[str]  # of what a checkpoint holds of it
    config: Config
    mesh: Mesh
    sampler: AheadSampler
    timings: dict[str, float]
    journal: Journal | None
    on_sampling: OnSampling | None
    _spare: SparePrompts
    _batch_metrics: dict[str, float]

    def _begin_queue(self, config: Config) -> None:
        self.oldest = config.rollout.staleness * config.loss.epochs * config.loss.mini_batches  # optimizer steps
        self._batches: dict[int, Queued[Item]] = {}
        self._change = threading.Condition()
        self._failure: str | None = None  # of what does not run in the main thread
        self._dropped = 0

    @abstractmethod
    def _ask(self, queued: Queued[Item], groups: range) -> None:
        """Have this rank's share of these groups written, less what a checkpoint had."""

    @abstractmethod
    def _of_all_ranks(self, queued: Queued[Item]) -> dict[int, Item]:
        """What was written of a batch, by number."""

    @abstractmethod
    def _finished(
        self, batch: int, candidates: Candidates, signal: Mapping[int, bool], written: Mapping[int, Item]
    ) -> list[Sample]:
        """The samples of a batch, with its numbers noted."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """For `extra` of a checkpoint. Every rank calls it and gets the same."""

    @abstractmethod
    def restore(self, extra: Mapping[str, Any]) -> None:
        """Go on with what `state` has kept."""

    def _fail(self, batch: int, message: str) -> NoReturn:
        raise UserError.of(message)

    def exchange(self, trained: PreTrainedModel, version: int) -> None:
        """Let the weights of `trained` write from now on. Every rank calls it."""
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        self.timings = {"weight_exchange": time.perf_counter() - begin, "sampling": 0.0}

    def put(self, groups: Sequence[Group], *, batch: int, version: int) -> None:
        """Ask for the responses of a batch that will be trained after `version` optimizer steps."""
        candidates = Candidates(batch, groups, self.config.rollout, self._spare)
        queued: Queued[Item] = Queued(batch=batch, candidates=candidates, version=version)
        self._batches[batch] = queued
        self._ask(queued, candidates.begin())

    def look(self) -> None:
        """Ask for what replaces groups with equal rewards in batches whose turn has not come. Every rank calls it."""
        if self.config.rollout.filter == "none":
            return
        own = {batch: self._signal(queued) if not queued.missing else None for batch, queued in self._batches.items()}
        everybody = told(own, self.mesh)
        for batch, queued in self._batches.items():
            parts = [one[batch] for one in everybody]
            if None not in parts:
                self._ask(queued, queued.candidates.more(_merged(parts)))

    def take(self, batch: int, *, version: int) -> list[Sample]:
        """The samples of a batch, trained now, when all of its responses are there. Every rank calls it alike."""
        begin = time.perf_counter()
        queued = self._batches[batch]
        signal: dict[int, bool] = {}
        while True:
            self._wait(queued)
            everybody = told((self._error(), bool(queued.missing), self._signal(queued)), self.mesh)
            for message, _, _ in everybody:
                if message is not None:
                    self._fail(batch, message)
            if any(lacks for _, lacks, _ in everybody):
                self.sampler.renew()
                continue
            signal = _merged([part for _, _, part in everybody])
            asked = queued.candidates.more(signal)
            if not asked:
                break
            self._ask(queued, asked)
        del self._batches[batch]
        written = self._of_all_ranks(queued)
        waiting = self._waiting_groups()
        self.timings["waiting"] = time.perf_counter() - begin
        samples = self._finished(batch, queued.candidates, signal, written)
        self._batch_metrics |= self._queue_metrics(queued.candidates, signal, written, version, waiting)
        return samples

    def _wait(self, queued: Queued[Item]) -> None:
        """Until this rank's responses are there, or something must be done about it.

        The sampler is not asked under the lock: its threads may hold one of their own when they come for ours.
        """
        while not self.sampler.stuck:
            with self._change:
                if self.on_sampling is not None:
                    self.on_sampling(len(queued.written), len(queued.written) + len(queued.missing))
                if not queued.missing or self._error() is not None:
                    return
                self._change.wait(POLL)

    def _error(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self.journal is not None and self.journal.failure is not None:
            return self.journal.failure
        return None if self.sampler.failure is None else str(self.sampler.failure)

    def _signal(self, queued: Queued[Item]) -> dict[int, bool]:
        """Of this rank's groups, once all of their responses are there."""
        if queued.missing:
            return {}
        own = range(self.mesh.loss.rank, queued.candidates.asked, self.mesh.loss.size)
        return signals(queued.candidates.groups, own, queued.written)

    def _waiting_groups(self) -> tuple[int, int]:
        """Groups of later batches that are finished, and that are not, on all ranks."""
        finished = unfinished = 0
        for queued in self._batches.values():
            with self._change:
                missing = set(queued.missing)
            for index in range(self.mesh.loss.rank, queued.candidates.asked, self.mesh.loss.size):
                lacks = bool(missing.intersection(numbers_of(queued.candidates.groups, index)))
                finished, unfinished = finished + (not lacks), unfinished + lacks
        everybody = told((finished, unfinished), self.mesh)
        return sum(one for one, _ in everybody), sum(other for _, other in everybody)

    def _queue_metrics(
        self,
        candidates: Candidates,
        signal: Mapping[int, bool],
        written: Mapping[int, Item],
        version: int,
        waiting: tuple[int, int],
    ) -> dict[str, float]:
        chosen = [number for index in candidates.chosen(signal) for number in numbers_of(candidates.groups, index)]
        ages = version - np.concatenate([written[number].versions for number in chosen])
        assert ages.min() >= 0, "no token is written by weights that are still to come"
        assert ages.max() <= self.oldest, "older groups are dropped when they are put in"
        dropped, self._dropped = self._dropped, 0
        found = {
            "version_age": float(ages.mean()),
            "version_age_max": float(ages.max()),
            "queue_finished": float(waiting[0]),
            "queue_unfinished": float(waiting[1]),
            "groups_dropped": float(dropped),
        }
        speed = self.sampler.metrics().get("tokens_per_second")
        return found if speed is None else {**found, "sampler_tokens_per_second": speed}


class AheadWriter(RolloutWriter, AheadQueue[Written]):
    """Prompts to rewarded samples, batches ahead."""

    key = KEY
    sampler: AheadSampler

    def __init__(
        self, config: Config, mesh: Mesh, sampler: AheadSampler, tokenizer: Any, prompts: Sequence[Prompt] = ()
    ) -> None:
        super().__init__(config, mesh, sampler, tokenizer, prompts)
        self._begin_queue(config)
        self._restored: dict[tuple[int, int], Stored] = {}
        self._rewarding = DaemonPool(REWARD_THREADS, "reward")

    def close(self) -> None:
        super().close()
        self._rewarding.close()

    def _of_all_ranks(self, queued: Queued[Written]) -> dict[int, Written]:
        if self.journal is not None:
            self.journal.sync()
        return self._gathered(list(queued.written.values()), None)

    # Responses

    def _ask(self, queued: Queued[Written], groups: range) -> None:
        """Ask for this rank's share of these groups, less what a checkpoint had."""
        prompts = [prompt for group in queued.candidates.groups for prompt in group]
        numbers: list[int] = []
        whole: list[tuple[int, Response]] = []
        for index in groups:
            own = numbers_of(queued.candidates.groups, index)
            stored = self._stored(queued, own, prompts)
            if index % self.mesh.loss.size != self.mesh.loss.rank:
                continue
            with self._change:
                queued.missing.update(own)
                for number, one in stored.items():
                    if one.reward is not None:
                        text = self._text_of(one.response)
                        queued.written[number] = Written(number, one.response, text, one.reward)
                        queued.missing.remove(number)
                    else:
                        queued.begun[number] = one.response
            for number in sorted(queued.missing & set(own)):
                begun = queued.begun.get(number)
                if begun is not None and begun.is_whole(prompts[number].room):
                    whole.append((number, begun))
                else:
                    numbers.append(number)
        requests = [
            replace(request, begun=queued.begun.get(number))
            for number, request in zip(numbers, self._requests(prompts, queued.batch, numbers), strict=True)
        ]

        def arrived(place: int, response: Response) -> None:
            number = numbers[place]
            with self._change:  # a checkpoint has what the journal had before it
                queued.begun[number] = response
                if self.journal is not None and len(response.tokens):
                    self.journal.keep(queued.batch, [(number, prompts[number].tokens, response)])
            if response.is_whole(prompts[number].room):
                self._rewarding.submit(self._reward, queued, number, response, prompts[number])

        for number, response in whole:
            self._rewarding.submit(self._reward, queued, number, response, prompts[number])
        if requests:
            self.sampler.begin(requests, arrived)

    def _reward(self, queued: Queued[Written], number: int, response: Response, prompt: Prompt) -> None:
        """By one of the threads for it."""
        try:
            written = self._rewarded(number, response, prompt)
        except BaseException as error:  # it must reach the main thread, which waits for the response
            with self._change:
                self._failure = str(error) if isinstance(error, UserError) else f"rollout.reward: {error!r}"
                self._change.notify_all()
            return
        with self._change:
            queued.written[number] = written
            del queued.begun[number]
            queued.missing.remove(number)
            self._change.notify_all()

    # Checkpoints

    def _stored(self, queued: Queued[Written], numbers: range, prompts: Sequence[Prompt]) -> dict[int, Stored]:
        """What a checkpoint and the journal had of a group, unless it is too old by now."""
        found: dict[int, Stored] = {}
        for number in numbers:
            one = self._restored.pop((queued.batch, number), None)
            later = None if self.journal is None else self.journal.find(queued.batch, number, prompts[number].tokens)
            if later is not None and (
                one is None or (one.reward is None and len(later.tokens) > len(one.response.tokens))
            ):
                one = Stored(queued.batch, number, later, None)
                self._from_journal += 1
            if one is not None:
                found[number] = one
        if any(queued.version - one.response.token_versions.min() > self.oldest for one in found.values()):
            self._dropped += 1
            return {}
        return found

    def state(self) -> dict[str, Any]:
        own: list[Stored] = []
        with self._change:
            for batch, queued in self._batches.items():
                own += [Stored(batch, number, one.response, one.reward) for number, one in queued.written.items()]
                own += [
                    Stored(batch, number, response, None)
                    for number, response in queued.begun.items()
                    if len(response.tokens)
                ]
        everybody = [one for part in self._told(own) for one in part]
        return stored_state([*everybody, *self._restored.values()])

    def restore(self, extra: Mapping[str, Any]) -> None:
        self._restored = {(one.batch, one.number): one for one in stored_responses(extra)}


def stored_state(stored: Sequence[Stored]) -> dict[str, Any]:
    """As what a checkpoint can hold."""
    stored = sorted(stored, key=lambda one: (one.batch, one.number))
    rows = [
        {
            "batch": one.batch,
            "number": one.number,
            "length": len(one.response.tokens),
            "ended": one.response.ended,
            "reward": None if one.reward is None else float(one.reward),
        }
        for one in stored
    ]
    if not rows:
        return {KEY: rows}
    arrays: dict[str, list[NDArray[Any]]] = {
        "tokens": [one.response.tokens for one in stored],
        "logprobs": [one.response.logprobs for one in stored],
        "versions": [one.response.token_versions for one in stored],
    }
    tensors = {
        f"{KEY}/{name}": torch.from_numpy(np.concatenate(found).astype(ARRAYS[name])) for name, found in arrays.items()
    }
    return {KEY: rows, **tensors}


def stored_responses(extra: Mapping[str, Any]) -> list[Stored]:
    """What `stored_state` was made of; nothing, where a checkpoint has no queue."""
    rows = extra.get(KEY) or []
    if not rows:
        return []
    ends = np.cumsum([row["length"] for row in rows])[:-1]
    pieces = {name: np.split(extra[f"{KEY}/{name}"].numpy(), ends) for name in ARRAYS}
    return [
        Stored(
            row["batch"],
            row["number"],
            Response(tokens=tokens, logprobs=logprobs, ended=row["ended"], version=int(versions[0]), versions=versions),
            row["reward"],
        )
        for row, tokens, logprobs, versions in zip(rows, *(pieces[name] for name in ARRAYS), strict=True)
    ]


def _merged(parts: Sequence[Mapping[int, bool]]) -> dict[int, bool]:
    return {index: value for part in parts for index, value in part.items()}
