"""Play many episodes concurrently on one event loop, each with a timeout, rewards and error handling.

An episode fails if it or its reward raises an exception, including `SystemExit`, or exceeds the timeout. The clock of
an episode stops while it waits for tokens. A failure ends the run or, with `rollout.on_failure=skip`, is recorded in
the result.

`EpisodeRunner.play` waits for its episodes. `EpisodeRunner.begin` appends episodes to a queue and does not wait: they
run during training.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padfree.data.records import LARGEST, shown
from padfree.errors import UserError, shown_error
from padfree.rollout.base import Gather, Response, Sampler, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode, Policy
from padfree.rollout.environment.gateway import Gateway
from padfree.rollout.environment.group_rewards import GroupReward, PlayGroup, Scored
from padfree.rollout.environment.tokens import TokenSource, TurnPath, blocked, failure_of, make_token_source
from padfree.rollout.environment.trajectory import Branch, Trajectory, Tree, leaf_of
from padfree.rollout.group import Leaf, LeafImages, Play, Played, RolloutGroup, Watcher
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.reward_workers import RewardWorkers
from padfree.rollout.truncation import WHOLE, Truncation

MAX_TURNS = 10_000
"""Maximum number of requests for tokens in one episode."""

GRACE = 5.0
"""Seconds in which a cancelled episode must end. After that, it is abandoned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """Settings of an `EpisodeRunner`.

    `name`: the name of the environment, for messages. `skip_failures`: record a failure and do not raise it.
    """

    name: str
    max_concurrent: int
    timeout: float
    skip_failures: bool
    temperature: float = 1.0
    truncation: Truncation = WHOLE


class EpisodeRunner:
    """Plays episodes with one sampler. If an episode returns no reward, `reward_workers` compute the reward."""

    reward_seconds = 0.0  # not measured: rewards are computed while other episodes run

    def __init__(
        self,
        episode: Episode,
        sampler: Sampler,
        chat_tokenizer: ChatTokenizer,
        reward_workers: RewardWorkers | None,
        settings: RunnerSettings,
    ) -> None:
        self._episode, self._sampler, self.chat_tokenizer, self._reward_workers = (
            episode,
            sampler,
            chat_tokenizer,
            reward_workers,
        )
        self._settings = settings
        self._thread = LoopThread("episodes")
        self._free_slots = asyncio.Semaphore(settings.max_concurrent)  # limits the concurrent episodes of `begin`
        self._turn = asyncio.Lock()  # held by the batch whose episodes are being started
        self._gateway = Gateway(chat_tokenizer, settings.temperature, truncation=settings.truncation)

    def play(
        self,
        plays: Sequence[Play],
        gather: Gather,
        *,
        reward_workers: RewardWorkers | None = None,
        watch: Watcher | None = None,
    ) -> list[Played]:
        """Play the episodes `plays` and return their results in the same order. Each rank passes its own episodes.

        `gather` gathers an object from all ranks. `reward_workers`, if given, compute the rewards instead of the
        workers of this runner. `watch`: its `on_progress` gets the number of finished episodes.
        """
        source = make_token_source(self._sampler, self._thread, self._settings.timeout)
        free_slots = asyncio.Semaphore(self._settings.max_concurrent)
        members = Counter(play.group for play in plays)
        compared = {group: PlayGroup(group.size, number) for group, number in members.items()}
        progress, finished = (watch or Watcher()).on_progress, itertools.count(1)
        playing = self._thread.submit(
            self._play_all(
                plays,
                source,
                reward_workers or self._reward_workers,
                free_slots,
                lambda played: progress(next(finished)),
                compared=compared,
            )
        )
        try:
            source.serve(playing, gather)
        except BaseException:
            playing.cancel()
            raise
        return playing.result()

    def begin(self, plays: Sequence[Play], watch: Watcher) -> None:
        """Append the episodes `plays` to the queue of episodes, and return without waiting for them.

        The sampler must be an `AsyncSampler`. `watch`: callbacks, e.g. for finished episodes.
        """
        source = make_token_source(self._sampler, self._thread, self._settings.timeout)

        def ended(playing: Future[Any]) -> None:
            try:
                message = failure_of(playing)
            except Exception as error:
                # The error must reach the thread that waits for the episodes.
                message = f"rollout.environment: {shown_error(error)}; report this bug of padfree"
            if message is not None:
                watch.on_failed(message)

        self._thread.submit(self._play_in_turn(plays, source, watch.on_played)).add_done_callback(ended)

    def blocked(self) -> str | None:
        """Return an error message if an episode blocks the event loop; otherwise None."""
        return blocked(self._thread, self._settings.timeout)

    def close(self) -> None:
        self._thread.close(self._end)

    async def _end(self) -> None:
        self._gateway.close()
        if self._reward_workers is not None:
            await self._reward_workers.close()

    async def _play_in_turn(
        self, plays: Sequence[Play], source: TokenSource, on_played: Callable[[Played], None]
    ) -> None:
        await self._turn.acquire()
        await self._play_all(plays, source, self._reward_workers, self._free_slots, on_played, self._turn.release)

    async def _play_all(
        self,
        plays: Sequence[Play],
        source: TokenSource,
        reward_workers: RewardWorkers | None,
        free_slots: asyncio.Semaphore,
        on_played: Callable[[Played], None] | None = None,
        on_started: Callable[[], None] | None = None,
        *,
        compared: Mapping[RolloutGroup, PlayGroup] | None = None,
    ) -> list[Played]:
        """Play at most `free_slots` episodes at a time, and return the results in order. `source` samples their tokens.

        `on_started`: called when all episodes have started, or one has failed. `compared`: the `PlayGroup` of each
        rollout group. None: a reward that compares episodes raises an error.
        """
        tasks: list[asyncio.Task[Played]] = []
        try:
            try:
                for play in plays:
                    await free_slots.acquire()
                    source.started(play.number)
                    session = _Session(self, play, source, free_slots.release, (compared or {}).get(play.group))
                    playing = self._play_one(session, reward_workers, on_played)
                    tasks.append(asyncio.create_task(playing, name=play.prompt.uid))
                    self._raise_failure(tasks)
            finally:
                if on_started is not None:
                    on_started()
            for task in asyncio.as_completed(tasks):
                await task
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play_one(
        self, session: _Session, reward_workers: RewardWorkers | None, on_played: Callable[[Played], None] | None
    ) -> Played:
        played = await session.play(self._episode, reward_workers)
        if on_played is not None:
            on_played(played)
        return played

    def _raise_failure(self, tasks: Sequence[asyncio.Task[Played]]) -> None:
        for task in tasks:
            if task.done():
                task.result()


class _Session:
    """One running episode. It implements `Host`, the interface through which the episode samples tokens."""

    def __init__(
        self,
        runner: EpisodeRunner,
        play: Play,
        source: TokenSource,
        free: Callable[[], None],
        compared: PlayGroup | None,
    ) -> None:
        """Create the session of one episode.

        `free`: called when the episode samples no more tokens. `compared`: the episodes of the same prompt on this
        rank. None: a reward that compares episodes raises an error.
        """
        self._runner, self._play, self._source, self._free, self._compared = runner, play, source, free, compared
        self.chat_tokenizer, self.key = runner.chat_tokenizer, play.key
        self.temperature = runner._settings.temperature
        self._tree = Tree(play.prompt)
        self._clock = asyncio.timeout(None)
        self._num_waiting = self._turns = 0  # number of waiting requests, and of all requests
        self._remaining = runner._settings.timeout
        self._finished = False

    async def play(self, episode: Episode, reward_workers: RewardWorkers | None) -> Played:
        settings, prompt = self._runner._settings, self._play.prompt
        failure: str | UserError | None = None
        leaves: tuple[Leaf, ...] = ()
        metrics: dict[str, float] = {}
        try:
            async with self._clock:
                self._run_clock()
                trajectory = await _in_own_task(episode(prompt, Policy(self._tree, self._tree.root, self)), prompt.uid)
                self._finish()
                trajectory = _checked(trajectory, self._tree, settings.name)
                if trajectory.group_reward is not None:
                    trajectory = await self._with_group_reward(trajectory, trajectory.group_reward)
                metrics = {str(name): float(value) for name, value in trajectory.metrics.items()}
                leaves = await self._leaves(trajectory, reward_workers)
        except BaseException as error:  # an environment is user code
            task = asyncio.current_task()
            assert task is not None
            if isinstance(error, asyncio.CancelledError) and task.cancelling():  # cancelled by the run
                raise
            if self._clock.expired():
                failure = f"took more than {settings.timeout:g} s (rollout.episode_timeout)"
            elif isinstance(error, UserError) and _is_own(error):
                failure = error
            else:
                failure = f"raised {shown_error(error)}"
        finally:
            self._finish()
        failure = self._tree.failure or failure
        if failure is not None:
            if self._compared is not None:
                self._compared.fail()
            if not settings.skip_failures:
                raise self._error(failure)
            return Played(number=self._play.number, failure=str(failure), counts=dict(self._tree.counts))
        return Played(number=self._play.number, leaves=leaves, metrics=metrics, counts=dict(self._tree.counts))

    def _error(self, failure: str | UserError) -> UserError:
        if isinstance(failure, UserError):
            return failure
        what = f"{self._runner._settings.name} {failure} for {self._play.prompt.uid!r}"
        return UserError("rollout.environment", what, "correct the environment, or set rollout.on_failure=skip")

    async def _leaves(self, trajectory: Trajectory, reward_workers: RewardWorkers | None) -> tuple[Leaf, ...]:
        branches = self._tree.leaves()
        texts = [self._text(branch.ids, branch.ended) for branch in branches]
        pending: list[Awaitable[float | None]] = []
        for branch, text in zip(branches, texts, strict=True):
            own = trajectory.reward if branch.reward is None else branch.reward
            pending.append(self._reward(own, text if trajectory.answer is None else trajectory.answer, reward_workers))
        rewards = await asyncio.gather(*pending)
        return tuple(
            leaf_of(*one, trajectory.answer, images=self._images(one[0]))
            for one in zip(branches, texts, rewards, strict=True)
        )

    def _images(self, branch: Branch) -> LeafImages | None:
        if not self._tree.has_new_images(branch):
            return None
        return LeafImages(branch.images, self.chat_tokenizer.rotary_positions(self._tree, branch))

    async def _with_group_reward(self, trajectory: Trajectory, given: GroupReward) -> Trajectory:
        """Wait for all episodes of the prompt. Return this episode's trajectory with a reward from comparing them."""
        name = self._runner._settings.name
        if self._compared is None:  # a checkpoint may hold only some of the episodes to compare
            raise UserError(
                "rollout.environment",
                f"the rewards of {name} compare all episodes of a prompt, which needs rollout.staleness=0",
                "set rollout.staleness=0",
            )
        # Waiting for other episodes does not count towards the timeout. The last one computes the rewards of all.
        self._clock.reschedule(None)
        scoring = GroupReward(result=given.result, score=lambda results: self._timed(given.score(results)))
        reward, metrics = await self._compared.scored(self._play.number, scoring)
        return replace(trajectory, reward=reward, metrics={**trajectory.metrics, **metrics})

    async def _timed(self, scoring: Awaitable[Sequence[Scored]]) -> Sequence[Scored]:
        async with asyncio.timeout(self._runner._settings.timeout):
            return await scoring

    async def _reward(self, own: Any, text: str, reward_workers: RewardWorkers | None) -> float | None:
        prompt, name = self._play.prompt, self._runner._settings.name
        if own is None:
            if reward_workers is None:
                raise UserError(
                    "rollout.reward",
                    f"is not set, and {name} returned no reward for {prompt.uid!r}",
                    "set rollout.reward, or return policy.trajectory(reward=...)",
                )
            return await reward_workers(text, prompt.row, prompt.uid)
        if reward_workers is not None:
            raise UserError(
                "rollout.reward",
                f"is set, but {name} returned a reward for {prompt.uid!r}",
                "remove rollout.reward, or return no reward from the environment",
                value=reward_workers.name,
            )
        if not isinstance(own, (int, float, np.integer, np.floating, np.bool_)) or not -LARGEST < own < LARGEST:
            raise UserError(
                "rollout.environment",
                f"{name} returned the reward {shown(own)} for {prompt.uid!r}",
                "return a finite number",
            )
        return float(own)

    def _text(self, ids: Sequence[int], ended: bool) -> str:
        """Decode the token sequence `ids`, without the prompt if the sequence starts with the prompt.

        If `ended`, the last id is a stop token, which is also left out.
        """
        prompt = self._play.prompt.tokens
        start = len(prompt) if ids[: len(prompt)] == prompt.tolist() else 0
        return self.chat_tokenizer.decode(ids[start:-1] if ended else ids[start:])

    # Methods of `Host`

    async def respond(self, path: TurnPath, request: SamplingRequest) -> Response:
        if self._finished:
            raise UserError(
                "rollout.environment",
                "an episode requests tokens after its end",
                "await all tasks that the episode creates",
            )
        self._turns += 1
        # The timeout cannot end an episode that always waits for tokens: its clock stops during these waits.
        if self._turns > MAX_TURNS:
            raise UserError(
                "rollout.environment",
                f"{self._runner._settings.name} has requested tokens {MAX_TURNS} times for {self._play.prompt.uid!r}",
                "end the episode earlier",
            )
        if not self._num_waiting and not self._finished:
            when = self._clock.when()
            if when is not None:
                self._remaining = when - asyncio.get_running_loop().time()
                self._clock.reschedule(None)
        self._num_waiting += 1
        try:
            return await self._source.respond(self._play.number, path, request)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._run_clock()

    def _run_clock(self) -> None:
        if not self._clock.expired() and not self._finished:
            self._clock.reschedule(asyncio.get_running_loop().time() + max(self._remaining, 0.0))

    async def serve(self, tree: Tree) -> str:
        return await self._runner._gateway.address(tree, self)

    def _finish(self) -> None:
        """Record that the episode requests no more tokens, so that another episode can start."""
        if not self._finished:
            self._runner._gateway.forget(self._tree)
            self._source.finished(self._play.number)
            self._free()
            self._finished = True


def _is_own(error: UserError) -> bool:
    """Return whether the error is about a setting or the reward function of the run.

    Other `UserError`s come from padfree functions that the environment's code called with a wrong argument.
    """
    return error.setting == "reward" or error.setting.startswith(("rollout.", "data."))


async def _in_own_task(coroutine: Awaitable[Trajectory], name: str) -> Trajectory:
    """Run the coroutine of an episode in a new asyncio task, and return its trajectory.

    A task that is cancelled but does not end is abandoned. `name`: the name of the task.
    """
    task = asyncio.ensure_future(coroutine)
    if isinstance(task, asyncio.Task):
        task.set_name(name)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        raise
    return task.result()


def _checked(trajectory: Any, tree: Tree, name: str) -> Trajectory:
    uid = tree.prompt.uid
    if not isinstance(trajectory, Trajectory) or trajectory.tree is not tree:
        raise UserError(
            "rollout.environment", f"{name} returned {shown(trajectory)} for {uid!r}", "return policy.trajectory(...)"
        )
    answer = trajectory.answer
    if answer is not None and not isinstance(answer, str):
        raise UserError(
            "rollout.environment", f"{name} returned the answer {shown(answer)} for {uid!r}", "return a string"
        )
    leaves = tree.leaves()
    if not leaves:
        raise UserError(
            "rollout.environment", f"{name} sampled no tokens for {uid!r}", "await policy.generate() in the episode"
        )
    if not all(any(branch.sampled) for branch in leaves):
        raise UserError(
            "rollout.environment",
            f"{name} set the reward of a branch without sampled tokens for {uid!r}",
            "set a reward only if policy.loss_mask.any()",
        )
    return trajectory
