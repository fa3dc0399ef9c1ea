"""Weight sync: send the weights of a model to the servers.

Rank 0 sends each bucket (a group of tensors) to all servers concurrently: by broadcast (`GroupTransport`), or in a file
that the servers read (`FilesTransport`). Gathering is collective, so all ranks iterate over all tensors even if servers
fail.

A server that confirmed the last weight sync may receive only what has changed (`SentWeights`). Other servers receive
all weights. Adapters are merged into the weights, or sent alone if the engine supports adapters.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel

from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.model.export import export_adapters
from padfree.rollout.engines.servers.buckets import BucketForm, address_towards, broadcast, join_group
from padfree.rollout.engines.servers.server_api import FailedError, ServerApi, ServerLostError
from padfree.rollout.engines.servers.server_processes import Launcher
from padfree.rollout.engines.servers.weight_stream import Bucket, SentWeights, WeightStream
from padfree.rollout.loop_thread import LoopThread
from padfree.warning import PadfreeWarning


def form_of(bucket: Bucket, *, keep: bool = False, file: Path | None = None) -> BucketForm:
    return BucketForm(
        names=[name for name, _ in bucket.tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
        shapes=[list(tensor.shape) for _, tensor in bucket.tensors],
        file=None if file is None else str(file),
        keep=keep,
        differences=bucket.differences,
    )


def packed(bucket: Bucket, form: BucketForm, device: torch.device) -> Tensor:
    """Copy the tensors of a bucket (tensors that are sent together) into one buffer [num_bytes] uint8, and return it.

    `form` describes where each tensor is in the buffer.
    """
    buffer = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
    for (_, source), (_, target) in zip(bucket.tensors, form.parts(buffer), strict=True):
        target.copy_(source)
    return buffer


class GroupTransport:
    """Sends buckets (weight tensors that are sent together) to servers by broadcast.

    `FilesTransport`, which sends buckets as files, has the same methods.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._device, self._timeout = device, timeout
        self._groups: dict[str, tuple[Any, Any]] = {}  # by URL: the process group and its rendezvous store
        self._buffer: Tensor | None = None

    async def connect(self, server: ServerApi) -> None:
        """Set up the process group with a server, unless it exists. Call this before weights are sent to the server."""
        if server.url in self._groups:
            return
        world = 1 + await server.workers()
        address = address_towards(server.host, server.port)
        limit = timedelta(seconds=self._timeout)
        store = TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        transfer_info = {
            "transport": "group",
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

        self._groups[server.url] = await call_during(server, server.join(transfer_info), join), store

    def prepare(self, bucket: Bucket, *, keep: bool = False) -> BucketForm:
        """Copy a bucket of weights into the buffer that is sent to all servers. Runs in the main thread.

        Return the description of the bucket for the servers.

        `keep`: whether the servers keep a copy of the tensors.
        """
        form = form_of(bucket, keep=keep)
        self._buffer = packed(bucket, form, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the sending threads use other streams
        return form

    async def send(self, server: ServerApi, form: BucketForm) -> None:
        group, _ = self._groups[server.url]
        buffer = self._buffer
        assert buffer is not None

        def push() -> None:
            broadcast(group, buffer)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        await call_during(server, server.bucket(form), push)

    def forget(self, server: ServerApi) -> None:
        """Drop the connection to a server that has failed."""
        self._groups.pop(server.url, None)

    def clear(self) -> None:
        """Release the buffer for buckets of weights, after the last bucket of a weight sync."""
        self._buffer = None


async def call_during(server: ServerApi, call: Awaitable[None], function: Callable[[], Any]) -> Any:
    """Await `call`, a request to the server, while `function` runs in a thread. Return the result of `function`.

    `call` and `function` are the two sides of one collective. An error on either side is raised.
    """
    running = asyncio.get_running_loop().run_in_executor(None, function)
    running.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may never be awaited
    await call  # if the server rejects the call, `function` runs on until the collective times out
    try:
        return await running
    except (RuntimeError, ValueError) as error:  # raised by the connection; any other exception is a bug
        reason = " ".join(str(error).split())[:200]
        raise server.lost(f"lost the connection for weights ({reason})") from None


class FilesTransport:
    """Sends buckets (weight tensors that are sent together) as safetensors files.

    The files are in a folder that the servers see under the same path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / f"bucket-{os.getpid()}.safetensors"
        self._connected: set[str] = set()

    async def connect(self, server: ServerApi) -> None:
        if server.url not in self._connected:
            await server.join({"transport": "files"})
            self._connected.add(server.url)

    def prepare(self, bucket: Bucket, *, keep: bool = False) -> BucketForm:
        temporary = self._file.with_suffix(".writing")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.cpu() for name, tensor in bucket.tensors}, temporary)
            temporary.replace(self._file)
        except OSError as error:
            raise UserError(
                "rollout.transfer_folder",
                f"{self._folder} cannot be written ({error.strerror or error})",
                "free disk space, or set rollout.transfer_folder to a folder that this run can write to and the "
                "servers can read",
            ) from None
        return form_of(bucket, keep=keep, file=self._file)

    async def send(self, server: ServerApi, form: BucketForm) -> None:
        await server.bucket(form)

    def forget(self, server: ServerApi) -> None:
        self._connected.discard(server.url)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)


ServerCall = Callable[[ServerApi], Awaitable[None]]


async def for_each(servers: Sequence[ServerApi], call: ServerCall) -> dict[ServerApi, ServerLostError]:
    """Run `call` for all servers concurrently. Return the servers whose call raised a `ServerLostError`, and the error.

    Any other error is raised after all calls have ended.
    """
    failed: dict[ServerApi, ServerLostError] = {}
    for server, error in zip(servers, await asyncio.gather(*map(call, servers), return_exceptions=True), strict=True):
        if isinstance(error, ServerLostError):
            failed[server] = error
        elif error is not None:
            raise error
    return failed


@dataclass(kw_only=True, slots=True)
class SyncOutcome:
    """The result of a weight sync, on rank 0."""

    failed: dict[str, str] = field(default_factory=dict)  # by URL of each server without the weights: an error message
    refused: set[str] = field(default_factory=set)  # URLs of the servers that answered but could not load the weights
    num_bytes: int = 0  # number of bytes sent
    error: str | None = None  # an error that ends the run, because only the user can fix it


@dataclass(kw_only=True, eq=False)
class WeightSync:
    """Sends the weights of a model to servers. Every rank creates one. `send` is collective."""

    servers: Sequence[ServerApi]
    loop: LoopThread
    mesh: Mesh
    stream: WeightStream
    sent: SentWeights | None  # the weights that were sent last, to send only changes; None: send whole tensors
    transport: GroupTransport | FilesTransport
    folder: Path
    base: str  # the folder of the model without adapters
    model: str  # the name of this model on the servers
    adapters: bool  # whether only adapters are sent
    launcher: Launcher | None
    colocated: bool = False  # whether the servers sleep between a rollout batch and the next weight sync

    def __post_init__(self) -> None:
        self.first = self.mesh.loss.rank == 0
        self._confirmed: dict[str, int] = {}  # by URL: the version of the last weight sync that reached the server
        self._behind: dict[str, str] = {}  # by URL: why this server cannot receive differences

    def name(self, version: int) -> str:
        """Return the name under which the servers serve policy version `version`."""
        return f"{self.model}-step-{version}" if self.adapters else self.model

    @property
    def sends_all(self) -> bool:
        """Whether each weight sync sends all weights to the servers."""
        return self.sent is None and not self.adapters

    def close(self) -> None:
        for server in self.servers:
            self.transport.forget(server)
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        """Send the current weights as policy version `version`. Collective."""
        with self._probes_paused():
            return (self._send_adapters if self.adapters else self._send_weights)(trained, version)

    def _send_weights(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        outcome = SyncOutcome()
        waiting = list(self.servers) if self.first else []
        self._attempt(self._begin, waiting, outcome)
        if outcome.error is not None:
            waiting.clear()
        updated: list[ServerApi] = []
        if self.sent is not None and self.sent.version is not None:
            updated = [server for server in waiting if server.url not in self._behind]
            if self._agreed(bool(updated)):
                self._send_differences(self.sent, trained, version, updated, outcome)
            waiting = [s for s in waiting if s.url in self._behind and s.url not in outcome.failed]
            for server in waiting:
                reason = self._behind[server.url]
                warnings.warn(
                    f"weight sync {version}: {server.url} receives all weights, not only the changes ({reason})",
                    PadfreeWarning,
                    2,
                )
        if self._agreed(bool(waiting)):
            self._send_buckets(self.stream.buckets(trained, keep=self.first), waiting, outcome)
            if self.sent is not None and self.sent.version != version:
                self.sent.keep(trained, version)
        self.transport.clear()

        async def finish(server: ServerApi) -> None:
            await server.finish(version)
            if self.colocated:
                await server.wake("kv_cache")
            await server.resume()
            self._confirmed[server.url] = version

        self._attempt(finish, [*updated, *waiting], outcome)
        return outcome

    async def _begin(self, server: ServerApi) -> None:
        if self.colocated:
            await server.wake("weights")
        await server.pause()
        found, confirmed = await server.version(), self._confirmed.get(server.url)
        self._behind.pop(server.url, None)
        if confirmed is None or found != str(confirmed):
            self.transport.forget(server)  # reconnect: the server process is new, or another run used the server
        if found is None:
            self._behind[server.url] = "it has no weights of this run"
        elif self.sent is not None and (found != str(confirmed) or confirmed != self.sent.version):
            self._behind[server.url] = f"it has policy version {found}, and version {self.sent.version} was sent last"
        await self.transport.connect(server)
        await server.begin()

    def _send_differences(
        self, sent: SentWeights, trained: PreTrainedModel, version: int, servers: list[ServerApi], outcome: SyncOutcome
    ) -> None:
        """Send the weight elements that have changed since the last weight sync. Collective.

        Servers that fail are removed from `servers`. A server that could not apply the changes is marked to receive all
        weights instead.
        """
        failed = self._send_buckets(sent.buckets(trained, version), servers, outcome)
        again = [server for server, error in failed.items() if isinstance(error, FailedError)]
        for server in again:
            del outcome.failed[server.url]
            outcome.refused.discard(server.url)
        self._attempt(self._begin, again, outcome)
        self._behind |= {server.url: str(failed[server]) for server in again}

    def _send_buckets(
        self, buckets: Iterable[Bucket], servers: list[ServerApi], outcome: SyncOutcome
    ) -> dict[ServerApi, ServerLostError]:
        """Send buckets to `servers`. Return the servers that failed, and remove them from `servers`. Collective."""
        lost: dict[ServerApi, ServerLostError] = {}
        for bucket in buckets:
            if not servers or outcome.error is not None:
                continue  # gathering is collective
            try:
                form = self.transport.prepare(bucket, keep=self.sent is not None)
            except UserError as wrong:
                outcome.error = str(wrong)
                continue
            outcome.num_bytes += form.num_bytes

            async def send(server: ServerApi, form: BucketForm = form) -> None:
                await self.transport.send(server, form)

            lost |= self._attempt(send, servers, outcome)
        outcome.refused |= {server.url for server, error in lost.items() if isinstance(error, FailedError)}
        return lost

    def _attempt(
        self, call: ServerCall, servers: list[ServerApi], outcome: SyncOutcome
    ) -> dict[ServerApi, ServerLostError]:
        """Run `call` for all servers. Return the servers that failed, and remove them from `servers`."""
        try:
            lost = self.loop.run(for_each(servers, call)) if servers else {}
        except UserError as wrong:
            outcome.error = outcome.error or str(wrong)
            return {}
        for server, error in lost.items():
            outcome.failed[server.url] = str(error)
            self._confirmed.pop(server.url, None)
            self.transport.forget(server)
            servers.remove(server)
        return lost

    def _agreed(self, value: bool) -> bool:
        """Return rank 0's `value` on every rank. Collective."""
        return bool(broadcast_object(value, self.mesh))

    def _send_adapters(self, trained: PreTrainedModel, version: int) -> SyncOutcome:
        """Write the model's adapters to files, and let the servers load them as policy `version`. Collective."""
        name = self.name(version)
        folder = self.folder / name
        if self.first and self.folder.is_dir():
            for earlier in self.folder.iterdir():  # adapters of earlier versions, which a server might have read again
                shutil.rmtree(earlier, ignore_errors=True)
        export_adapters(trained, folder, base=self.base)
        outcome = SyncOutcome()
        if not self.first:
            return outcome

        async def load(server: ServerApi) -> None:
            if self.colocated:
                await server.wake("weights")
                await server.wake("kv_cache")
            await server.pause()
            # The pause interrupts the responses of the previous version. Loading adapters alone would need no pause.
            await server.resume()
            await server.load_adapters(folder, name=name, model=self.model, version=version)

        outcome.num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        try:
            lost = self.loop.run(for_each(self.servers, load))
            outcome.failed = {server.url: str(error) for server, error in lost.items()}
        except UserError as wrong:
            outcome.error = str(wrong)
        return outcome

    @contextmanager
    def _probes_paused(self) -> Iterator[None]:
        if self.launcher is None:
            yield
            return
        self.loop.run(self.launcher.probe_lock.acquire())
        try:
            yield
        finally:
            self.loop.call(self.launcher.probe_lock.release)


def broadcast_object(value: Any, mesh: Mesh) -> Any:
    """Return rank 0's `value` on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(mesh.loss.group, 0), group=mesh.loss.group)
    return box[0]
