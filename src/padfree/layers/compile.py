"""Compile each layer separately with `torch.compile`, once for all sequence lengths.

The numbers of tokens and samples are dynamic sizes; all other sizes are static.

With the argument `exact` (the setting `rollout.exact`), a token's hidden state has the same bits in every graph of a
layer. The bits do not depend on the number of tokens, nor on which activations are recomputed. For this purpose, sums
have a fixed order, and every operation rounds its result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from padfree.choices import LayerLevel
from padfree.layers.offload import ActivationOffload
from padfree.layers.ops.quack_support import has_epilogues
from padfree.layers.passes import PASSES, GraphPass, Stage, graph_nodes
from padfree.layers.passes.rms_norm import rms_norm_pass
from padfree.layers.recompute import KEPT_BY_LEVEL, Kept, mark_saved

HOST_INPUT_ONLY_FRACTION = 0.05
"""The fraction of layers (the first ones) that save only their inputs with `kept="host"`. Offloading more of their
activations would take too long.
"""

LONG_PACK = 8192
"""If a layer is compiled for at least this many tokens, each Triton program of the compiler's kernels for norms handles
`REDUCED_TOKENS` tokens.
"""

REDUCED_TOKENS = 32

RECOMPILE_LIMIT = 64
"""The number of graphs that torch.compile may make for the layers of all models of a process. PyTorch's default is 8.

Beyond the limit, layers run uncompiled. They are then slow, and round differently.
"""

WIDE_ROW = 2048
"""From this hidden size on, the GPU takes longer to compute a layer than the host takes to launch its kernels."""


def compile_layers(
    layers: Iterable[nn.Module],
    backend: str,
    kept: Kept | Sequence[LayerLevel] = "none",
    *,
    operators: bool = True,
    exact: bool = False,
) -> None:
    """Compile each layer separately, in place.

    `kept` says which activations are saved for backward. `operators` allows the operators of `padfree.layers.ops` where
    they save time. With `exact`, a token gets the same bits in every call.
    """
    layers = list(layers)
    # torch.compile compiles `nn.Module._call_impl`, the same function for all layers, so they share one limit.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    offload = None
    if isinstance(kept, str):
        input_only = math.ceil(HOST_INPUT_ONLY_FRACTION * len(layers)) if kept == "host" else 0
        saved: list[Kept] = ["input" if number < input_only else kept for number in range(len(layers))]
        if kept == "host":
            offload = ActivationOffload(len(layers))
    else:
        assert len(kept) == len(layers)
        saved = [KEPT_BY_LEVEL[level] for level in kept]
        offloaded = [number for number, level in enumerate(kept) if level == "host"]
        if offloaded:
            offload = ActivationOffload(len(layers), offloaded=offloaded)
    compilers = {name: layer_compiler(backend, name, operators=operators, exact=exact) for name in get_args(Kept)}
    for number, layer in enumerate(layers):
        layer.compile(backend=compilers[saved[number]])
        # Wrap the result of `nn.Module.compile`, because a wrapper around the layer's forward would itself be compiled.
        call = _for_any_length(layer._compiled_call_impl)
        if offload is not None:
            call = offload.around(layer, call, number)
        object.__setattr__(layer, "_compiled_call_impl", call)


def layer_compiler(backend: str, kept: Kept, *, operators: bool, exact: bool) -> Callable[..., Any]:
    """Return the function that compiles a layer's graph: it runs padfree's graph passes, then `backend` of
    `torch.compile`.
    """
    return partial(_compiled, backend=lookup_backend(backend), kept=kept, operators=operators, exact=exact)


def _for_any_length(call: Any) -> Callable[..., Any]:
    """Wrap the function `call` of a layer so that, before each call, sizes that vary between batches are marked as
    dynamic.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        _mark_variable(args)
        _mark_variable(kwargs.values())
        context = kwargs.get("attn_context")
        if context is not None:
            _mark(context.segments.cu_seqlens, 0)
            if context.prefix_keys is not None:
                _mark(context.prefix_keys.numbers, 0)
        return call(*args, **kwargs)

    return called


def _mark_variable(inputs: Iterable[Any]) -> None:
    """Mark dimension 1, the number of tokens T, as dynamic in hidden states [1, T, D] and positions [1, T]."""
    for each in inputs:
        if isinstance(each, Tensor) and each.ndim >= 2 and each.shape[0] == 1:
            _mark(each, 1)
        elif isinstance(each, tuple):
            _mark_variable(each)


def _mark(tensor: Tensor, dim: int) -> None:
    # A tensor may already be marked, because all layers share the same cos, sin and cu_seqlens tensors.
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _compiled(
    graph: fx.GraphModule,
    inputs: Any,
    *,
    backend: Callable[..., Any],
    kept: Kept,
    operators: bool = True,
    exact: bool = False,
) -> Any:
    hidden = _hidden_states(inputs)
    on_gpu = hidden is not None and hidden.is_cuda
    # With `exact`, all layers on a GPU use the operators, so that all graphs add in the same order.
    inserted = (exact and on_gpu) or (operators and _operators_pay(hidden))
    if inserted:
        # With `exact`, replace all norms: the order of the sums of padfree's norms depends only on the width.
        counts = [rms_norm_pass(graph.graph, every=True)] if exact else []
        counts += [each.run(graph.graph) for each in PASSES if each.stage == "before autograd"]
        if any(counts):
            graph.recompile()
    if backend is lookup_backend("inductor"):
        patches: dict[str, Any] = {}
        if operators or exact:
            epilogues = operators and inserted and _has_epilogues(hidden)
            patches["post_grad_custom_pre_pass"] = InductorPass("after autograd", epilogues=epilogues, exact=exact)
            patches["post_grad_custom_post_pass"] = InductorPass("after inductor", epilogues=epilogues, exact=exact)
        if exact:
            # Round after each operation, so that it does not matter which operations share a kernel.
            patches["emulate_precision_casts"] = True
        if hidden is not None and hidden.is_cuda:
            # The compiler must choose reductions without regard to the pack's length. Otherwise it would compile again
            # for other lengths.
            patches["triton.mix_order_reduction_non_strict_mode"] = True
            if _size(hidden.shape[1]) >= LONG_PACK:
                patches["triton.mix_order_reduction_split_size"] = REDUCED_TOKENS
        backend = partial(backend, config_patches=patches)
    if kept == "none":
        return backend(graph, inputs)
    mark_saved(graph.graph, kept)
    # The compiler's disk cache ignores the marks of saved activations and would return a layer compiled without them.
    with functorch_config.patch(enable_autograd_cache=False):
        return backend(graph, inputs)


class InductorPass(CustomGraphPass):
    """Runs the graph passes (changes of a layer's graph) of one compilation stage, as a custom pass of Inductor."""

    def __init__(self, stage: Stage, *, epilogues: bool, exact: bool = False) -> None:
        self.passes: list[GraphPass] = [
            each
            for each in PASSES
            if each.stage == stage and (epilogues or not each.needs_epilogues) and (exact or not each.exact_only)
        ]
        self.exact = exact

    def __call__(self, graph: fx.Graph) -> None:
        forward = self.exact and not _is_backward(graph)
        for each in self.passes:
            # In an exact forward graph, a matmul with an epilogue would omit the rounding of the matmul's result.
            if (each.exact_only and not forward) or (each.needs_epilogues and forward):
                continue
            each.run(graph)

    def uuid(self) -> bytes:  # a part of the keys of Inductor's cache
        files = (*(inspect.getfile(each.run) for each in self.passes), graph_nodes.__file__, __file__)
        key: bytes = get_hash_for_files(files, extra=f"exact={self.exact}")
        return key


def _is_backward(graph: fx.Graph) -> bool:
    """Return whether a graph is a backward graph, which has inputs named `tangents_...`."""
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def _hidden_states(inputs: Any) -> Tensor | None:
    """Return the hidden states [1, T, D] among the inputs of a layer, or None if there are none."""
    candidates = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.ndim == 3]
    return max(candidates, key=lambda tensor: _size(tensor.shape[2]), default=None)


def _size(size: Any) -> int:
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _operators_pay(hidden: Tensor | None) -> bool:
    """Return whether padfree's own operators save more time on the GPU than their launches cost on the host."""
    return hidden is not None and hidden.is_cuda and _size(hidden.shape[2]) >= WIDE_ROW


def _has_epilogues(hidden: Tensor | None) -> bool:
    return hidden is not None and has_epilogues(hidden.device, hidden.dtype)
