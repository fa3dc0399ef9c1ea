"""Make the sampler for inference servers: start or find the servers, check them, and build the sampler.

rank 0     starts the servers (`rollout.launch`) or uses running ones (`rollout.servers`), and checks each of them
all ranks  receive the URLs of the servers and the name of the model from rank 0, or an error
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.config import Config
from padfree.config.rollout import TRUNCATION, TRUNCATION_BY_LOGITS, RolloutConfig
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.model.lora import adapted_modules, needs_merging
from padfree.model.vision.families import family_of
from padfree.rollout.base import Score
from padfree.rollout.engines.in_process.hf_cache import stop_tokens
from padfree.rollout.engines.servers.canary import LIMITS, TEXT, Canary, canary_sequences
from padfree.rollout.engines.servers.routed_experts import routed_layers
from padfree.rollout.engines.servers.sampler import ServerSampler, end_servers
from padfree.rollout.engines.servers.server_api import (
    LateError,
    SamplingSettings,
    ServedModel,
    ServerApi,
    ServerLostError,
)
from padfree.rollout.engines.servers.server_processes import Launcher, make_launcher
from padfree.rollout.engines.servers.weight_stream import SentWeights, WeightStream
from padfree.rollout.engines.servers.weight_sync import FilesTransport, GroupTransport, WeightSync, broadcast_object
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.token_ids import vocabulary_of
from padfree.rollout.truncation import truncation_of


def make_server_sampler(
    api: type[ServerApi], config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> ServerSampler:
    """Make a sampler that lets inference servers sample. Collective.

    The servers already run (`rollout.servers`), or this function starts new ones (`rollout.launch`).
    """
    rollout, first = config.rollout, mesh.loss.rank == 0
    if rollout.launch.command and not _same_machine(mesh):
        raise UserError(
            "rollout.launch.command",
            "can start servers on one machine only, but the run uses several",
            "start the servers yourself and set rollout.servers",
        )
    check_truncation(api, rollout)
    check_colocated(api, rollout)
    check_image_inputs(api, config, trained)
    served = served_model(config, trained, tokenizer)
    loop = LoopThread("servers")
    launcher: Launcher | None = None
    try:
        shared: Any = None
        if first:
            try:
                servers: Sequence[ServerApi] = [api(url, rollout.timeout) for url in rollout.servers]
                if rollout.launch.command:
                    logs = Path(config.run.folder) / "servers"
                    launcher = make_launcher(api, rollout.launch, served, logs, rollout.timeout)
                    servers = launcher.servers
                    loop.run(launcher.start(rollout.timeout))
                shared = [server.url for server in servers], loop.run(check_servers(servers, served))
            except UserError as error:
                shared = str(error)
        shared = broadcast_object(shared, mesh)
        if isinstance(shared, str):
            raise UserError.of(shared)
        servers = [api(url, rollout.timeout) for url in shared[0]]
        folder = transfer_folder(config)
        adapters = bool(served.lora_rank) and api.takes_adapters
        stream = WeightStream(trained, getattr(torch, config.model.dtype))
        by_difference = sends_differences(api, config, adapters=adapters)
        longest = min(
            config.batch.max_tokens,
            getattr(trained.config.get_text_config(), "max_position_embeddings", None) or 1 << 30,
        )
        return ServerSampler(
            servers=servers,
            loop=loop,
            mesh=mesh,
            trained=trained,
            sync=WeightSync(
                servers=servers,
                loop=loop,
                mesh=mesh,
                stream=stream,
                sent=SentWeights(stream=stream, group=mesh.loss.group) if by_difference else None,
                transport=GroupTransport(mesh.device, rollout.timeout)
                if rollout.resolved_transfer == "group"
                else FilesTransport(folder),
                folder=folder,
                base=config.model.path,
                model=shared[1],
                adapters=adapters,
                launcher=launcher,
                colocated=rollout.colocated,
            ),
            launcher=launcher,
            sampling=SamplingSettings(
                served.temperature,
                tuple(stop_tokens(tokenizer, trained)),
                served.vocabulary,
                routed_layers(trained) if served.returns_routes else None,
                truncation_of(rollout),
            ),
            canary=Canary(rollout.canary or LIMITS[config.model.dtype], api),
            sequences=canary_sequences(tokenizer, vocabulary=served.vocabulary, longest=longest),
            score=score,
            salt=broadcast_object(secrets.token_hex(8), mesh),
            concurrency=rollout.max_concurrent,
            on_update=rollout.on_update,
            colocated=rollout.colocated,
            timeout=rollout.timeout,
        )
    except BaseException:
        # Stop the servers after any exception, even an interrupt. Otherwise they would keep running.
        end_servers(loop, launcher)
        raise


def served_model(config: Config, trained: PreTrainedModel, tokenizer: Any) -> ServedModel:
    """Return what the run needs from its servers: a model, tokenizer and adapters to serve, and optional features.

    No adapters are listed if the trainer must merge them into the weights, because servers could not load them.
    """
    merged = needs_merging(trained)
    return ServedModel(
        model=config.model,
        lora_rank=0 if merged else config.lora.rank,
        adapted=() if merged else adapted_modules(trained),
        vocabulary=vocabulary_of(trained),
        temperature=config.loss.temperature,
        text=TEXT,
        tokens=[int(token) for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]],
        returns_routes=config.rollout.routing == "replay",
        colocated=config.rollout.colocated,
        memory=config.rollout.server_memory,
        returns_kept=next(iter(active_truncation(config.rollout, TRUNCATION_BY_LOGITS)), None),
    )


def active_truncation(settings: RolloutConfig, names: Iterable[str] = TRUNCATION) -> list[str]:
    """Return the settings, such as `rollout.top_p`, that truncate the softmax in this run.

    `names`: the settings to look at.
    """
    return [f"rollout.{name}" for name in names if getattr(settings, name) != TRUNCATION[name]]


def check_truncation(api: type[ServerApi], settings: RolloutConfig) -> None:
    """Raise a `UserError` if the run truncates the softmax (e.g. by top-k), but the engine does not support this."""
    names = active_truncation(settings)
    if names and not api.takes_truncation:
        name = names[0].removeprefix("rollout.")
        problem = f"is not supported by the servers of rollout.engine={settings.engine}"
        raise UserError(names[0], problem, "leave it out", getattr(settings, name))


def check_colocated(api: type[ServerApi], settings: RolloutConfig) -> None:
    """Raise a `UserError` for `rollout.colocated` if the servers of this engine cannot sleep."""
    if settings.colocated and not api.can_sleep:
        problem = f", but the servers of rollout.engine={settings.engine} cannot release their GPU memory"
        raise UserError("rollout.colocated", problem, "set rollout.colocated=false or rollout.engine=vllm", "true")


def check_image_inputs(api: type[ServerApi], config: Config, model: PreTrainedModel) -> None:
    """Raise a `UserError` if the prompts have images, but servers of this engine cannot take images of this model."""
    family = family_of(model) if config.model.vision else None
    if family is not None and family.inputs != api.image_inputs:
        raise UserError(
            "rollout.engine",
            f", but its servers cannot take images for {type(model).__name__}",
            "set rollout.engine=in_process, or use a model of the Qwen or GLM families",
            config.rollout.engine,
        )


def sends_differences(api: type[ServerApi], config: Config, *, adapters: bool) -> bool:
    """Return whether weight syncs send only the elements that have changed since the last weight sync.

    `adapters`: whether weight syncs send only adapters. Raise a `UserError` if `rollout.weight_sync` is "difference",
    but differences cannot be sent.
    """
    if not config.rollout.keeps_sent_weights(config.model.dtype):
        return False
    problem = (
        ", but this run sends only adapters"
        if adapters
        else None
        if api.takes_differences
        else f", but the servers of rollout.engine={config.rollout.engine} accept only whole weights"
    )
    if problem is not None and config.rollout.weight_sync == "difference":
        raise UserError(
            "rollout.weight_sync", problem, "set rollout.weight_sync=full, or leave the setting out", "difference"
        )
    return problem is None


async def check_servers(servers: Sequence[ServerApi], served: ServedModel) -> str:
    """Return the name under which the servers serve the model. Raise a `UserError` if a server does not fit the run."""
    try:
        names = {await server.check(served) for server in servers}
    except LateError as error:
        raise UserError.of(f"{error}; check the server, or raise rollout.timeout") from None
    except ServerLostError as error:
        raise UserError.of(f"{error}; start the server, or correct rollout.servers") from None
    if len(names) > 1:
        problem = f"the servers have different names for the model: {', '.join(sorted(names))}"
        raise UserError("rollout.servers", problem, servers[0].fix_name)
    return names.pop()


def transfer_folder(config: Config) -> Path:
    """Return the folder for the weight files of this run.

    It is inside `rollout.transfer_folder` if this is set. Otherwise, it is in shared memory for servers that the run
    starts and for colocated servers, and in the run folder for other servers.
    """
    digest = hashlib.sha256(str(Path(config.run.folder).resolve()).encode()).hexdigest()[:12]
    memory = Path("/dev/shm")
    if config.rollout.transfer_folder is not None:
        parent = Path(config.rollout.transfer_folder).resolve()
    elif (config.rollout.launch.command or config.rollout.colocated) and memory.is_dir():
        parent = memory
    else:
        parent = Path(config.run.folder).resolve()
    return parent / f"padfree-weights-{digest}"


def _same_machine(mesh: Mesh) -> bool:
    """Return whether all ranks run on one machine. Collective."""
    names: list[Any] = [None] * mesh.loss.size
    dist.all_gather_object(names, socket.gethostname(), group=mesh.loss.group)
    return len(set(names)) == 1
