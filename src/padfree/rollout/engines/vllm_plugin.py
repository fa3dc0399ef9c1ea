"""The vLLM side of a weight sync: a weight transfer engine, registered by the entry point `vllm.general_plugins`.

A vLLM server uses it if it is started with `--weight-transfer-config '{"backend": "padfree"}'`. The trainer calls these
routes of the server:

    /init_weight_transfer_engine   {"transport": "group", "address", "port", ...}, or {"transport": "files"}
    /start_weight_update           begins vLLM's layerwise reload
    /update_weights                one bucket: names, dtypes, shapes, differences; its bytes come by broadcast or in a
                                   file
    /finish_weight_update          ends the reload, and processes tied weights again

Every worker receives whole tensors, or differences, which it applies to a copy of the whole tensors in host memory. The
model's `load_weights` keeps the shard that belongs to the worker.

vLLM's layerwise reload processes a layer once the weights of that layer have arrived. A head that is tied to the
embeddings has no weights of its own, and on the CPU vLLM computes it from a packed copy of the embeddings. If
`/finish_weight_update` did not process the head again, the head would keep the old copy.

The server imports this module. Its environment has torch and safetensors, but not all dependencies of padfree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from padfree.rollout.engines.servers.buckets import BucketForm, Receiver

BACKEND = "padfree"


def register() -> None:
    """Register padfree's weight transfer engine. vLLM calls this at the start of each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


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

        def receive_weights(self, update_info: Any) -> None:
            if self._receiver is None:
                raise RuntimeError("padfree: a bucket arrived before /init_weight_transfer_engine")
            # vLLM's reload keeps views of a bucket's tensors until all weights of their layer have arrived.
            self.model.load_weights(self._receiver.tensors(BucketForm.of(asdict(update_info))))

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            process_tied(self.model)
            self._open = False

        def shutdown(self) -> None:
            self._receiver = None

    return PadfreeEngine


def process_tied(model: nn.Module) -> None:
    """Process tied heads and embeddings again, because on the CPU each of them keeps a packed copy of the weight."""
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
