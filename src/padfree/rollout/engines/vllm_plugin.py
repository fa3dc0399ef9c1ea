"""A weight transfer engine for vLLM servers. It receives the weights that padfree's trainer sends in a weight sync.

vLLM finds the engine by the entry point `vllm.general_plugins`. A server uses the engine if it is started with
`--weight-transfer-config '{"backend": "padfree"}'`.

A bucket (tensors that are sent together) holds whole tensors, or only the elements that have changed. A worker applies
changes to a copy of the tensors in host memory. It gives whole tensors to the model's `load_weights`.

The server's environment has torch and safetensors, but not all dependencies of padfree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from padfree.rollout.engines.servers.buckets import BucketForm, Receiver
from padfree.rollout.engines.vllm_images import add_image_routes

BACKEND = "padfree"


def register() -> None:
    """Register padfree's weight transfer engine. vLLM calls this at the start of each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ImportError):  # newer versions of vLLM have another module, with these routes
        from vllm.entrypoints.serve.dev.rlhf.api_router import router

        add_version_routes(router)
    add_image_routes()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


def add_version_routes(router: Any) -> None:
    """Add vLLM's routes for the policy version to the `APIRouter` of a vLLM release that lacks them.

    One API server process stores the policy version in memory, so the version is lost if the process restarts.
    """
    from fastapi import Body

    if any(getattr(route, "path", None) == "/weight_info" for route in router.routes):
        return
    current = "default"

    async def weight_info() -> dict[str, str]:
        return {"weight_version": current}

    async def update_weight_version(new_version: str = Body(embed=True)) -> dict[str, str]:
        nonlocal current
        current = new_version
        return {"weight_version": current}

    router.add_api_route("/weight_info", weight_info, methods=["GET"])
    router.add_api_route("/update_weight_version", update_weight_version, methods=["POST"])


def _engine_class() -> type[Any]:
    """Return the class of the weight transfer engine. It is defined inside a function, because its base is in vLLM."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
        transport: str
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
        keep: bool = False
        differences: list[dict[str, Any]] | None = None

    class PadfreeEngine(WeightTransferEngine):  # type: ignore[misc]
        """The weight transfer engine in a worker of a vLLM server: receives weights from padfree's trainer."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo
        _receiver: Receiver | None = None
        _open = False

        def __init__(self, config: Any, vllm_config: Any, *others: Any) -> None:
            """Create the engine. In vLLM 0.24, the arguments after `config` are a `parallel_config` and the model."""
            super().__init__(config, vllm_config, *others)
            if not hasattr(self, "device"):
                self.device = next(self.model.parameters()).device

        def init_transfer_engine(self, init_info: Any) -> None:
            parallel = self.parallel_config
            self._receiver = Receiver(self.device)
            rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._receiver.join(asdict(init_info), rank)

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import (
                finalize_layerwise_reload,
                initialize_layerwise_reload,
            )

            if self._open:  # the last update is unfinished: its trainer was killed, or a bucket did not arrive
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)
            self._open = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def receive_weights(self, update_info: Any, load_weights: Callable[[Any], Any] | None = None) -> None:
            # vLLM 0.24 begins and ends the reload itself, and calls this method with `load_weights`.
            if self._receiver is None:
                raise RuntimeError("padfree: a bucket arrived before /init_weight_transfer_engine")
            # vLLM's reload keeps views of a bucket's tensors until all weights of their layer have arrived.
            form = {one.name: getattr(update_info, one.name) for one in fields(BucketForm)}
            (load_weights or self.model.load_weights)(self._receiver.tensors(BucketForm.of(form)))

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            process_tied(self.model)  # no weights arrive for a tied head, so the reload does not process it
            self._open = False

        def shutdown(self) -> None:
            self._receiver = None

        @staticmethod
        def trainer_send_weights(*_: Any) -> None:
            """vLLM 0.24 requires this method."""
            raise NotImplementedError("padfree's trainer sends the weights")

    return PadfreeEngine


def process_tied(model: nn.Module) -> None:
    """Run vLLM's `process_weights_after_loading` again for heads and embeddings that share a weight.

    On the CPU, each of these modules has a packed copy of the weight. Without this call, a copy could keep the values
    from before the weight sync.
    """
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
