"""The policy as an OpenAI-compatible API, served on this machine for agent programs (`rollout.agent`).

    http://127.0.0.1:PORT/KEY/v1/chat/completions        KEY: a secret that identifies the episode
                                 completions
                                 models

The gateway uses three modules: `listener` (the HTTP server), `call_fields` (checks the fields of a call) and `calls`
(turns the calls of an episode into token sequences).

Tokens are sampled at `loss.temperature`, because the trainer computes log-probabilities at that temperature. A call
that cannot be served gets status 400 and the reason. A bug in the gateway gives status 500 and fails the episode;
`rollout.on_failure` decides whether the run continues.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from padfree.errors import UserError, shown_error
from padfree.rollout.environment.call_fields import (
    CHAT,
    COMPLETIONS,
    check_fields,
    max_tokens_asked,
    messages_of,
    parsed,
)
from padfree.rollout.environment.calls import Calls, Context
from padfree.rollout.environment.episode_policy import ChatTokenizer, Host, Turn
from padfree.rollout.environment.listener import Answer, CallError, Listener, ListenerLimits, Reply
from padfree.rollout.environment.trajectory import Tree
from padfree.rollout.truncation import WHOLE, Truncation

MODEL = "policy"
ROUTES = {"v1/models": "GET", f"v1/{CHAT}": "POST", f"v1/{COMPLETIONS}": "POST"}


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    """An episode whose policy is served at a URL. The URL contains a secret key."""

    key: str
    tree: Tree
    calls: Calls
    pending: set[asyncio.Task[Any]] = field(default_factory=set)


class Gateway:
    """The API server, in the thread of the event loop. The server starts when the first URL is requested."""

    def __init__(
        self,
        chat_tokenizer: ChatTokenizer,
        temperature: float = 1.0,
        limits: ListenerLimits | None = None,
        *,
        truncation: Truncation = WHOLE,
    ) -> None:
        self._chat_tokenizer, self._temperature, self._truncation = chat_tokenizer, temperature, truncation
        self._listener = Listener(self._admit, limits)
        self._port: int | None = None
        self._starting = asyncio.Lock()
        self._episodes: list[_Served] = []

    async def address(self, tree: Tree, host: Host) -> str:
        """Return the base URL at which an episode can call the policy. Each episode has its own URL.

        `tree`: the tree that records the token ids of the episode.
        """
        async with self._starting:
            if self._port is None:
                self._port = await self._listener.start()
        served = next((one for one in self._episodes if one.tree is tree), None)
        if served is None:
            served = _Served(secrets.token_hex(16), tree, Calls(tree, host))
            self._episodes.append(served)
        return f"http://127.0.0.1:{self._port}/{served.key}/v1"

    def forget(self, tree: Tree) -> None:
        """Remove the URL of an episode that has ended, and cancel its API calls that have no answer yet."""
        for one in self._episodes:
            if one.tree is tree:
                for task in one.pending:
                    task.cancel()
        self._episodes = [one for one in self._episodes if one.tree is not tree]

    def close(self) -> None:
        self._listener.close()

    def _admit(self, method: str, path: str) -> Answer:
        key, _, route = path.partition("?")[0].lstrip("/").partition("/")
        given, episode = key.encode("latin-1"), None
        for one in self._episodes:  # compare all keys, so that the timing reveals nothing about them
            if hmac.compare_digest(given, one.key.encode()):
                episode = one
        if episode is None:
            raise CallError(404, "no such episode, or it has ended")
        served = episode
        return lambda raw: self._replied(served, method, route, raw)

    def _replied(self, episode: _Served, method: str, route: str, raw: bytes) -> Coroutine[Any, Any, Reply]:
        body_error = None
        body: dict[str, Any] = {}
        try:
            body = parsed(raw)
        except CallError as error:
            body_error = error
        return self._reply(episode, method, route, body, body_error)

    async def _reply(
        self, episode: _Served, method: str, route: str, body: Mapping[str, Any], body_error: CallError | None
    ) -> Reply:
        task = asyncio.current_task()
        assert task is not None
        episode.pending.add(task)
        try:
            if ROUTES.get(route) != method:
                known = ", ".join(f"{allowed} /{name}" for name, allowed in ROUTES.items())
                raise CallError(405 if route in ROUTES else 404, f"no route {method} /{route}; the routes are {known}")
            if body_error is not None:
                raise body_error
            return await self._route(episode, route.removeprefix("v1/"), body)
        except CallError as error:
            episode.tree.count("refused")
            return Reply.of_error(error)
        except RecursionError:
            episode.tree.count("refused")
            return Reply.of_error(CallError(400, "the body is nested too deeply"))
        except Exception as error:  # other episodes must continue
            problem = f"answering a call of {route} raised {shown_error(error)}"
            failure = UserError("rollout.environment", problem, "report this bug of padfree")
            episode.tree.failure = episode.tree.failure or failure
            return Reply.of_error(CallError(500, f"rollout.environment: {problem}"), last=True)
        finally:
            episode.pending.discard(task)

    # Calls

    async def _route(self, episode: _Served, route: str, body: Mapping[str, Any]) -> Reply:
        if route == "models":
            models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "padfree"}]
            return Reply(data=json.dumps({"object": "list", "data": models}).encode())
        if check_fields(body, route, self._temperature, self._truncation):
            episode.tree.count("sampling_overridden")
        chat = route == CHAT
        try:
            context = self._chat(episode.calls, body) if chat else self._prompt(episode.calls, body)
        except UserError as error:  # e.g. a chat template fails, or token ids are wrong
            raise CallError(400, str(error)) from None
        max_new_tokens = episode.calls.max_new_tokens(context)
        if max_new_tokens < 1:
            raise CallError(
                400, "the context exceeds the maximum length of a sample; shorten it", "context_length_exceeded"
            )
        max_new_tokens = int(min(max_new_tokens, max_tokens_asked(body)))
        turns = await asyncio.gather(*(episode.calls.respond(context, max_new_tokens) for _ in range(body.get("n", 1))))
        answer = completion(context, turns, chat=chat, model=body.get("model", MODEL))
        if not body.get("stream"):
            return Reply(data=json.dumps(answer).encode())
        usage = body.get("stream_options", {}).get("include_usage", False)
        return Reply(data=events(answer, usage=usage), kind="text/event-stream", last=True)

    def _chat(self, calls: Calls, body: Mapping[str, Any]) -> Context:
        if self._chat_tokenizer.chat is None:
            raise CallError(400, "the run has no chat template; call completions, or set data.prompt_format=chat")
        tools = None if body.get("tool_choice") == "none" else body.get("tools")
        return calls.of_messages(messages_of(body["messages"]), tools or None)

    def _prompt(self, calls: Calls, body: Mapping[str, Any]) -> Context:
        prompt = body["prompt"]
        if isinstance(prompt, list):
            prompt = self._chat_tokenizer.checked(prompt, "prompt")
        return calls.of_prompt(prompt)


def completion(context: Context, turns: list[Turn], *, chat: bool, model: str) -> dict[str, Any]:
    """Return the answer to an API call, in OpenAI's format. `turns`: the sampled responses.

    `chat`: whether the call is a chat completion. `model`: the model name that the call gave.
    """
    choices: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {"index": index, "finish_reason": "stop" if turn.ended else "length", "logprobs": None}
        message = {"role": "assistant", "content": turn.text}
        choices.append(choice | ({"message": message} if chat else {"text": turn.text}))
    written = sum(len(turn.tokens) for turn in turns)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": len(context.ids),
            "completion_tokens": written,
            "total_tokens": len(context.ids) + written,
        },
    }


def events(answer: Mapping[str, Any], *, usage: bool = False) -> bytes:
    """Return an answer as server-sent events: the whole text, the finish reason and, if `usage`, the token counts."""
    parts: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        chunk = {**answer, "object": answer["object"].replace("chat.completion", "chat.completion.chunk")}
        del chunk["usage"]
        rest = {"index": choice["index"], "logprobs": None}
        if "message" in choice:
            first, last = {**rest, "delta": choice["message"]}, {**rest, "delta": {}}
        else:
            first, last = {**rest, "text": choice["text"]}, {**rest, "text": ""}
        parts += [
            {**chunk, "choices": [{**first, "finish_reason": None}]},
            {**chunk, "choices": [{**last, "finish_reason": choice["finish_reason"]}]},
        ]
    if usage:
        parts = [{**part, "usage": None} for part in parts] + [{**chunk, "choices": [], "usage": answer["usage"]}]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts).encode() + b"data: [DONE]\n\n"
