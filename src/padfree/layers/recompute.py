"""Choose which activations a layer saves for backward. Backward recomputes all other activations.

The modes, and what they save:

    layers that are not compiled (`recompute_layers`)
        full        the layer's input
        selective   the layer's input and the results of matmuls
    compiled layers (`mark_saved`)
        input       the layer's input
        selective   the layer's input and the result of attention
        host        as `selective`, and the results of the projections q, k, v and o

With `host`, the saved tensors may be moved to host memory (`padfree.layers.offload`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from padfree.choices import Checkpointing, LayerLevel
from padfree.errors import UserError
from padfree.layers.matmuls import is_matmul

Kept = Literal["none", "input", "selective", "host"]
"""The modes of a compiled layer, which say what activations it saves. With the mode `none`, the compiler decides."""

KEPT_BY_LEVEL: dict[LayerLevel, Kept] = {
    "full": "input",
    "host": "host",
    "selective": "selective",
    "attention": "host",
    "none": "none",
}
"""What a compiled layer saves (`Kept`) at each checkpointing level. The setting `parallel.checkpointing` can give
layers different levels: `6 host, 30 none` are 6 layers with `host`, followed by 30 with `none`.
"""


def recompute_layers(layers: Iterable[nn.Module], mode: Checkpointing | LayerLevel) -> None:
    """Make layers that are not compiled recompute activations in backward. `mode` says which activations are saved."""
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_matmuls)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise UserError(
                "parallel.checkpointing",
                f"is not supported, because {type(layer).__name__} cannot be recomputed",
                "set it to 'none'",
                value=mode,
            )
        layer.gradient_checkpointing = True
        # Use object.__setattr__, because nn.Module.__setattr__ is typed for tensors and modules only.
        object.__setattr__(layer, "_gradient_checkpointing_func", partial(checkpoint, **options))


def _save_matmuls(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = is_matmul(operation, "after autograd")
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def mark_saved(graph: fx.Graph, kept: Kept) -> None:
    """Mark each node of a compiled layer's graph as saved for backward or recomputed."""
    saved: set[fx.Node] = set()
    if kept != "input":
        saved = {node for node in graph.nodes if _is_attention(node)}
    if kept == "host":
        before, after = (lambda node: node.all_input_nodes), (lambda node: list(node.users))
        saved |= _nearest_matmuls(saved, before) | _nearest_matmuls(saved, after)
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # If an operator has several results, each result is saved separately, through its getitem node.
        source = node.args[0] if node.target is operator.getitem else node
        policy = CheckpointPolicy.MUST_SAVE if source in saved else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0


def _is_attention(node: fx.Node) -> bool:
    return str(node.target).removesuffix(".default") in ("padfree.self_attention", "padfree.prefix_attention")


def _nearest_matmuls(start: set[fx.Node], neighbours: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """Return the first matmul on each path through the graph that begins at a node of `start`.

    `neighbours` is a function that returns the next nodes of a path, for example the users of a node.
    """
    found: set[fx.Node] = set()
    seen, todo = set(start), list(start)
    while todo:
        for node in neighbours(todo.pop()):
            if node in seen:
                continue
            seen.add(node)
            if is_matmul(node.target, "before autograd"):
                found.add(node)
            else:
                todo.append(node)
    return found
