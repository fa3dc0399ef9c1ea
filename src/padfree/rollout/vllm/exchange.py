"""One exchange of weights: they go to every server that takes them, and the canary tells which of them have them.

hand_over    all ranks gather, rank 0 sends buckets, or adapters as files     -> a line for each server that failed
check        servers score the canary's sequences, all ranks do, too          -> the servers that have the weights
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.batch import Sample
from padfree.config import Config
from padfree.distributed import Mesh, raise_together
from padfree.errors import UserError
from padfree.model.export import export_adapters
from padfree.rollout.base import Score
from padfree.rollout.token_ids import vocabulary_of
from padfree.rollout.vllm.canary import DRAWN, LIMITS, Canary, Scores
from padfree.rollout.vllm.http import NO_WEIGHTS, Server, ServerLostError
from padfree.rollout.vllm.launch import Launcher
from padfree.rollout.vllm.transfer import FilesWay, GroupWay, Stream, Way, each

LORA = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class WeightExchange:
    """Gives the weights of a model to servers. Every rank makes one and calls it alike."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        trained: PreTrainedModel,
        servers: Sequence[Server],
        *,
        model: str,
        launcher: Launcher | None,
        score: Score,
        sequences: Sequence[Sequence[int]],
        salt: str,
    ) -> None:
        """`model` is what the servers call the model, `sequences` are those of the canary."""
        self.config, self.mesh, self.servers = config, mesh, servers
        self._first = mesh.loss.rank == 0
        self._model, self._launcher, self._score = model, launcher, score
        self._sequences, self._salt = sequences, salt
        self._vocabulary = vocabulary_of(trained)
        self._stream = Stream(trained, getattr(torch, config.model.dtype))
        self._canary = Canary(config.rollout.canary or LIMITS[config.model.dtype])
        self._folder = transfer_folder(config)
        self._way: Way = (
            GroupWay(mesh.device, config.rollout.timeout)
            if config.rollout.transfer == "group"
            else FilesWay(self._folder)
        )

    def name(self, version: int) -> str:
        """What the servers call the policy."""
        return f"{self._model}-step-{version}" if self.config.lora.rank else self._model

    def close(self) -> None:
        for server in self.servers:
            self._way.forget(server)
        if self._first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def hand_over(self, trained: PreTrainedModel, version: int) -> tuple[dict[str, str], int]:
        """A line by address for each server that did not take the weights, and bytes."""
        failed, sent = (self._send_adapters if self.config.lora.rank else self._send_weights)(trained, version)
        return agreed(failed, self.mesh), sent

    def _send_weights(self, trained: PreTrainedModel, version: int) -> tuple[dict[str, str], int]:
        failed: dict[str, str] = {}
        sent, error = 0, None
        taking: list[Server] = []

        def drop(lines: Mapping[Server, str]) -> None:
            for server, line in lines.items():
                failed[server.url] = line
                self._way.forget(server)
                taking.remove(server)

        def attempt(act: Callable[[Server], None]) -> None:
            drop(each(taking, act))

        with self._servers_left_alone():
            try:
                if self._first:
                    taking = list(self.servers)
                    attempt(self._begin)
            except UserError as wrong:
                error, taking = str(wrong), []
            for bucket in self._stream.buckets(trained, keep=self._first):
                if not taking or error is not None:
                    continue
                try:
                    form = self._way.prepare(bucket)
                    sent += form.num_bytes
                    attempt(lambda server, form=form: self._way.send(server, form))  # type: ignore[misc]
                except UserError as wrong:
                    error = str(wrong)
            if isinstance(self._way, FilesWay):
                self._way.clear()
            try:
                attempt(lambda server: self._finish(server, version))
            except UserError as wrong:
                error = error or str(wrong)
        raise_together(error, self.mesh.loss.group)
        return failed, sent

    def _begin(self, server: Server) -> None:
        self._pause(server)
        if server.version() == NO_WEIGHTS:
            self._way.forget(server)  # a new process behind the same address
        self._way.connect(server)
        try:
            server.call("POST", "/start_weight_update")
        except ServerLostError:  # an update that a killed run has begun
            server.call("POST", "/finish_weight_update", {})
            server.call("POST", "/start_weight_update")

    def _finish(self, server: Server, version: int) -> None:
        server.call("POST", "/finish_weight_update", {"weight_version": str(version)})
        server.call("POST", "/reset_prefix_cache")
        server.call("POST", "/resume")

    def _pause(self, server: Server) -> None:
        server.call("POST", "/pause?mode=abort")

    def _send_adapters(self, trained: PreTrainedModel, version: int) -> tuple[dict[str, str], int]:
        """The adapters alone, as files: that is what vLLM's route takes."""
        name = self.name(version)
        folder = self._folder / name
        if self._first and self._folder.is_dir():
            for earlier in self._folder.iterdir():  # a server may read what it was given last once more
                shutil.rmtree(earlier, ignore_errors=True)
        export_adapters(trained, folder, base=self.config.model.path)
        failed: dict[str, str] = {}
        error, sent = None, 0
        if self._first:
            sent = sum(path.stat().st_size for path in folder.iterdir())
            with self._servers_left_alone():
                try:
                    lines = each(self.servers, lambda server: self._load_adapter(server, name, folder, version))
                    failed = {server.url: line for server, line in lines.items()}
                except UserError as wrong:
                    error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        return failed, sent

    def _load_adapter(self, server: Server, name: str, folder: Path, version: int) -> None:
        self._pause(server)
        server.call("POST", "/resume")  # adapters can be added while it runs; nothing of the last version may
        known = server.models()
        if name in known:
            server.tell("/v1/unload_lora_adapter", {"lora_name": name}, cure=LORA)
        server.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, cure=LORA)
        for other in known:
            if other.startswith(f"{self._model}-step-") and other != name:
                server.tell("/v1/unload_lora_adapter", {"lora_name": other}, cure=LORA)
        server.call("POST", "/update_weight_version", {"new_version": str(version)})

    def check(
        self, servers: Sequence[Server], version: int, *, lost: dict[str, str], numbers: dict[str, float]
    ) -> list[Server]:
        """The canary: those of the servers whose log-probabilities are the trainer's, and its numbers.

        One that is lost meanwhile is none of them, and rank 0 notes why; one that has other weights ends the run.
        """
        temperature = self.config.loss.temperature
        rows: dict[str, list[tuple[list[int], list[float]]]] = {}
        error = None

        def score(server: Server) -> None:
            rows[server.url] = server.score(
                self._sequences,
                drawn=DRAWN,
                vocabulary=self._vocabulary,
                temperature=temperature,
                model=self.name(version),
                salt=f"{self._salt} canary {version}",
            )

        if self._first:
            try:
                lost |= {server.url: line for server, line in each(servers, score).items()}
            except UserError as wrong:
                error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        rows = agreed(rows, self.mesh)
        samples = [Sample(tokens=np.array(tokens)) for found in rows.values() for tokens, _ in found]
        if not samples:
            return []
        plain = self._score(samples, 1.0)
        heated = plain if temperature == 1.0 else self._score(samples, temperature)
        place = 0
        try:
            for url, found in rows.items():
                part = slice(place, place + len(found))
                place += len(found)
                trainer = [
                    [*cold[1 : len(cold) - DRAWN], *hot[len(hot) - DRAWN :]]
                    for cold, hot in zip(plain[part], heated[part], strict=True)
                ]
                server_scores = Scores.of([logprobs for _, logprobs in found], DRAWN)
                found_here = self._canary.judge(url, server_scores, Scores.of(trainer, DRAWN), version)
                for name, value in found_here.items():  # the worst of all servers
                    worse = min if name == "canary_followed" else max
                    numbers[name] = worse(numbers.get(name, value), value)
        except UserError as wrong:
            error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        return [server for server in servers if server.url in rows]

    def _servers_left_alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self._launcher is None else self._launcher.left_alone()


def agreed(value: Any, mesh: Mesh) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(mesh.loss.group, 0), group=mesh.loss.group)
    return box[0]


def transfer_folder(config: Config) -> Path:
    """A folder of the run's own for weights: where it is said, or in memory for servers of this machine."""
    mark = hashlib.sha256(str(Path(config.run.folder).resolve()).encode()).hexdigest()[:12]
    memory = Path("/dev/shm")
    if config.rollout.transfer_folder is not None:
        parent = Path(config.rollout.transfer_folder).resolve()
    elif config.rollout.launch.command and memory.is_dir():
        parent = memory
    else:
        parent = Path(config.run.folder).resolve()
    return parent / f"padfree-weights-{mark}"
