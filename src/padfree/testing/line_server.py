"""A small rollout server for tests, and an example: a Hugging Face model on the CPU that speaks JSON lines over TCP.

    python -m padfree.testing.line_server --model FOLDER --port 4000 --name policy

    rollout.engine = "padfree.testing.line_server:make_line_sampler"
    rollout.servers = ["tcp://127.0.0.1:4000"]

A connection carries one call, such as `{"call": "complete", "tokens": [7, 8], ...}`. The reply is one line: `{"ok":
...}` with the result, `{"failed": "why"}` if the server failed and a retry may succeed, or `{"refused": "why"}` if the
server would also reject a retry. There is no KV cache, so the server suits tiny models only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from padfree.errors import UserError
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers.buckets import BucketForm, Receiver
from padfree.rollout.engines.servers.sampler import ServerSampler
from padfree.rollout.engines.servers.server_api import (
    Completion,
    FailedError,
    LateError,
    SamplingSettings,
    ServedModel,
    ServerApi,
    checked_tokens,
)
from padfree.rollout.engines.servers.start import make_server_sampler
from padfree.rollout.sampling_rng import GREEDY

LONGEST_LINE = 1 << 28
"""Maximum size of a request or an answer in bytes."""


def make_line_sampler(config: Any, mesh: Any, trained: Any, tokenizer: Any, score: Any) -> ServerSampler:
    """Make the sampler that requests responses from the servers of this module. The setting `rollout.engine` names this
    function.
    """
    return make_server_sampler(LineServer, config, mesh, trained, tokenizer, score)


class LineServer(ServerApi):
    """The trainer's side of the JSON-lines protocol: sends calls to one server."""

    takes_differences = True

    async def check(self, served: ServedModel) -> str:
        about = await self.call("about")
        with self.reading("the call 'about' did not return a name and a vocabulary"):
            name, vocabulary = str(about["name"]), int(about["vocabulary"])
        if vocabulary != served.vocabulary:
            raise UserError(
                "rollout.servers",
                f"{self.url} has a vocabulary of {vocabulary}, but the model of this run has {served.vocabulary}",
                "start the server with the model of model.path",
            )
        await self.resume()  # a killed run may have left the server paused
        return name

    async def version(self, *, timeout: float | None = None) -> str | None:
        about = await self.call("about", timeout=timeout)
        with self.reading("the call 'about' did not return a version"):
            return None if about["version"] is None else str(about["version"])

    async def complete(
        self, request: SamplingRequest, sampling: SamplingSettings, *, model: str, version: int, salt: str
    ) -> Completion:
        found = await self.call(
            "complete",
            tokens=request.tokens.tolist(),
            max_new_tokens=request.max_new_tokens,
            seed=request.key,
            temperature=0.0 if request.key == GREEDY else sampling.temperature,
            stops=list(sampling.stops),
            version=str(version),
        )
        with self.reading("the call 'complete' did not return tokens"):
            answered, reason = found["version"], str(found["reason"])
            tokens, logprobs = checked_tokens(found["tokens"], found["logprobs"])
        self.need_version(answered, version)
        return Completion(tokens=tokens, logprobs=logprobs, reason=reason)

    async def score(
        self, sequences: Sequence[Sequence[int]], *, num_sampled: int, temperature: float, model: str, salt: str
    ) -> list[tuple[list[int], list[float]]]:
        scored = await self.call(
            "score", sequences=list(map(list, sequences)), num_sampled=num_sampled, temperature=temperature
        )
        with self.reading("the call 'score' did not return log-probabilities"):
            return [(list(tokens), [float(value) for value in logprobs]) for tokens, logprobs in scored]

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        await self.call("resume")

    async def workers(self) -> int:
        return 1

    async def join(self, transfer_info: Mapping[str, Any]) -> None:
        await self.call("join", transfer_info=dict(transfer_info))

    async def begin(self) -> None:
        pass  # buckets are loaded as they arrive

    async def bucket(self, form: BucketForm) -> None:
        await self.call("bucket", form=form.transfer_info)

    async def finish(self, version: int) -> None:
        await self.call("finish", version=str(version))

    @classmethod
    def command(cls, arguments: Sequence[str], served: ServedModel, *, name: str, port: int) -> list[str]:
        options = ["--model", served.path, "--dtype", served.model.dtype, "--name", name, "--port", str(port)]
        return [*arguments, *options]

    async def call(self, name: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Send a call with its arguments, and return the value of `ok` in the reply. `timeout` is in seconds."""
        seconds = timeout or self.timeout
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(self.host, self.port, limit=LONGEST_LINE)
                try:
                    writer.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
        except TimeoutError:
            raise LateError(
                f"rollout.servers: {self.url} did not answer the call '{name}' within {seconds:g} s"
            ) from None
        except ConnectionRefusedError:
            raise self.lost("refused the connection") from None
        except OSError as error:
            raise self.lost(f"{name} broke the connection ({error})") from None
        with self.reading(f"the reply to the call '{name}' is not a line of JSON"):
            answer = dict(json.loads(line))
        if "refused" in answer:
            raise UserError(
                "rollout.servers",
                f"{self.url} rejected the call {name} ({answer['refused']})",
                "start the server with the model of model.path",
            )
        if "ok" not in answer:
            raise FailedError(f"rollout.servers: {self.url} failed in {name} ({answer.get('failed')})")
        return answer["ok"]


class RefusedError(Exception):
    """Raised inside the server for a call whose retry would fail too. The server replies `{"refused": "why"}`."""


class LineService:
    """The server's side of the JSON-lines protocol. The coroutine `answer_NAME` handles the call NAME."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name
        self.version: str | None = None
        self._receiver = Receiver(torch.device("cpu"))
        self._targets = dict(model.named_parameters()) | dict(model.named_buffers())
        self._compute = asyncio.Lock()
        self._running = asyncio.Event()  # set while the server is not paused
        self._running.set()
        self._pauses = 0

    async def listen(self, port: int = 0) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", port, limit=LONGEST_LINE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        try:
            request = json.loads(await reader.readline())
            answer = {"ok": await getattr(self, "answer_" + request.pop("call"))(**request)}
        except RefusedError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # report it to the trainer
            answer = {"failed": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def answer_about(self) -> dict[str, Any]:
        return {"name": self.name, "vocabulary": self.model.config.vocab_size, "version": self.version}

    async def answer_pause(self) -> None:
        self._pauses += 1
        self._running.clear()

    async def answer_resume(self) -> None:
        self._running.set()

    async def answer_join(self, transfer_info: dict[str, Any]) -> None:
        await asyncio.to_thread(self._receiver.join, transfer_info, 1)

    async def answer_bucket(self, form: dict[str, Any]) -> None:
        async with self._compute:
            self.version = None  # no version until the last bucket has arrived
            await asyncio.to_thread(self.load, BucketForm.of(form))

    @torch.no_grad()
    def load(self, form: BucketForm) -> None:
        for name, tensor in self._receiver.tensors(form):
            target = self._targets[name]
            if target.shape != tensor.shape:
                raise RuntimeError(f"{name} is {list(tensor.shape)}, not {list(target.shape)}")
            target.copy_(tensor)

    async def answer_finish(self, version: str) -> None:
        self.version = version

    async def answer_score(
        self, sequences: list[list[int]], num_sampled: int, temperature: float
    ) -> list[tuple[list[int], list[float]]]:
        scored = []
        for number, sequence in enumerate(sequences):
            given = torch.log_softmax(await self._logits(sequence), -1)
            scores = [given[position, token].item() for position, token in enumerate(sequence[1:])]
            tokens, logprobs, _ = await self._sample(sequence, num_sampled, number, temperature, stops=[])
            scored.append(([*sequence, *tokens], [*scores, *logprobs]))
        return scored

    async def answer_complete(
        self, tokens: list[int], max_new_tokens: int, seed: int, temperature: float, stops: list[int], version: str
    ) -> dict[str, Any]:
        await self._running.wait()
        sampled: tuple[list[int], list[float], str] = [], [], "length"
        own = self.version
        if own == version:
            sampled = await self._sample(tokens, max_new_tokens, seed, temperature, stops)
        return dict(zip(("tokens", "logprobs", "reason"), sampled, strict=True)) | {"version": own}

    async def _sample(
        self, prompt: list[int], max_new_tokens: int, seed: int, temperature: float, stops: list[int]
    ) -> tuple[list[int], list[float], str]:
        """Sample a response; return its tokens, their log-probabilities and the reason why the response ended.

        `stops`: token ids that end a response.
        """
        generator, pauses = torch.Generator().manual_seed(seed), self._pauses
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_new_tokens:
            logits = await self._logits([*prompt, *tokens])
            if self._pauses != pauses:
                return tokens, logprobs, "cut"
            scores = torch.log_softmax(logits[-1] / (temperature or 1.0), -1)
            token = torch.multinomial(scores.exp(), 1, generator=generator) if temperature else scores.argmax()
            tokens.append(int(token))
            logprobs.append(scores[tokens[-1]].item())
            if tokens[-1] in stops:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    async def _logits(self, tokens: list[int]) -> Tensor:
        """Return the float32 logits [n, V] of the model for these n tokens."""
        if max(tokens) >= self.model.config.vocab_size:
            raise RefusedError(f"token {max(tokens)} is not in the vocabulary")
        async with self._compute:
            return await asyncio.to_thread(self._forward, torch.tensor([tokens]))

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits[0].float()
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--dtype", default="float32")
    settings = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    model.eval()

    async def serve() -> None:
        async with await LineService(model, settings.name).listen(settings.port) as server:
            await server.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
