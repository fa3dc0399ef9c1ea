"""`torch.compile` of each layer, and what a compiled layer keeps for its backward pass.

Attention is one operator in a layer's graph (over context ranks: a break in it). On a GPU so are the norms and the
gated activation of wide layers: see `layers.ops.rms_norm` and `layers.ops.swiglu`. On Hopper the matmuls around
the activation compute it as well: `layers.ops.matmul_epilogues`. The numbers of tokens and of samples are
variables from the first row on; what never changes stays constant. Of a decoder layer

    x -> norm -> q k v -> norm, rotation -> attention -> o -> (+ x) -> norm -> gate, up -> activation -> down -> (+)

backward is given

    none        whatever the compiler finds best
    input       x; everything is computed again, all products but the last one
    selective   x and the result of attention
    host        the products q k v o as well, and most of this waits in the host's memory: see `padfree.layers.offload`.
                The first layers keep their input alone: the link to the host needs the time, and nearly all gradients
                are there when backward comes to them

What is computed again is what costs least for its bytes. The head never is.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from padfree.layers.offload import HostMemory
from padfree.layers.ops.quack_support import has_epilogues
from padfree.layers.passes import matmul_epilogues as epilogues
from padfree.layers.passes import nodes
from padfree.layers.passes.norms import gather, replace_norms
from padfree.layers.passes.swiglu import overwrite, replace_gated

Kept = Literal["none", "input", "selective", "host"]

FIRST = 0.05
"""The share of the layers that keep their input alone under `host`."""

LONG_ROW = 8192
"""Tokens from which on the compiler reduces norms `ROWS_AT_A_TIME` rows at a time: its own choice is half of that."""

ROWS_AT_A_TIME = 32

WIDE_ROW = 2048
"""Numbers of a token's hidden states from which on a GPU takes longer for a layer than the host for its launches."""

PRODUCTS = (
    nn.functional.linear,
    torch._C._nn.linear,
    torch.addmm,
    torch.mm,
    torch.matmul,
    operator.matmul,
)
"""What a matrix product can be in a graph before it is lowered."""


def compile_layers(layers: Iterable[nn.Module], backend: str, kept: Kept = "none") -> None:
    """Compile each layer by itself."""
    layers = list(layers)
    memory = HostMemory(len(layers)) if kept == "host" else None
    compilers = {name: partial(_compiled, backend=lookup_backend(backend), kept=name) for name in get_args(Kept)}
    for number, layer in enumerate(layers):
        is_first = kept == "host" and number < FIRST * len(layers)
        layer.compile(backend=compilers["input" if is_first else kept])
        # What `nn.Module.compile` made, called in a frame around it: inside, it would be compiled.
        call = _for_any_length(layer._compiled_call_impl)
        if memory is not None:
            call = memory.around(layer, call, number)
        object.__setattr__(layer, "_compiled_call_impl", call)


def _for_any_length(call: Any) -> Callable[..., Any]:
    """`call` of a layer, which learns which sizes are those of the row before it is compiled."""

    def called(*args: Any, **kwargs: Any) -> Any:
        _mark_variable(args)
        _mark_variable(kwargs.values())
        context = kwargs.get("attn_context")
        if context is not None:
            _mark(context.segments.cu_seqlens, 0)
        return call(*args, **kwargs)

    return called


def _mark_variable(inputs: Iterable[Any]) -> None:
    """Hidden states [1, T, D], positions [1, T] and what is in tuples of such."""
    for each in inputs:
        if isinstance(each, Tensor) and each.ndim >= 2 and each.shape[0] == 1:
            _mark(each, 1)
        elif isinstance(each, tuple):
            _mark_variable(each)


def _mark(tensor: Tensor, dimension: int) -> None:
    # Angles and offsets are the same tensors for all layers.
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _compiled(graph: fx.GraphModule, inputs: Any, *, backend: Callable[..., Any], kept: Kept) -> Any:
    row = _hidden_states(inputs)
    pays = _pays(row)
    if pays and replace_norms(graph.graph, PRODUCTS) + replace_gated(graph.graph, PRODUCTS):
        graph.recompile()
    if backend is lookup_backend("inductor"):
        fused = [epilogues.fuse] if pays and _has_epilogues(row) else []
        patches: dict[str, Any] = {
            "post_grad_custom_pre_pass": GraphPass(gather, *fused),
            # Behind the compiler's own passes, which expect that nothing is overwritten.
            "post_grad_custom_post_pass": GraphPass(overwrite, epilogues.overwrite),
        }
        if row is not None and row.is_cuda:
            # Without asking how long the row is: each answer would be true of some lengths only, and compiled again.
            patches["triton.mix_order_reduction_non_strict_mode"] = True
            if _size(row.shape[1]) >= LONG_ROW:
                patches["triton.mix_order_reduction_split_size"] = ROWS_AT_A_TIME
        backend = partial(backend, config_patches=patches)
    if kept == "none":
        return backend(graph, inputs)
    mark_kept(graph.graph, kept)
    # The compiler's cache on disk does not look at the marks, and would give us a layer compiled without them.
    with functorch_config.patch(enable_autograd_cache=False):
        return backend(graph, inputs)


class GraphPass(CustomGraphPass):
    """Changes of each graph after autograd, as the compiler wants them."""

    def __init__(self, *changes: Callable[[fx.Graph], None]) -> None:
        self.changes = changes

    def __call__(self, graph: fx.Graph) -> None:
        for change in self.changes:
            change(graph)

    def uuid(self) -> bytes:
        """What the compiler's caches know this pass by."""
        return get_hash_for_files((*(inspect.getfile(change) for change in self.changes), nodes.__file__))


def _hidden_states(inputs: Any) -> Tensor | None:
    """The row [1, T, D] that a layer is compiled with."""
    rows = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.ndim == 3]
    return max(rows, key=lambda row: _size(row.shape[2]), default=None)


def _size(size: Any) -> int:
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _pays(row: Tensor | None) -> bool:
    """Whether operators of our own are worth their launches; the compiler's cost the host less."""
    return row is not None and row.is_cuda and _size(row.shape[2]) >= WIDE_ROW


def _has_epilogues(row: Tensor | None) -> bool:
    return row is not None and has_epilogues(row.device, row.dtype)


def mark_kept(graph: fx.Graph, what: Kept) -> None:
    """Say of each node whether backward is given its result or computes it again."""
    kept: set[fx.Node] = set()
    if what != "input":
        kept = {node for node in graph.nodes if _is_attention(node)}
    if what == "host":
        before, after = (lambda node: node.all_input_nodes), (lambda node: list(node.users))
        kept |= _nearest_products(kept, before) | _nearest_products(kept, after)
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # Of an operator with several results it is each of them that is kept.
        source = node.args[0] if node.target is operator.getitem else node
        policy = CheckpointPolicy.MUST_SAVE if source in kept else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0


def _is_attention(node: fx.Node) -> bool:
    return node.target in (torch.ops.padfree.self_attention, torch.ops.padfree.self_attention.default)


def _nearest_products(start: set[fx.Node], neighbours: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """The first products on every way from `start`."""
    found: set[fx.Node] = set()
    seen, todo = set(start), list(start)
    while todo:
        for node in neighbours(todo.pop()):
            if node in seen:
                continue
            seen.add(node)
            if node.target in PRODUCTS:
                found.add(node)
            else:
                todo.append(node)
    return found
