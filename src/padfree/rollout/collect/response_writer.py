"""Episodes of one turn: a prompt, a response, a reward. No coroutine is needed for them.

    play      requests p0 p1 p2 q0 q1 q2 -> one call of `Sampler.sample` -> rewards in their order, by the main thread
    begin     requests -> `AsyncSampler.begin` -> each response to a thread for its reward as it arrives

Rewards are computed by threads wherever one of them may fail or hang alone (`rollout.on_failure=skip`, batches ahead),
and in processes if there are some (`rollout.reward_processes`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from padfree.errors import UserError
from padfree.rollout.base import AsyncSampler, Response, Sampler, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.environment.play import Play, Played, Watcher
from padfree.rollout.environment.reward_workers import RewardWorkers
from padfree.rollout.environment.runner import RunnerSettings
from padfree.rollout.environment.tokens import Tell
from padfree.rollout.environment.trajectory import Leaf, leaf_of_response
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.time_limit import DaemonPool

REWARD_THREADS = 64


class ResponseWriter:
    """Has one sampler write responses, and `reward_workers` judge them. The same methods as `EpisodeRunner` has."""

    def __init__(
        self, sampler: Sampler, chat_tokenizer: ChatTokenizer, reward_workers: RewardWorkers, settings: RunnerSettings
    ) -> None:
        self._sampler, self.chat_tokenizer, self._reward_workers, self._settings = (
            sampler,
            chat_tokenizer,
            reward_workers,
            settings,
        )
        self._pool = DaemonPool(REWARD_THREADS, "reward")
        self._thread = LoopThread("rewards")  # where processes are asked
        self.reward_seconds = 0.0  # of all calls of `play`

    def play(
        self,
        plays: Sequence[Play],
        tell: Tell,
        *,
        reward_workers: RewardWorkers | None = None,
        watch: Watcher | None = None,
    ) -> list[Played]:
        """In the order of the plays. Every rank calls it with its own."""
        reward_workers, watch = reward_workers or self._reward_workers, watch or Watcher()
        found = {play.number: play.begun for play in plays if play.begun is not None}
        missing = [play for play in plays if play.number not in found]

        def finished(responses: Sequence[tuple[int, Response]]) -> None:
            watch.on_responses([(missing[index].number, response) for index, response in responses])

        before = len(found)
        callbacks = self._taken(on_progress=lambda done: watch.on_progress(before + done), on_finished=finished)
        sampled = self._sampler.sample([_request(play) for play in missing], **callbacks)
        if "on_finished" not in callbacks:
            finished(list(enumerate(sampled)))
        found |= {play.number: response for play, response in zip(missing, sampled, strict=True)}
        begin = time.perf_counter()
        pairs = [(play, found[play.number]) for play in plays]
        if reward_workers.processes or self._settings.skips:
            futures = [self._rewarding(play, response, reward_workers) for play, response in pairs]
            played = [future.result() for future in futures]
        else:
            played = [self._rewarded(play, response, reward_workers) for play, response in pairs]
        self.reward_seconds += time.perf_counter() - begin
        return played

    def begin(self, plays: Sequence[Play], watch: Watcher) -> None:
        """Ask for these after all that were asked for before, and return; the sampler takes requests at any time."""
        whole = [play for play in plays if play.begun is not None and play.begun.is_whole(play.prompt.max_new_tokens)]
        there = {play.number for play in whole}
        rest = [play for play in plays if play.number not in there]

        def ended(future: Future[Played]) -> None:
            error = future.exception()
            if error is None:
                watch.on_played(future.result())
            else:
                watch.on_failed(str(error) if isinstance(error, UserError) else f"rollout.reward: {error!r}")

        def reward_workers(play: Play, response: Response) -> None:
            self._rewarding(play, response, self._reward_workers).add_done_callback(ended)

        def arrived(index: int, response: Response) -> None:
            watch.on_responses([(rest[index].number, response)])
            if response.is_whole(rest[index].prompt.max_new_tokens):
                reward_workers(rest[index], response)

        for play in whole:
            reward_workers(play, cast(Response, play.begun))
        if rest:
            cast(AsyncSampler, self._sampler).begin([_request(play) for play in rest], arrived)

    def blocked(self) -> str | None:
        return None

    def close(self) -> None:
        self._pool.close()
        self._thread.close(self._reward_workers.close)

    def _taken(self, **wanted: Any) -> dict[str, Any]:
        """Callbacks that the sampler takes: a user's need not."""
        taken = inspect.signature(self._sampler.sample).parameters
        return {name: callback for name, callback in wanted.items() if name in taken}

    def _leaf(self, play: Play, response: Response) -> Leaf:
        """Special tokens stay in its text: the policy could exploit what the reward does not see."""
        text = self.chat_tokenizer.decode(response.tokens[:-1] if response.ended else response.tokens)
        return leaf_of_response(play.prompt, response, text)

    # Rewards

    def _rewarding(self, play: Play, response: Response, reward_workers: RewardWorkers) -> Future[Played]:
        """A reward that a thread or a process computes."""
        if reward_workers.processes:
            return self._thread.submit(self._by_process(play, response, reward_workers))
        future: Future[Played] = Future()

        def run() -> None:
            try:
                future.set_result(self._rewarded(play, response, reward_workers))
            except BaseException as error:  # whoever waits for the future gets it
                future.set_exception(error)

        self._pool.submit(run)
        return future

    def _rewarded(self, play: Play, response: Response, reward_workers: RewardWorkers) -> Played:
        prompt, leaf = play.prompt, self._leaf(play, response)
        try:
            reward = reward_workers.within(self._settings.timeout, leaf.text, prompt.row, prompt.uid)
        except UserError as error:
            return self._failed(play, error)
        return Played(number=play.number, leaves=(replace(leaf, reward=reward),))

    async def _by_process(self, play: Play, response: Response, reward_workers: RewardWorkers) -> Played:
        prompt, leaf = play.prompt, self._leaf(play, response)
        try:
            reward = await reward_workers(leaf.text, prompt.row, prompt.uid, self._settings.timeout)
        except UserError as error:
            return self._failed(play, error)
        return Played(number=play.number, leaves=(replace(leaf, reward=reward),))

    def _failed(self, play: Play, error: UserError) -> Played:
        if not self._settings.skips:
            raise error
        return Played(number=play.number, failure=str(error))


def _request(play: Play) -> SamplingRequest:
    return SamplingRequest(
        tokens=play.prompt.tokens, max_new_tokens=play.prompt.max_new_tokens, key=play.key, begun=play.begun
    )
