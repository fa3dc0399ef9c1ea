"""Every entry point for token ids, with the same invalid ids."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from padfree.rollout import Prompt, Response, SamplingRequest
from padfree.rollout.engines import CheckedAsyncSampler, CheckedSampler
from padfree.rollout.engines.servers.server_api import SamplingSettings, ServerLostError
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.episode_policy import ChatTokenizer
from padfree.rollout.token_ids import checked_ids, vocabulary_of
from padfree.testing.models import build
from tests.refused import refused
from tests.rollout.environment.environment_cases import VOCABULARY, Scripted, ids, play, prompt, text, tokenizer

SIZE = len(VOCABULARY)
WRONG: dict[str, Any] = {
    "above": [1, 2, 999_999],
    "just above": [SIZE],
    "negative": [3, -1],
    "int32": [2**31],
    "int64": [2**63],
    "huge": [10**400],
    "float": [1.0],
    "nan": [float("nan")],
    "true": [True],
    "null": [None],
    "text": ["1"],
    "nested": [[1, 2]],
    "numpy true": [np.True_],
    "numpy float": [np.float32(1)],
    "numpy, negative": [np.int64(-5)],
    "array of floats": np.array([1.0, 2.0]),
    "array of truth": np.array([True]),
    "array of two dimensions": np.array([[1, 2]]),
    "unsigned array": np.array([2**63], np.uint64),
    "tensor, above": torch.tensor([SIZE]),
    "bytes": b"\x01\x02",
    "set": {1, 2},
    "object": {1: 2},
    "number": 7,
    "nothing": None,
}
RIGHT: dict[str, Any] = {
    "list": [0, SIZE - 1],
    "none of them": [],
    "tuple": (1, 2),
    "numpy integers": [np.int32(1), np.uint8(2), np.int64(3)],
    "array": np.array([1, 2], np.int16),
    "tensor": torch.tensor([1, 2]),
    "range": range(3),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_ids_are_refused(which: str) -> None:
    with refused("entry_point") as caught:
        checked_ids(WRONG[which], SIZE, "entry_point")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize("which", RIGHT)
def test_right_ids_are_integers_of_python(which: str) -> None:
    found = checked_ids(RIGHT[which], SIZE, "entry_point")
    assert all(type(token) is int for token in found)
    assert found == [int(token) for token in RIGHT[which]]


def test_embeddings_without_a_token_are_allowed() -> None:
    """An embedding matrix is often padded: the policy can sample the extra ids, and programs may send them back."""
    assert vocabulary_of(build("qwen3", vocab_size=128)) == 128
    chat_tokenizer = ChatTokenizer(tokenizer(), None, SIZE + 10)
    assert chat_tokenizer.checked([SIZE + 9], "entry_point") == [SIZE + 9]
    with pytest.raises(
        ValueError, match=f"token id {SIZE + 10} at index 0 is out of range; give ids from 0 to {SIZE + 9}"
    ):
        chat_tokenizer.checked([SIZE + 10], "entry_point")


# The entry points. Each gets ids and returns the error message, or None if it accepts them.


def environment(given: Any) -> str | None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        if task.row["prompt"] == "p":
            policy.add(given)
        await policy.generate()
        return policy.trajectory(1.0)

    first, second = play(episode, lambda *_: "x$", prompt("p"), prompt("q"), skip_failures=True)
    assert second.failure is None
    return first.failure


class Knowing(Scripted):
    """A sampler that returns given responses."""

    def sample(self, requests: Sequence[SamplingRequest], *, on_progress: Any = None) -> list[Response]:
        return [self._response("", request) for request in requests]


def gateway(given: Any) -> str | None:
    answers: list[str | None] = []

    def call(url: str) -> str | None:
        body = json.dumps({"prompt": given}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body), timeout=60).close()
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["error"]["message"]) if error.code == 400 else None
        return None

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        answers.append(await asyncio.to_thread(call, await policy.base_url()))
        await policy.generate()
        return policy.trajectory(1.0)

    (played,) = play(episode, None, prompt("p"), sampler=Knowing(lambda *_: "x$"))
    assert played.failure is None, "the episode continues"
    return answers[0]


def _response(given: Any, **other: Any) -> Response:
    tokens = given if isinstance(given, np.ndarray) else np.array(given)
    parts = {"logprobs": np.full(len(tokens), -1.0, np.float32), "ended": True, "version": 0, **other}
    return Response(tokens=tokens, **parts)


REQUEST = SamplingRequest(tokens=np.array([1]), max_new_tokens=8, key=1)


class Engine:
    def __init__(self, response: Any) -> None:
        self.response, self.failure, self.stuck = response, None, False

    def update_weights(self, trained: Any, version: int) -> None: ...

    def sample(self, requests: Sequence[SamplingRequest]) -> Any:
        return [self.response for _ in requests]

    def begin(self, requests: Sequence[SamplingRequest], on_response: Any) -> None:
        on_response(0, self.response)

    def renew(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {"a": 1.0}

    def close(self) -> None: ...


def engine(given: Any) -> str | None:
    sampler = CheckedSampler(Engine(given if isinstance(given, Response) else _response(given)), "mine:engine")
    sampler.update_weights(build("qwen3", vocab_size=SIZE), 0)
    finished: list[Any] = []
    try:
        sampler.sample([REQUEST], on_finished=finished.extend)
    except ValueError as error:
        assert not finished, "the callback must not see it"
        return str(error)
    assert len(finished) == 1
    return None


def engine_ahead(given: Any) -> str | None:
    sampler = CheckedAsyncSampler(Engine(given if isinstance(given, Response) else _response(given)), "mine:engine")
    sampler.update_weights(build("qwen3", vocab_size=SIZE), 0)
    seen: list[Any] = []
    sampler.begin([REQUEST], lambda *one: seen.append(one))
    assert bool(seen) == (sampler.failure is None)
    return None if sampler.failure is None else str(sampler.failure)


class Answering(VllmServer):
    """A server that answers with one choice and has the weights of version 0."""

    def __init__(self, choice: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1", 1.0)
        self.choice = choice

    @asynccontextmanager
    async def connected(self, timeout: float | None = None) -> AsyncIterator[Any]:
        yield self

    async def call(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if path == "/weight_info":
            return {"weight_version": "0"}
        return {"model": "policy", "choices": [{"index": 0, **self.choice}]}


def server(given: Any) -> str | None:
    choice = {
        "token_ids": given,
        "logprobs": {"token_logprobs": [-1.0] * (len(given) if hasattr(given, "__len__") else 1)},
        "finish_reason": "length",
        "prompt_token_ids": [1],
    }
    asked = SamplingRequest(tokens=np.array([1]), max_new_tokens=len(given) if hasattr(given, "__len__") else 1, key=1)
    sampling = SamplingSettings(temperature=1.0, stops=(0,), vocabulary=SIZE)
    try:
        asyncio.run(Answering(choice).respond(asked, sampling, model="policy", version=0, salt="run"))
    except (ServerLostError, ValueError) as error:
        return str(error)
    return None


ENTRY_POINTS: dict[str, Callable[[Any], str | None]] = {
    "environment": environment,
    "gateway": gateway,
    "engine": engine,
    "engine_ahead": engine_ahead,
    "server": server,
}
AT_ALL_DOORS = ("above", "just above", "negative", "float", "nested", "true", "huge")


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_rejects_wrong_ids_and_accepts_right_ones(entry_point: str) -> None:
    assert ENTRY_POINTS[entry_point]([1, SIZE - 1]) is None
    for which in AT_ALL_DOORS:
        line = ENTRY_POINTS[entry_point](WRONG[which])
        assert line is not None, which
        assert "\n" not in line


def test_text_is_checked_too() -> None:
    """A token that was added to the tokenizer, but not to the model."""
    known = tokenizer()
    known.add_tokens([AddedToken("<tool>", special=True)])
    chat_tokenizer = ChatTokenizer(known, None, SIZE)
    assert chat_tokenizer.encode("ab") == ids("ab")
    for encode in (chat_tokenizer.encode, lambda said: chat_tokenizer.encode_prompt(said, begun=True)):
        with refused("model.tokenizer"):
            encode("a<tool>")


@pytest.mark.parametrize(
    ("response", "line"),
    [
        (None, "returned NoneType as a response; return a Response"),
        (_response([1], logprobs=np.zeros(2, np.float32)), r"returned logprobs as float32\[2\]; return a flat numpy"),
        (_response([1], logprobs=np.array([np.nan], np.float32)), "returned nan as a log-probability"),
        (_response([1], logprobs=np.array([0.5], np.float32)), "returned 0.5 as a log-probability"),
        (_response([1], logprobs=[-1.0]), "returned logprobs as list"),
        (_response([1], versions=np.zeros(3, np.int64)), "returned versions as int64"),
        (_response([1], ended="yes"), "returned ended='yes'"),
        (_response([1] * 9), "returned 9 tokens, more than the 8 that were requested; return 1 to 8 tokens"),
        (_response([1], ended=False), "a response of 1 tokens that has not ended"),
        (_response(np.zeros(0, np.int64)), "a response of 0 tokens"),
    ],
)
def test_other_invalid_responses_of_an_engine(response: Any, line: str) -> None:
    sampler = CheckedSampler(Engine(response), "mine:engine")
    sampler.update_weights(build("qwen3", vocab_size=SIZE), 0)
    with refused("rollout.engine", f"'mine:engine' .*{line}"):
        sampler.sample([REQUEST])


@pytest.mark.parametrize("found", [None, [], [_response([1])] * 2, 5])
def test_another_number_of_responses(found: Any) -> None:
    made = Engine(None)
    made.sample = lambda requests: found  # type: ignore[method-assign]
    with refused("rollout.engine", "'mine:engine' returned .* for 1 requests"):
        CheckedSampler(made, "mine:engine").sample([REQUEST])


def test_ids_of_an_environment_become_part_of_the_sample() -> None:
    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        policy.add(np.array(ids("yz"), np.int16))
        await policy.generate()
        return policy.trajectory(1.0)

    (played,) = play(episode, {"pyz": "a$"}, prompt("p"))
    assert text(played.leaves[0].tokens.tolist()) == "pyza$"
