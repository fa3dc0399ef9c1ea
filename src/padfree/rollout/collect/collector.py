"""From the groups of a global batch to its samples, whichever engine samples and whatever an episode is.

    put 7     groups (p p p) (q q q)   -> numbers 0 1 2 | 3 4 5, divided over all ranks
              journal, checkpoint      -> what is there already is not written again
    take 7    episodes                 -> `ResponseWriter` (one turn), or `EpisodeRunner` (an environment)
              rewards                  -> by a function where the episode is played; by a model for all ranks together
              filter                   -> groups whose rewards are all equal are replaced (`candidates`), if wanted
              samples                  -> in the order of groups, episodes and leaves; every rank knows of all, and
                                          the tokens stay where they were written (`travel`)

Sampling in step with training is staleness 0: `put` asks for nothing, and `take` plays the whole batch at once.
With `rollout.staleness` above 0 the sampler works on the batches that were put in while earlier ones are trained:

    main thread    put 1 2 3 | take 1 | train 1 ............ | weights | put 4 | take 2 | train 2 .....
    sampler          1 1 1 1 2 2 2 2 3 3 3 3 ...   3 3       |  cut    | 3 3 4 4 4 ...
    rewards              1 1 1 1 2 2 2 2 3 3 3 ...

What is drawn depends on the seed, the number of the batch and the number of the episode in it, so that another number
of ranks, or a resumed run, sees the same rollouts (up to rounding of the logits). Which batch is trained when is known
when it is put in, and does not depend on the speed of the sampler. All methods are collective.

A checkpoint holds what is queued (`queue_state`). A group with a token that would be older than `staleness` batches
when it is trained is dropped, counted, and asked for anew: that happens if the setting was lowered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.config.functions import model_of
from padfree.data import Reward, load_reward
from padfree.data.chat_renderer import ChatRenderer
from padfree.distributed import Mesh, gather_objects
from padfree.errors import UserError
from padfree.record.file_names import FAILURES, ROLLOUTS
from padfree.rollout.base import Response, Sampler
from padfree.rollout.collect.candidates import Candidates, SparePrompts
from padfree.rollout.collect.group import RolloutGroup, written_groups
from padfree.rollout.collect.queue_state import Stored, dropped_reason, queue_state, stored_in
from padfree.rollout.collect.response_examples import ResponseExamples, log_line
from padfree.rollout.collect.response_writer import ResponseWriter
from padfree.rollout.collect.rollout_metrics import batch_metrics, queue_metrics
from padfree.rollout.collect.sample_exchange import LeafFacts, facts_of, stand_ins, travelling
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.environment.load_environment import environment_name, load_episode
from padfree.rollout.environment.play import Play, Played, Watcher
from padfree.rollout.environment.reward_workers import RewardsLater, RewardWorkers
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.prompts import Prompt
from padfree.rollout.response_log import ResponseLog
from padfree.rollout.sampling_rng import response_keys

OnSampling = Callable[[int, int], None]
"""Called with the number of this rank's responses that are finished, and of those it has asked for."""

RewardModel = Callable[[Sequence[tuple[Prompt, str]]], "list[float | str]"]
"""Prompts and texts of this rank to rewards, or to what is wrong with one. A collective of all ranks."""

NUM_SHOWN = 4
"""How many groups of a batch show their first response in the response log."""
POLL = 0.2
"""Seconds."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What every rank knows of an episode."""

    rewards: tuple[float, ...]
    failure: str | None
    num_tokens: int  # that were sampled
    ended: bool

    @property
    def reward(self) -> float:
        """Mean reward of the leaves; 0 if the episode failed."""
        return sum(self.rewards) / max(len(self.rewards), 1)


@dataclass(kw_only=True, slots=True, eq=False)
class Queued:
    """A batch between `put` and `take`; the episodes are this rank's, by number."""

    batch: int
    candidates: Candidates
    version: int  # optimizer steps that will have been made when it is trained
    plays: list[Play] = field(default_factory=list)  # that `take` will have played
    missing: set[int] = field(default_factory=set)  # that have not ended
    begun: dict[int, Response] = field(default_factory=dict)  # of missing ones, what was written so far
    played: dict[int, Played] = field(default_factory=dict)


class Collector:
    """Prompts to rewarded samples."""

    def __init__(
        self,
        config: Config,
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
        """`sampler`: a `Sampler`; an `AsyncSampler` for `rollout.staleness`. `prompts`: all, for `rollout.filter`.

        `vocabulary`: rows of the model's embedding matrix; other token ids of environments are refused. `chat` renders
        what they say. `response_log` keeps responses until a checkpoint has them.
        """
        settings = config.rollout
        self.config, self.mesh, self.sampler = config, mesh, sampler
        self.chat_tokenizer = ChatTokenizer(tokenizer, chat, vocabulary)
        self.response_log = None if settings.has_episodes else response_log  # episodes are played again
        self.timings: dict[str, float] = {}  # seconds of the last batch besides sampling, by what they were spent on
        self._reward_model, self._on_sampling = reward_model, on_sampling
        self._writer = _make_writer(config, sampler, self.chat_tokenizer)
        self._async = settings.staleness > 0
        self.oldest = settings.staleness * config.loss.epochs * config.loss.mini_batches  # optimizer steps
        self._spare = SparePrompts(prompts, config.run.seed)
        self._batches: dict[int, Queued] = {}
        self._restored: dict[tuple[int, int], Played | Response] = {}
        self._change = threading.Condition()
        self._failure: str | None = None  # of what does not run in the main thread
        self._dropped = self._from_response_log = 0  # groups, responses
        self._batch_metrics: dict[str, float] = {}
        folder, first = Path(config.run.folder), mesh.loss.rank == 0
        self._log = ResponseExamples(folder / ROLLOUTS) if first else None
        self._failures = ResponseExamples(folder / FAILURES) if first else None

    def collect(
        self, trained: PreTrainedModel, groups: Sequence[RolloutGroup], *, batch: int, version: int
    ) -> list[Sample]:
        """The samples of global batch number `batch`, written by `trained` after `version` optimizer steps."""
        self.sync_weights(trained, version)
        self.put(groups, batch=batch, version=version)
        return self.take(batch, version=version)

    def sync_weights(self, trained: PreTrainedModel, version: int) -> None:
        """Let the weights of `trained` write from now on."""
        begin = time.perf_counter()
        self.sampler.update_weights(trained, version)
        rest = {"sampling": 0.0} if self._async else {"rewards": 0.0, "waiting": 0.0}
        self.timings = {"weight_sync": time.perf_counter() - begin, **rest}

    def put(self, groups: Sequence[RolloutGroup], *, batch: int, version: int) -> None:
        """Ask for the episodes of a batch that will be trained after `version` optimizer steps."""
        candidates = Candidates(batch, groups, self.config.rollout, self._spare)
        queued = self._batches[batch] = Queued(batch=batch, candidates=candidates, version=version)
        self._ask(queued, candidates.begin())

    def look(self) -> None:
        """Ask for what replaces groups with equal rewards in batches whose turn has not come."""
        if self.config.rollout.filter == "none" or not self._async or self._reward_model is not None:
            return
        with self._change:
            own = {batch: None if queued.missing else _outcomes(queued) for batch, queued in self._batches.items()}
        everybody = self._gathered(own)
        for batch, queued in self._batches.items():
            parts = [one[batch] for one in everybody]
            if None not in parts:
                self._ask(queued, queued.candidates.more(_signal(queued.candidates, _merged(parts))))

    def take(self, batch: int, *, version: int) -> list[Sample]:
        """The samples of a batch, trained now, when all of its episodes are there."""
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
            signal = _signal(queued.candidates, outcomes)
            asked = queued.candidates.more(signal)
            if not asked:
                break
            self._ask(queued, asked)
        del self._batches[batch]
        if self.response_log is not None:
            self.response_log.sync()
        groups, owners, num_failed = self._written(queued, signal, outcomes)
        waiting = self._waiting_groups() if self._async else None
        if self._async:
            self.timings["waiting"] = time.perf_counter() - begin - self.timings.get("rewards", 0.0)
        samples = [sample for group in groups for sample in group.samples(self.config.rollout)]
        if self.mesh.loss.size > 1:
            samples = self._travelling(samples, groups, owners, queued.played)
        self._batch_metrics = {
            **queued.candidates.metrics(signal),
            **batch_metrics(groups, samples, self.config.rollout, failed=num_failed),
            **({"responses_from_log": float(self._from_response_log)} if self._from_response_log else {}),
        }
        if waiting is not None:
            self._batch_metrics |= queue_metrics(
                groups, version, self.oldest, waiting=waiting, dropped=self._dropped, sampler=self.sampler.metrics()
            )
        self._dropped = self._from_response_log = 0
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
        """One episode for each prompt of the groups, drawn with the noise of its key, in order. Not part of a batch.

        `reward` judges in the place of the run's own. An episode that fails has earned nothing.
        """
        self.sampler.update_weights(trained, version)
        candidates = Candidates(0, groups, self.config.rollout, self._spare)
        prompts = [prompt for group in groups for prompt in group]
        own = _owners(candidates.groups, range(len(groups)), self.mesh.loss.size)[self.mesh.loss.rank]
        plays = [Play(number=number, prompt=prompts[number], key=int(keys[number])) for number in own]
        queued = Queued(batch=0, candidates=candidates, version=version, plays=plays)

        def on_progress(done: int) -> None:
            if on_sampling is not None:
                on_sampling(done, len(plays))

        reward_workers = None if reward is None else RewardWorkers(reward)
        error = self._play(queued, reward_workers, Watcher(on_progress=on_progress))
        outcomes = self._complete(queued, error, model=reward is None)
        assert outcomes is not None
        return [outcomes[number] for number in range(len(prompts))]

    def metrics(self) -> Mapping[str, float]:
        """Of the last batch, as this rank saw it."""
        return {f"sampler/{name}": value for name, value in self.sampler.metrics().items()} | self._batch_metrics

    def close(self) -> None:
        self._writer.close()
        self.sampler.close()

    # Episodes

    def _ask(self, queued: Queued, asked: range) -> None:
        """Have this rank's share of these groups written, less what a checkpoint or the journal had."""
        groups = queued.candidates.groups
        known: dict[int, Played | Response] = {}
        for index in asked:
            known |= self._known(queued, groups[index])
        numbers = _owners(groups, asked, self.mesh.loss.size)[self.mesh.loss.rank]
        prompts = {number: groups[index].prompt for index in asked for number in groups[index].numbers}
        keys = response_keys(self.config.run.seed, queued.batch, np.array(numbers, dtype=np.int64))
        plays: list[Play] = []
        with self._change:
            for number, key in zip(numbers, keys, strict=True):
                one = known.get(number)
                if isinstance(one, Played):
                    queued.played[number] = one
                    continue
                plays.append(Play(number=number, prompt=prompts[number], key=int(key), begun=one))
                queued.missing.add(number)
                if one is not None:
                    queued.begun[number] = one
        if self._async and plays:
            self._writer.begin(plays, self._watcher(queued, plays))
        elif not self._async:
            queued.plays += plays

    def _watcher(self, queued: Queued, plays: Sequence[Play]) -> Watcher:
        prompts = {play.number: play.prompt for play in plays}

        def on_progress(done: int) -> None:
            if self._on_sampling is not None:
                self._on_sampling(done, len(plays))

        def on_responses(responses: Sequence[tuple[int, Response]]) -> None:
            with self._change:  # a checkpoint has what the journal had before it
                queued.begun |= dict(responses)
                kept = [(number, prompts[number].tokens, one) for number, one in responses if len(one.tokens)]
                if self.response_log is not None and kept:
                    self.response_log.keep(queued.batch, kept)

        def on_played(played: Played) -> None:
            with self._change:
                queued.played[played.number] = played
                queued.begun.pop(played.number, None)
                queued.missing.discard(played.number)
                self._change.notify_all()

        def on_failed(line: str) -> None:
            with self._change:
                self._failure = self._failure or line
                self._change.notify_all()

        return Watcher(on_progress=on_progress, on_responses=on_responses, on_played=on_played, on_failed=on_failed)

    def _play(
        self, queued: Queued, reward_workers: RewardWorkers | None = None, watch: Watcher | None = None
    ) -> str | None:
        """Play what was asked for, at once; what is wrong."""
        plays, queued.plays = queued.plays, []
        watch = watch or self._watcher(queued, plays)
        seconds = self._writer.reward_seconds
        try:
            for played in self._writer.play(plays, self._gathered, reward_workers=reward_workers, watch=watch):
                queued.played[played.number] = played
        except UserError as error:
            return str(error)
        finally:
            queued.missing.clear()
            queued.begun.clear()
        self._spent("rewards", self._writer.reward_seconds - seconds)
        return None if self.response_log is None else self.response_log.failure

    def _wait(self, queued: Queued) -> str | None:
        """Until this rank's episodes are there, or something must be done about it; what is wrong.

        The sampler is not asked under the lock: its threads may hold one of their own when they come for ours.
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

    def _complete(self, queued: Queued, error: str | None, *, model: bool = True) -> dict[int, EpisodeOutcome] | None:
        """What each episode of all ranks has earned, by number; None: some rank still waits for the sampler.

        An error of one rank is raised on all. `model`: whether the reward model judges.
        """
        begin = time.perf_counter()
        everybody = self._gathered((error, bool(queued.missing)))
        for message, _ in everybody:
            if message is not None:
                raise UserError.of(message)
        if any(lacks for _, lacks in everybody):
            return None
        if self._reward_model is not None and model:
            self._spent("waiting", time.perf_counter() - begin)
            begin = time.perf_counter()
            self._score_by_model(self._reward_model, queued)
            self._spent("rewards", time.perf_counter() - begin)
            begin = time.perf_counter()
        outcomes = _merged(self._gathered(_outcomes(queued)))
        self._spent("waiting", time.perf_counter() - begin)
        return outcomes

    def _score_by_model(self, reward_workers: RewardModel, queued: Queued) -> None:
        """Rewards of this rank's leaves that have none yet."""
        prompts = {number: group.prompt for group in queued.candidates.groups for number in group.numbers}
        played = [one for one in queued.played.values() if len(one.rewards) < len(one.leaves)]
        asked = [(prompts[one.number], leaf.answer or leaf.text) for one in played for leaf in one.leaves]
        rewards = iter(reward_workers(asked))
        skips, wrong = self.config.rollout.on_failure == "skip", None
        for one in played:
            found = [next(rewards) for _ in one.leaves]
            failure = next((value for value in found if isinstance(value, str)), None)
            wrong = wrong or failure
            leaves = tuple(
                replace(leaf, reward=value)
                for leaf, value in zip(one.leaves, found, strict=True)
                if not isinstance(value, str)
            )
            failed = Played(number=one.number, failure=failure)
            queued.played[one.number] = failed if failure is not None else replace(one, leaves=leaves)
        for message in self._gathered(None if skips else wrong):
            if message is not None:
                raise UserError.of(message)

    def _written(
        self, queued: Queued, signal: Mapping[int, bool], outcomes: Mapping[int, EpisodeOutcome]
    ) -> tuple[list[RolloutGroup], dict[int, int], tuple[int, int]]:
        """The groups that are trained, the ranks that played their episodes, how many episodes and groups have failed.

        Groups with a failure are left out, and listed. With several ranks the leaves of the episodes are stand-ins.
        """
        failed, lines = set(), []
        for group in queued.candidates.groups[: queued.candidates.asked]:
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
                f"'skip', but every group of batch {queued.batch} has failed, the first: {lines[0]['failure']}",
                f"see {FAILURES} in the run folder",
            )
        failures = len(lines), len(failed)
        if self.mesh.loss.size == 1:
            return written_groups(chosen, queued.played), {}, failures
        begin = time.perf_counter()
        played, owners = self._known_to_all(chosen, queued.played)
        self._spent("waiting", time.perf_counter() - begin)
        return written_groups(chosen, played), owners, failures

    def _known_to_all(
        self, groups: Sequence[RolloutGroup], own: Mapping[int, Played]
    ) -> tuple[dict[int, Played], dict[int, int]]:
        """The episodes of these groups with stand-ins for their leaves, and the ranks that played them."""
        facts: dict[int, tuple[tuple[LeafFacts, ...], Mapping[str, float], Mapping[str, float]]] = {}
        for place, group in enumerate(groups):
            part = [own[number] for number in group.numbers if number in own]
            shown = group.first if place < NUM_SHOWN else None
            for one, about in zip(part, facts_of(part, group.prompt.tokens, shown=shown), strict=True):
                facts[one.number] = about, one.metrics, one.counts
        played: dict[int, Played] = {}
        owners: dict[int, int] = {}
        num_leaves = 0
        for rank, known in enumerate(self._gathered(facts)):
            for group in groups:
                numbers = [number for number in group.numbers if number in known]
                known = [about for number in numbers for about in known[number][0]]
                leaves = iter(stand_ins(known, group.prompt.tokens, num_leaves))
                num_leaves += len(known)
                for number in numbers:
                    about, metrics, counts = known[number]
                    own_leaves = tuple(next(leaves) for _ in about)
                    played[number] = Played(number=number, leaves=own_leaves, metrics=metrics, counts=counts)
                    owners[number] = rank
        return played, owners

    def _travelling(
        self,
        samples: Sequence[Sample],
        groups: Sequence[RolloutGroup],
        owners: Mapping[int, int],
        own: Mapping[int, Played],
    ) -> list[Sample]:
        leaves = [(one.number, place) for group in groups for one in group.episodes for place in range(len(one.leaves))]
        arrays = {}
        for index, (number, place) in enumerate(leaves):
            if number in own:
                leaf = own[number].leaves[place]
                arrays[index] = leaf.tokens, leaf.logprobs
        return travelling(samples, self.mesh, [owners[number] for number, _ in leaves], arrays)

    def _list_failures(self, batch: int, lines: list[dict[str, Any]]) -> None:
        if self._failures is not None and (lines or self._failures.path.exists()):
            self._failures.write(batch, lines)

    def _line(self, group: RolloutGroup) -> dict[str, Any]:
        prompt = self.chat_tokenizer.decode(group.prompt.tokens)
        return log_line(group.prompt.uid, prompt, group.episodes[0], episodes=self.config.rollout.has_episodes)

    def _waiting_groups(self) -> tuple[int, int]:
        """Groups of later batches that are finished, and that are not, on all ranks."""
        with self._change:
            own = {batch: set(queued.missing) for batch, queued in self._batches.items()}
        everybody = self._gathered(own)
        unfinished = total = 0
        for batch, queued in self._batches.items():
            missing: set[int] = set().union(*(one[batch] for one in everybody))
            groups = queued.candidates.groups[: queued.candidates.asked]
            total += len(groups)
            unfinished += sum(not missing.isdisjoint(group.numbers) for group in groups)
        return total - unfinished, unfinished

    def _gathered(self, own: Any) -> list[Any]:
        """What every rank says."""
        return gather_objects(own, self.mesh.loss.group, "the exchange of rollouts")

    def _spent(self, part: str, seconds: float) -> None:
        self.timings[part] = self.timings.get(part, 0.0) + seconds

    # Checkpoints

    def _known(self, queued: Queued, group: RolloutGroup) -> dict[int, Played | Response]:
        """What a checkpoint and the journal had of a group, unless it is too old by now."""
        found: dict[int, Played | Response] = {}
        for number in group.numbers:
            one = self._restored.pop((queued.batch, number), None)
            later = (
                None if self.response_log is None else self.response_log.find(queued.batch, number, group.prompt.tokens)
            )
            if later is not None and not self._async and not later.is_whole(group.prompt.max_new_tokens):
                later = None  # not every sampler can go on with a part
            if later is not None and (
                one is None or (isinstance(one, Response) and len(later.tokens) > len(one.tokens))
            ):
                one = later
                self._from_response_log += 1
            if one is not None:
                found[number] = one
        if any((queued.version - _versions(one) > self.oldest).any() for one in found.values()):
            self._dropped += 1
            return {}
        return found

    def state(self) -> dict[str, Any]:
        """For `extra` of a checkpoint, the same on every rank."""
        if not self._async:
            return {}
        own: list[Stored] = []
        with self._change:
            for batch, queued in self._batches.items():
                own += [(batch, number, played) for number, played in queued.played.items()]
                own += [(batch, number, begun) for number, begun in queued.begun.items() if len(begun.tokens)]
        everybody = [one for part in self._gathered(own) for one in part]
        left = [(batch, number, one) for (batch, number), one in self._restored.items()]
        return queue_state([*everybody, *left], environment_name(self.config.rollout))

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Go on with what `state` has kept."""
        if self.dropped_reason(extra) is None:
            self._restored = {(batch, number): one for batch, number, one in stored_in(extra)}

    def dropped_reason(self, extra: Mapping[str, Any]) -> str | None:
        """Why what a checkpoint has ahead cannot be used; None: it can, or there is nothing."""
        return dropped_reason(extra, environment_name(self.config.rollout), self.config.rollout.staleness)


def _make_writer(config: Config, sampler: Sampler, chat_tokenizer: ChatTokenizer) -> ResponseWriter | EpisodeRunner:
    """What plays episodes: of an environment, or of one turn."""
    settings = config.rollout
    runner = RunnerSettings(
        name=environment_name(settings),
        most=settings.max_concurrent,
        timeout=settings.episode_timeout,
        skips=settings.on_failure == "skip",
        temperature=config.loss.temperature,
    )
    reward_workers: RewardWorkers | None = None
    if model_of(settings.reward) is not None:
        reward_workers = RewardsLater(str(settings.reward))
    elif settings.reward is not None:
        reward_workers = RewardWorkers(load_reward(settings.reward), settings.reward_processes)
    if settings.has_episodes:
        return EpisodeRunner(load_episode(settings), sampler, chat_tokenizer, reward_workers, runner)
    assert reward_workers is not None
    return ResponseWriter(sampler, chat_tokenizer, reward_workers, runner)


def _owners(groups: Sequence[RolloutGroup], asked: range, world: int) -> list[list[int]]:
    """The numbers of the episodes of the groups `asked` that each rank plays."""
    before = groups[asked.start].first if asked else 0
    parts = divided([(len(groups[index]), len(groups[index].prompt.tokens)) for index in asked], world)
    return [[before + place for place in part] for part in parts]


def divided(groups: Sequence[tuple[int, int]], world: int) -> list[list[int]]:
    """The numbers of the responses of each rank; `groups` are (responses, tokens of the prompt).

    Shares differ by one response at most, and a group is cut only where a share ends. Neighbours in length go to
    different ranks, so that every rank has prompts of all lengths.

        3 groups of 2, world 2      numbers  0 1 | 2 3 | 4 5        shares  0 1 4 | 5 2 3
    """
    firsts = np.cumsum([0, *(count for count, _ in groups)])
    by_length = sorted(range(len(groups)), key=lambda group: (groups[group][1], group))
    dealt = [group for rank in range(world) for group in by_length[rank::world]]
    order = [int(firsts[group]) + member for group in dealt for member in range(groups[group][0])]
    return [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), world)]


def _outcomes(queued: Queued) -> dict[int, EpisodeOutcome]:
    return {
        number: EpisodeOutcome(one.rewards, one.failure, one.num_tokens, one.ended)
        for number, one in queued.played.items()
    }


def _signal(candidates: Candidates, outcomes: Mapping[int, EpisodeOutcome]) -> dict[int, bool]:
    """Of each group that was asked for, whether its rewards differ."""
    found = {}
    for index, group in enumerate(candidates.groups[: candidates.asked]):
        found[index] = len({reward for number in group.numbers for reward in outcomes[number].rewards}) > 1
    return found


def _versions(one: Played | Response) -> NDArray[np.int64]:
    return one.versions if isinstance(one, Played) else one.token_versions


def _merged(parts: Iterable[Mapping[int, EpisodeOutcome]]) -> dict[int, EpisodeOutcome]:
    return {number: one for part in parts for number, one in part.items()}
