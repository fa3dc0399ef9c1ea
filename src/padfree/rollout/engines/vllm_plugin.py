"""vLLM's side of the weight sync: an engine that vLLM finds by the entry point `vllm.general_plugins`.

    --weight-transfer-config '{"backend": "padfree"}'                      on the server's command line

    /init_weight_transfer_engine   {"way": "group", "address", "port", ...}    or {"way": "files"}
    /start_weight_update           vLLM's layerwise reload begins
    /update_weights                one bucket: names, dtypes, shapes, and its bytes by broadcast, or a safetensors file
    /finish_weight_update          the reload ends; what was derived from tied weights is derived again

Each worker takes its own share of every tensor: that is what the model's `load_weights` does.

vLLM's layerwise reload processes a layer when its own weights have arrived. A head that is tied to the embeddings has
none of its own, and on the CPU vLLM computes it from a packed copy: without the last line above it would go on with the
old one.

This module is imported in the server's environment, which has torch and safetensors, and not all that padfree needs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from padfree.rollout.engines.servers.buckets import BucketForm, Receiver

BACKEND = "padfree"


def register() -> None:
    """Called by vLLM in each of its processes, at their start."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


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

            if self._open:  # an update that was not finished: its trainer was killed, or a bucket did not arrive
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)
            self._open = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def receive_weights(self, update_info: Any) -> None:
            if self._receiver is None:
                raise RuntimeError("padfree: a bucket before /init_weight_transfer_engine")
            # The reload keeps views of a bucket until their layer is complete.
            self.model.load_weights(self._receiver.tensors(BucketForm(**asdict(update_info))))

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            process_tied(self.model)
            self._open = False

        def shutdown(self) -> None:
            self._receiver = None

    return PadfreeEngine


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
