"""A fake vLLM server with a plain HF model. It can be made to fail.

    with serving(FakeVllm(vocabulary=50)) as url: ...                in a thread of the test, without a model
    launch_of(url)                                                   a proxy process for it, for `rollout.launch`

    fake.fault = "500"          every completion fails like this until it is None; see `FAULTS`

It receives weights like the plugin: by broadcast in a process group, or from files.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch

from padfree.rollout.engines.servers.buckets import BucketForm, Receiver

NEEDED_PARTS = {
    "/v1/completions": {"weights", "kv_cache"},
    "/inference/v1/generate": {"weights", "kv_cache"},
    "/v1/load_lora_adapter": {"weights"},
    "/start_weight_update": {"weights"},
    "/update_weights": {"weights"},
    "/finish_weight_update": {"weights"},
    "/resume": {"weights", "kv_cache"},
}
"""The parts of a server that a route uses. While one of them sleeps, the route fails."""
FAULTS = ("500", "hang", "half", "malformed", "list", "cut", "abort", "short", "logprobs", "version", "other model")


class FakeVllm:
    """The state and the routes of a server."""

    def __init__(self, *, vocabulary: int = 50, model: Any = None, tokenizer: Any = None, name: str = "policy") -> None:
        self.vocabulary, self.model, self.tokenizer, self.name = vocabulary, model, tokenizer, name
        self.fault: str | None = None
        self.stale = False  # it reports success without loading weights
        self.version = "default"
        self.backend, self.logprobs_mode, self.stops = "padfree", "processed_logprobs", ()
        self.missing: set[str] = set()  # routes that return 404
        self.failing: set[str] = set()  # routes that return 500
        self.release = "0.32.0"  # the version of vLLM
        self.returns_kept: bool | None = (
            False  # the option --return-sampling-mask; None: this version has no such option
        )
        self.scales_out = True  # the option --enable-scale-out
        self.routed_experts: Any = None  # function of the number of tokens that gives the experts of each input
        self.max_model_len = 512
        self.seconds = 0.0  # duration of a completion
        self.token_seconds = 0.0  # and of each of its tokens
        self.completed: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.most_at_once = self.at_once = 0
        self._lock, self._compute = threading.Lock(), threading.Lock()
        self._receiver = Receiver(torch.device("cpu"))
        self._updating = False
        self.sleep_mode = True  # the option --enable-sleep-mode
        self.asleep: set[str] = set()  # the parts that sleep: weights, kv_cache
        self.levels: list[int] = []  # the level of each sleep
        self.broken: list[str] = []  # calls that would have read memory of a sleeping part, or discarded weights
        self.discarded = False  # whether the weights are lost
        self.paused, self._pauses = False, 0
        self._resumed = threading.Event()
        self._resumed.set()
        self._loaded = {} if model is None else {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def answer(self, path: str, body: dict[str, Any], query: str = "") -> tuple[int, Any]:
        """Return the status and the JSON answer of a route."""
        self.calls.append(path + (f"?{query}" if path in ("/sleep", "/wake_up") else ""))
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        if path in self.failing:
            return 500, {"error": {"message": "the engine failed"}}
        needed = NEEDED_PARTS.get(path, set())
        if needed & self.asleep:
            self.broken.append(path)
            return 500, {"error": {"message": f"{path} needs {sorted(needed & self.asleep)}, which sleeps"}}
        if path in ("/v1/completions", "/inference/v1/generate"):
            with self._lock:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                return self._complete(body) if path == "/v1/completions" else self._generate(body)
            finally:
                with self._lock:
                    self.at_once -= 1
        routes = {
            "/health": dict,
            "/restart": lambda: self._restart(body["name"]),
            "/version": lambda: {"version": self.release},
            "/weight_info": lambda: {"weight_version": "77" if self.fault == "version" else self.version},
            "/get_world_size": lambda: {"world_size": 1},
            "/v1/models": lambda: {"data": [{"id": self.name, "max_model_len": self.max_model_len}]},
            "/server_info": lambda: {
                "vllm_config": {
                    "model_config": {
                        "logprobs_mode": self.logprobs_mode,
                        "skip_tokenizer_init": self.tokenizer is None,
                        "enable_sleep_mode": self.sleep_mode,
                        "enable_return_routed_experts": self.routed_experts is not None,
                        **({} if self.returns_kept is None else {"return_sampling_mask": self.returns_kept}),
                    },
                    "weight_transfer_config": {"backend": self.backend},
                }
            },
            "/tokenize": lambda: {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]},
            "/v1/unload_lora_adapter": lambda: "Success: LoRA adapter removed successfully.",
            "/pause": lambda: self._pause(True),
            "/resume": lambda: self._pause(False),
            "/sleep": lambda: self._sleep(int(parse_qs(query)["level"][0])),
            "/wake_up": lambda: self._wake(parse_qs(query)["tags"]),
            "/is_sleeping": lambda: {"is_sleeping": self.paused or bool(self.asleep)},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/reset_prefix_cache": lambda: {"success": True},
            "/init_weight_transfer_engine": lambda: self._join(body["init_info"]),
            "/start_weight_update": lambda: self._start(),
            "/update_weights": lambda: self._take(body["update_info"]),
            "/finish_weight_update": lambda: self._finish(body),
            "/update_weight_version": lambda: self._relabel(body["new_version"]),
        }
        if path not in routes:
            return 404, {"detail": "Not Found"}
        try:
            return 200, routes[path]()
        except RuntimeError as error:
            return 500, {"error": {"message": str(error)}}

    def _restart(self, name: str) -> dict[str, Any]:
        """Reset it to the state of a new process, without the weights it received."""
        self.name, self.version = name, "default"
        self._receiver.leave()
        self._updating = False
        self.asleep.clear()
        self.discarded = False
        if self.model is not None:
            with self._compute:
                self.model.load_state_dict(self._loaded)
        return self._pause(False)

    def _sleep(self, level: int) -> dict[str, Any]:
        """Sleeping pauses the scheduler. With level 2, the weights are lost."""
        if not self.sleep_mode:
            raise RuntimeError("sleep mode is not enabled")
        self._pause(True)
        if self.asleep:
            return {}  # vLLM 0.24 ignores this call if any part sleeps
        self.asleep, self.levels = {"weights", "kv_cache"}, [*self.levels, level]
        self.discarded = level == 2
        if self.discarded and self.model is not None:
            with torch.no_grad(), self._compute:
                for parameter in self.model.parameters():
                    parameter.fill_(torch.nan)
        return {}

    def _wake(self, tags: list[str]) -> dict[str, Any]:
        """Wake these parts. vLLM resumes the scheduler as soon as no part sleeps."""
        self.asleep -= set(tags)
        return {} if self.asleep else self._pause(False)

    # Weights

    def _pause(self, paused: bool) -> dict[str, Any]:
        """A pause ends responses in progress with their tokens so far; later requests wait until it ends."""
        self.paused = paused
        if paused:
            self._pauses += 1
            self._resumed.clear()
        else:
            self._resumed.set()
        return {}

    def _join(self, transfer_info: dict[str, Any]) -> dict[str, Any]:
        self._receiver.join(transfer_info, rank=1)
        return {}

    def _start(self) -> dict[str, Any]:
        if self._updating:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._updating = True
        return {}

    def _take(self, transfer_info: dict[str, Any]) -> dict[str, Any]:
        arrived = dict(self._receiver.tensors(BucketForm.of(transfer_info)))
        if self.model is not None and not self.stale:
            targets = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            with torch.no_grad(), self._compute:
                for name, tensor in arrived.items():
                    targets[name].copy_(tensor)
        return {}

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        self._updating = False
        self.discarded &= "weight_version" not in body
        self.version = body.get("weight_version", self.version)
        return {}

    def _relabel(self, version: str) -> dict[str, Any]:
        self.version = version
        return {}

    # Completions

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """The route that returns kept sets; it has other names for fields than the route for completions."""
        if not self.scales_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        given = {name: body[name] for name in ("model", "cache_salt") if name in body}
        status, answer = self._complete({**given, **body["sampling_params"], "prompt": body["token_ids"]})
        for choice in answer["choices"] if status == 200 and isinstance(answer, dict) else ():
            logprobs = [{"logprob": value} for value in choice["logprobs"]["token_logprobs"]]
            choice["logprobs"] = {"content": logprobs}
            choice["sampling_mask"] = choice.pop("kept") if self.returns_kept else None
            answer["prompt_token_ids"] = choice.pop("prompt_token_ids")
        return status, answer

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        fault = self.fault
        if self.returns_kept and (body.get("temperature", 1.0) <= 0 or body.get("top_k", 0) <= 0):
            return 400, {"error": {"message": "sampling distribution replay requires temperature > 0 and top_k > 0"}}
        self._resumed.wait(60)
        time.sleep(self.seconds)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if max(max(prompt) for prompt in prompts) >= self.vocabulary:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        if self.discarded:
            self.broken.append("weights")
            return 500, {"error": {"message": "the weights were discarded"}}
        if max(len(prompt) for prompt in prompts) + body["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": "This model's maximum context length is exceeded"}}
        if fault == "500":
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        if fault == "hang":
            time.sleep(30)
        choices = [self._choice(index, prompt, body) for index, prompt in enumerate(prompts)]
        if fault == "half":
            choices = choices[: len(choices) // 2]
        for choice in choices:
            if fault == "abort":
                choice["finish_reason"] = "abort"
            if fault == "short":
                choice["token_ids"] = choice["token_ids"][:-1]
            if fault == "logprobs":
                choice["logprobs"]["token_logprobs"] = [0.5] * len(choice["token_ids"])
        with self._lock:
            self.completed.append(body)
        answer: Any = {"model": "another" if fault == "other model" else body["model"], "choices": choices}
        return 200, [answer] if fault == "list" else answer

    def _choice(self, index: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs, kept = list(prompt), [], []
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        ends = {*body.get("stop_token_ids", ()), *self.stops}
        reason, given, pauses = "length", [], self._pauses
        if body.get("prompt_logprobs") is not None:
            with torch.no_grad(), self._compute:
                scores = torch.log_softmax(self._logits(tokens), -1)
            given = [scores[position, token].item() for position, token in enumerate(tokens[1:])]
        for count in range(body["max_tokens"]):
            self._before_token(body, count, pauses)
            with torch.no_grad(), self._compute:
                if self._pauses != pauses:
                    reason = "abort"
                    break
                logits = self._logits(tokens)[-1] / (body.get("temperature", 1.0) or 1.0)
            mask = kept_ids(logits, body, ends if count < body.get("min_tokens", 0) else set())
            last = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
            greedy = body.get("temperature", 1.0) == 0
            token = int(last.argmax() if greedy else torch.multinomial(last.exp(), 1, generator=generator))
            tokens.append(token)
            kept.append(mask.nonzero()[:, 0].tolist())
            logprobs.append(last[token].item())
            if token in ends:
                reason = "stop"
                break
        return {
            "index": index,
            "finish_reason": reason,
            "prompt_token_ids": prompt,
            "token_ids": tokens[len(prompt) :],
            "logprobs": {"token_logprobs": logprobs},
            "kept": kept,
            "prompt_logprobs": [None, *({str(t): {"logprob": v}} for t, v in zip(prompt[1:], given, strict=False))],
            "routed_experts": None if self.routed_experts is None else self.routed_experts(len(tokens)),
        }

    def _before_token(self, body: dict[str, Any], count: int, pauses: int) -> None:
        """Called before each token of a response with `count` tokens that started after `pauses` pauses."""
        time.sleep(self.token_seconds)

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [n, V] float32; without a model all tokens have the same logit."""
        if self.model is None:
            return torch.zeros(len(tokens), self.vocabulary)
        return self.model(input_ids=torch.tensor([tokens])).logits[0].float()


def kept_ids(logits: torch.Tensor, body: dict[str, Any], refused: set[int]) -> torch.Tensor:
    """[V] bools: the ids that vLLM samples from. It applies min-p first, then top-k, then top-p."""
    mask = torch.ones(len(logits), dtype=torch.bool)
    mask[list(refused)] = False
    p = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1)
    mask &= p >= body.get("min_p", 0.0) * p.max()
    order = p.masked_fill(~mask, 0.0).argsort(descending=True)
    if 0 < body.get("top_k", 0) < len(logits):
        mask[order[body["top_k"] :]] = False
    if body.get("top_p", 1.0) < 1:
        q = p.masked_fill(~mask, 0.0)[order] / p[mask].sum()
        mask[order[q.cumsum(0) - q >= body["top_p"]]] = False
    return mask


class Remembering(FakeVllm):
    """Records the weights of every version."""

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._finish(body)
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.__dict__.setdefault("weights", {})[int(self.version)] = state
        return answer


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVllm
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the content waits 40 ms after the headers

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply(json.loads(content) if content else {})

    def _reply(self, body: dict[str, Any]) -> None:
        path, _, query = self.path.partition("?")
        status, answer = self.fake.answer(path, body, query)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        length = len(content)
        if path == "/v1/completions" and self.fake.fault == "malformed":
            content = b"<html>bad gateway</html>"
            length = len(content)
        if path == "/v1/completions" and self.fake.fault == "cut":
            content = content[: len(content) // 2]
            self.close_connection = True
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the client has closed the connection

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_server(fake: FakeVllm, port: int = 0) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    return server


@contextmanager
def serving(*fakes: FakeVllm) -> Iterator[list[str]]:
    """Serve each of these in a thread; the URLs."""
    servers = [make_server(fake) for fake in fakes]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def launch_of(urls: Sequence[str]) -> dict[str, Any]:
    """Settings `rollout.launch` that start a proxy process for each URL."""
    command = [sys.executable, str(Path(__file__).with_name("proxy.py")), *urls]
    return {"command": command, "devices": [str(number) for number in range(len(urls))]}
