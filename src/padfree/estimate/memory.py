"""Estimate the memory that a run needs on each device, before any weight is loaded.

`MemoryEstimate` lists the parts of the estimate. Memory fragmentation, buffers of collectives, and the CUDA context are
not included. With `parallel.expert`, a rank whose experts are chosen more often than the mean needs more memory than
estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from padfree.choices import LayerLevel
from padfree.config import Config
from padfree.config.checkpointing import uses_host
from padfree.config.functions import model_of
from padfree.config.rollout import TRUNCATION
from padfree.estimate.activations import (
    FLOAT32,
    cache_bytes,
    feature_bytes,
    host_layer_bytes,
    layer_bytes,
    layer_token_bytes,
    levels_by_layer,
    offloaded_bytes,
    outside_bytes,
)
from padfree.head.budget import budget_bytes, choose_tile, plan_fused, usable_budget
from padfree.model.lora import add_adapters, needs_merging
from padfree.model.parts import freeze
from padfree.model.split_weight import storage_bytes
from padfree.model.stacked_experts import stacked_experts, undivided
from padfree.model.structure import layers_of, skeleton, tower_blocks
from padfree.optim.optimizer import RULES, make_groups, state_bytes
from padfree.sizes import ModelSizes

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingParts:
    """The bytes of temporary memory that the phases of a micro-batch need, such as the head and a layer's backward
    pass.
    """

    backward: int  # gradients, during the backward pass of a layer
    recomputed: int  # activations of a layer that recomputes them, during its backward pass
    head: int  # logits and gradients of the head, between the forward and the backward pass of the layers


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """An estimate of the bytes that a run needs on one device, and in the host memory of the device's process."""

    weights: int
    gradients: int
    optimizer: int
    optimizer_state: str  # description
    offloaded: bool  # whether weights, gradients and optimizer state are on the CPU
    gathered: int  # unsharded weights and gradients, while FSDP2 computes
    tokens: int  # of a micro-batch
    activations: int  # that the forward pass of a micro-batch keeps on the device
    offloaded_activations: int  # in host memory
    working: int  # temporary memory of the head or of a layer's backward pass, whichever needs more
    working_parts: WorkingParts
    compiled: bool  # whether activations are counted as for compiled layers
    reference: int  # weights of the frozen models: reference, teacher and reward model
    reference_offloaded: bool
    sampler: int  # weights of the sampler's copy of the model; 0 if it shares the trained weights
    sent_weights: int  # a copy of the last sent weights, in host memory
    cache: int  # KV cache
    sampling: int  # temporary memory of a decode step
    cache_stays: bool  # if False, KV cache and temporary memory exist only while the sampler generates
    parameters: int
    trained: int

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def between_steps(self) -> int:
        """Return the bytes of the device memory that stay in use between two training steps."""
        standing = self.sampler
        standing += 0 if self.offloaded else self.weights + self.optimizer
        standing += 0 if self.reference_offloaded else self.reference
        return standing

    @property
    def device(self) -> int:
        """Return the peak of the device memory over a whole step (sampling and training), in bytes."""
        standing = self.between_steps + (0 if self.offloaded else self.gradients)
        training = self.gathered + self.activations + self.working
        sampler = self.cache + self.sampling
        return standing + (training + sampler if self.cache_stays else max(training, sampler))

    @property
    def host(self) -> int:
        states = (self.states if self.offloaded else 0) + (self.reference if self.reference_offloaded else 0)
        return states + self.offloaded_activations + self.sent_weights


def estimate_memory(
    config: Config,
    model: PreTrainedModel,  # on the meta device
    *,
    processes: int,
    device_type: str,
    longest: int = 0,  # tokens of the largest micro-batch, if it may exceed `batch.max_tokens`
    prompt_tokens: int = 0,  # tokens of the longest prompt
    copied_keys: float = 0.0,  # keys that attention copies per token, if samples of a data row share prefixes
    image_share: float = 0.0,  # the largest fraction of a sample's tokens that are placeholders of images
) -> MemoryEstimate:
    """Estimate the memory of a run with these settings.

    If the settings ask for adapters, the function adds them to `model`.
    """
    checkpointing, reshard = config.parallel.checkpointing, config.parallel.reshard
    assert checkpointing != "auto", "resolved earlier, see padfree.train.resolve_auto"
    assert reshard != "auto", "resolved earlier, see padfree.train.resolve_auto"
    size, expert = NUMBER_BYTES[config.model.dtype], config.parallel.expert
    shards = Shards(processes // config.parallel.replicate, expert)
    if config.lora.rank:
        add_adapters(model, config.lora)
    freeze(model, config.model.freeze)
    sharded = processes > 1 or size < FLOAT32 or config.parallel.offload
    # see `padfree.sharding.parallelize`: a single process without resharding keeps split weights
    split = processes == 1 and size < FLOAT32 and not config.parallel.offload and not reshard
    master_bytes: Callable[[int], int] = storage_bytes if split else partial(mul, FLOAT32)
    counts = _counts(model, shards)
    weights = master_bytes(counts.trained) + counts.frozen * (size if sharded else FLOAT32)
    reference = 0
    if config.reference.path is not None:
        code = config.model.trust_remote_code
        other = skeleton(
            config.reference.path, trust_remote_code=code, setting="reference.path", vision=config.model.vision
        )
        reference = _counts(other, shards).all * (size if sharded else FLOAT32)
    if config.teacher.path is not None:
        code = config.model.trust_remote_code
        other = skeleton(
            config.teacher.path, trust_remote_code=code, setting="teacher.path", vision=config.model.vision
        )
        reference += _counts(other, shards).all * (size if sharded else FLOAT32)
    if (judge := model_of(config.rollout.reward)) is not None:
        code = config.model.trust_remote_code
        other = skeleton(judge, trust_remote_code=code, setting="rollout.reward", head="scalar", vision=None)
        reference += _counts(other, shards).all * (size if sharded else FLOAT32)
    groups, divided = make_groups(model, config.optimizer), shards.divided(model)
    critic = 0
    if config.loss.advantage == "gae":
        code, path = config.model.trust_remote_code, config.critic.path or config.model.path
        other = skeleton(path, trust_remote_code=code, setting="critic.path", head="scalar", vision=config.model.vision)
        critic = _counts(other, shards).all
        groups += make_groups(other, config.optimizer.without_groups())
        divided |= shards.divided(other)
    sampler = cache = sampling = 0
    if config.rollout.source is not None and config.rollout.engine == "in_process":
        alone = processes == 1 and not config.parallel.offload and not counts.frozen
        sampler = 0 if alone and (size == FLOAT32 or not reshard) else counts.parameters * size
        cache = _cache(config, model, size, processes=processes, device_type=device_type, prompt_tokens=prompt_tokens)
        sampling = _responses(config, processes) * _decode_bytes(config, model, size)
    tokens = max(config.batch.max_tokens, longest)
    # Context parallelism, divided experts and replayed routers break the graph of a compiled layer. The layer then
    # keeps more for its backward pass. It is counted like a layer that is not compiled.
    context = config.parallel.most_context(processes)
    whole = context == 1 and expert == 1 and config.rollout.routing == "recompute"
    compiled = config.parallel.compile != "none" and whole
    parts = _working(
        config, model, tokens, size, device_type, max(key_copies(config, prompt_tokens), copied_keys), context
    )
    kept = [tokens * each for each in layer_token_bytes(model, size, checkpointing, compiled=compiled)]
    activations = sum(kept) + tokens * outside_bytes(model, size)
    activations += int(tokens * image_share) * feature_bytes(model, size, checkpointing)
    offloaded = tokens * offloaded_bytes(model, size, checkpointing) if uses_host(checkpointing) else 0
    levels = levels_by_layer(checkpointing, len(kept))
    return MemoryEstimate(
        weights=weights + master_bytes(critic),
        gradients=(counts.trained + critic) * FLOAT32,
        optimizer=state_bytes(groups, partial(shards.share, divided=divided)),
        optimizer_state=", ".join(dict.fromkeys(RULES[group["rule"]].remembers for group in groups)),
        offloaded=config.parallel.offload,
        gathered=_gathered(model, size, reshard, shards, split=split) if sharded else 0,
        tokens=tokens,
        activations=activations,
        offloaded_activations=offloaded,
        working=_highest(kept, levels, parts, tokens * host_layer_bytes(ModelSizes.of(model.config), size)),
        working_parts=parts,
        compiled=compiled,
        reference=reference,
        reference_offloaded=config.reference.offload or config.teacher.offload,
        sampler=sampler,
        sent_weights=_sent_weights(config, model, shards, size, device_type=device_type),
        cache=cache,
        sampling=sampling,
        cache_stays=device_type != "cpu",
        parameters=counts.parameters,
        trained=counts.trained_parameters,
    )


def _sent_weights(config: Config, model: PreTrainedModel, shards: Shards, size: int, *, device_type: str) -> int:
    """Return the size in bytes of the copy of the last sent weights that a process keeps in host memory.

    The result is 0 unless weight syncs send the differences between old and new weights.
    """
    only_adapters = config.lora.rank > 0 and not needs_merging(model)
    if only_adapters or not config.rollout.keeps_sent_weights(config.model.dtype):
        return 0
    divided = shards.divided(model)
    parts = [shards.share(parameter, divided) * size for parameter in model.parameters()]
    # With a GPU, the host memory is pinned, and torch rounds the size of a pinned tensor up to a power of two.
    return sum(1 << (part - 1).bit_length() if device_type == "cuda" and part else part for part in parts)


def _cache(
    config: Config, model: PreTrainedModel, size: int, *, processes: int, device_type: str, prompt_tokens: int
) -> int:
    """Return the bytes of the KV cache of the in-process sampler; 0 for other samplers.

    On a GPU, all responses to a prompt share the keys and values of the prompt.
    """
    if config.rollout.engine != "in_process":
        return 0
    rollout, samples = config.rollout, -(-(config.batch.samples or 1) // processes)
    responses = _responses(config, processes)
    if device_type == "cpu":
        return responses * (prompt_tokens + rollout.max_new_tokens) * cache_bytes(model, size)
    prompts = -(-samples // rollout.samples_per_prompt)
    wanted = (responses * rollout.max_new_tokens + prompts * prompt_tokens) * cache_bytes(model, size)
    return wanted if rollout.kv_cache_bytes is None else min(wanted, rollout.kv_cache_bytes)


def _responses(config: Config, processes: int) -> int:
    """Return the number of responses that the sampler of a process generates at the same time."""
    return min(config.rollout.max_concurrent, -(-(config.batch.samples or 1) // processes))


def _decode_bytes(config: Config, model: PreTrainedModel, size: int) -> int:
    """Return the bytes of temporary memory that one response needs while one token is sampled.

    They hold the logits and, with top-p, top-k or min-p, the tensors that truncate the distribution.
    """
    # Per id: the scaled logit and its exponential, a sort index and masks, and copies of the index and the masks.
    truncated = FLOAT32 * 6 + 4 if _is_truncated(config) else 0
    return ModelSizes.of(model.config).vocabulary * (size + truncated)


def _is_truncated(config: Config) -> bool:
    """Return whether top-p, top-k or min-p truncates sampling, so that each sampled token has a set of allowed ids."""
    return any(getattr(config.rollout, name) != default for name, default in TRUNCATION.items())


# Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    parameters: int  # of the model without adapters
    trained_parameters: int
    trained: int  # elements in the largest shard
    frozen: int

    @property
    def all(self) -> int:
        return self.trained + self.frozen


@dataclass(frozen=True, slots=True)
class Shards:
    """How weights are sharded. `ranks`: the number of ranks over which weights are sharded. `expert`: the number of
    neighbouring ranks over which experts are divided (expert parallelism).
    """

    ranks: int
    expert: int = 1

    def divided(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the expert weights of `model` that are divided over `expert` ranks, possibly none."""
        if self.expert == 1 or undivided(model, self.expert, self.ranks // self.expert) is not None:
            return set()
        return {parameter for module in stacked_experts(model) for parameter in module.parameters(recurse=False)}

    def share(self, parameter: nn.Parameter, divided: set[nn.Parameter]) -> int:
        """Return the number of elements in the largest shard of `parameter`.

        FSDP2 shards a parameter along its first dimension, and its first shards are the largest. The parameters in
        `divided` (weights of experts) are sharded evenly.
        """
        if not parameter.ndim:
            return parameter.numel()
        if parameter in divided:
            return parameter.numel() // self.ranks
        return -(-parameter.shape[0] // self.ranks) * (parameter.numel() // max(1, parameter.shape[0]))


def _counts(model: nn.Module, shards: Shards) -> _Counts:
    trained = frozen = parameters = trained_parameters = 0
    divided = shards.divided(model)
    for name, parameter in model.named_parameters():
        share = shards.share(parameter, divided)
        if parameter.requires_grad:
            trained += share
            trained_parameters += parameter.numel()
        else:
            frozen += share
        parameters += 0 if ".lora_" in name else parameter.numel()
    return _Counts(parameters=parameters, trained_parameters=trained_parameters, trained=trained, frozen=frozen)


def _gathered(model: PreTrainedModel, size: int, reshard: bool, shards: Shards, *, split: bool) -> int:
    """Return the bytes of unsharded weights and gradients that exist on a device while FSDP2 computes.

    With `split`, weights are stored as bfloat16 plus the difference from float32, and are not gathered. Only gradients
    are then counted.
    """
    divided = shards.divided(model)

    def numbers(parameter: nn.Parameter) -> int:
        # Of the experts, only those of this rank are gathered.
        return parameter.numel() // (shards.expert if parameter in divided else 1)

    units = [*layers_of(model), *tower_blocks(model)]
    layers = [sum(map(numbers, unit.parameters())) for unit in units]
    root = sum(map(numbers, model.parameters())) - sum(layers)
    trained = max(
        sum(numbers(parameter) for parameter in unit.parameters() if parameter.requires_grad) for unit in units
    )
    # Gradients of one layer. When a bfloat16 run reduces them, they also have a float32 copy.
    gradients = trained * (size if split or size == FLOAT32 else size + FLOAT32)
    embeddings: Any = model.get_input_embeddings()
    if embeddings.weight.requires_grad:
        gradients += embeddings.weight.numel() * size
    if split:
        return gradients
    # Weights outside the layers, and of two layers (the current one and the next) or, without `reshard`, of all layers.
    return (root + (2 * max(layers) if reshard else sum(layers))) * size + gradients


# Temporary memory


def key_copies(config: Config, prompt_tokens: int) -> float:
    """Return how many keys attention copies per computed token, because samples share prefixes of `prompt_tokens`
    tokens.

    Return 0 if samples share no prefixes. Also return 0 for SFT with `batch.share_prefixes=auto`, because
    `estimate_memory` gets these copies as `copied_keys`.
    """
    sharing = config.batch.share_prefixes
    if sharing is False or (sharing == "auto" and config.loss.kind == "sft"):
        return 0.0
    group, prompt, response = 8, 1, 1  # if the run generates no responses: eight samples that share their first half
    if config.rollout.source is not None:
        group, prompt, response = config.rollout.samples_per_prompt, prompt_tokens, config.rollout.max_new_tokens
    # For each sample of a group, attention copies the keys of the prompt.
    return (prompt + group * (prompt + response)) / (prompt + group * response)


def _highest(kept: list[int], levels: Sequence[LayerLevel], parts: WorkingParts, offloaded: int) -> int:
    """Return the peak memory of the head and the backward pass of a micro-batch, in bytes, minus the sum of `kept`.

    `kept`: the bytes that each layer keeps on the device. `offloaded`: the bytes that a layer with the level "host"
    copies to host memory.
    """
    found, below, total = parts.head, 0, sum(kept)
    for own, level in zip(kept, levels, strict=True):
        below += own
        # When this layer runs backward, the later layers have already freed their activations (total - below).
        found = max(found, below - total + backward_bytes(level, parts, offloaded))
    return found


def backward_bytes(level: LayerLevel, parts: WorkingParts, offloaded: int) -> int:
    """Return the bytes of temporary memory during the backward pass of a layer with the checkpointing level `level`."""
    # With "host", the activations of two layers are on the device again: of this layer, and prefetched of the previous.
    return parts.backward + (0 if level == "none" else parts.recomputed) + (2 * offloaded if level == "host" else 0)


def _working(
    config: Config, model: PreTrainedModel, tokens: int, size: int, device_type: str, copies: float, context: int
) -> WorkingParts:
    sizes, parallel = ModelSizes.of(model.config), config.parallel
    layer = max(layer_bytes(model.config, each, size) for each in layers_of(model))
    inner = max(sizes.mlp, sizes.experts_per_token * sizes.expert_mlp)
    backward = size * (4 * inner + 2 * sizes.hidden)
    if context > 1:  # each rank also holds the keys and values of the whole pack, and their gradients
        backward += 2 * size * (sizes.key + sizes.value) * context
    if parallel.expert > 1:  # add the hidden states that a layer sends to and receives from other ranks
        backward += 2 * size * sizes.experts_per_token * sizes.hidden
    fixed = 0
    if parallel.linear == "float8":  # of the widest linear layer: two copies of the output's gradient, one of the input
        backward += 2 * sizes.mlp + sizes.hidden
        fixed = sizes.mlp * sizes.hidden  # a copy of its weight
    copied = 2 * size * (sizes.key + sizes.value) * copies  # copied keys and values, and their gradients
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits = 0
    if head is not None:  # a scalar head computes one number per token and needs no memory for logits
        logits = head_bytes(
            tokens,
            sizes.hidden,
            sizes.vocabulary,
            size=size,
            device_type=device_type,
            budget=budget_bytes(parallel.head_bytes),
            weight_gradient=bool(head.weight.requires_grad),
            masks=_is_truncated(config),
        )
    fixed += int(tokens * copied)
    return WorkingParts(backward=tokens * backward + fixed, recomputed=tokens * layer, head=logits)


def head_bytes(
    tokens: int,
    hidden: int,
    vocabulary: int,
    *,
    size: int,
    device_type: str,
    budget: int,
    weight_gradient: bool,
    masks: bool = False,
) -> int:
    """Return the bytes that the fused head needs if all tokens are scored, including the gradients of hidden states and
    weight.

    `masks`: whether each token has a set of allowed token ids.
    """
    operand = size if device_type == "cuda" else FLOAT32
    budget = usable_budget(budget, tokens, hidden, sum_bytes=FLOAT32)
    tile = choose_tile(tokens, vocabulary, itemsize=FLOAT32, device_type=device_type, budget=budget)
    # a mask takes two bytes per logit of a tile
    products = tile.rows * tile.columns * (FLOAT32 + (2 if masks else 0))
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
