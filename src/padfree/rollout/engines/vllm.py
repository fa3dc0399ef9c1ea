"""vLLM servers: their routes, their options, and what their answers look like.

A response belongs to the version that the server reports on the same connection before and after it. Versions never
come back, and a connection does not outlive its server, so the weights were those from the first token to the last.

vLLM could also freeze requests over a pause and go on with them (`keep`). Then nobody would know which token is of
which version, and later tokens could be drawn from keys and values of old weights, so that their log-probabilities
would be those of no policy. So a pause ends them (`abort`), and what is asked for anew is prefilled by the new weights.

`vllm_plugin` is the part that runs inside the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from padfree.errors import UserError
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers.buckets import BucketForm
from padfree.rollout.engines.servers.http import HttpConnection, HttpServer
from padfree.rollout.engines.servers.sampler import ServerSampler
from padfree.rollout.engines.servers.server_api import (
    Completion,
    Drawing,
    IncompleteError,
    ServedModel,
    ServerLostError,
    checked_tokens,
)
from padfree.rollout.engines.servers.start import make_server_sampler
from padfree.rollout.sampling_rng import GREEDY

START = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "padfree"}\''
LORA = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
COMPLETIONS = "/v1/completions"

_OWN_WEIGHTS = "default"  # what vLLM calls the weights that it has loaded itself
_SEEDS = (1 << 63) - 1  # vLLM takes -1 for no seed
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM reserves memory for


def make_vllm_sampler(*run: Any) -> ServerSampler:
    """For `rollout.engine=vllm`; the arguments are those of `make_sampler`."""
    return make_server_sampler(VllmServer, *run)


class VllmServer(HttpServer):
    """A vLLM server with padfree's plugin."""

    takes_adapters = True
    completing = COMPLETIONS
    cure_route = START
    cure_stops = "start it with --generation-config vllm"
    cure_length = "start it with --max-model-len {length} or more"
    cure_name = "start all with the same --served-model-name"
    cure_weights = "use padfree's transfer on a vLLM that can reload this model, or raise rollout.canary"
    cure_temperature = "start it with --logprobs-mode processed_logprobs"

    # Before a run

    async def check(self, served: ServedModel) -> str:
        await self.version()
        await self._end_interrupted_sync()
        name = (await self.models(cure="give the address of a vLLM server"))[0]
        options = (await self.call("GET", "/server_info?config_format=json")).get("vllm_config")
        if not isinstance(options, dict) or not isinstance(options.get("model_config"), dict):
            raise self.lost("/server_info answered without vllm_config")
        given = options.get("weight_transfer_config")
        transfer = given.get("backend") if isinstance(given, dict) else given
        if transfer != "padfree" and not served.lora_rank:
            raise UserError("rollout.servers", f"{self.url} has the weight transfer {transfer!r}", START)
        mode = options["model_config"].get("logprobs_mode")
        if mode != "processed_logprobs" and served.temperature != 1.0:
            raise UserError(
                "rollout.servers",
                f"{self.url} reports {mode}, which do not know loss.temperature {served.temperature:g}",
                self.cure_temperature,
            )
        await self._check_vocabulary(name, served.vocabulary)
        if not options["model_config"].get("skip_tokenizer_init"):  # then it has no tokenizer that could be wrong
            answer = await self.call("POST", "/tokenize", {"prompt": served.text, "add_special_tokens": False})
            if answer.get("tokens") != list(served.tokens):
                raise UserError(
                    "rollout.servers",
                    f"{self.url} has another tokenizer than this run",
                    "start it with the model of model.path, and model.tokenizer as --tokenizer",
                )
        return name

    async def models(self, *, cure: str = START) -> list[str]:
        """What the server calls its models: the one that it has loaded first, then adapters."""
        answer = await self.call("GET", "/v1/models", cure=cure)
        with self.reading("/v1/models names no model"):
            names = [str(entry["id"]) for entry in answer["data"]]
            if not names:
                raise IncompleteError("an empty list")
        return names

    async def _end_interrupted_sync(self) -> None:
        """A run that was killed while it handed weights over has left the server paused, with layers half loaded."""
        if (await self.call("GET", "/is_paused")).get("is_paused"):
            with suppress(ServerLostError):  # one is under way
                await self.call("POST", "/start_weight_update")
            await self.call("POST", "/finish_weight_update", {})
            await self.resume()

    async def _check_vocabulary(self, name: str, vocabulary: int) -> None:
        """The last token of the vocabulary is one of the server's, and there is none behind it."""
        for token, known in ((vocabulary - 1, True), (vocabulary, False)):
            try:
                async with self.connected() as connection:
                    body = {"model": name, "prompt": [token], "max_tokens": 1}
                    await connection.call("POST", COMPLETIONS, body)
                found = True
            except UserError as error:
                if "vocabulary" not in str(error):
                    raise
                found = False
            if found != known:
                raise UserError(
                    "rollout.servers",
                    f"{self.url} {'knows' if found else 'does not know'} token {token}, the model of this run has "
                    f"{vocabulary} tokens",
                    "start it with the model of model.path",
                )

    # Responses

    async def version(self, *, timeout: float | None = None) -> str | None:
        async with self.connected(timeout) as connection:
            return await self._version(connection)

    async def _version(self, connection: HttpConnection) -> str | None:
        answer = await connection.call("GET", "/weight_info", cure=START)
        found = answer.get("weight_version")
        if not isinstance(found, str):
            raise self.lost(f"/weight_info answered {answer} without weight_version")
        return None if found == _OWN_WEIGHTS else found

    async def complete(
        self, request: SamplingRequest, drawing: Drawing, *, model: str, version: int, salt: str
    ) -> Completion:
        body = {
            "model": model,
            "prompt": request.tokens.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": request.key & _SEEDS,
            "stop_token_ids": list(drawing.stops),
            "cache_salt": f"{salt} {version}",
            "logprobs": 0,
            **_plain_sampling(0.0 if request.key == GREEDY else drawing.temperature),
        }
        async with self.connected() as connection:
            self.need_version(await self._version(connection), version)
            (choice,) = self._choices(await connection.call("POST", COMPLETIONS, body), 1, model)
            cut = choice.get("finish_reason") == "abort"  # all its tokens are from before the pause
            if not cut:
                self.need_version(await self._version(connection), version)
        if cut and not choice.get("token_ids"):
            return Completion(tokens=[], logprobs=[], reason="cut")
        with self.reading(f"{COMPLETIONS} answered without token ids and log-probabilities"):
            tokens, logprobs = _drawn(choice)
        if not cut and choice.get("prompt_token_ids") != body["prompt"]:
            raise UserError(
                "rollout.servers",
                f"{self.url} changed the token ids of a prompt",
                "start it with the run's model, and with nothing between",
            )
        return Completion(tokens=tokens, logprobs=logprobs, reason="cut" if cut else str(choice.get("finish_reason")))

    async def score(
        self, sequences: Sequence[Sequence[int]], *, drawn: int, temperature: float, model: str, salt: str
    ) -> list[tuple[list[int], list[float]]]:
        body = {
            "model": model,
            "prompt": [list(sequence) for sequence in sequences],
            "max_tokens": drawn,
            "seed": 0,
            "cache_salt": salt,
            "logprobs": 0,
            "prompt_logprobs": 0,
            **_plain_sampling(temperature),
        }
        async with self.connected() as connection:
            answer = await connection.call("POST", COMPLETIONS, body)
        found = []
        choices = self._choices(answer, len(sequences), model)
        with self.reading("answered without the log-probabilities of the canary"):
            for sequence, choice in zip(sequences, choices, strict=True):
                given = [
                    float(entry[str(token)]["logprob"])
                    for token, entry in zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                tokens, logprobs = _drawn(choice)
                found.append(([*sequence, *tokens], [*given, *logprobs]))
        return found

    def _choices(self, answer: Mapping[str, Any], number: int, model: str) -> list[dict[str, Any]]:
        """As many as were asked for, in the order of the prompts."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self.lost(f"{COMPLETIONS} answered without choices")
        if sorted(str(choice.get("index")) for choice in choices) != sorted(map(str, range(number))):
            raise self.lost(f"{COMPLETIONS} answered {len(choices)} of {number} responses")
        if answer.get("model") != model:
            raise self.lost(f"{COMPLETIONS} answered for the model {answer.get('model')!r}, not {model!r}")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    # Weights

    async def pause(self) -> None:
        await self.call("POST", "/pause?mode=abort")

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def workers(self) -> int:
        answer = await self.call("GET", "/get_world_size")
        if not isinstance(answer.get("world_size"), int):
            raise self.lost(f"/get_world_size answered {answer} without world_size")
        return int(answer["world_size"])

    async def join(self, transfer_info: Mapping[str, Any]) -> None:
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": dict(transfer_info)})

    async def begin(self) -> None:
        try:
            await self.call("POST", "/start_weight_update")
        except ServerLostError:  # one that a killed run has begun
            await self.call("POST", "/finish_weight_update", {})
            await self.call("POST", "/start_weight_update")

    async def bucket(self, form: BucketForm) -> None:
        await self.call("POST", "/update_weights", {"update_info": form.transfer_info})

    async def finish(self, version: int) -> None:
        await self.call("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self.call("POST", "/reset_prefix_cache")

    async def load_adapters(self, folder: Path, *, name: str, model: str, version: int) -> None:
        known = await self.models()
        if name in known:
            await self.tell("/v1/unload_lora_adapter", {"lora_name": name}, cure=LORA)
        await self.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, cure=LORA)
        for other in known:
            if other.startswith(f"{model}-step-") and other != name:
                await self.tell("/v1/unload_lora_adapter", {"lora_name": other}, cure=LORA)
        await self.call("POST", "/update_weight_version", {"new_version": str(version)})

    # Servers that a run starts

    @classmethod
    def command(cls, words: Sequence[str], served: ServedModel, *, name: str, port: int) -> list[str]:
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
        if served.model.tokenizer is not None:
            wanted.append(("--tokenizer", served.model.tokenizer))
        if served.random:
            wanted.append(("--load-format", "dummy"))
        if served.model.trust_remote_code:
            wanted.append(("--trust-remote-code",))
        if served.lora_rank:
            rank = next((rank for rank in _LORA_RANKS if rank >= served.lora_rank), served.lora_rank)
            wanted += [("--enable-lora",), ("--max-lora-rank", str(rank))]
        if served.adapted:  # or the head is prepared for an adapter, too, and on the CPU cannot score prompts then
            wanted.append(("--lora-target-modules", *served.adapted))
        said = {word.partition("=")[0] for word in words if word.startswith("--")}
        return [*words, *(word for flag in wanted if flag[0] not in said for word in flag)]

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def _plain_sampling(temperature: float) -> dict[str, Any]:
    """Draws from the softmax and nothing else, whatever the server's defaults are; and ids in place of text."""
    return {
        "n": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _drawn(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    if not isinstance(choice["logprobs"], dict):
        raise IncompleteError("no log-probabilities")
    return checked_tokens(choice["token_ids"], choice["logprobs"]["token_logprobs"])
