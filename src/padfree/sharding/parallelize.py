"""Prepare a plain Hugging Face model for training with an ordered list of transformations.

Each line has the name of a transformation, what it does, and the setting that turns it on:

    attach          limits attention to the tokens of a sample     (always on)
    freeze          turns off the gradients of parameters          model.freeze
    adapters        trains LoRA adapters instead of the weights    lora.rank
    replay          uses the experts that the sampler chose        rollout.routing
    exact           gives matmuls the same bits as in the sampler  rollout.exact
    float8          computes matmuls of linear layers in float8    parallel.linear
    compile         compiles each layer separately                 parallel.compile
    checkpointing   recomputes activations of layers in backward   parallel.checkpointing

At the end, FSDP2 shards the model if needed. Checkpoints keep the original parameter names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from padfree.choices import Float8Product, LayerLevel
from padfree.config import LoraConfig
from padfree.config.checkpointing import is_by_layer, levels_of, needs_compiled_layers, stretched
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.layers.compile import compile_layers
from padfree.layers.float8 import fits_float8, use_float8
from padfree.layers.recompute import Kept, recompute_layers
from padfree.model import attach
from padfree.model.decoder_linears import decoder_linears
from padfree.model.grouped_matmuls import use_exact_matmuls
from padfree.model.lora import add_adapters
from padfree.model.parts import freeze as freeze_parts
from padfree.model.route_replay import RouteReplay, need_replay
from padfree.model.structure import layers_of, tower_blocks
from padfree.optim.master_weights import compute_copies, keep_master_weights
from padfree.sharding.fsdp import shard_model
from padfree.sharding.rules import Rule

Transformation = Callable[[PreTrainedModel], None]
Result = TypeVar("Result")

ENTRY = "run_inside"
"""The name of the model's method that `inside` calls. FSDP2 treats the method like `forward`: embeddings, last norm and
head are gathered while it runs.
"""


def transformations(
    mesh: Mesh,
    *,
    attention: str = "auto",
    compile: str = "none",
    operators: bool = True,
    exact: bool = False,
    checkpointing: str = "none",
    stretch: bool = False,
    dtype: torch.dtype = torch.float32,
    reshard: bool = True,
    offload: bool = False,
    frozen: bool = False,
    freeze: Sequence[str] = (),
    lora: LoraConfig | None = None,
    float8: Sequence[Float8Product] = (),
    rules: Sequence[Rule] = (),
    replay: bool = False,
) -> list[Transformation]:
    """Return the transformations that prepare a model for training, in the order in which they are applied.

    `exact`: give a token the same bits as the sampler (`rollout.exact`). `rules`: see `shard_model`. `stretch`: adapt
    the layer counts in `checkpointing`, e.g. in "6 host, 30 none", to this model.
    """
    steps: list[Transformation] = [partial(_attach, attention=attention, fast_mixers=operators)]
    if frozen:
        steps.append(_freeze)
    if freeze:
        steps.append(partial(freeze_parts, selections=freeze))
    if lora is not None and lora.rank:
        steps.append(partial(add_adapters, settings=lora))
    if replay:
        steps.append(_replay)
    if exact:
        steps.append(partial(use_exact_matmuls, device=mesh.device))
    if float8:
        steps.append(partial(_use_float8, products=tuple(float8)))
    assert compile != "none" or not needs_compiled_layers(checkpointing), "only compiled layers have these levels"
    # The compiler implements the modes "selective" and "host", and levels by layer. Everything else uses PyTorch's
    # activation checkpointing.
    by_compiler = compile != "none" and (checkpointing in ("selective", "host") or is_by_layer(checkpointing))
    if compile != "none":
        kept = checkpointing if by_compiler else "none"
        steps.append(partial(_compile, backend=compile, kept=kept, operators=operators, exact=exact, stretch=stretch))
    if checkpointing != "none" and not by_compiler:
        steps.append(partial(_recompute, mode=checkpointing, stretch=stretch))
    if mesh.loss.size == 1 and dtype != torch.float32 and not (offload or reshard):
        steps.append(partial(_keep_master_weights, dtype=dtype))
    elif mesh.loss.size > 1 or dtype != torch.float32 or offload:
        steps.append(
            partial(
                shard_model,
                mesh=mesh,
                dtype=dtype,
                reshard=reshard,
                offload=offload,
                rules=rules,
                recompute_experts=by_compiler,
            )
        )
    return steps


def parallelize(model: PreTrainedModel, steps: list[Transformation]) -> None:
    """Apply the transformations to a model in place. The model may be on the meta device."""
    for step in steps:
        step(model)


def _attach(model: PreTrainedModel, attention: str, fast_mixers: bool) -> None:
    attach(model, attention, fast_mixers=fast_mixers)


def _replay(model: PreTrainedModel) -> None:
    need_replay(model)
    RouteReplay(model)


def _freeze(model: PreTrainedModel) -> None:
    model.requires_grad_(False)


def _use_float8(model: PreTrainedModel, products: tuple[Float8Product, ...]) -> None:
    linears = [linear for linear in decoder_linears(model).values() if fits_float8(linear)]
    if not linears:
        raise UserError(
            "parallel.linear",
            f"'float8', but no linear layer in the decoder layers of {type(model).__name__} can be computed in float8",
            "set parallel.linear=bfloat16",
        )
    for linear in linears:
        use_float8(linear, products)


def _compile(model: PreTrainedModel, backend: str, kept: str, operators: bool, exact: bool, stretch: bool) -> None:
    layers = layers_of(model)
    kept = stretched(kept, len(layers)) if stretch else kept
    saved = levels_of(kept, len(layers)) if is_by_layer(kept) else cast(Kept, kept)
    compile_layers(layers, backend, saved, operators=operators, exact=exact)


def _recompute(model: PreTrainedModel, mode: str, stretch: bool) -> None:
    """Recompute the activations of decoder layers in backward. `mode` is a value of `parallel.checkpointing`.

    Trained blocks of the vision tower get the same checkpointing level as the first decoder layer.
    """
    layers = layers_of(model)
    mode = stretched(mode, len(layers)) if stretch else mode
    levels = levels_of(mode, len(layers)) if is_by_layer(mode) else (cast(LayerLevel, mode),) * len(layers)
    blocks = [block for block in tower_blocks(model) if any(each.requires_grad for each in block.parameters())]
    for level in set(levels) - {"none"}:
        chosen = [layer for layer, own in zip(layers, levels, strict=True) if own == level]
        recompute_layers([*chosen, *(blocks if level == levels[0] else ())], level)


def _keep_master_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    keep_master_weights(model, dtype, [*layers_of(model), *tower_blocks(model)])


def inside(model: PreTrainedModel, function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(model, *args)` while the embeddings, the last norm and the head are gathered (not sharded).

    `function` may return tensors, or tuples, lists and dicts of tensors. FSDP2 does not find tensors in other objects.
    """
    if not isinstance(model, FSDPModule):
        with compute_copies(model):
            return function(model, *args)
    if not hasattr(model, ENTRY):
        setattr(model, ENTRY, MethodType(_run, model))
        register_fsdp_forward_method(model, ENTRY)
    result: Result = getattr(model, ENTRY)(function, *args)
    if not torch.is_grad_enabled():
        # Without gradients, no backward pass reshards the weights. They must be gathered again after they change.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return result


def _run(model: PreTrainedModel, function: Callable[..., Any], *args: Any) -> Any:
    return function(model, *args)
