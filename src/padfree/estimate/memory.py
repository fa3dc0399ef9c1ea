"""How much memory a run needs on each device, before any weight is loaded.

    weights, gradients, optimizer   counted exactly: what the largest shard holds (float32; frozen weights of a bfloat16
                                    run in bfloat16); on the CPU with parallel.offload
    gathered                        the root unit and two layers whole (all layers without parallel.reshard), and their
                                    gradients, while FSDP2 computes
    activations                     what forward keeps for backward, of one micro-batch of so many tokens
    working                         the larger of: the head's logits and gradients; one layer's gradients, and its
                                    activations where they are computed again
    reference, sampler              frozen copies; the sampler has none where it can sample from the trained weights
    cache                           the sampler's keys and values: on a GPU they stay, on the CPU only while it writes

Activations are counted from the sizes of a usual decoder layer, a token of one layer at a time. Numbers are e bytes (4
or 2), D is the hidden size, q k v o are widths of all heads together, I the MLP's width:

    each norm of width w        (4 + e) w                          input in float32, and what is scaled; LayerNorm e w
    inputs of projections       2 e D
    attention                   e (q + k + v + o) + 4 heads        and the log-sum-exp
    MLP                         4 e I                              gate, activation, up, product; 2 e I without a gate
    experts, k a token          k e (2 D + 4 I)                    the token once for each, in and out, and their MLPs
    compiled, without experts   e (4 D + 2 (q + k) + v + o + 3 I)  norms are computed again; q and k as they come and
                                                                   rotated; gate, up and their product

An estimate: memory that an allocator cannot use, buffers of collectives and the CUDA context are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.config import Config
from padfree.config.choices import Checkpointing
from padfree.head.budget import budget_bytes, choose_tile, plan_fused, usable_budget
from padfree.layers.compile import HOST_INPUT_ONLY_FRACTION
from padfree.layers.offload import OFFLOADED_FRACTION
from padfree.model.lora import add_adapters
from padfree.model.structure import layers_of, skeleton

FLOAT32 = 4
SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one device, and of its process on the CPU."""

    weights: int
    gradients: int
    optimizer: int
    offloaded: bool  # the three above are on the CPU
    gathered: int
    tokens: int  # of a micro-batch
    activations: int
    activations_away: int  # in the host's memory
    working: int
    reference: int
    reference_offloaded: bool
    sampler: int  # the copy's weights; 0: it shares those that are trained
    cache: int  # keys and values
    cache_stays: bool  # else it is there only while the sampler writes
    parameters: int
    trained: int

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """At the fullest moment: in a training step, or while the sampler writes."""
        standing = self.sampler
        standing += 0 if self.offloaded else self.states
        standing += 0 if self.reference_offloaded else self.reference
        training = self.gathered + self.activations + self.working
        return standing + (training + self.cache if self.cache_stays else max(training, self.cache))

    @property
    def host(self) -> int:
        states = (self.states if self.offloaded else 0) + (self.reference if self.reference_offloaded else 0)
        return states + self.activations_away


def estimate_memory(
    config: Config,
    model: PreTrainedModel,
    *,
    processes: int,
    device_type: str,
    longest: int = 0,
    prompt_tokens: int = 0,
) -> MemoryEstimate:
    """Of a run with these settings. `model` is a `skeleton` of `model.path`, into which adapters are put if asked for.

    `longest`: tokens of a device in its longest micro-batch, where that may be more than `batch.max_tokens`.
    `prompt_tokens`: of the longest prompt that responses will be written to.
    """
    checkpointing, reshard = config.parallel.checkpointing, config.parallel.reshard
    assert checkpointing != "auto", "settled before: see padfree.train.settle"
    assert reshard != "auto", "settled before: see padfree.train.settle"
    shards, size = processes // config.parallel.replicate, SIZES[config.model.dtype]
    if config.lora.rank:
        add_adapters(model, config.lora)
    sharded = processes > 1 or size < FLOAT32 or config.parallel.offload
    counts = _counts(model, shards)
    weights = counts.trained * FLOAT32 + counts.frozen * (size if sharded else FLOAT32)
    reference = 0
    if config.reference.path is not None:
        code = config.model.trust_remote_code
        other = skeleton(config.reference.path, trust_remote_code=code, setting="reference.path")
        reference = _counts(other, shards).all * (size if sharded else FLOAT32)
    sampler = cache = 0
    if config.rollout.reward is not None and config.rollout.engine == "in_process":
        alone = processes == 1 and not config.parallel.offload and not counts.frozen
        sampler = 0 if alone and (size == FLOAT32 or not reshard) else counts.parameters * size
        cache = _cache(config, model, size, processes=processes, device_type=device_type, prompt_tokens=prompt_tokens)
    tokens = max(config.batch.max_tokens, longest)
    # Over context ranks attention cuts a compiled layer, which then keeps more: counted as if it were not compiled.
    compiled = config.parallel.compile != "none" and config.parallel.context == 1
    return MemoryEstimate(
        weights=weights,
        gradients=counts.trained * FLOAT32,
        optimizer=2 * counts.trained * FLOAT32,
        offloaded=config.parallel.offload,
        gathered=_gathered(model, size, reshard) if sharded else 0,
        tokens=tokens,
        activations=tokens * token_bytes(model, size, checkpointing, compiled=compiled),
        activations_away=tokens * away_bytes(model, size) if checkpointing == "host" else 0,
        working=_working(config, model, tokens, size, device_type),
        reference=reference,
        reference_offloaded=config.reference.offload,
        sampler=sampler,
        cache=cache,
        cache_stays=device_type != "cpu",
        parameters=counts.parameters,
        trained=counts.trained_parameters,
    )


def _cache(
    config: Config, model: PreTrainedModel, size: int, *, processes: int, device_type: str, prompt_tokens: int
) -> int:
    """Keys and values of the in-process sampler. On a GPU a prompt is there once, however many responses follow it."""
    if config.rollout.engine != "in_process":
        return 0
    rollout, samples = config.rollout, -(-(config.batch.samples or 1) // processes)
    responses = min(rollout.batch, samples)
    if device_type == "cpu":
        return responses * (prompt_tokens + rollout.max_new_tokens) * cache_bytes(model, size)
    prompts = -(-samples // rollout.group)
    wanted = (responses * rollout.max_new_tokens + prompts * prompt_tokens) * cache_bytes(model, size)
    return wanted if rollout.kv_cache_bytes is None else min(wanted, rollout.kv_cache_bytes)


# Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    parameters: int  # of the model without adapters
    trained_parameters: int
    trained: int  # in the largest shard
    frozen: int

    @property
    def all(self) -> int:
        return self.trained + self.frozen


def _counts(model: nn.Module, shards: int) -> _Counts:
    """FSDP2 cuts every parameter along its first dimension, rounded up for the first shards."""
    trained = frozen = parameters = trained_parameters = 0
    for name, parameter in model.named_parameters():
        share = parameter.numel()
        if parameter.ndim:
            share = -(-parameter.shape[0] // shards) * (parameter.numel() // max(1, parameter.shape[0]))
        if parameter.requires_grad:
            trained += share
            trained_parameters += parameter.numel()
        else:
            frozen += share
        parameters += 0 if ".lora_" in name else parameter.numel()
    return _Counts(parameters=parameters, trained_parameters=trained_parameters, trained=trained, frozen=frozen)


def _gathered(model: PreTrainedModel, size: int, reshard: bool) -> int:
    """The root unit and two layers (the one that computes and the next) whole, or all of them; gradients of the
    embeddings and of one layer, which are made float32 to be reduced."""
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]
    root = sum(parameter.numel() for parameter in model.parameters()) - sum(layers)
    trained = max(
        sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
        for layer in layers_of(model)
    )
    gradients = trained * (size if size == FLOAT32 else size + FLOAT32)
    embeddings: Any = model.get_input_embeddings()
    if embeddings.weight.requires_grad:
        gradients += embeddings.weight.numel() * size
    return (root + (2 * max(layers) if reshard else sum(layers))) * size + gradients


# Activations


def token_bytes(model: PreTrainedModel, size: int, checkpointing: Checkpointing, *, compiled: bool = False) -> int:
    """What forward keeps for backward of one token, embeddings and last norm included.

    Selective checkpointing keeps the results of products, or, of a compiled layer, attention's output and lse; of the
    layers under `host` this counts those whose tensors stay on the device.
    """
    text = model.config.get_text_config()
    widths = _Widths(text)
    outside = _norm_bytes(widths.hidden, size) + 2 * widths.head * size
    if checkpointing == "none":
        kept_by = compiled_layer_bytes if compiled else layer_bytes
        return outside + sum(kept_by(text, layer, size) for layer in layers_of(model))
    inputs = widths.hidden * size
    num_layers = len(layers_of(model))
    if checkpointing == "host":
        return outside + (num_layers - math.ceil(OFFLOADED_FRACTION * num_layers)) * _host_layer(widths, size)
    kept = 0
    if checkpointing == "selective" and compiled:
        kept = num_layers * (widths.output * size + FLOAT32 * widths.heads)
    elif checkpointing == "selective":
        kept = sum(_product_width(layer) * size for layer in layers_of(model))
    return outside + num_layers * inputs + kept


def away_bytes(model: PreTrainedModel, size: int) -> int:
    """What waits in the host's memory under `host`, of one token."""
    num_layers, widths = len(layers_of(model)), _Widths(model.config.get_text_config())
    first = math.ceil(HOST_INPUT_ONLY_FRACTION * num_layers)
    offloaded = math.ceil(OFFLOADED_FRACTION * num_layers)
    return first * size * widths.hidden + (offloaded - first) * _host_layer(widths, size)


def _host_layer(widths: _Widths, size: int) -> int:
    """A layer's input, the products around attention, and attention's output."""
    products = widths.query + widths.key + widths.value + widths.hidden
    return size * (widths.hidden + products + widths.output) + FLOAT32 * widths.heads


def layer_bytes(text: Any, layer: nn.Module, size: int) -> int:
    """Of one token in one layer whose activations are all kept; `text` is the HF config."""
    widths = _Widths(text)
    modules = dict(layer.named_modules())
    norms = sum(
        size * width if isinstance(module, nn.LayerNorm) else _norm_bytes(width, size)
        for name, module in modules.items()
        if type(module).__name__.endswith("Norm")
        for width in [widths.norm(name, module.weight.shape[-1])]
    )
    attention = size * (widths.query + widths.key + widths.value + widths.output) + 4 * widths.heads
    if any("experts" in name for name in modules):
        routed = widths.experts * (2 * widths.hidden + 4 * widths.expert_mlp)
        return norms + attention + size * (2 * widths.hidden + routed + 4 * widths.shared_mlp)
    copies = 4 if any("gate" in name for name in modules) else 2
    if "gelu_new" in (getattr(text, "hidden_act", None), getattr(text, "activation_function", None)):
        copies += 3  # it is written out in elementary operations
    return norms + attention + size * (2 * widths.hidden + copies * widths.mlp)


def compiled_layer_bytes(text: Any, layer: nn.Module, size: int) -> int:
    """The same of a compiled layer: the compiler keeps what products are made of and computes the rest again."""
    widths = _Widths(text)
    written_out = layer_bytes(text, layer, size)
    if any("experts" in name for name, _ in layer.named_modules()):
        return written_out
    attention = 2 * (widths.query + widths.key) + widths.value + widths.output
    kept = size * (4 * widths.hidden + attention + 3 * widths.mlp) + FLOAT32 * widths.heads
    return min(kept, written_out)


def cache_bytes(model: PreTrainedModel, size: int) -> int:
    """Keys and values of one token in all layers."""
    text = model.config.get_text_config()
    widths = _Widths(text)
    return int(text.num_hidden_layers) * (widths.key + widths.value) * size


class _Widths:
    """Widths of a layer's parts, from an HF config."""

    def __init__(self, text: Any) -> None:
        self.hidden = hidden = int(text.hidden_size)
        self.heads = int(text.num_attention_heads)
        key_heads = _first(text, "num_key_value_heads") or self.heads
        self.head = _first(text, "head_dim") or hidden // self.heads
        self.query, self.key = self.heads * self.head, key_heads * self.head
        self.value, self.output = self.key, self.query
        if getattr(text, "kv_lora_rank", None):  # latent attention: every head has its own keys and values
            self.head = int(text.qk_nope_head_dim + text.qk_rope_head_dim)
            self.query = self.key = self.heads * self.head
            self.value = self.output = self.heads * int(text.v_head_dim)
        self.mlp = _first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
        self.experts = _first(text, "num_experts_per_tok", "moe_topk", "moe_k")
        self.expert_mlp = _first(text, "moe_intermediate_size") or self.mlp
        self.shared_mlp = _first(text, "shared_expert_intermediate_size")
        self.shared_mlp = self.shared_mlp or self.expert_mlp * _first(text, "n_shared_experts", "num_shared_experts")

    def norm(self, name: str, width: int) -> int:
        """The width of a norm that a module of `width` does; those of queries and keys go over all heads."""
        last = name.rpartition(".")[2]
        if width == self.head and last.startswith("q"):
            return self.query
        if width == self.head and last.startswith("k"):
            return self.key
        return width


def _first(text: Any, *names: str) -> int:
    """The first of these that the config has; 0 if it has none."""
    for name in names:
        value = getattr(text, name, None)
        if value:
            return int(max(value)) if isinstance(value, (list, tuple)) else int(value)
    return 0


def _norm_bytes(width: int, size: int) -> int:
    return (FLOAT32 + size) * width


def _product_width(layer: nn.Module) -> int:
    """What selective checkpointing keeps of a token: the outputs of matrix products, experts' excepted."""
    return sum(
        module.out_features if isinstance(module, nn.Linear) else int(module.nf)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and "experts" not in name
    )


# What is there for a moment


def _working(config: Config, model: PreTrainedModel, tokens: int, size: int, device_type: str) -> int:
    text, parallel = model.config.get_text_config(), config.parallel
    widths = _Widths(text)
    layer = max(layer_bytes(text, each, size) for each in layers_of(model))
    inner = max(widths.mlp, widths.experts * widths.expert_mlp)
    backward = size * (4 * inner + 2 * widths.hidden)
    if parallel.checkpointing != "none":
        backward += layer
    if parallel.context > 1:  # keys and values of the whole row, and their gradients
        backward += 2 * size * (widths.key + widths.value) * parallel.context
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return max(
        tokens * backward,
        head_bytes(
            tokens,
            widths.hidden,
            int(text.vocab_size),
            size=size,
            device_type=device_type,
            budget=budget_bytes(parallel.head_bytes),
            weight_gradient=bool(head.weight.requires_grad),
        ),
    )


def head_bytes(
    tokens: int, hidden: int, vocabulary: int, *, size: int, device_type: str, budget: int, weight_gradient: bool
) -> int:
    """What the fused head holds, gradients of hidden states and of its weight included, if all tokens are scored."""
    operand = size if device_type == "cuda" else FLOAT32
    budget = usable_budget(budget, tokens, hidden, sum_bytes=FLOAT32)
    tile = choose_tile(tokens, vocabulary, itemsize=FLOAT32, device_type=device_type, budget=budget)
    products = tile.rows * tile.columns * FLOAT32
    plan = plan_fused(
        tokens,
        hidden,
        vocabulary,
        logit_bytes=operand,
        row_bytes=hidden * operand,
        sum_bytes=FLOAT32,
        gradient_bytes=size,
        budget=budget - products,
        weight_gradient=weight_gradient,
    )
    sums = (plan.kept - plan.shared) * hidden * FLOAT32 if plan.chunk_rows < tokens else 0
    chunk = plan.chunk_rows * (plan.kept + hidden) * operand
    return products + chunk + sums + tokens * hidden * size + (vocabulary * hidden * size if weight_gradient else 0)
