"""`VllmServer`: the HTTP interface of a vLLM server. `vllm_plugin` runs inside the server.

The policy version of the server's weights is read before and after each complete response. If both readings are equal,
all tokens were sampled from the weights of this version.

For a weight sync, vLLM is paused in mode `abort`: requests end with the tokens sampled so far. A request that continues
such a partial response computes its keys and values with the new weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from padfree.errors import UserError
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers.buckets import BucketForm
from padfree.rollout.engines.servers.http import HttpConnection, HttpServer
from padfree.rollout.engines.servers.read_kept_sets import read_kept_sets
from padfree.rollout.engines.servers.routed_experts import read_routed_experts
from padfree.rollout.engines.servers.sampler import ServerSampler
from padfree.rollout.engines.servers.server_api import (
    Completion,
    IncompleteError,
    SamplingSettings,
    ServedModel,
    ServerLostError,
    checked_tokens,
)
from padfree.rollout.engines.servers.start import make_server_sampler
from padfree.rollout.engines.vllm_images import GENERATE as GENERATE_FROM_IMAGES
from padfree.rollout.engines.vllm_images import STORE, ImageClient
from padfree.rollout.sampling_rng import GREEDY

SUPPORTED = ((0, 24), (0, 33))
"""The oldest and the newest supported version of vLLM."""

START = 'start the server with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "padfree"}\''
LORA = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
KEPT = "start the server with --return-sampling-mask, --enable-scale-out and --logprobs-mode processed_logprobs"
SLEEP = "start the server with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
IMAGES = "use vLLM 0.32 or newer, and start the server with --enable-scale-out and --no-mm-device-do-normalize"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"  # returns kept sets
KEPT_SINCE = "0.30"  # the first version of vLLM that has this route and its options

_OWN_WEIGHTS = "default"  # version of the weights that vLLM loaded itself
_SEEDS = (1 << 63) - 1  # a mask that makes seeds non-negative: to vLLM, -1 means no seed
_EVERY_ID = (1 << 31) - 1  # as top_k: the whole vocabulary; with --return-sampling-mask, vLLM refuses 0
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank


def make_vllm_sampler(*arguments: Any) -> ServerSampler:
    """Make the sampler of `rollout.engine=vllm`, with the arguments of `make_sampler`."""
    return make_server_sampler(VllmServer, *arguments)


class VllmServer(HttpServer):
    """A vLLM server with padfree's plugin."""

    takes_adapters = True
    takes_differences = True
    takes_truncation = True
    can_sleep = True
    image_inputs = ("pixel_values", "image_grid_thw")
    fix_route = START
    fix_stops = "start the server with --generation-config vllm"
    fix_length = "start the server with --max-model-len {length} or more"
    fix_name = "start all servers with the same --served-model-name"
    fix_weights = "use padfree's transfer on a vLLM that can reload this model, or raise rollout.canary"
    fix_temperature = "start the server with --logprobs-mode processed_logprobs"

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(url, timeout)
        self._images = ImageClient()

    # Before a run

    async def check(self, served: ServedModel) -> str:
        await self.version()
        was_asleep = await self._end_interrupted_sync()
        name = (await self.models(fix="set the URL of a vLLM server"))[0]
        release = await self._check_release()
        options = (await self.call("GET", "/server_info?config_format=json")).get("vllm_config")
        if not isinstance(options, dict) or not isinstance(options.get("model_config"), dict):
            raise self.lost("/server_info returned no vllm_config")
        given = options.get("weight_transfer_config")
        transfer = given.get("backend") if isinstance(given, dict) else given
        if transfer != "padfree" and not served.lora_rank:
            raise UserError("rollout.servers", f"{self.url} has the weight transfer backend {transfer!r}", START)
        mode = options["model_config"].get("logprobs_mode")
        if mode != "processed_logprobs" and served.temperature != 1.0:
            raise UserError(
                "rollout.servers",
                f"{self.url} has logprobs_mode={mode}, which ignores loss.temperature ({served.temperature:g})",
                self.fix_temperature,
            )
        if served.returns_routes and not options["model_config"].get("enable_return_routed_experts"):
            raise UserError(
                "rollout.routing",
                f", but {self.url} does not return the experts that each token used",
                "start the server with --enable-return-routed-experts, or set rollout.routing=recompute",
                "replay",
            )
        if served.colocated and not options["model_config"].get("enable_sleep_mode"):
            raise UserError("rollout.colocated", f", but {self.url} has no sleep mode", SLEEP, "true")
        if served.colocated:
            await self.call("GET", "/is_sleeping", fix=SLEEP)
        if served.returns_kept is not None:
            await self._check_kept(served.returns_kept, options["model_config"], release)
        if served.returns_kept is not None and not was_asleep:
            await self._check_kept_route(served.returns_kept, name)
        if served.model.vision:
            await self._check_images()
        await self._check_vocabulary(name, served.vocabulary, has_weights=not was_asleep)
        if not options["model_config"].get("skip_tokenizer_init"):
            answer = await self.call("POST", "/tokenize", {"prompt": served.text, "add_special_tokens": False})
            if answer.get("tokens") != list(served.tokens):
                raise UserError(
                    "rollout.servers",
                    f"{self.url} has a different tokenizer than this run",
                    "start the server with the model of model.path, and with --tokenizer if model.tokenizer is set",
                )
        return name

    async def models(self, *, fix: str = START) -> list[str]:
        """Return the names of the models that the server serves: the base model first, then adapters.

        `fix`: advice for the error message if the server has no route /v1/models.
        """
        answer = await self.call("GET", "/v1/models", fix=fix)
        with self.reading("/v1/models names no model"):
            names = [str(entry["id"]) for entry in answer["data"]]
            if not names:
                raise IncompleteError("an empty list")
        return names

    async def _end_interrupted_sync(self) -> bool:
        """Finish a weight sync that a killed run left open. Wake the server if the run left it asleep.

        Return whether the server was paused or asleep. If it was, its weights may have any values until the next weight
        sync.
        """
        was_paused = bool((await self.call("GET", "/is_paused")).get("is_paused"))
        if was_paused:  # a sleeping server is paused; it must be awake before its weights are touched
            if (await self.call("GET", "/is_sleeping")).get("is_sleeping"):  # vLLM also says so if it is only paused
                await self.wake("weights")
                await self.wake("kv_cache")
            with suppress(ServerLostError):  # vLLM refuses to start an update if one is already open
                await self.call("POST", "/start_weight_update", {})
            await self.call("POST", "/finish_weight_update", {})
            await self.resume()
        return was_paused

    async def _check_release(self) -> str:
        """Return the version of vLLM, such as 0.32.0. Raise an error unless it is one of `SUPPORTED`."""
        release = str((await self.call("GET", "/version", fix="set the URL of a vLLM server")).get("version"))
        number = re.match(r"(\d+)\.(\d+)", release)
        oldest, newest = SUPPORTED
        if number is None or not oldest <= (int(number[1]), int(number[2])) <= newest:
            shown = " to ".join(".".join(map(str, one)) for one in SUPPORTED)
            raise UserError("rollout.servers", f"{self.url} runs vLLM {release}", f"use vLLM {shown}")
        return release

    async def _check_kept(self, setting: str, options: Mapping[str, Any], release: str) -> None:
        """Raise an error unless the server's options let it return kept sets (the ids from which tokens were sampled).

        `options`: the server's `model_config`. `release`: the version of vLLM that the server runs. `setting`: the
        setting that needs kept sets.
        """
        if "return_sampling_mask" not in options:
            problem = (
                f"{self.url} runs vLLM {release}, which does not return kept sets (the ids from which each token was "
                "sampled)"
            )
            raise UserError(setting, problem, f"use vLLM {KEPT_SINCE} or newer, or leave the setting out")
        if not options["return_sampling_mask"] or options.get("logprobs_mode") != "processed_logprobs":
            raise UserError(
                setting, f"{self.url} does not return kept sets (the ids from which each token was sampled)", KEPT
            )

    async def _check_kept_route(self, setting: str, name: str) -> None:
        """Raise an error unless the server has the route `GENERATE`, the only one that returns kept sets.

        A kept set holds the ids from which a token was sampled. `setting`: the setting that needs kept sets. `name`:
        the name of the model on the server.
        """
        try:
            body = _generate_body({"model": name, "prompt": [0], "max_tokens": 1, "top_k": 1})
            await self.call("POST", GENERATE, body, fix=KEPT)
        except UserError as error:
            raise UserError(
                setting,
                f"{error.problem}, so the server does not return kept sets (the ids from which each token was sampled)",
                KEPT,
            ) from None

    async def _check_images(self) -> None:
        """Raise an error unless the server reads images, and uses pixels as they are sent."""
        answer = await self.call("GET", STORE, fix=IMAGES)
        if not answer.get("reads_images"):
            problem = f"{self.url} serves a model that reads no images"
            raise UserError("rollout.servers", problem, "start the server with the model of model.path")
        if answer.get("normalizes"):
            problem = f"{self.url} would normalize the pixels of images, which the trainer has normalized"
            raise UserError("rollout.servers", problem, "start the server with --no-mm-device-do-normalize")

    async def _check_vocabulary(self, name: str, vocabulary: int, *, has_weights: bool) -> None:
        """Raise an error unless the server's vocabulary has the size `vocabulary`.

        `has_weights`: False if a killed run left arbitrary weights on the server. The model must not compute with
        these weights, so only an id outside the vocabulary is tested.
        """
        for token, expected in ((vocabulary - 1, True), (vocabulary, False)) if has_weights else ((vocabulary, False),):
            try:
                async with self.connected() as connection:
                    body = {"model": name, "prompt": [token], "max_tokens": 1, "top_k": 1}
                    await connection.call("POST", COMPLETIONS, body)
                accepted = True
            except UserError as error:
                if "vocabulary" not in str(error):
                    raise
                accepted = False
            if accepted != expected:
                raise UserError(
                    "rollout.servers",
                    f"{self.url} {'accepts' if accepted else 'rejects'} token {token}, but the model of this run has "
                    f"{vocabulary} tokens",
                    "start the server with the model of model.path",
                )

    # Responses

    async def version(self, *, timeout: float | None = None) -> str | None:
        async with self.connected(timeout) as connection:
            return await self._version(connection)

    async def _version(self, connection: HttpConnection) -> str | None:
        answer = await connection.call("GET", "/weight_info", fix=START)
        version = answer.get("weight_version")
        if not isinstance(version, str):
            raise self.lost(f"/weight_info returned {answer}, which has no weight_version")
        return None if version == _OWN_WEIGHTS else version

    def complete_name(self, sampling: SamplingSettings) -> str:
        return GENERATE if sampling.truncation.depends_on_logits else COMPLETIONS

    async def complete(
        self, request: SamplingRequest, sampling: SamplingSettings, *, model: str, version: int, salt: str
    ) -> Completion:
        prompt = request.tokens.tolist()
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "seed": request.key & _SEEDS,
            "stop_token_ids": list(sampling.stops),
            "cache_salt": f"{salt} {version}",
            "logprobs": 0,
            **_plain_sampling(0.0 if request.key == GREEDY else sampling.temperature),
            **_truncation_fields(request, sampling),
        }
        returns_kept = sampling.truncation.depends_on_logits
        generates = returns_kept or bool(request.images)
        route = GENERATE_FROM_IMAGES if request.images else self.complete_name(sampling)
        async with self.connected() as connection:
            self.need_version(await self._version(connection), version)
            post = partial(connection.call, "POST")
            if request.images:
                # vLLM keeps the features of an image. The key makes it encode the image again with new weights.
                key = str(body["cache_salt"])
                answer = await self._images.generate(post, _generate_body(body), request.images, key)
            else:
                answer = await post(route, _generate_body(body) if generates else body)
            (choice,) = self._choices(answer, 1, model, route)
            cut = choice.get("finish_reason") == "abort"  # a pause aborted it; its tokens were sampled before
            # No weight sync reuses an earlier version, and a restart of the server would close the connection.
            if not cut:
                self.need_version(await self._version(connection), version)
        if cut and not choice.get("token_ids"):
            return Completion(tokens=[], logprobs=[], reason="cut")
        with self.reading(f"{route} did not return token ids and log-probabilities"):
            tokens, logprobs = (_generated if generates else _sampled)(choice)
        kept = None
        if sampling.truncation.is_active:
            with self.reading(f"{route} did not return the kept set of each token"):
                lists = choice["sampling_mask"] if returns_kept else ()
                kept = read_kept_sets(lists, tokens, request, sampling)
        if not cut and (answer if generates else choice).get("prompt_token_ids") != prompt:
            raise UserError(
                "rollout.servers",
                f"{self.url} changed the token ids of a prompt",
                "start the server with the model of the run, and remove any proxy that changes requests",
            )
        routes = None
        if sampling.routed is not None and not cut:
            with self.reading(f"{route} did not return the experts of each token"):
                routes = read_routed_experts(
                    choice["routed_experts"], len(request.tokens) + len(tokens), sampling.routed
                )
        reason = "cut" if cut else str(choice.get("finish_reason"))
        return Completion(tokens=tokens, logprobs=logprobs, reason=reason, routes=routes, kept=kept)

    async def score(
        self, sequences: Sequence[Sequence[int]], *, num_sampled: int, temperature: float, model: str, salt: str
    ) -> list[tuple[list[int], list[float]]]:
        body = {
            "model": model,
            "prompt": [list(sequence) for sequence in sequences],
            "max_tokens": num_sampled,
            "seed": 0,
            "cache_salt": salt,
            "logprobs": 0,
            "prompt_logprobs": 0,
            **_plain_sampling(temperature),
        }
        async with self.connected() as connection:
            answer = await connection.call("POST", COMPLETIONS, body)
        scored = []
        choices = self._choices(answer, len(sequences), model)
        with self.reading("did not return the log-probabilities with which the canary checks a weight sync"):
            for sequence, choice in zip(sequences, choices, strict=True):
                given = [
                    float(entry[str(token)]["logprob"])
                    for token, entry in zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                tokens, logprobs = _sampled(choice)
                scored.append(([*sequence, *tokens], [*given, *logprobs]))
        return scored

    def _choices(
        self, answer: Mapping[str, Any], number: int, model: str, route: str = COMPLETIONS
    ) -> list[dict[str, Any]]:
        """Return the sampled responses (the field `choices`) of a server's answer, in the order of the prompts.

        Raise an error unless the answer has `number` choices, and names `model` as the model. `route`: the route that
        was called, for error messages.
        """
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self.lost(f"{route} returned no choices")
        if sorted(str(choice.get("index")) for choice in choices) != sorted(map(str, range(number))):
            raise self.lost(f"{route} returned {len(choices)} of {number} responses")
        if answer.get("model") != model:
            raise self.lost(f"{route} answered for the model {answer.get('model')!r}, not {model!r}")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    # Weights

    async def pause(self) -> None:
        # With mode `keep`, later tokens would attend to keys and values of the old weights.
        await self.call("POST", "/pause?mode=abort")

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def workers(self) -> int:
        answer = await self.call("GET", "/get_world_size")
        if not isinstance(answer.get("world_size"), int):
            raise self.lost(f"/get_world_size returned {answer}, which has no world_size")
        return int(answer["world_size"])

    async def join(self, transfer_info: Mapping[str, Any]) -> None:
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": dict(transfer_info)})

    async def begin(self) -> None:
        try:
            await self.call("POST", "/start_weight_update", {})
        except ServerLostError:  # a killed run left an update open
            await self.call("POST", "/finish_weight_update", {})
            await self.call("POST", "/start_weight_update", {})

    async def bucket(self, form: BucketForm) -> None:
        await self.call("POST", "/update_weights", {"update_info": form.transfer_info})

    async def finish(self, version: int) -> None:
        await self.call("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self.call("POST", "/update_weight_version", {"new_version": str(version)})  # for vLLM before 0.27
        await self.call("POST", "/reset_prefix_cache")

    async def load_adapters(self, folder: Path, *, name: str, model: str, version: int) -> None:
        known = await self.models()
        if name in known:
            await self.tell("/v1/unload_lora_adapter", {"lora_name": name}, fix=LORA)
        await self.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, fix=LORA)
        for other in known:
            if other.startswith(f"{model}-step-") and other != name:
                await self.tell("/v1/unload_lora_adapter", {"lora_name": other}, fix=LORA)
        await self.call("POST", "/update_weight_version", {"new_version": str(version)})

    async def sleep(self, level: int) -> None:
        await self.call("POST", f"/sleep?level={level}", fix=SLEEP)

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        # vLLM ignores the call if this part is awake. Without tags, vLLM 0.24 would map awake parts a second time.
        await self.call("POST", f"/wake_up?tags={part}", fix=SLEEP)

    # Servers that a run starts

    @classmethod
    def command(cls, arguments: Sequence[str], served: ServedModel, *, name: str, port: int) -> list[str]:
        wanted: list[tuple[str, ...]] = [
            ("--model", served.path),
            ("--served-model-name", name),
            ("--host", "127.0.0.1"),
            ("--port", str(port)),
            ("--dtype", served.model.dtype),
            ("--weight-transfer-config", '{"backend": "padfree"}'),
            ("--logprobs-mode", "processed_logprobs"),
            ("--generation-config", "vllm"),
        ]
        if served.colocated:
            wanted.append(("--enable-sleep-mode",))
        if served.memory is not None:
            wanted.append(("--gpu-memory-utilization", f"{served.memory:g}"))
        if served.model.tokenizer is not None:
            wanted.append(("--tokenizer", served.model.tokenizer))
        if served.random:
            wanted.append(("--load-format", "dummy"))
        if served.model.trust_remote_code:
            wanted.append(("--trust-remote-code",))
        if served.returns_routes:
            wanted.append(("--enable-return-routed-experts",))
        if served.returns_kept is not None:
            wanted.append(("--return-sampling-mask",))
        if served.model.vision:
            wanted.append(("--no-mm-device-do-normalize",))
        if served.returns_kept is not None or served.model.vision:
            wanted.append(("--enable-scale-out",))
        if served.lora_rank:
            rank = next((rank for rank in _LORA_RANKS if rank >= served.lora_rank), served.lora_rank)
            wanted += [("--enable-lora",), ("--max-lora-rank", str(rank))]
        # Name the modules with adapters. Otherwise vLLM adapts the head too, and cannot compute logits on the CPU.
        if served.adapted:
            wanted.append(("--lora-target-modules", *served.adapted))
        given = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
        return [*arguments, *(argument for flag in wanted if flag[0] not in given for argument in flag)]

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def _plain_sampling(temperature: float) -> dict[str, Any]:
    """Return request options that sample from the plain softmax and return ids instead of text.

    The options override the defaults of the server.
    """
    return {
        "n": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": _EVERY_ID,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _truncation_fields(request: SamplingRequest, sampling: SamplingSettings) -> dict[str, Any]:
    """Return the request options that truncate the softmax; {} if the run does not truncate it.

    A greedy response with truncation is requested with top-k 1, because a server that returns kept sets (the ids that
    the truncation keeps) refuses temperature 0.
    """
    truncation = sampling.truncation
    fields: dict[str, Any] = {}
    if truncation.min_new_tokens > request.num_earlier:
        fields["min_tokens"] = min(truncation.min_new_tokens - request.num_earlier, request.max_new_tokens)
    if truncation.depends_on_logits and request.key == GREEDY:
        fields |= {"temperature": sampling.temperature, "top_k": 1}  # a server that returns kept sets refuses 0
    elif truncation.depends_on_logits:
        fields |= {"top_p": truncation.top_p, "top_k": truncation.top_k or _EVERY_ID, "min_p": truncation.min_p}
    return fields


_OF_REQUEST = ("model", "cache_salt")
_OF_COMPLETIONS = ("prompt", "return_token_ids", "return_tokens_as_token_ids")


def _generate_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of a request for the route `COMPLETIONS` to the format of the route `GENERATE`."""
    sampling = {name: value for name, value in body.items() if name not in (*_OF_REQUEST, *_OF_COMPLETIONS)}
    return {
        **{name: body[name] for name in _OF_REQUEST if name in body},
        "token_ids": body["prompt"],
        "return_token_ids": True,
        "sampling_params": {**sampling, "detokenize": False},
    }


def _generated(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities of `choice`, one completion in a reply of the route `GENERATE`."""
    if not isinstance(choice["logprobs"], dict):
        raise IncompleteError("no log-probabilities")
    return checked_tokens(choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]])


def _sampled(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    if not isinstance(choice["logprobs"], dict):
        raise IncompleteError("no log-probabilities")
    return checked_tokens(choice["token_ids"], choice["logprobs"]["token_logprobs"])
