"""OpenAI's interface to the policy, served on this machine for programs that are environments.

    http://127.0.0.1:PORT/KEY/v1/chat/completions        KEY: one for each episode, so that its calls are its own
                                 completions
                                 models

The program says what it always says; `padfree.rollout.environment.calls` makes branches of it. Tokens are drawn at
`loss.temperature`, because the log-probabilities that are trained with are those: other settings of drawing in a call
are not followed, and such calls are counted. What would change which tokens can be written is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from padfree.rollout.environment.calls import Calls, Context
from padfree.rollout.environment.policy import Host, Turn, Words
from padfree.rollout.environment.trajectory import Tree

MODEL = "policy"
REFUSED = ("stop", "logit_bias", "echo", "suffix", "logprobs", "best_of")
"""What a call may not ask for."""
DRAWING = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "top_k": None}
LARGEST_BODY = 1 << 26


class CallError(Exception):
    """A call that is answered with an error, as the interface has them."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Gateway:
    """The server, begun with the first address that is asked for. All of it runs in the thread of the loop."""

    def __init__(self, words: Words, temperature: float = 1.0) -> None:
        self._words, self._temperature = words, temperature
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Lock | None = None
        self._episodes: dict[str, tuple[Tree, Calls]] = {}

    async def address(self, tree: Tree, host: Host) -> str:
        """Of one episode; always the same."""
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        known = [key for key, (one, _) in self._episodes.items() if one is tree]
        key = known[0] if known else secrets.token_hex(12)
        self._episodes.setdefault(key, (tree, Calls(tree, host)))
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/{key}/v1"

    def forget(self, tree: Tree) -> None:
        """The episode has ended: its address is gone."""
        self._episodes = {key: entry for key, entry in self._episodes.items() if entry[0] is not tree}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    # HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the program is gone
            try:
                while await self._exchange(reader, writer):
                    pass
            finally:
                writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            return False
        method, path, _ = (head[0] + "  ").split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        stays = headers.get("connection", "").lower() != "close"
        streamed = False
        try:
            body = await self._body(reader, writer, headers)
            answer, streamed = await self._answered(method, path, body)
            status = 200
        except CallError as error:
            answer = {"error": {"message": str(error), "type": "invalid_request_error", "code": error.code}}
            status = error.status
        if streamed:
            data, kind, stays = events(answer), "text/event-stream", False
        else:
            data, kind = json.dumps(answer).encode(), "application/json"
        writer.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
            f"Connection: {'keep-alive' if stays else 'close'}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        return stays

    async def _body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        if "transfer-encoding" in headers:
            raise CallError(411, "give the length of the body (Content-Length)")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > LARGEST_BODY:
            raise CallError(413, f"a body of {length} bytes")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = await reader.readexactly(int(length))
        try:
            body = json.loads(raw or b"{}")
        except ValueError as error:
            raise CallError(400, f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise CallError(400, "the body is no JSON object")
        return body

    # Calls

    async def _answered(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The answer, and whether it is wanted as a stream of events."""
        key, _, route = path.partition("?")[0].lstrip("/").partition("/")
        if key not in self._episodes:
            raise CallError(404, "no such episode, or it has ended")
        tree, calls = self._episodes[key]
        if (method, route) == ("GET", "v1/models"):
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "padfree"}]}, False
        if method != "POST" or route not in ("v1/chat/completions", "v1/completions"):
            raise CallError(404, f"no route {method} /{route}; there are chat/completions, completions and models")
        self._check(tree, body)
        chat = route == "v1/chat/completions"
        try:
            context = self._messages(calls, body) if chat else self._prompt(calls, body)
        except ValueError as error:  # of the chat template
            raise CallError(400, str(error)) from None
        room = self._room(tree, calls.room(context), body)
        turns = await asyncio.gather(*(calls.respond(context, room) for _ in range(self._number(body))))
        return completion(context, turns, chat=chat, model=str(body.get("model", MODEL))), bool(body.get("stream"))

    def _check(self, tree: Tree, body: Mapping[str, Any]) -> None:
        for name in REFUSED:
            if body.get(name):
                raise CallError(400, f"{name} is not supported: every token is drawn as the policy is trained")
        form = body.get("response_format")
        if form is not None and form != {"type": "text"}:
            raise CallError(400, "response_format is not supported: every token is drawn as the policy is trained")
        neutral = {**DRAWING, "temperature": self._temperature}
        if any(body.get(name) not in (None, value) for name, value in neutral.items()):
            tree.count("drawn_otherwise")

    def _messages(self, calls: Calls, body: Mapping[str, Any]) -> Context:
        messages = body.get("messages")
        if self._words.chat is None:
            raise CallError(400, "the run has no chat template; ask for completions, or set data.prompt_format=chat")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise CallError(400, "messages: give a list of objects with role and content")
        plain = [{**one, "content": content_of(one.get("content"))} for one in messages]
        return calls.of_messages(plain, body.get("tools") or None)

    def _prompt(self, calls: Calls, body: Mapping[str, Any]) -> Context:
        prompt = body.get("prompt")
        ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise CallError(400, "prompt: give a text, or a list of token ids")
        return calls.of_prompt(prompt)

    def _room(self, tree: Tree, room: int, body: Mapping[str, Any]) -> int:
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if asked is not None and (type(asked) is not int or asked < 1):
            raise CallError(400, f"max_tokens: {asked!r}; give 1 or more")
        if room < 1:
            tree.count("refused")
            raise CallError(400, "the context is longer than a sample of the run may be", "context_length_exceeded")
        return room if asked is None else min(room, asked)

    def _number(self, body: Mapping[str, Any]) -> int:
        number = body.get("n") or 1
        if type(number) is not int or not 1 <= number <= 128:
            raise CallError(400, f"n: {number!r}; give 1 to 128")
        return number


def content_of(content: Any) -> str:
    """The text of a message: itself, or its parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise CallError(400, "messages: content that is no text")


def completion(context: Context, turns: list[Turn], *, chat: bool, model: str) -> dict[str, Any]:
    """The answer to a call."""
    choices: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {"index": index, "finish_reason": "stop" if turn.ended else "length", "logprobs": None}
        said = {"role": "assistant", "content": turn.text}
        choices.append(choice | ({"message": said} if chat else {"text": turn.text}))
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


def events(answer: Mapping[str, Any]) -> bytes:
    """The same answer as a stream: all words at once, then how it ended."""
    parts = []
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
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts).encode() + b"data: [DONE]\n\n"
