"""A small OpenAI-compatible server with a transformers model on the CPU, for tests of `padfree doctor`.

    with serving_openai(OpenAiService(model, tokenizer)) as url: ...

The server has the paths /v1/models, /v1/completions, /v1/chat/completions and /tokenize. Its answers also have vLLM's
fields for token ids and prompt log-probabilities; `Abilities` can turn these fields off.

The server samples with a KV cache, one request at a time, and applies `processors` (transformers' logits processors) to
every request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """The optional parts that the server supports."""

    prompt_logprobs: bool = True
    echo: bool = True
    token_ids: bool = True  # of responses
    prompt_ids: bool = True
    tokenize: bool = True


class OpenAiService:
    """The model, its tokenizer, and the routes of the server."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "served",
        abilities: Abilities | None = None,
        processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
        temperature: float | None = None,
        bos_twice: bool = False,
        generation_prompt: bool = True,
        make_cache: Callable[[Any], Any] | None = None,
    ) -> None:
        """`temperature` replaces that of requests. `bos_twice`: texts and messages get a second bos token.

        `make_cache(config)` makes the KV cache of a request.
        """
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.abilities = abilities or Abilities()
        self.processors, self.temperature = processors, temperature
        self.bos_twice, self.generation_prompt = bos_twice, generation_prompt
        self.make_cache = make_cache or (lambda config: DynamicCache(config=config))
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the JSON answer of a route."""
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name}]}
        if path == "/tokenize" and self.abilities.tokenize:
            if "messages" in body:
                return 200, {"tokens": self.ids_of_messages(body["messages"])}
            return 200, {"tokens": self.ids_of_text(body["prompt"], body.get("add_special_tokens", True))}
        if path == "/v1/completions":
            prompt = body["prompt"]
            ids = self.ids_of_text(prompt, True) if isinstance(prompt, str) else list(prompt)
            if max(ids) >= self.model.config.vocab_size:
                return 400, {"error": {"message": "a token is not in the vocabulary"}}
            return 200, {"model": self.name, "choices": [self.completion(ids, body)]}
        if path == "/v1/chat/completions":
            ids = self.ids_of_messages(body["messages"])
            choice = self.completion(ids, body)
            given = choice.pop("logprobs")
            tokens = zip(given["tokens"], given["token_logprobs"], strict=True)
            choice["logprobs"] = {"content": [{"token": token, "logprob": value} for token, value in tokens]}
            return 200, {"model": self.name, "choices": [choice]}
        return 404, {"error": {"message": "no such route"}}

    def ids_of_text(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return [self.tokenizer.bos_token_id, *ids] if self.bos_twice else list(ids)

    def ids_of_messages(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=self.generation_prompt
        )
        return self.ids_of_text(text, False)

    @torch.no_grad()
    def completion(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """Return one entry of `choices`: a response to the prompt `ids`, with log-probabilities."""
        asked = body.get("temperature", 1.0) if self.temperature is None else self.temperature
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        with self._lock:
            cache = self.make_cache(self.model.config)
            logits = self.model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0].float()
            plain = logits.log_softmax(-1)
            given = [plain[position, token].item() for position, token in enumerate(ids[1:])]
            tokens, logprobs = list[int](), list[float]()
            while len(tokens) < body["max_tokens"]:
                scores = logits[-1:] / (asked or 1.0)
                for process in self.processors:
                    scores = process(torch.tensor([ids + tokens]), scores)
                log_p = scores.log_softmax(-1)[0]
                token = int(torch.multinomial(log_p.exp(), 1, generator=generator)) if asked else int(log_p.argmax())
                tokens.append(token)
                logprobs.append(log_p[token].item())
                step = self.model(input_ids=torch.tensor([[token]]), past_key_values=cache)
                logits = step.logits[0].float()
        return self._choice(ids, given, tokens, logprobs, body)

    def _choice(
        self, ids: list[int], given: list[float], tokens: list[int], logprobs: list[float], body: dict[str, Any]
    ) -> dict[str, Any]:
        shown, values = list(tokens), list[float | None](logprobs)
        if body.get("echo") and self.abilities.echo:
            shown, values = [*ids, *tokens], [None, *given, *logprobs]
        as_ids = body.get("return_tokens_as_token_ids") and self.abilities.token_ids
        texts = [f"token_id:{token}" if as_ids else self.tokenizer.decode([token]) for token in shown]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice["logprobs"] = {"tokens": texts, "token_logprobs": values}
        if body.get("return_token_ids") and self.abilities.token_ids:
            choice["token_ids"] = tokens
        if body.get("return_token_ids") and self.abilities.prompt_ids:
            choice["prompt_token_ids"] = ids
        if body.get("prompt_logprobs") is not None and self.abilities.prompt_logprobs:
            entries = zip(ids[1:], given, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in entries)]
        return choice


class _OpenAiHandler(BaseHTTPRequestHandler):
    service: OpenAiService
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the content waits 40 ms after the headers

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def _reply(self, body: dict[str, Any]) -> None:
        status, answer = self.service.answer(self.path, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving_openai(service: OpenAiService) -> Iterator[str]:
    """Serve in a thread; yields the URL."""
    handler = type("BoundHandler", (_OpenAiHandler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
