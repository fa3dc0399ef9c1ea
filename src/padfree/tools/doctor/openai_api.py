"""A client that asks OpenAI-compatible servers for token ids and log-probabilities.

    route                  input                what the server can return about the input
    /v1/completions        token ids            log-probabilities (`prompt_logprobs` of vLLM, or `echo`)
                           text                 token ids
    /v1/chat/completions   messages             token ids
    /tokenize              text or messages     token ids

The first two routes can also return the token ids of the response and their log-probabilities. Fields and routes that
OpenAI's own API does not have are optional. `ServerProbe.missing` names features that the server lacks.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from padfree.errors import UserError

SETTING = "--server"
KEY = "OPENAI_API_KEY"

PLAIN_SAMPLING = {"top_p": 1.0, "n": 1, "stream": False}
PLAIN_EXTRAS = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Request options that OpenAI's API does not have. If a server rejects them, requests are sent without them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServerAnswer:
    """One response of a server. A field is None if the server did not return it."""

    prompt_ids: list[int] | None
    prompt_logprobs: list[float] | None  # of all tokens of the prompt except the first
    tokens: list[int] | None
    logprobs: list[float] | None

    @property
    def is_scored(self) -> bool:
        """Return whether each token of the response has a log-probability."""
        return bool(self.tokens) and self.logprobs is not None and len(self.tokens or ()) == len(self.logprobs)


class RejectedError(UserError):
    """Raised if the server rejects a request with a status below 500."""


@dataclass(slots=True)
class ServerProbe:
    """A connection to an OpenAI-compatible server. `missing` names features that the server lacks."""

    url: str
    token_ids: Mapping[str, int]  # the id of each token by its text, for servers that return texts instead of ids
    timeout: float = 120.0
    name: str = ""
    missing: set[str] = field(default_factory=set)
    _extras: bool = True

    @staticmethod
    def at(url: str, token_ids: Mapping[str, int], name: str | None, timeout: float) -> ServerProbe:
        """Connect to a server. `name`: the model to ask for; None: the first model that the server lists."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(SETTING, "", "give a URL with http:// or https://, e.g. http://127.0.0.1:8000", value=url)
        probe = ServerProbe(url.rstrip("/").removesuffix("/v1"), token_ids, timeout)
        answer = probe.call("/v1/models")
        listed = answer.get("data") if isinstance(answer, dict) else None
        names = [str(entry["id"]) for entry in listed or () if isinstance(entry, dict) and "id" in entry]
        if name is not None and names and name not in names:
            raise UserError("--name", "is not served", f"give one of {', '.join(names)}", value=name)
        if name is None and not names:
            raise UserError(SETTING, f"{probe.url}/v1/models names no model", "give the name with --name")
        probe.name = name or names[0]
        return probe

    def call(self, path: str, body: Any = None) -> Any:
        """Return the JSON answer of a route, after a GET request or, with `body`, a POST request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            text = " ".join(error.read().decode(errors="replace").split())[:200]
            kind = RejectedError if error.code < 500 else UserError
            raise kind(
                SETTING, f"{self.url}{path} answered {error.code} ({text})", "read the log of the server"
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                SETTING, f"{self.url}{path} cannot be read ({reason})", "start the server, and give its URL"
            ) from None

    def complete(
        self, prompt: Sequence[int] | str, *, max_tokens: int, temperature: float, seed: int = 0
    ) -> ServerAnswer:
        """Ask for a completion, with the log-probabilities of prompt and response."""
        body = {
            "model": self.name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 1,
        }
        if "prompt log-probabilities" not in self.missing and not isinstance(prompt, str):
            body["prompt_logprobs"] = 0
        answer = _read(self._asked("/v1/completions", body), self.token_ids)
        if answer.prompt_logprobs is None and "prompt_logprobs" in body:
            echoed = self._echoed(body, len(prompt))
            if echoed is not None:
                return echoed
            self.missing.add("prompt log-probabilities")
        return answer

    def _echoed(self, body: dict[str, Any], length: int) -> ServerAnswer | None:
        """Ask for a completion with OpenAI's option `echo`, which also gives the prompt's log-probabilities.

        Return None if the server does not support `echo`.
        """
        try:
            found = self._asked("/v1/completions", {**body, "echo": True, "prompt_logprobs": None})
        except RejectedError:
            return None
        answer = _read(found, self.token_ids)
        if answer.logprobs is None or len(answer.logprobs) <= length:
            return None
        tokens = None if answer.tokens is None else answer.tokens[-(len(answer.logprobs) - length) :]
        return ServerAnswer(
            prompt_ids=answer.prompt_ids,
            prompt_logprobs=answer.logprobs[1:length],
            tokens=tokens,
            logprobs=answer.logprobs[length:],
        )

    def chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float) -> ServerAnswer:
        body = {
            "model": self.name,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": 0,
            "logprobs": True,
            "top_logprobs": 0,
        }
        return _read(self._asked("/v1/chat/completions", body), self.token_ids)

    def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Ask the route /tokenize for the ids of a text or of messages. Return None if the server has no such route."""
        try:
            answer = self.call("/tokenize", {"model": self.name, **body})
        except UserError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None

    def _asked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {key: value for key, value in (PLAIN_SAMPLING | body).items() if value is not None}
        answer: Any
        if self._extras:
            try:
                answer = self.call(path, {**PLAIN_EXTRAS, **body})
            except RejectedError:
                answer = self.call(path, {key: value for key, value in body.items() if key != "prompt_logprobs"})
                self._extras = False
                self.missing.add("options beyond OpenAI's own")
        else:
            answer = self.call(path, {key: value for key, value in body.items() if key != "prompt_logprobs"})
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list) or not answer["choices"]:
            raise UserError(SETTING, f"{self.url}{path} returned no choices", "give an OpenAI-compatible server")
        return answer


def _read(answer: dict[str, Any], token_ids: Mapping[str, int]) -> ServerAnswer:
    """Read the first of the `choices` in the JSON object that a server returned for a completion or chat completion."""
    choice = answer["choices"][0]
    given = choice.get("logprobs") or {}
    logprobs, texts = given.get("token_logprobs"), given.get("tokens")
    if isinstance(given.get("content"), list):  # of a chat completion
        logprobs = [entry.get("logprob") for entry in given["content"]]
        texts = [entry.get("token") for entry in given["content"]]
    if isinstance(logprobs, list) and logprobs and logprobs[0] is None:
        logprobs = [0.0, *logprobs[1:]]  # with `echo`, the first token of the prompt has no log-probability
    tokens = choice.get("token_ids")
    if tokens is None and isinstance(texts, list):
        tokens = [_id_of(text, token_ids) for text in texts]
        if None in tokens and isinstance(logprobs, list):  # later tokens cannot be scored without this one
            known = tokens.index(None)
            tokens, logprobs = tokens[:known], logprobs[:known]
    if not _all(tokens, int) or not _all(logprobs, (int, float)):
        tokens, logprobs = None, logprobs if _all(logprobs, (int, float)) else None
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return ServerAnswer(
        prompt_ids=prompt_ids if _all(prompt_ids, int) else None,
        prompt_logprobs=_prompt_logprobs(choice.get("prompt_logprobs"), prompt_ids),
        tokens=tokens,
        logprobs=logprobs,
    )


def _id_of(text: Any, token_ids: Mapping[str, int]) -> int | None:
    if isinstance(text, str) and text.startswith("token_id:"):
        return int(text.removeprefix("token_id:"))
    return token_ids.get(text)


def _all(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def _prompt_logprobs(entries: Any, prompt_ids: Any) -> list[float] | None:
    """Return the log-probabilities of the prompt tokens from vLLM's `prompt_logprobs`.

    The entry of a token is {id: {"logprob": ...}}. It may have a second id, that of the most likely token.
    """
    if not isinstance(entries, list) or len(entries) < 2:
        return None
    found = []
    for number, entry in enumerate(entries[1:], 1):
        if not isinstance(entry, dict) or not entry:
            return None
        own = (
            str(prompt_ids[number]) if isinstance(prompt_ids, list) and number < len(prompt_ids) else next(iter(entry))
        )
        value = entry.get(own, next(iter(entry.values())))
        found.append(float(value["logprob"]))
    return found


def unique_texts(tokenizer: Any, vocabulary: int) -> dict[str, int]:
    """Map the text of each token to its id. Texts that several tokens have in common are left out."""
    found: dict[str, int] = {}
    repeated = set()
    for token in range(min(vocabulary, len(tokenizer))):
        text = str(tokenizer.decode([token]))
        if text in found:
            repeated.add(text)
        found[text] = token
    return {text: token for text, token in found.items() if text not in repeated}
