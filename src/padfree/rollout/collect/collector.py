"""Turn the groups of a global batch into samples, for any engine and any kind of episode.

`Collector.put` queues a batch and `Collector.take` returns its samples. For batch 7 with 3 episodes for each of the
prompts p and q:

    put 7     groups (p p p) (q q q)     episodes 0 1 2 | 3 4 5, divided over all ranks
              known episodes             those in the checkpoint or the response log are not sampled again
    take 7    episodes                   played by `ResponseWriter` (one turn) or `EpisodeRunner` (an environment)
              rewards                    a function runs on the rank of the episode; a reward model runs on all ranks
              filter                     optionally replaces groups whose rewards are all equal (`candidates`)
              samples                    ordered by group, episode and leaf; every rank knows all of them, and the
                                         tokens stay on the rank that sampled them (`sample_exchange`)

With `rollout.staleness` 0, `put` requests nothing and `take` plays the whole batch at once. With a staleness above 0,
the sampler works on queued batches while earlier ones are trained. A digit below is the number of a batch:

    main thread    put 1 2 3 | take 1 | train 1 ............ | sync weights | put 4 | take 2 | train 2 .....
    sampler          1 1 1 1 2 2 2 2 3 3 3 3 ...   3 3       | interrupted  | 3 3 4 4 4 ...
    rewards              1 1 1 1 2 2 2 2 3 3 3 ...

The sampled tokens depend on the seed, the batch number and the episode number in the batch. Another number of ranks, or
a resumed run, therefore gives the same rollouts, up to rounding of the logits. The order in which batches are trained
is fixed when they are queued and does not depend on the speed of the sampler. All methods are collective.

A checkpoint holds the queued batches (`queue_state`). If `rollout.staleness` was lowered before a resume, a group may
hold tokens that would be too old when it is trained. The collector drops such a group, counts it and samples it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.config import LossConfig, RunConfig
from padfree.config.rollout import RolloutConfig
from padfree.data import Reward
from padfree.data.chat_renderer import ChatRenderer
from padfree.distributed import Mesh, gather_objects
from padfree.errors import UserError
from padfree.record.file_names import FAILURES, ROLLOUTS
from padfree.rollout.base import Response
from padfree.rollout.collect.candidates import Candidates, SparePrompts
from padfree.rollout.collect.group import RolloutGroup, check_recorded, written_groups
from padfree.rollout.collect.queue_state import KnownEpisodes, Stored, dropped_reason, queue_state, stored_in
from padfree.rollout.collect.queued_batch import (
    EpisodeOutcome,
    QueuedBatch,
    RewardModel,
    merged,
    outcomes_of,
    owners_of,
    score_by_model,
    signals_of,
)
from padfree.rollout.collect.response_examples import ResponseExamples, log_line
from padfree.rollout.collect.response_writer import make_writer
from padfree.rollout.collect.rollout_metrics import batch_metrics, queue_metrics
from padfree.rollout.collect.sample_exchange import known_to_all, travelling_samples
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.environment.group_rewards import PlayGroup
from padfree.rollout.environment.load_environment import environment_name
from padfree.rollout.environment.play import Play, Played, Watcher
from padfree.rollout.environment.reward_workers import RewardWorkers
from padfree.rollout.prompts import Prompt
from padfree.rollout.response_log import ResponseLog
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample

OnSampling = Callable[[int, int], None]
"""Called with this rank's number of finished responses and its number of requested responses."""

NUM_SHOWN = 4
"""Number of groups of a batch whose first response is written to `rollouts.jsonl`."""
POLL = 0.2
"""Seconds between two checks while the collector waits for episodes."""


class Collector:
    """Turns groups of prompts into rewarded samples."""

    def __init__(
        self,
        settings: RolloutConfig,
        loss: LossConfig,
        run: RunConfig,
        mesh: Mesh,
        sampler: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt] = (),
        *,
        vocabulary: int,
        chat: ChatRenderer | None = None,
        reward_model: RewardModel | None = None,
        response_log: ResponseLog | None = None,
        on_sampling: OnSampling | None = None,
    ) -> None:
        """Create a collector.

        `loss` gives the temperature and the updates per batch, `run` gives the seed and the folder. `sampler` is a
        `Sampler`, or an `AsyncSampler` if `rollout.staleness` is above 0. `prompts` are all prompts of the run, for
        `rollout.filter`. `vocabulary` is the size of the model's embedding matrix: an environment may not add other
        token ids. `chat` renders the messages of environments. `response_log` stores responses until a checkpoint holds
        them.
        """
        self.settings, self.mesh, self.sampler, self._seed = settings, mesh, sampler, run.seed
        self.chat_tokenizer = ChatTokenizer(tokenizer, chat, vocabulary)
        self.response_log = None if settings.has_episodes else response_log  # a resumed run replays episodes
        self.timings: dict[str, float] = {}  # seconds of the last batch other than sampling, by activity
        self._reward_model, self._on_sampling = reward_model, on_sampling
        self._writer = make_writer(settings, sampler, self.chat_tokenizer, temperature=loss.temperature)
        self._async = settings.staleness > 0
        self.oldest = settings.staleness * loss.epochs * loss.mini_batches  # maximum age, in steps
        self._spare = SparePrompts(prompts, run.seed)
        self._batches: dict[int, QueuedBatch] = {}
        self._known = KnownEpisodes(self.response_log, oldest=self.oldest, continues=self._async)
        self._change = threading.Condition()
        self._failure: str | None = None  # error message of another thread
        self._batch_metrics: dict[str, float] = {}
        folder, first = Path(run.folder), mesh.loss.rank == 0
        self._log = ResponseExamples(folder / ROLLOUTS) if first else None
        self._failures = ResponseExamples(folder / FAILURES) if first else None

    def sync_weights(self, trained: PreTrainedModel, version: int) -> None:
        """Send the weights of `trained` to the sampler. From now on, it samples from these weights."""
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        rest = {"sampling": 0.0} if self._async else {"rewards": 0.0, "waiting": 0.0}
        self.timings = {"weight_sync": time.perf_counter() - begin, **rest}

    def put(self, groups: Sequence[RolloutGroup], *, batch: int, version: int) -> None:
        """Queue the episodes of a batch that will be trained after `version` optimizer steps."""
        candidates = Candidates(batch, groups, self.settings, self._spare)
        queued = self._batches[batch] = QueuedBatch(batch=batch, candidates=candidates, version=version)
        self._request(queued, candidates.first())

    def look(self) -> None:
        """Request spare groups for queued batches, to replace groups whose rewards are all equal."""
        if self.settings.filter == "none" or not self._async or self._reward_model is not None:
            return
        with self._change:
            own = {batch: None if queued.missing else outcomes_of(queued) for batch, queued in self._batches.items()}
        by_rank = self._gathered(own)
        for batch, queued in self._batches.items():
            parts = [outcomes[batch] for outcomes in by_rank]
            if None not in parts:
                self._request(queued, queued.candidates.more(signals_of(queued.candidates, merged(parts))))

    def take(self, batch: int, *, version: int) -> list[Sample]:
        """Wait for all episodes of a batch and return its samples, to be trained now."""
        begin = time.perf_counter()
        queued = self._batches[batch]
        while True:
            error = self._wait(queued) if self._async else self._play(queued)
            try:
                outcomes = self._complete(queued, error)
            except UserError as wrong:
                self._list_failures(batch, [{"failure": str(wrong)}])
                raise
            if outcomes is None:
                self.sampler.renew()
                continue
            signal = signals_of(queued.candidates, outcomes)
            requested = queued.candidates.more(signal)
            if not requested:
                break
            self._request(queued, requested)
        del self._batches[batch]
        if self.response_log is not None:
            self.response_log.sync()
        groups, owners, num_failed = self._written(queued, signal, outcomes)
        waiting = self._waiting_groups() if self._async else None
        if self._async:
            self.timings["waiting"] = time.perf_counter() - begin - self.timings.get("rewards", 0.0)
        check_recorded(queued.played.values(), self.settings)
        samples = [sample for group in groups for sample in group.samples(self.settings)]
        if self.mesh.loss.size > 1:
            samples = travelling_samples(samples, self.mesh, groups, owners, queued.played)
        dropped, from_log = self._known.take_counts()
        self._batch_metrics = {
            **queued.candidates.metrics(signal),
            **batch_metrics(groups, samples, self.settings, failed=num_failed),
            **({"responses_from_log": float(from_log)} if from_log else {}),
        }
        if waiting is not None:
            self._batch_metrics |= queue_metrics(
                groups, version, self.oldest, waiting=waiting, dropped=dropped, sampler=self.sampler.metrics()
            )
        if self._log is not None:
            self._log.write(batch, [self._line(group) for group in groups[:NUM_SHOWN]])
        return samples

    def evaluate(
        self,
        trained: PreTrainedModel,
        groups: Sequence[RolloutGroup],
        *,
        keys: NDArray[np.int64],
        version: int,
        reward: Reward | None = None,
        on_sampling: OnSampling | None = None,
    ) -> list[EpisodeOutcome]:
        """Play one evaluation episode for each prompt of the groups. Return the outcomes in the order of the prompts.

        `keys` are the random keys of the episodes. `reward` replaces the reward of the run. A failed episode has
        reward 0.
        """
        self.sampler.update_weights(trained, version)
        candidates = Candidates(0, groups, self.settings, self._spare)
        prompts = [prompt for group in groups for prompt in group]
        own = owners_of(candidates.groups, range(len(groups)), self.mesh.loss.size)[self.mesh.loss.rank]
        by_number: dict[int, PlayGroup] = {}
        for group in candidates.groups:
            by_number |= dict.fromkeys(group.numbers, PlayGroup(len(group)))
        plays = [
            Play(number=number, prompt=prompts[number], key=int(keys[number]), group=by_number[number].join())
            for number in own
        ]
        queued = QueuedBatch(batch=0, candidates=candidates, version=version, plays=plays)

        def on_progress(done: int) -> None:
            if on_sampling is not None:
                on_sampling(done, len(plays))

        reward_workers = None if reward is None else RewardWorkers(reward)
        error = self._play(queued, reward_workers, Watcher(on_progress=on_progress))
        outcomes = self._complete(queued, error, model=reward is None)
        assert outcomes is not None
        return [outcomes[number] for number in range(len(prompts))]

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last batch on this rank."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()} | self._batch_metrics

    def close(self) -> None:
        self._writer.close()
        self.sampler.close()

    # Episodes

    def _request(self, queued: QueuedBatch, requested: range) -> None:
        """Request this rank's share of the episodes of these groups.

        Episodes that the checkpoint or the response log holds are not requested again.
        """
        groups = queued.candidates.groups
        known: dict[int, Played | Response] = {}
        for index in requested:
            known |= self._known.find(queued.batch, groups[index], version=queued.version)
        numbers = owners_of(groups, requested, self.mesh.loss.size)[self.mesh.loss.rank]
        prompts = {number: groups[index].prompt for index in requested for number in groups[index].numbers}
        keys = response_keys(self._seed, queued.batch, np.array(numbers, dtype=np.int64))
        # A checkpoint may hold some episodes of a group and not the others, so groups need rollout.staleness=0.
        by_number: dict[int, PlayGroup] = {}
        for index in requested if not self._async else ():
            by_number |= dict.fromkeys(groups[index].numbers, PlayGroup(len(groups[index])))
        plays: list[Play] = []
        with self._change:
            for number, key in zip(numbers, keys, strict=True):
                stored = known.get(number)
                if isinstance(stored, Played):
                    queued.played[number] = stored
                    continue
                group = by_number[number].join() if by_number else None
                plays.append(Play(number=number, prompt=prompts[number], key=int(key), partial=stored, group=group))
                queued.missing.add(number)
                if stored is not None:
                    queued.partial[number] = stored
        if self._async and plays:
            self._writer.begin(plays, self._watcher(queued, plays))
        elif not self._async:
            queued.plays.extend(plays)

    def _watcher(self, queued: QueuedBatch, plays: Sequence[Play]) -> Watcher:
        prompts = {play.number: play.prompt for play in plays}

        def on_progress(done: int) -> None:
            if self._on_sampling is not None:
                self._on_sampling(done, len(plays))

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

        return Watcher(on_progress=on_progress, on_responses=on_responses, on_played=on_played, on_failed=on_failed)

    def _play(
        self, queued: QueuedBatch, reward_workers: RewardWorkers | None = None, watch: Watcher | None = None
    ) -> str | None:
        """Play all requested episodes now. Return an error message, or None."""
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

    def _wait(self, queued: QueuedBatch) -> str | None:
        """Wait until this rank's episodes are finished, or the sampler is stuck. Return an error message, or None.

        `sampler.stuck` is read without holding `self._change`, because a thread of the sampler may hold the lock of the
        sampler while it waits for `self._change`.
        """
        while not self.sampler.stuck:
            with self._change:
                if self._on_sampling is not None:
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
        """Return the outcomes of the episodes of all ranks, keyed by episode number.

        Return None if episodes of a rank are unfinished, because its sampler is stuck. An error on one rank is raised
        on all ranks. `model`: whether to compute rewards with the reward model, if there is one.
        """
        begin = time.perf_counter()
        by_rank = self._gathered((error, bool(queued.missing)))
        for message, _ in by_rank:
            if message is not None:
                raise UserError.of(message)
        if any(waits for _, waits in by_rank):
            return None
        if self._reward_model is not None and model:
            self._spent("waiting", time.perf_counter() - begin)
            begin = time.perf_counter()
            score_by_model(self._reward_model, queued, self._gathered, skip_failures=self.settings.on_failure == "skip")
            self._spent("rewards", time.perf_counter() - begin)
            begin = time.perf_counter()
        outcomes = merged(self._gathered(outcomes_of(queued)))
        self._spent("waiting", time.perf_counter() - begin)
        return outcomes

    def _written(
        self, queued: QueuedBatch, signal: Mapping[int, bool], outcomes: Mapping[int, EpisodeOutcome]
    ) -> tuple[list[RolloutGroup], dict[int, int], tuple[int, int]]:
        """Return the groups to train on, the rank of each episode, and the numbers of failed episodes and groups.

        Groups with a failed episode are left out, and are listed in the file of failures. With several ranks, the
        episodes have placeholders in place of their tokens (`sample_exchange`).
        """
        failed, lines = set(), []
        for group in queued.candidates.groups[: queued.candidates.num_requested]:
            for index, number in enumerate(group.numbers, start=1):
                if (failure := outcomes[number].failure) is not None:
                    failed.add(group.first)
                    lines.append({"uid": group.prompt.uid, "episode": index, "failure": failure})
        self._list_failures(queued.batch, lines)
        chosen = [queued.candidates.groups[index] for index in queued.candidates.chosen(signal)]
        chosen = [group for group in chosen if group.first not in failed]
        if not chosen:
            raise UserError(
                "rollout.on_failure",
                f"'skip', but every group of batch {queued.batch} failed (the first: {lines[0]['failure']})",
                f"correct the failures that {FAILURES} in the run folder lists",
            )
        failures = len(lines), len(failed)
        if self.mesh.loss.size == 1:
            return written_groups(chosen, queued.played), {}, failures
        begin = time.perf_counter()
        played, owners = known_to_all(chosen, queued.played, self._gathered, num_shown=NUM_SHOWN)
        self._spent("waiting", time.perf_counter() - begin)
        return written_groups(chosen, played), owners, failures

    def _list_failures(self, batch: int, lines: list[dict[str, Any]]) -> None:
        if self._failures is not None and (lines or self._failures.path.exists()):
            self._failures.write(batch, lines)

    def _line(self, group: RolloutGroup) -> dict[str, Any]:
        prompt = self.chat_tokenizer.decode(group.prompt.tokens)
        return log_line(group.prompt.uid, prompt, group.episodes[0], episodes=self.settings.has_episodes)

    def _waiting_groups(self) -> tuple[int, int]:
        """Return the numbers of finished and unfinished groups of the queued batches, over all ranks."""
        with self._change:
            own = {batch: set(queued.missing) for batch, queued in self._batches.items()}
        by_rank = self._gathered(own)
        unfinished = total = 0
        for batch, queued in self._batches.items():
            missing: set[int] = set().union(*(missing_by_batch[batch] for missing_by_batch in by_rank))
            groups = queued.candidates.groups[: queued.candidates.num_requested]
            total += len(groups)
            unfinished += sum(not missing.isdisjoint(group.numbers) for group in groups)
        return total - unfinished, unfinished

    def _gathered(self, own: Any) -> list[Any]:
        """Gather an object from every rank."""
        return gather_objects(own, self.mesh.loss.group, "the exchange of rollouts")

    def _spent(self, part: str, seconds: float) -> None:
        self.timings[part] = self.timings.get(part, 0.0) + seconds

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state of the queue, for the `extra` field of a checkpoint. It is the same on every rank.

        The state is empty if `rollout.staleness` is 0, because then nothing is queued.
        """
        if not self._async:
            return {}
        own: list[Stored] = []
        with self._change:
            for batch, queued in self._batches.items():
                own += [(batch, number, played) for number, played in queued.played.items()]
                own += [(batch, number, partial) for number, partial in queued.partial.items() if len(partial.tokens)]
        from_ranks = [one for part in self._gathered(own) for one in part]
        not_requested = [(batch, number, one) for (batch, number), one in self._known.restored.items()]
        return queue_state([*from_ranks, *not_requested], environment_name(self.settings))

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore the queue from the `extra` field of a checkpoint, where `state` was stored."""
        if self.dropped_reason(extra) is None:
            self._known.restore(stored_in(extra))

    def dropped_reason(self, extra: Mapping[str, Any]) -> str | None:
        """Return the reason why the queue in a checkpoint cannot be used, or None if it can be used or is empty."""
        return dropped_reason(extra, environment_name(self.settings), self.settings.staleness)
