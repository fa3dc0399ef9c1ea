"""Play an environment without a model, e.g. in a test: the turns of the policy are given as text.

leaves = rehearse(episode, "48/2?", ["<<48/2=", "#### 24"], tokenizer)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padfree.data import load_reward
from padfree.data.chat_renderer import ChatRenderer
from padfree.data.image_processor import ImageSettings
from padfree.errors import UserError
from padfree.rollout.base import OnFinished, OnProgress, Response, SamplingRequest
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode
from padfree.rollout.environment.runner import EpisodeRunner, RunnerSettings
from padfree.rollout.group import Leaf, Play, RolloutGroup
from padfree.rollout.prompts import Prompt
from padfree.rollout.reward_workers import RewardWorkers
from padfree.rollout.token_ids import tokenizer_size


def rehearse(
    episode: Episode,
    prompt: str,
    turns: Sequence[str],
    tokenizer: Any,
    *,
    row: Mapping[str, Any] | None = None,
    chat: bool = False,
    max_new_tokens: int = 1000,
    reward: str | None = None,
    images: ImageSettings | None = None,
) -> tuple[Leaf, ...]:
    """Play an episode in which the policy writes `turns` in order. Return the sequences that become samples (leaves).

    An eos token ends each turn. `chat`: whether the chat template renders the environment's replies. `reward`: the
    value of `rollout.reward`. `images`: how a vision-language model reads images in the replies.
    """
    renderer = ChatRenderer(tokenizer) if chat else None
    chat_tokenizer = ChatTokenizer(tokenizer, renderer, tokenizer_size(tokenizer), images)
    reward_workers = None if reward is None else RewardWorkers(load_reward(reward))
    settings = RunnerSettings(name="the episode", max_concurrent=1, timeout=60.0, skip_failures=False)
    runner = EpisodeRunner(
        episode, _Turns(turns, chat_tokenizer, tokenizer.eos_token_id), chat_tokenizer, reward_workers, settings
    )
    given = Prompt(
        tokens=np.array(chat_tokenizer.encode(prompt), np.int64),
        max_new_tokens=max_new_tokens,
        row={"prompt": prompt, **(row or {})},
        uid="rehearsal",
        source="rehearsal",
    )
    try:
        (played,) = runner.play([Play(number=0, group=RolloutGroup(prompt=given, size=1), key=1)], lambda own: [own])
    finally:
        runner.close()
    return played.leaves


class _Turns:
    """A sampler that returns the texts in `turns` as responses, one after the other, instead of using a model.

    Each token has a log-probability of -1.
    """

    def __init__(self, turns: Sequence[str], chat_tokenizer: ChatTokenizer, eos: int) -> None:
        self._turns, self._chat_tokenizer, self._eos = list(turns), chat_tokenizer, eos

    def update_weights(self, trained: Any, version: int) -> None:
        raise AssertionError("there is no model")

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        return [self._response(request) for request in requests]

    def _response(self, request: SamplingRequest) -> Response:
        if not self._turns:
            raise UserError(
                "turns", "no text is left for another call of policy.generate", "give one text for each call"
            )
        ids = [*self._chat_tokenizer.encode(self._turns.pop(0)), self._eos][: request.max_new_tokens]
        tokens = np.array(ids, np.int64)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        return Response(tokens=tokens, logprobs=logprobs, ended=ids[-1] == self._eos, version=0)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass
