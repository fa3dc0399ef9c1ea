"""Plays episodes: many at a time on one event loop, each with its time-out, its rewards and its failures.

    plays      0 1 2 3 4 5 …     at most `most` at a time; the next begins when one has its trajectory
    a play     episode -> leaves -> rewards -> Played
                   |                   |
                   raises, hangs       raises, hangs          Played with a failure, or the end of the run

The time-out counts an episode's own time: while it waits for tokens, its clock stands still. An episode is
the user's code: whatever it raises, `SystemExit` too, is its failure, and one that ignores its cancellation is left
behind.

`play` waits for its episodes. `begin` does not: those of batches ahead go on while others are trained, in the order in
which they were begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from padfree.data.records import LARGEST, shown
from padfree.errors import UserError, shown_error
from padfree.rollout.base import Response, Sampler, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode, Policy
from padfree.rollout.environment.gateway import Gateway
from padfree.rollout.environment.play import Play, Played, Watcher
from padfree.rollout.environment.reward_workers import RewardWorkers
from padfree.rollout.environment.tokens import Place, Tell, TokenSource, blocked, failure_of, make_token_source
from padfree.rollout.environment.trajectory import Leaf, Trajectory, Tree, leaf_of
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.time_limit import shown_safely

MOST_TURNS = 10_000
"""Requests for tokens of one episode."""

GRACE = 5.0
"""Seconds that an episode gets to end when it is cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """`name`: of the environment, for messages. `skips`: a failure is kept, and not raised."""

    name: str
    max_concurrent: int
    timeout: float
    skip_failures: bool
    temperature: float = 1.0


class EpisodeRunner:
    """Plays episodes with one sampler. `reward_workers` gives rewards where episodes do not."""

    reward_seconds = 0.0  # rewards are computed beside other episodes

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
        self._max_new_tokens = asyncio.Semaphore(settings.max_concurrent)  # of episodes that were begun
        self._turn = asyncio.Lock()  # theirs, whose batch begins episodes
        self._gateway = Gateway(chat_tokenizer, settings.temperature)

    def play(
        self,
        plays: Sequence[Play],
        tell: Tell,
        *,
        reward_workers: RewardWorkers | None = None,
        watch: Watcher | None = None,
    ) -> list[Played]:
        """In the order of the plays. Every rank calls it with its own; `tell` lets all know what one says."""
        source = make_token_source(self._sampler, self._thread, self._settings.timeout)
        max_new_tokens = asyncio.Semaphore(self._settings.max_concurrent)
        playing = self._thread.submit(
            self._play_all(plays, source, reward_workers or self._reward_workers, max_new_tokens)
        )
        try:
            source.serve(playing, tell)
        except BaseException:
            playing.cancel()
            raise
        return playing.result()

    def begin(self, plays: Sequence[Play], watch: Watcher) -> None:
        """Queue these episodes behind the earlier ones and return at once.

        The sampler must take requests at any time.
        """
        source = make_token_source(self._sampler, self._thread, self._settings.timeout)

        def ended(playing: Future[Any]) -> None:
            try:
                line = failure_of(playing)
            except Exception as error:  # it must reach the thread that waits for the episodes
                line = f"rollout.environment: {shown_error(error)}; report it, an episode's own errors are caught"
            if line is not None:
                watch.on_failed(line)

        self._thread.submit(self._play_in_turn(plays, source, watch.on_played)).add_done_callback(ended)

    def blocked(self) -> str | None:
        """A line if an episode keeps the event loop for itself."""
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
        await self._play_all(plays, source, self._reward_workers, self._max_new_tokens, on_played, self._turn.release)

    async def _play_all(
        self,
        plays: Sequence[Play],
        source: TokenSource,
        reward_workers: RewardWorkers | None,
        max_new_tokens: asyncio.Semaphore,
        on_played: Callable[[Played], None] | None = None,
        on_begun: Callable[[], None] | None = None,
    ) -> list[Played]:
        """`on_begun` is called when all of them have begun, or one has failed."""
        tasks: list[asyncio.Task[Played]] = []
        try:
            try:
                for play in plays:
                    await max_new_tokens.acquire()
                    source.began(play.number)
                    session = _Session(self, play, source, max_new_tokens.release)
                    playing = self._play_one(session, reward_workers, on_played)
                    tasks.append(asyncio.create_task(playing, name=play.prompt.uid))
                    self._raise_failure(tasks)
            finally:
                if on_begun is not None:
                    on_begun()
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
    """One episode while it is played; what its policies ask for goes through here."""

    def __init__(self, runner: EpisodeRunner, play: Play, source: TokenSource, free: Callable[[], None]) -> None:
        self._runner, self._play, self._source, self._free = runner, play, source, free
        self.chat_tokenizer, self.key = runner.chat_tokenizer, play.key
        self._tree = Tree(play.prompt)
        self._clock = asyncio.timeout(None)
        self._asking = self._turns = 0
        self._remaining = runner._settings.timeout
        self._left = False

    async def play(self, episode: Episode, reward_workers: RewardWorkers | None) -> Played:
        settings, prompt = self._runner._settings, self._play.prompt
        failure: str | UserError | None = None
        leaves: tuple[Leaf, ...] = ()
        metrics: dict[str, float] = {}
        try:
            async with self._clock:
                self._run_clock()
                trajectory = await _apart(episode(prompt, Policy(self._tree, self._tree.root, self)), prompt.uid)
                self._leave()
                trajectory = _checked(trajectory, self._tree, settings.name)
                metrics = {str(name): float(value) for name, value in trajectory.metrics.items()}
                leaves = await self._leaves(trajectory, reward_workers)
        except BaseException as error:  # an environment is code of its own
            task = asyncio.current_task()
            assert task is not None
            if isinstance(error, asyncio.CancelledError) and task.cancelling():  # by the run, not by the episode
                raise
            if self._clock.expired():
                failure = f"took more than {settings.timeout:g} s (rollout.episode_timeout)"
            elif isinstance(error, UserError) and _is_own(error):
                failure = error
            else:
                failure = f"raised {shown_safely(error)}"
        finally:
            self._leave()
        failure = self._tree.failure or failure
        if failure is not None:
            if not settings.skip_failures:
                raise self._error(failure)
            return Played(number=self._play.number, failure=str(failure), counts=dict(self._tree.counts))
        return Played(number=self._play.number, leaves=leaves, metrics=metrics, counts=dict(self._tree.counts))

    def _error(self, failure: str | UserError) -> UserError:
        if isinstance(failure, UserError):
            return failure
        what = f"{self._runner._settings.name} {failure} for {self._play.prompt.uid!r}"
        return UserError("rollout.environment", what, "correct it, or set rollout.on_failure=skip")

    async def _leaves(self, trajectory: Trajectory, reward_workers: RewardWorkers | None) -> tuple[Leaf, ...]:
        branches = self._tree.leaves()
        texts = [self._text(branch.ids, branch.ended) for branch in branches]
        found: list[Awaitable[float | None]] = []
        for branch, text in zip(branches, texts, strict=True):
            own = trajectory.reward if branch.reward is None else branch.reward
            found.append(self._reward(own, text if trajectory.answer is None else trajectory.answer, reward_workers))
        rewards = await asyncio.gather(*found)
        return tuple(leaf_of(*one, trajectory.answer) for one in zip(branches, texts, rewards, strict=True))

    async def _reward(self, own: Any, text: str, reward_workers: RewardWorkers | None) -> float | None:
        prompt, name = self._play.prompt, self._runner._settings.name
        if own is None:
            if reward_workers is None:
                raise UserError(
                    "rollout.reward",
                    f"none, and {name} gave {prompt.uid!r} none either",
                    "give one of them, as in policy.trajectory(reward=1.0)",
                )
            return await reward_workers(text, prompt.row, prompt.uid)
        if reward_workers is not None:
            raise UserError(
                "rollout.reward",
                f", but {name} gave {prompt.uid!r} a reward itself",
                "leave one of them out",
                value=reward_workers.name,
            )
        if not isinstance(own, (int, float, np.integer, np.floating, np.bool_)) or not -LARGEST < own < LARGEST:
            raise UserError(
                "rollout.environment", f"{name} gave {prompt.uid!r} {shown(own)} as a reward", "give a finite number"
            )
        return float(own)

    def _text(self, ids: Sequence[int], ended: bool) -> str:
        """Behind the prompt, where the branch has that, without the token that ended it."""
        prompt = self._play.prompt.tokens
        behind = len(prompt) if ids[: len(prompt)] == prompt.tolist() else 0
        return self.chat_tokenizer.decode(ids[behind:-1] if ended else ids[behind:])

    # What policies ask for

    async def respond(self, place: Place, request: SamplingRequest) -> Response:
        if self._left:
            raise UserError(
                "rollout.environment", "an episode asks for tokens after its end", "await what it has begun"
            )
        self._turns += 1
        if self._turns > MOST_TURNS:  # its clock stands still meanwhile, so that nothing else would end it
            raise UserError(
                "rollout.environment",
                f"{self._runner._settings.name} has asked for tokens {MOST_TURNS} times for {self._play.prompt.uid!r}",
                "let an episode end",
            )
        if not self._asking and not self._left:
            when = self._clock.when()
            if when is not None:
                self._remaining = when - asyncio.get_running_loop().time()
                self._clock.reschedule(None)
        self._asking += 1
        try:
            return await self._source.respond(self._play.number, place, request)
        finally:
            self._asking -= 1
            if not self._asking:
                self._run_clock()

    def _run_clock(self) -> None:
        if not self._clock.expired() and not self._left:
            self._clock.reschedule(asyncio.get_running_loop().time() + max(self._remaining, 0.0))

    async def serve(self, tree: Tree) -> str:
        return await self._runner._gateway.address(tree, self)

    def _leave(self) -> None:
        """It asks for no more tokens, so that another episode may begin."""
        if not self._left:
            self._runner._gateway.forget(self._tree)
            self._source.left(self._play.number)
            self._free()
            self._left = True


def _is_own(error: UserError) -> bool:
    """Whether it is about a setting, so that it names what to correct; not about an argument the environment gave."""
    return error.setting == "reward" or error.setting.startswith(("rollout.", "data."))


async def _apart(coroutine: Awaitable[Trajectory], name: str) -> Trajectory:
    """Await a task of its own for it: one that does not end when it is cancelled is left behind."""
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
        raise UserError("rollout.environment", f"{name} gave {uid!r} {shown(answer)} as an answer", "give a text")
    if not tree.leaves():
        raise UserError(
            "rollout.environment", f"{name} had the policy write nothing for {uid!r}", "await policy.generate()"
        )
    return trajectory
