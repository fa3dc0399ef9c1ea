"""Play single-turn episodes, which consist of a prompt, a response and a reward.

`ResponseWriter.play` samples all responses with one call of `Sampler.sample`, then computes the rewards one by one in
the main thread. With `rollout.on_failure=skip`, it computes the rewards in threads, so that the run continues if a
reward function fails or hangs.

`ResponseWriter.begin` passes the requests to `AsyncSampler.begin` and returns. As soon as a response arrives, a thread
computes its reward.

With `rollout.reward_processes`, both methods compute rewards in processes instead.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import numpy as np

from padfree.config.functions import model_of
from padfree.config.rollout import RolloutConfig
from padfree.data import load_reward
from padfree.errors import UserError
from padfree.kept_sets import KeptSets
from padfree.rollout.base import AsyncSampler, Gather, Response, Sampler, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.environment.load_environment import environment_name, load_episode
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.group import Leaf, Play, Played, Watcher, kept_fields
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.reward_workers import DaemonPool, RewardsLater, RewardWorkers
from padfree.rollout.truncation import truncation_of

REWARD_THREADS = 64


class ResponseWriter:
    """Plays single-turn episodes: samples responses and computes their rewards.

    The class has the same public methods as `EpisodeRunner`, which plays episodes of an environment.
    """

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
        self._thread = LoopThread("rewards")  # its event loop calls the reward processes
        self.reward_seconds = 0.0  # total over all calls of `play`

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
        reward workers of this object. `watch`: callbacks for progress and responses.
        """
        reward_workers, watch = reward_workers or self._reward_workers, watch or Watcher()
        responses = {play.number: play.partial for play in plays if play.partial is not None}
        missing = [play for play in plays if play.number not in responses]

        def on_finished(finished: Sequence[tuple[int, Response]]) -> None:
            watch.on_responses([(missing[index].number, response) for index, response in finished])

        before = len(responses)
        callbacks = self._supported(on_progress=lambda done: watch.on_progress(before + done), on_finished=on_finished)
        sampled = self._sampler.sample([_request(play) for play in missing], **callbacks)
        if "on_finished" not in callbacks:
            on_finished(list(enumerate(sampled)))
        responses |= {play.number: response for play, response in zip(missing, sampled, strict=True)}
        begin = time.perf_counter()
        pairs = [(play, responses[play.number]) for play in plays]
        if reward_workers.processes or self._settings.skip_failures:
            futures = [self._rewarding(play, response, reward_workers) for play, response in pairs]
            played = [future.result() for future in futures]
        else:
            played = [self._rewarded(play, response, reward_workers) for play, response in pairs]
        self.reward_seconds += time.perf_counter() - begin
        return played

    def begin(self, plays: Sequence[Play], watch: Watcher) -> None:
        """Append the episodes `plays` to the queue of the sampler, an `AsyncSampler`, and return without waiting.

        `watch`: callbacks for responses and finished episodes.
        """
        whole = [
            play for play in plays if play.partial is not None and play.partial.is_whole(play.prompt.max_new_tokens)
        ]
        finished = {play.number for play in whole}
        rest = [play for play in plays if play.number not in finished]

        def on_rewarded(future: Future[Played]) -> None:
            error = future.exception()
            if error is None:
                watch.on_played(future.result())
            else:
                watch.on_failed(str(error) if isinstance(error, UserError) else f"rollout.reward: {error!r}")

        def compute_reward(play: Play, response: Response) -> None:
            self._rewarding(play, response, self._reward_workers).add_done_callback(on_rewarded)

        def on_response(index: int, response: Response) -> None:
            watch.on_responses([(rest[index].number, response)])
            if response.is_whole(rest[index].prompt.max_new_tokens):
                compute_reward(rest[index], response)

        for play in whole:
            compute_reward(play, cast(Response, play.partial))
        if rest:
            cast(AsyncSampler, self._sampler).begin([_request(play) for play in rest], on_response)

    def blocked(self) -> str | None:
        return None

    def close(self) -> None:
        self._pool.close()
        self._thread.close(self._reward_workers.close)

    def _supported(self, **callbacks: Any) -> dict[str, Any]:
        """Return the callbacks that the sampler's method `sample` accepts. A user's sampler may accept only some."""
        parameters = inspect.signature(self._sampler.sample).parameters
        return {name: callback for name, callback in callbacks.items() if name in parameters}

    def _leaf(self, play: Play, response: Response) -> Leaf:
        """Return the leaf (the sequence that becomes a sample) of a single-turn episode: prompt and response.

        The text for the reward keeps all special tokens except the stop token. Otherwise, the policy could exploit
        tokens that the reward does not see.
        """
        prompt, before = play.prompt.tokens, len(play.prompt.tokens)
        kept = None if response.kept is None else KeptSets.joined([KeptSets.whole(before), response.kept])
        return Leaf(
            tokens=np.concatenate([prompt, response.tokens]),
            sampled=np.arange(before + len(response.tokens)) >= before,
            logprobs=np.concatenate([np.zeros(before, np.float32), response.logprobs]),
            versions=np.concatenate([np.zeros(before, np.int64), response.token_versions]),
            **kept_fields(kept),
            ended=response.ended,
            turns=1,
            text=self.chat_tokenizer.decode(response.tokens[:-1] if response.ended else response.tokens),
            routes=response.routes,
        )

    # Rewards

    def _rewarding(self, play: Play, response: Response, reward_workers: RewardWorkers) -> Future[Played]:
        """Compute a response's reward in a thread or process. Return a future of the episode with this reward."""
        if reward_workers.processes:
            return self._thread.submit(self._by_process(play, response, reward_workers))
        future: Future[Played] = Future()

        def run() -> None:
            try:
                future.set_result(self._rewarded(play, response, reward_workers))
            except BaseException as error:  # `future.result()` raises it
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
        if not self._settings.skip_failures:
            raise error
        return Played(number=play.number, failure=str(error))


def make_writer(
    settings: RolloutConfig, sampler: Sampler, chat_tokenizer: ChatTokenizer, *, temperature: float
) -> ResponseWriter | EpisodeRunner:
    """Return the object that plays episodes: `EpisodeRunner` for an environment, otherwise `ResponseWriter`."""
    runner = RunnerSettings(
        name=environment_name(settings),
        max_concurrent=settings.max_concurrent,
        timeout=settings.episode_timeout,
        skip_failures=settings.on_failure == "skip",
        temperature=temperature,
        truncation=truncation_of(settings),
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


def _request(play: Play) -> SamplingRequest:
    prompt = play.prompt
    return SamplingRequest(
        tokens=prompt.tokens,
        max_new_tokens=prompt.max_new_tokens,
        key=play.key,
        partial=play.partial,
        images=prompt.images,
        rotary_positions=prompt.rotary_positions,
    )
