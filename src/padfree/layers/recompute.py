"""Activations of a layer that forward does not keep: backward computes them again.

    full        keeps the layer's input; everything is computed again
    selective   keeps the results of matmuls as well; the rest is computed again

This is PyTorch's activation checkpointing, put around layers that are not compiled. A compiled layer is told in its
graph what to keep: see `padfree.layers.compile`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from padfree.config.choices import Checkpointing

SAVED_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
"""What selective recomputation keeps the results of."""


def recompute_layers(layers: Iterable[nn.Module], mode: Checkpointing) -> None:
    """Forget the activations of each layer and compute them again in backward."""
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_matmuls)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ValueError(
                f"parallel.checkpointing: {mode!r}, but {type(layer).__name__} cannot be recomputed; set it to none"
            )
        layer.gradient_checkpointing = True
        # A plain attribute of the class: nn.Module's own setattr is typed for tensors and modules.
        object.__setattr__(layer, "_gradient_checkpointing_func", partial(checkpoint, **options))


def _save_matmuls(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_MATMULS else CheckpointPolicy.PREFER_RECOMPUTE
