"""Weights from a trained model, which may be sharded, to servers, bucket by bucket.

    trained model     q.weight [shards]  k.weight [shards]  ...         every rank gathers each tensor in turn
      -> layers       names and shapes as in HF files, experts one by one; rank 0 holds one layer
      -> buckets      of about BUCKET bytes, uint8                      rank 0 holds one
      -> way          "group"   a broadcast to the workers of each server, in a process group of its own
                      "files"   a safetensors file that all servers read, removed afterwards

A group belongs to one server: a server that dies takes nothing from the others, and one that comes back gets another
group. Whatever happens to the servers, every rank goes through all tensors, because gathering them is collective.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from padfree.errors import UserError
from padfree.model.export import empty_copy, whole_tensors
from padfree.model.load import clean_name, named_tensors
from padfree.rollout.vllm.http import Server, ServerLostError
from padfree.rollout.vllm.plugin import BucketForm, address_towards, broadcast, join_group

BUCKET = 256 << 20

Named = tuple[str, Tensor]


class Stream:
    """The tensors of a model under the names, in the shapes and in the types that HF files of `dtype` have."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._empty = empty_copy(model, dtype)
        parameters = {clean_name(name) for name, _ in self._empty.named_parameters()}
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(self._empty).items() if name in parameters}

    def buckets(self, model: PreTrainedModel, *, keep: bool, size: int = BUCKET) -> Iterator[list[Named]]:
        """Every rank must go through all of them; where `keep` is false they are empty."""
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


class Way(Protocol):
    """How a bucket gets to a server."""

    def connect(self, server: Server) -> None:
        """Whatever must be agreed on before the first bucket."""

    def prepare(self, bucket: Sequence[Named]) -> BucketForm:
        """Once for all servers."""

    def send(self, server: Server, form: BucketForm) -> None:
        """One bucket to one server. Calls for different servers come from different threads."""

    def forget(self, server: Server) -> None:
        """It was lost: what was agreed on with it is void."""


class GroupWay:
    """By broadcast."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._device, self._timeout = device, timeout
        self._groups: dict[str, tuple[Any, Any]] = {}  # by address: the group, and the store it was made with
        self._buffer: Tensor | None = None

    def connect(self, server: Server) -> None:
        if server.url in self._groups:
            return
        world = 1 + server.number("/get_world_size", "world_size")
        address = address_towards(server.host, server.port)
        limit = timedelta(seconds=self._timeout)
        store = TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        told = {
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

        group = _meanwhile(server, "/init_weight_transfer_engine", {"init_info": told}, join)
        self._groups[server.url] = group, store

    def prepare(self, bucket: Sequence[Named]) -> BucketForm:
        form = form_of(bucket)
        self._buffer = packed(bucket, form, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # threads below have streams of their own
        return form

    def send(self, server: Server, form: BucketForm) -> None:
        group, _ = self._groups[server.url]
        buffer = self._buffer
        assert buffer is not None
        told = {"names": form.names, "dtypes": form.dtypes, "shapes": form.shapes}

        def push() -> None:
            broadcast(group, buffer)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        _meanwhile(server, "/update_weights", {"update_info": told}, push)

    def forget(self, server: Server) -> None:
        self._groups.pop(server.url, None)


def _meanwhile(server: Server, path: str, body: Any, act: Callable[[], Any]) -> Any:
    """Call a route that waits for what `act` does here, and do it. What fails on either side fails this.

    If the server refuses at once, `act` waits for nobody until its own timeout; its thread is left behind.
    """
    outcome: list[Any] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(act())
        except Exception as error:  # it must reach whoever waits below
            failure.append(error)

    acting = threading.Thread(target=run, name="transfer", daemon=True)
    acting.start()
    server.call("POST", path, body)
    acting.join()
    if failure and not isinstance(failure[0], RuntimeError | ValueError):
        raise failure[0]  # a mistake of ours, and not of the connection
    if failure:
        reason = " ".join(str(failure[0]).split())[:200]
        raise ServerLostError(f"rollout.servers: {server.url} lost the connection for weights ({reason})")
    return outcome[0]


class FilesWay:
    """By safetensors files in a folder that servers see under the same name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._connected: set[str] = set()

    def connect(self, server: Server) -> None:
        if server.url not in self._connected:
            server.call("POST", "/init_weight_transfer_engine", {"init_info": {"way": "files"}})
            self._connected.add(server.url)

    def prepare(self, bucket: Sequence[Named]) -> BucketForm:
        self._file = self._folder / f"bucket-{os.getpid()}.safetensors"
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

    def send(self, server: Server, form: BucketForm) -> None:
        told = {"names": form.names, "dtypes": form.dtypes, "shapes": form.shapes, "file": form.file}
        server.call("POST", "/update_weights", {"update_info": told})

    def forget(self, server: Server) -> None:
        self._connected.discard(server.url)

    def clear(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def each(servers: Sequence[Server], act: Callable[[Server], Any]) -> dict[Server, str]:
    """Do it for all of them at once; a line for each that failed."""
    failed: dict[Server, str] = {}

    def attempt(server: Server) -> None:
        try:
            act(server)
        except ServerLostError as error:
            failed[server] = str(error)

    if servers:
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(attempt, servers))
    return failed
