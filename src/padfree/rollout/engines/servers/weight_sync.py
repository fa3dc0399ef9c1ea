"""A weight sync: the weights of a model that may be sharded go to every server that takes them.

    trained model     q.weight [shards]  k.weight [shards]  ...         every rank gathers each tensor in turn
      -> layers       names and shapes as in HF files, experts one by one; rank 0 holds one layer
      -> buckets      of about BUCKET bytes, uint8                      rank 0 holds one
      -> way          "group"   a broadcast to the workers of each server, in a process group of its own
                      "files"   a safetensors file that all servers read, removed afterwards

    main thread       gather | bucket 0 ............ | gather | bucket 1 ...     collectives, and waits for the servers
    event loop                 server 0: bucket, server 1: bucket                all servers at the same time

Whatever happens to the servers, every rank goes through all tensors, because gathering them is collective. Adapters
travel alone, as files, to engines that take them; for others they are merged into the weights.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from padfree.errors import UserError
from padfree.model.export import empty_copy, export_adapters, whole_tensors
from padfree.model.load import clean_name, named_tensors
from padfree.rollout.engines.servers.buckets import BucketForm, address_towards, broadcast, join_group
from padfree.rollout.engines.servers.server_api import FailedError, ServerApi, ServerLostError
from padfree.rollout.engines.servers.server_processes import Launcher
from padfree.rollout.loop_thread import LoopThread

BUCKET = 256 << 20

Named = tuple[str, Tensor]


class WeightStream:
    """The tensors of a model under the names, in the shapes and in the dtypes that HF files of `dtype` have."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._empty = empty_copy(model, dtype)
        parameters = {clean_name(name) for name, _ in self._empty.named_parameters()}
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(self._empty).items() if name in parameters}

    def buckets(self, model: PreTrainedModel, *, keep: bool, size: int = BUCKET) -> Iterator[list[Named]]:
        """Every rank must go through all of them; if `keep` is false they are empty."""
        bucket: list[Named] = []
        held = 0
        for _, layer in groupby(whole_tensors(model), key=lambda named: _layer_of(named[0])):
            gathered: dict[str, Tensor] = {}
            for name, tensor in layer:
                if keep:
                    gathered[name] = tensor.to(self._dtypes.get(name, tensor.dtype))
            for name, tensor in revert_weight_conversion(self._empty, gathered).items() if keep else ():
                bytes_ = tensor.numel() * tensor.element_size()
                if bucket and held + bytes_ > size:
                    yield bucket
                    bucket, held = [], 0
                bucket.append((name, tensor.contiguous()))
                held += bytes_
        yield bucket


def _layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.experts.7.up_proj.weight`; the name itself outside of layers."""
    parts = name.split(".")
    return next((".".join(parts[: place + 1]) for place, part in enumerate(parts) if part.isdigit()), name)


def form_of(bucket: Sequence[Named], file: Path | None = None) -> BucketForm:
    return BucketForm(
        names=[name for name, _ in bucket],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        shapes=[list(tensor.shape) for _, tensor in bucket],
        file=None if file is None else str(file),
    )


def packed(bucket: Sequence[Named], form: BucketForm, device: torch.device) -> Tensor:
    """[num_bytes] uint8"""
    buffer = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
    for (_, source), (_, place) in zip(bucket, form.parts(buffer), strict=True):
        place.copy_(source)
    return buffer


class GroupTransport:
    """Buckets go by broadcast. Both ways have these methods."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._device, self._timeout = device, timeout
        self._groups: dict[str, tuple[Any, Any]] = {}  # by address: the group, and the store it was made with
        self._buffer: Tensor | None = None

    async def connect(self, server: ServerApi) -> None:
        """Whatever must be agreed on before the first bucket."""
        if server.url in self._groups:
            return
        world = 1 + await server.workers()
        address = address_towards(server.host, server.port)
        limit = timedelta(seconds=self._timeout)
        store = TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        transfer_info = {
            "way": "group",
            "backend": self._backend,
            "address": address,
            "port": store.port,
            "world": world,
            "timeout": self._timeout,
        }

        def join() -> Any:
            return join_group(
                store, 0, world, backend=self._backend, address=address, device=self._device, timeout=self._timeout
            )

        self._groups[server.url] = await meanwhile(server, server.join(transfer_info), join), store

    def prepare(self, bucket: Sequence[Named]) -> BucketForm:
        """Once for all servers, in the main thread."""
        form = form_of(bucket)
        self._buffer = packed(bucket, form, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the threads that send have streams of their own
        return form

    async def send(self, server: ServerApi, form: BucketForm) -> None:
        group, _ = self._groups[server.url]
        buffer = self._buffer
        assert buffer is not None

        def push() -> None:
            broadcast(group, buffer)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        await meanwhile(server, server.bucket(form), push)

    def forget(self, server: ServerApi) -> None:
        """It was lost: what was agreed on with it is void."""
        self._groups.pop(server.url, None)

    def clear(self) -> None:
        """All buckets have arrived."""
        self._buffer = None


async def meanwhile(server: ServerApi, call: Awaitable[None], act: Callable[[], Any]) -> Any:
    """Make a call that the server answers when `act` was done here, in a thread. What fails on either side fails this.

    If the server refuses at once, `act` waits in vain until its own timeout; its thread is left behind.
    """
    acting = asyncio.get_running_loop().run_in_executor(None, act)
    acting.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may be left behind
    await call
    try:
        return await acting
    except (RuntimeError, ValueError) as error:  # of the connection; anything else is a mistake of ours
        reason = " ".join(str(error).split())[:200]
        raise server.lost(f"lost the connection for weights ({reason})") from None


class FilesTransport:
    """Buckets are safetensors files in a folder that servers see under the same name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / f"bucket-{os.getpid()}.safetensors"
        self._connected: set[str] = set()

    async def connect(self, server: ServerApi) -> None:
        if server.url not in self._connected:
            await server.join({"way": "files"})
            self._connected.add(server.url)

    def prepare(self, bucket: Sequence[Named]) -> BucketForm:
        beside = self._file.with_suffix(".writing")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.cpu() for name, tensor in bucket}, beside)
            beside.replace(self._file)
        except OSError as error:
            raise UserError(
                "rollout.transfer_folder",
                f"{self._folder} cannot be written ({error.strerror or error})",
                "give a folder that the servers see, with room for a bucket",
            ) from None
        return form_of(bucket, self._file)

    async def send(self, server: ServerApi, form: BucketForm) -> None:
        await server.bucket(form)

    def forget(self, server: ServerApi) -> None:
        self._connected.discard(server.url)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)


Act = Callable[[ServerApi], Awaitable[None]]


async def each(servers: Sequence[ServerApi], act: Act) -> dict[ServerApi, ServerLostError]:
    """Do it for all of them at once; those that were lost. Any other error is raised when all have ended."""
    failed: dict[ServerApi, ServerLostError] = {}
    for server, found in zip(servers, await asyncio.gather(*map(act, servers), return_exceptions=True), strict=True):
        if isinstance(found, ServerLostError):
            failed[server] = found
        elif found is not None:
            raise found
    return failed


@dataclass(kw_only=True, slots=True)
class SyncOutcome:
    """Of a weight sync, on rank 0."""

    failed: dict[str, str] = field(default_factory=dict)  # a line by address for each server without the weights
    refused: set[str] = field(default_factory=set)  # those of them that were there, and could not load weights
    num_bytes: int = 0
    error: str | None = None  # that only the user can cure


@dataclass(kw_only=True, eq=False)
class WeightSync:
    """Gives the weights of a model to servers. Every rank makes one and calls it alike; `first` is rank 0."""

    servers: Sequence[ServerApi]
    loop: LoopThread
    first: bool
    stream: WeightStream
    way: GroupTransport | FilesTransport
    folder: Path
    base: str  # the folder of the model without adapters
    model: str  # what the servers call it
    adapters: bool  # whether these travel alone
    launcher: Launcher | None

    def name(self, version: int) -> str:
        """What the servers call the policy."""
        return f"{self.model}-step-{version}" if self.adapters else self.model

    def close(self) -> None:
        for server in self.servers:
            self.way.forget(server)
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def hand_over(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        with self._servers_left_alone():
            return (self._send_adapters if self.adapters else self._send_weights)(trained, version)

    def _send_weights(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        outcome = SyncOutcome()
        taking = list(self.servers) if self.first else []

        def attempt(act: Act, *, loads: bool = False) -> None:
            try:
                for server, error in self.loop.run(each(taking, act)).items() if taking else ():
                    outcome.failed[server.url] = str(error)
                    if loads and isinstance(error, FailedError):
                        outcome.refused.add(server.url)
                    self.way.forget(server)
                    taking.remove(server)
            except UserError as wrong:
                outcome.error = outcome.error or str(wrong)

        async def finish(server: ServerApi) -> None:
            await server.finish(version)
            await server.resume()

        attempt(self._begin)
        if outcome.error is not None:
            taking.clear()
        for bucket in self.stream.buckets(trained, keep=self.first):
            if taking and outcome.error is None:
                try:
                    form = self.way.prepare(bucket)
                except UserError as wrong:
                    outcome.error = str(wrong)
                    continue
                outcome.num_bytes += form.num_bytes
                attempt(lambda server, form=form: self.way.send(server, form), loads=True)  # type: ignore[misc]
        self.way.clear()
        attempt(finish)
        return outcome

    async def _begin(self, server: ServerApi) -> None:
        await server.pause()
        if await server.version() is None:
            self.way.forget(server)  # a new process behind the same address
        await self.way.connect(server)
        await server.begin()

    def _send_adapters(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        """The adapters alone, as files."""
        name = self.name(version)
        folder = self.folder / name
        if self.first and self.folder.is_dir():
            for earlier in self.folder.iterdir():  # a server may read what it was given last once more
                shutil.rmtree(earlier, ignore_errors=True)
        export_adapters(trained, folder, base=self.base)
        outcome = SyncOutcome()
        if not self.first:
            return outcome

        async def load(server: ServerApi) -> None:
            await server.pause()
            await server.resume()  # adapters can be added while it runs; nothing of the last version may
            await server.load_adapters(folder, name=name, model=self.model, version=version)

        outcome.num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        try:
            lost = self.loop.run(each(self.servers, load))
            outcome.failed = {server.url: str(error) for server, error in lost.items()}
        except UserError as wrong:
            outcome.error = str(wrong)
        return outcome

    @contextmanager
    def _servers_left_alone(self) -> Iterator[None]:
        if self.launcher is None:
            yield
            return
        self.loop.run(self.launcher.left_alone.acquire())
        try:
            yield
        finally:
            self.loop.call(self.launcher.left_alone.release)
