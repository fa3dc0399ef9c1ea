"""Turn groups of prompts into samples, batch by batch, for any engine and any kind of episode.

`put` requests the episodes of a batch from the sampler. `take` waits for the episodes and their rewards, and returns
the samples. All methods are collective.

With `rollout.staleness` 0, all episodes are played in `take`. With a staleness of 2, sampling goes on during training.
The digits are batch numbers:

    main thread    put 1 2 3 | take 1 | train 1 ............ | sync weights | put 4 | take 2 | train 2 ...
    sampler            111111111222222222222333333333333333  |              | 33333444444444444 ...

With `rollout.staleness` 0, rollouts do not depend on the number of ranks, up to rounding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.config import LossConfig, RunConfig
from padfree.config.rollout import RolloutConfig
from padfree.data import Reward
from padfree.data.chat_renderer import ChatRenderer
from padfree.data.image_processor import ImageSettings
from padfree.distributed import Mesh, gather_objects
from padfree.errors import UserError
from padfree.optim.master_weights import compute_copies
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.rollout.base import Response
from padfree.rollout.collect.batch_report import BatchFiles, batch_metrics, queue_metrics
from padfree.rollout.collect.queue_state import dropped_reason, queue_state, stored_in
from padfree.rollout.collect.queued_batch import (
    EpisodeOutcome,
    KnownEpisodes,
    Outcomes,
    QueuedBatch,
    merged,
    share_of_rank,
)
from padfree.rollout.collect.response_writer import make_writer
from padfree.rollout.collect.sample_exchange import known_to_all, travelling_samples
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.environment.load_environment import environment_name
from padfree.rollout.group import Play, Played, RolloutGroup, Watcher, check_recorded, written_groups
from padfree.rollout.prompts import Prompt
from padfree.rollout.response_log import ResponseLog
from padfree.rollout.reward_workers import RewardModel, RewardWorkers, score_by_model
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample

OnSampling = Callable[[int, int], None]
"""Called with two numbers of this rank: finished responses, and requested responses."""

Batcher = TokenBudgetBatcher[Any] | FixedSizeBatcher[Any]

NUM_SHOWN = 4
"""For the first NUM_SHOWN groups of each batch, the first response is written to `rollouts.jsonl`."""
POLL = 0.2
"""Seconds between two checks while the collector waits for episodes."""


class Collector:
    """Turns groups of prompts into samples with rewards: lets the sampler play episodes, and computes their rewards."""

    def __init__(
        self,
        settings: RolloutConfig,
        loss: LossConfig,  # gives the temperature and the updates per batch
        run: RunConfig,  # gives the seed, the steps and the folder
        mesh: Mesh,
        sampler: Any,  # a `Sampler`, or an `AsyncSampler` if `rollout.staleness` is above 0
        tokenizer: Any,
        prompts: Sequence[Prompt] = (),  # all prompts of the run, from which `rollout.filter` takes replacements
        *,
        vocabulary: int,  # number of embeddings; environments may add only token ids below it
        chat: ChatRenderer | None = None,  # renders the messages of environments
        images: ImageSettings | None = None,  # how to read the images of environments
        reward_model: RewardModel | None = None,
        response_log: ResponseLog | None = None,  # stores responses until a checkpoint holds them
        on_sampling: OnSampling = lambda done, total: None,
    ) -> None:
        self.settings, self.mesh, self.sampler, self._run, self._prompts = settings, mesh, sampler, run, prompts
        self.chat_tokenizer = ChatTokenizer(tokenizer, chat, vocabulary, images)
        self.response_log = None if settings.has_episodes else response_log  # a resumed run replays episodes
        self.timings: dict[str, float] = {}  # seconds of the last batch by activity, without the time of sampling
        self._reward_model, self._on_sampling = reward_model, on_sampling
        self._writer = make_writer(settings, sampler, self.chat_tokenizer, temperature=loss.temperature)
        self._async = settings.staleness > 0
        self._updates = loss.epochs * loss.mini_batches  # updates per batch
        self.oldest = settings.staleness * self._updates  # maximum age, in steps
        self._batches: dict[int, QueuedBatch] = {}  # the queue, oldest first, by batch number
        self._known = KnownEpisodes(self.response_log, oldest=self.oldest, continues=self._async)
        self._change = threading.Condition()
        self._failure: str | None = None  # the message of an error in another thread
        self._batch_metrics: dict[str, float] = {}
        self._files = BatchFiles(Path(run.folder), self.chat_tokenizer.decode, writes=mesh.loss.rank == 0)

    # The queue

    def next(self, batcher: Batcher, trained: PreTrainedModel, step: int) -> tuple[int, list[Sample]] | None:
        """Return the batch number and the samples of the next batch, or None after the last.

        `batcher` yields the groups of prompts of each batch. `trained`: the model whose weights sample the responses.
        `step`: the number of updates made so far.
        """
        with compute_copies(trained):  # a sampler in this process may share the copies while it samples
            self._fill(batcher, trained, step)
            if not self._batches:
                return None
            number = next(iter(self._batches))
            return number, self.take(number, version=step)

    def resume(self, batcher: Batcher, trained: PreTrainedModel, step: int, *, remaining: int) -> None:
        """Start to sample ahead of training after a resume; do nothing if `rollout.staleness` is 0.

        `step`: the number of updates made so far. `remaining`: the number of updates that the interrupted batch still
        needs.
        """
        if self._async:
            with compute_copies(trained):
                self._fill(batcher, trained, step, remaining)

    def _fill(self, batcher: Batcher, trained: PreTrainedModel, step: int, remaining: int = 0) -> None:
        """Sync the current weights to the sampler, then request batches until the queue is full.

        `step`: updates made so far. `remaining`: updates still to be made with the batch in training; 0 if no batch is
        in training.
        """
        self.sync_weights(trained, step)
        self._replace_equal_groups()
        # The queue is full with `staleness` batches beside the batch in training, or one more if there is none.
        while len(self._batches) < self.settings.staleness + (not remaining):
            version = step + remaining + len(self._batches) * self._updates  # policy version when it is trained
            if self._run.steps is not None and version >= self._run.steps:
                break
            cursor = batcher.state_dict()
            groups = next(batcher, None)
            if groups is None:
                break
            self.put(groups, batch=batcher.step, version=version, cursor=cursor)

    def cursor(self) -> Mapping[str, Any] | None:
        """Return the position in the data before the oldest queued batch, or None if no batch is queued.

        A run that resumes from a checkpoint reads the data from this position.
        """
        return next(iter(self._batches.values())).cursor if self._batches else None

    def sync_weights(self, trained: PreTrainedModel, version: int) -> None:
        """Send the weights of `trained` to the sampler. From now on, it samples from these weights."""
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        rest = {"sampling": 0.0} if self._async else {"rewards": 0.0, "waiting": 0.0}
        self.timings = {"weight_sync": time.perf_counter() - begin, **rest}

    def _let_servers_sleep(self) -> None:
        """With `rollout.colocated`, put the servers to sleep. Call this when no more responses are needed."""
        if self.settings.colocated:
            self.sampler.sleep()

    def put(
        self, groups: Sequence[RolloutGroup], *, batch: int, version: int, cursor: Mapping[str, Any] | None = None
    ) -> None:
        """Queue the episodes of a batch that will be trained after `version` optimizer steps.

        `cursor`: the position in the data before the batch.
        """
        queued = self._batches[batch] = QueuedBatch(
            batch, groups, self.settings, version=version, prompts=self._prompts, seed=self._run.seed, cursor=cursor
        )
        self._request(queued, queued.request_first())

    def _replace_equal_groups(self) -> None:
        """Request further groups for queued batches, to replace groups whose rewards are all equal."""
        if self.settings.filter == "none" or not self._async or self._reward_model is not None:
            return
        with self._change:
            own = {batch: None if queued.missing else queued.own_outcomes() for batch, queued in self._batches.items()}
        by_rank = self._gathered(own)
        for batch, queued in self._batches.items():
            parts = [outcomes[batch] for outcomes in by_rank]
            if None not in parts:
                self._request(queued, queued.request_more(merged(parts)))

    def take(self, batch: int, *, version: int) -> list[Sample]:
        """Wait for all episodes of a batch, and return its samples, which are trained next."""
        begin = time.perf_counter()
        queued = self._batches[batch]
        outcomes = self._finished(queued)
        self._let_servers_sleep()
        del self._batches[batch]
        if self.response_log is not None:
            self.response_log.sync()
        self._files.write_failures(batch, queued.failures(outcomes))
        groups, played = queued.chosen(outcomes), queued.played
        owners: dict[int, int] = {}
        if self.mesh.loss.size > 1:  # the episodes get placeholders for tokens, which stay on their rank
            with self._timed("waiting"):
                played, owners = known_to_all(groups, played, self._gathered, num_shown=NUM_SHOWN)
        groups = written_groups(groups, played)
        if self._async:
            waiting = self._waiting_groups()
            self.timings["waiting"] = time.perf_counter() - begin - self.timings.get("rewards", 0.0)
        check_recorded(queued.played.values(), self.settings)
        samples = [sample for group in groups for sample in group.samples(self.settings)]
        if self.mesh.loss.size > 1:
            samples = travelling_samples(samples, self.mesh, groups, owners, queued.played)
        dropped, from_log = self._known.take_counts()
        self._batch_metrics = {
            **queued.metrics(outcomes),
            **batch_metrics(groups, samples, self.settings, failed=queued.num_failed(outcomes)),
            **({"responses_from_log": float(from_log)} if from_log else {}),
        }
        if self._async:
            self._batch_metrics |= queue_metrics(
                groups, version, self.oldest, waiting=waiting, dropped=dropped, sampler=self.sampler.metrics()
            )
        self._files.write_responses(batch, groups[:NUM_SHOWN], with_turns=self.settings.has_episodes)
        return samples

    def evaluate(
        self,
        trained: PreTrainedModel,
        groups: Sequence[RolloutGroup],
        *,
        keys: NDArray[np.int64],
        version: int,
        reward: Reward | None = None,
        on_sampling: OnSampling = lambda done, total: None,
    ) -> list[EpisodeOutcome]:
        """Play all episodes of the groups for an evaluation. Return their outcomes, ordered by group and episode.

        `keys`: one random key for each episode, in the same order. `reward`, if given, replaces the reward function of
        the run. A failed episode has reward 0.
        """
        self.sampler.update_weights(trained, version)
        queued = QueuedBatch(0, groups, self.settings, version=version, prompts=self._prompts, seed=self._run.seed)
        share = self._share(queued.groups)
        queued.plays.extend([Play(number=number, group=group, key=int(keys[number])) for number, group in share])
        watch = Watcher(on_progress=lambda done: on_sampling(done, len(share)))
        error = self._play(queued, watch, None if reward is None else RewardWorkers(reward))
        outcomes = self._complete(queued, error, model=reward is None)
        self._let_servers_sleep()
        assert outcomes is not None
        return [outcomes[number] for number in range(len(keys))]

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the last batch, on this rank."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()} | self._batch_metrics

    def close(self) -> None:
        self._writer.close()
        self.sampler.close()

    # Episodes

    def _request(self, queued: QueuedBatch, requested: Sequence[RolloutGroup]) -> None:
        """Request the episodes of these groups that this rank has to play.

        Episodes in the checkpoint or the response log are not requested again.
        """
        known: dict[int, Played | Response] = {}
        for group in requested:
            known |= self._known.find(queued.batch, group, version=queued.version)
        share = self._share(requested)
        keys = response_keys(self._run.seed, queued.batch, np.array([number for number, _ in share], dtype=np.int64))
        plays: list[Play] = []
        with self._change:
            for (number, group), key in zip(share, keys.tolist(), strict=True):
                stored = known.get(number)
                if isinstance(stored, Played):
                    queued.played[number] = stored
                    continue
                plays.append(Play(number=number, group=group, key=key, partial=stored))
                queued.missing.add(number)
                if stored is not None:
                    queued.partial[number] = stored
        if self._async and plays:
            self._writer.begin(plays, self._watcher(queued, plays))
        elif not self._async:
            queued.plays.extend(plays)

    def _share(self, groups: Sequence[RolloutGroup]) -> list[tuple[int, RolloutGroup]]:
        return share_of_rank(groups, self.mesh.loss.rank, self.mesh.loss.size)

    def _watcher(self, queued: QueuedBatch, plays: Sequence[Play]) -> Watcher:
        prompts = queued.prompts()

        def on_responses(responses: Sequence[tuple[int, Response]]) -> None:
            with self._change:  # so that a checkpoint holds every response that was logged before it
                queued.partial.update(responses)
                to_log = [
                    (number, prompts[number].tokens, response) for number, response in responses if len(response.tokens)
                ]
                if self.response_log is not None and to_log:
                    self.response_log.keep(queued.batch, to_log)

        def on_played(played: Played) -> None:
            with self._change:
                queued.played[played.number] = played
                queued.partial.pop(played.number, None)
                queued.missing.discard(played.number)
                self._change.notify_all()

        def on_failed(message: str) -> None:
            with self._change:
                self._failure = self._failure or message
                self._change.notify_all()

        return Watcher(
            on_progress=lambda done: self._on_sampling(done, len(plays)),
            on_responses=on_responses,
            on_played=on_played,
            on_failed=on_failed,
        )

    def _play(
        self, queued: QueuedBatch, watch: Watcher | None = None, reward_workers: RewardWorkers | None = None
    ) -> str | None:
        """Play the batch's requested episodes now (staleness 0). Return an error message, or None without an error."""
        plays = queued.take_plays()
        watch = watch or self._watcher(queued, plays)
        seconds = self._writer.reward_seconds
        try:
            for played in self._writer.play(plays, self._gathered, reward_workers=reward_workers, watch=watch):
                queued.played[played.number] = played
        except UserError as error:
            return str(error)
        finally:
            queued.missing.clear()
            queued.partial.clear()
        self._spent("rewards", self._writer.reward_seconds - seconds)
        return None if self.response_log is None else self.response_log.failure

    def _finished(self, queued: QueuedBatch) -> Outcomes:
        """Return the outcomes of all episodes of a batch, keyed by episode number.

        Request further groups as long as `rollout.filter` needs more groups whose rewards differ.
        """
        while True:
            error = self._wait(queued) if self._async else self._play(queued)  # staleness 0: played only now
            try:
                outcomes = self._complete(queued, error)
            except UserError as wrong:
                self._files.write_failures(queued.batch, [{"failure": str(wrong)}])
                raise
            if outcomes is None:
                self.sampler.renew()
            elif requested := queued.request_more(outcomes):
                self._request(queued, requested)
            else:
                return outcomes

    def _wait(self, queued: QueuedBatch) -> str | None:
        """Wait until this rank has finished its episodes of the batch, an error occurs, or no server has the current
        weights. Return the error message, or None.
        """
        # Read `stuck` without the lock `self._change`: a sampler's thread may hold its own lock and wait for this one.
        while not self.sampler.stuck:
            with self._change:
                self._on_sampling(len(queued.played), len(queued.played) + len(queued.missing))
                if not queued.missing or self._error() is not None:
                    break
                self._change.wait(POLL)
        return self._error()

    def _error(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if self.response_log is not None and self.response_log.failure is not None:
            return self.response_log.failure
        return self._writer.blocked() or (None if self.sampler.failure is None else str(self.sampler.failure))

    def _complete(
        self, queued: QueuedBatch, error: str | None, *, model: bool = True
    ) -> dict[int, EpisodeOutcome] | None:
        """Return the outcomes of the episodes of all ranks, keyed by episode number. Collective.

        Return None if episodes wait for a server with the current weights. `error`: an error message of this rank,
        raised on all ranks. `model`: whether a reward model computes rewards now.
        """
        with self._timed("waiting"):
            by_rank = self._gathered((error, bool(queued.missing)))
        for message, _ in by_rank:
            if message is not None:
                raise UserError.of(message)
        if any(waits for _, waits in by_rank):
            return None
        if self._reward_model is not None and model:
            skips = self.settings.on_failure == "skip"
            with self._timed("rewards"):
                score_by_model(self._reward_model, queued.played, queued.prompts(), self._gathered, skip_failures=skips)
        with self._timed("waiting"):
            return merged(self._gathered(queued.own_outcomes()))

    def _waiting_groups(self) -> tuple[int, int]:
        """Return the numbers of finished and unfinished groups of the queued batches, over all ranks."""
        with self._change:
            own = {batch: set(queued.missing) for batch, queued in self._batches.items()}
        by_rank = self._gathered(own)
        unfinished = total = 0
        for batch, queued in self._batches.items():
            missing: set[int] = set().union(*(missing_by_batch[batch] for missing_by_batch in by_rank))
            total += queued.num_requested
            unfinished += sum(not missing.isdisjoint(group.numbers) for group in queued.requested)
        return total - unfinished, unfinished

    def _gathered(self, own: Any) -> list[Any]:
        """Gather an object from every rank, and return the list of them. Collective."""
        return gather_objects(own, self.mesh.loss.group, "the exchange of rollouts")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._spent(part, time.perf_counter() - begin)

    def _spent(self, part: str, seconds: float) -> None:
        self.timings[part] = self.timings.get(part, 0.0) + seconds

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state of the queued batches, which a checkpoint stores in its field `extra`.

        The state is the same on every rank. With `rollout.staleness` 0 it is empty, because nothing is queued.
        """
        if not self._async:
            return {}
        with self._change:
            own = [one for queued in self._batches.values() for one in queued.stored()]
        from_ranks = [one for part in self._gathered(own) for one in part]
        not_requested = [(batch, number, one) for (batch, number), one in self._known.restored.items()]
        return queue_state([*from_ranks, *not_requested], environment_name(self.settings))

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore the queued batches from `extra`, the field of a checkpoint that holds the result of `state()`."""
        if self.dropped_reason(extra) is None:
            self._known.restore(stored_in(extra))

    def dropped_reason(self, extra: Mapping[str, Any]) -> str | None:
        """Return why the queued batches in a checkpoint cannot be used; None if they can be used or there are none."""
        return dropped_reason(extra, environment_name(self.settings), self.settings.staleness)
