"""The server's side of the weight transfer: an engine that vLLM finds by the entry point `vllm.general_plugins`.

    --weight-transfer-config '{"backend": "padfree"}'                      on the server's command line

    /init_weight_transfer_engine   {"way": "group", "address", "port", ...}    or {"way": "files"}
    /start_weight_update           vLLM's layerwise reload begins
    /update_weights                one bucket: names, dtypes, shapes, and its bytes by broadcast, or a safetensors file
    /finish_weight_update          the reload ends; what was derived from tied weights is derived again

    bucket    q q q . k k v v v    uint8, one broadcast; every tensor begins at a multiple of ALIGNMENT bytes

A bucket is one broadcast from the trainer to all workers of a server: gloo between CPUs, NCCL between GPUs, with the
same code. Each worker takes its own share of every tensor: that is what the model's `load_weights` does.

vLLM's layerwise reload processes a layer when its own weights have arrived. A head that is tied to the embeddings has
none of its own, and on the CPU vLLM computes it from a packed copy: without the last line above it would go on with the
old one.

This module is imported in the server's environment, which has torch and safetensors, and not all that padfree needs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore

BACKEND = "padfree"
ALIGNMENT = 64


def register() -> None:
    """Called by vLLM in each of its processes, at their start."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


# The form of a bucket, which both sides must know


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """What a bucket holds; `file` is where it is, None: it comes by broadcast."""

    names: Sequence[str]
    dtypes: Sequence[str]  # of torch, such as bfloat16
    shapes: Sequence[Sequence[int]]
    file: str | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.dtypes) == len(self.shapes)

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    def _ends(self) -> list[int]:
        """Where each tensor's room ends, and 0 in front."""
        ends = [0]
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            size = prod(shape) * getattr(torch, dtype).itemsize
            ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return ends

    def parts(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a buffer [num_bytes] uint8, each a view of it."""
        for name, dtype, shape, begin in zip(self.names, self.dtypes, self.shapes, self._ends()[:-1], strict=True):
            kind = getattr(torch, dtype)
            yield name, buffer[begin : begin + prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def join_group(
    store: Store, rank: int, world: int, *, backend: str, address: str, device: torch.device, timeout: float
) -> Any:
    """A process group of its own, beside whatever groups the process has; `address` is this process's."""
    limit = timedelta(seconds=timeout)
    options: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = limit
    options._devices = [kind.create_device(hostname=address)]  # not what the host's name may stand for
    return kind(store, rank, world, options)


def broadcast(group: Any, buffer: Tensor) -> None:
    """From rank 0, the trainer."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()


def address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` sees."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


# The engine


def _engine_class() -> type[Any]:
    """Made when vLLM is there to inherit from."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        way: str
        backend: str = "gloo"
        address: str = ""
        port: int = 0
        world: int = 1
        timeout: float = 600.0

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
        names: list[str] = field(default_factory=list)
        dtypes: list[str] = field(default_factory=list)
        shapes: list[list[int]] = field(default_factory=list)
        file: str | None = None

    class PadfreeEngine(WeightTransferEngine):  # type: ignore[misc]
        """Weights from padfree's trainer."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        _group: Any = None
        _backend = "gloo"
        _open = False

        def init_transfer_engine(self, init_info: Any) -> None:
            self._group = None
            if init_info.way == "files":
                return
            if init_info.backend == "nccl" and self.device.type != "cuda":
                raise RuntimeError(f"padfree: the trainer is on a GPU, this worker is on {self.device}")
            parallel = self.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
            limit = timedelta(seconds=init_info.timeout)
            store = TCPStore(
                init_info.address,
                init_info.port,
                init_info.world,
                is_master=False,
                timeout=limit,
                wait_for_workers=False,
            )
            self._backend = init_info.backend
            self._group = join_group(
                store,
                rank,
                init_info.world,
                backend=init_info.backend,
                address=address_towards(init_info.address, init_info.port),
                device=self.device,
                timeout=init_info.timeout,
            )

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import (
                finalize_layerwise_reload,
                initialize_layerwise_reload,
            )

            if self._open:  # an update that was not finished: its trainer was killed, or a bucket did not arrive
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)
            self._open = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def receive_weights(self, update_info: Any) -> None:
            form = BucketForm(
                names=update_info.names, dtypes=update_info.dtypes, shapes=update_info.shapes, file=update_info.file
            )
            self.model.load_weights(_read(form, self.device) if form.file else self._received(form))

        def _received(self, form: BucketForm) -> Iterator[tuple[str, Tensor]]:
            if self._group is None:
                raise RuntimeError(
                    "padfree: a bucket by broadcast, but no process group; call /init_weight_transfer_engine"
                )
            place = self.device if self._backend == "nccl" else torch.device("cpu")
            # A buffer of its own: the reload keeps views of it until their layer is complete.
            buffer = torch.empty(form.num_bytes, dtype=torch.uint8, device=place)
            broadcast(self._group, buffer)
            return form.parts(buffer)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            process_tied(self.model)
            self._open = False

        def shutdown(self) -> None:
            self._group = None

    return PadfreeEngine


def _read(form: BucketForm, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(form.file, framework="pt", device=str(device)) as file:
        for name, dtype, shape in zip(form.names, form.dtypes, form.shapes, strict=True):
            tensor = file.get_tensor(name)
            if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", list(shape)):
                raise RuntimeError(f"padfree: {name} in {form.file} is {tensor.dtype} {list(tensor.shape)}")
            yield name, tensor


def process_tied(model: nn.Module) -> None:
    """Let heads and embeddings that share a weight derive again what they keep beside it (on the CPU a pack)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
