"""Whether servers are those for this run, before anything is sent to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from padfree.config import Config
from padfree.errors import UserError
from padfree.rollout.vllm.canary import TEXT
from padfree.rollout.vllm.http import START, LateError, Server, ServerLostError


def check_servers(servers: Sequence[Server], config: Config, tokenizer: Any, vocabulary: int) -> str:
    """What they call their model; a line if one is not there, or is a server of something else."""
    try:
        names = {check_server(server, config, tokenizer, vocabulary) for server in servers}
    except LateError as error:
        raise UserError.of(f"{error}; see that it is well, or raise rollout.timeout") from None
    except ServerLostError as error:
        raise UserError.of(f"{error}; start it, or correct rollout.servers") from None
    if len(names) > 1:
        raise UserError(
            "rollout.servers",
            f"they call the model {' and '.join(sorted(names))}",
            "start all with the same --served-model-name",
        )
    return names.pop()


def check_server(server: Server, config: Config, tokenizer: Any, vocabulary: int) -> str:
    """What the server calls its model; a line if it is a server of something else."""
    server.version()
    _end_interrupted_update(server)
    name = server.models(cure="give the address of a vLLM server")[0]
    options = server.call("GET", "/server_info?config_format=json").get("vllm_config")
    if not isinstance(options, dict) or not isinstance(options.get("model_config"), dict):
        raise ServerLostError(f"rollout.servers: {server.url} /server_info answered without vllm_config")
    given = options.get("weight_transfer_config")
    transfer = given.get("backend") if isinstance(given, dict) else given
    if transfer != "padfree" and not config.lora.rank:
        raise UserError("rollout.servers", f"{server.url} has the weight transfer {transfer!r}", f"{START}")
    mode = options["model_config"].get("logprobs_mode")
    if mode != "processed_logprobs" and config.loss.temperature != 1.0:
        raise UserError(
            "rollout.servers",
            f"{server.url} reports {mode}, which do not know loss.temperature {config.loss.temperature:g}",
            "start it with --logprobs-mode processed_logprobs",
        )
    _check_vocabulary(server, name, vocabulary)
    _check_tokenizer(server, options, tokenizer)
    return name


def _end_interrupted_update(server: Server) -> None:
    """A run that was killed while it handed weights over has left the server paused, with layers half loaded."""
    if not server.call("GET", "/is_paused").get("is_paused"):
        return
    with suppress(ServerLostError):  # one is under way
        server.call("POST", "/start_weight_update")
    server.call("POST", "/finish_weight_update", {})
    server.call("POST", "/resume")


def _check_vocabulary(server: Server, name: str, vocabulary: int) -> None:
    """The last token of the vocabulary is one of the server's, and there is none behind it."""
    for token, known in ((vocabulary - 1, True), (vocabulary, False)):
        try:
            server.call("POST", "/v1/completions", {"model": name, "prompt": [token], "max_tokens": 1})
            found = True
        except UserError as error:
            if "vocabulary" not in str(error):
                raise
            found = False
        if found != known:
            raise UserError(
                "rollout.servers",
                f"{server.url} {'knows' if found else 'does not know'} token {token}, the model of this run has "
                f"{vocabulary} tokens",
                "start it with the model of model.path",
            )


def _check_tokenizer(server: Server, options: dict[str, Any], tokenizer: Any) -> None:
    """The same text is the same tokens; a server without a tokenizer is asked nothing."""
    if options["model_config"].get("skip_tokenizer_init"):
        return
    answer = server.call("POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    ours = [int(token) for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    if answer.get("tokens") != ours:
        raise UserError(
            "rollout.servers",
            f"{server.url} has another tokenizer than this run",
            "start it with the model of model.path, and model.tokenizer as --tokenizer",
        )
