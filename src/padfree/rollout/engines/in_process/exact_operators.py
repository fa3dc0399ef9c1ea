"""Check for `rollout.exact` whether sampler and trainer can compute bitwise equal log-probabilities.

`problem` returns the first obstacle. It needs no weights.

The bits of a token may depend on the size of its batch, because matmul libraries choose the order of sums by size:

- Embedding, RoPE, RMSNorm, head and log-softmax give a token the same bits in every batch.
- Linear layers, experts, routers and LayerNorm may give it other bits. `row_trial` tries them with random numbers.
- Attention uses a kernel with the trainer's bits in decode steps (`exact_attention`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.spec import AttentionSpec
from padfree.config import LoraConfig, ParallelConfig, RolloutConfig
from padfree.config.rollout import TRUNCATION
from padfree.errors import UserError
from padfree.model.interface import chunk_of, text_config
from padfree.model.lora import needs_merging
from padfree.model.routers import routers_of
from padfree.model.sharing import state_obstacle
from padfree.model.stacked_experts import stacked_experts
from padfree.model.vision.families import family_of
from padfree.rollout.engines.in_process.cached_model import EXPERTS, layers_of_model, unsupported_reason
from padfree.rollout.engines.in_process.decode_experts import all_stacked
from padfree.rollout.engines.in_process.exact_attention import has_bits_of_trainer
from padfree.rollout.engines.in_process.row_trial import expert_problem, is_row_invariant, trial

HOPPER = (9, 0)
"""Compute capability of the GPUs on which sampler and trainer have been compared bit by bit for all operators."""

OWN_CODE = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text")
"""Model types for which a token gets other log-probabilities in another pack, because their code computes matmuls
outside of the modules that this file checks.
"""

_METHOD_PROBLEMS = {
    "ring": "parallel.method=ring merges the results of key blocks in an order that differs between ranks",
    "ulysses": "sampler and trainer were not compared bit by bit with parallel.method=ulysses",
}
"""For each value of `parallel.method` that `rollout.exact` does not allow: the reason."""

LEAVES = (nn.Linear, nn.Dropout, nn.Identity, nn.SiLU, nn.GELU, nn.ReLU, nn.ModuleDict, nn.ParameterDict)
"""Modules that a layer may contain, because they give a token the same bits in any pack. For linear layers, `row_trial`
finds the batch sizes for which this holds.
"""


def problem(
    model: PreTrainedModel,
    device: torch.device,
    *,
    rollout: RolloutConfig,
    parallel: ParallelConfig,
    lora: LoraConfig,
    dtype: torch.dtype,
    attention: str,
) -> str | None:
    """Return why the log-probabilities of sampler and trainer cannot be bitwise equal; None if they can.

    `model` has its adapters, and may be on the meta device. Its matmuls are tried with random numbers on `device`.
    `attention`: the setting `model.attention`.
    """
    return (
        _settings_problem(rollout, parallel, lora)
        or _device_problem(device, dtype, parallel)
        or model_problem(model, device)
        or attention_problem(model, device, dtype, attention)
        or _adapter_problem(model, device, lora)
        or _matmul_problem(model, device, dtype, rollout.max_concurrent)
    )


def _settings_problem(rollout: RolloutConfig, parallel: ParallelConfig, lora: LoraConfig) -> str | None:
    if rollout.engine != "in_process":
        return f"rollout.engine={rollout.engine} computes with other kernels than the trainer"
    if any(getattr(rollout, name) != neutral for name, neutral in TRUNCATION.items()):
        return "sampler and trainer were not compared bit by bit for truncated sampling (rollout.top_p, top_k, min_p)"
    if parallel.linear != "bfloat16":
        return f"parallel.linear={parallel.linear} is used in training, but not in the sampler"
    if lora.rank and lora.dropout:
        return f"lora.dropout={lora.dropout} changes the results of the trainer at random"
    if parallel.context != 1 and parallel.method != "allgather":
        return _METHOD_PROBLEMS[parallel.method]
    if parallel.expert != 1:
        return f"parallel.expert={parallel.expert} divides the experts over ranks in training, but not in the sampler"
    # Layers compiled by inductor round after every operation, so it does not matter which operations share a kernel.
    if parallel.compile not in ("none", "inductor"):
        return f"sampler and trainer were not compared bit by bit with parallel.compile={parallel.compile}"
    if parallel.compile == "inductor" and parallel.kernels != "auto":
        return f"parallel.kernels={parallel.kernels} lets the compiler choose the order of sums in RMSNorm"
    return None


def _device_problem(device: torch.device, dtype: torch.dtype, parallel: ParallelConfig) -> str | None:
    if device.type == "cpu":
        if parallel.compile != "none":
            return f"with parallel.compile={parallel.compile}, sampler and trainer were compared on a GPU only"
        return None if dtype == torch.float32 else "on a CPU, sampler and trainer were compared in float32 only"
    if not torch.cuda.is_available():
        return "this machine has no GPU on which the matmuls of sampler and trainer can be compared"
    if parallel.context != 1:
        return f"with parallel.context={parallel.context}, sampler and trainer were compared on a CPU only"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return (
            "sampler and trainer were compared bit by bit on GPUs of compute capability 9.0 only, "
            f"not {capability[0]}.{capability[1]}"
        )
    if dtype != torch.bfloat16:
        return f"on a GPU, sampler and trainer were compared in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return None


def model_problem(model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why an operator may give a token other bits in a decode step than in a pack; None if no operator does.

    `model` may be on the meta device. On a CPU, the bits of some norms and activations are compared by running them.
    """
    reason = state_obstacle(model) or unsupported_reason(model)
    if reason is not None:
        return reason
    if family_of(model) is not None:
        return "sampler and trainer were not compared bit by bit for vision-language models"
    if any(getattr(text_config(model.config), name, None) for name in EXPERTS) and not all_stacked(model):
        return "the model's experts are not stacked weights; their matmuls depend on how many tokens each expert gets"
    if text_config(model.config).model_type in OWN_CODE:
        return "the model's layers compute matmuls in custom code, which gives a token other bits in another pack"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            return f"the embedding {name} has no entries for the positions of padding tokens"
    layers = layers_of_model(model)
    assert layers is not None
    if device.type != "cpu":
        if getattr(text_config(model.config), "kv_lora_rank", None):
            return "attention with latent keys and values was compared with the trainer on a CPU only"
        if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
            return "attention sinks were compared with the trainer on a CPU only"
        reason = expert_problem(layers, torch.bfloat16)
        if reason is not None:
            return reason
    known = {*stacked_experts(layers), *(part for router in routers_of(layers) for part in router.module.modules())}
    for name, module in _leaves(layers):
        if module not in known and not _is_row_invariant(module, device):
            return f"the bits that {type(module).__name__} ({name}) gives a token may depend on other tokens"
    return None


def attention_problem(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, requested: str) -> str | None:
    """Return why attention in a decode step gives other bits than in training; None if it gives the same bits.

    `requested`: the setting `model.attention`, which chooses the trainer's attention backend.
    """
    config = text_config(model.config)
    num_heads = config.num_attention_heads
    key_shape = (
        getattr(config, "num_key_value_heads", None) or num_heads,
        getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )
    capped = getattr(config, "attn_logit_softcapping", None)
    try:
        name = choose_backend(device, dtype, key_shape[1], softcap=capped is not None, requested=requested)
    except UserError as error:
        return f"no attention backend: {error}"
    for module in model.modules():
        if chunk_of(module) is not None:
            return "attention in chunks of positions divides the keys into other blocks in a decode step than in a pack"
        window = getattr(module, "sliding_window", None)
        spec = AttentionSpec(
            scale=key_shape[1] ** -0.5, window=window if isinstance(window, int) else None, softcap=capped
        )
        if not (
            BACKENDS[name].has_decode_bits(torch.empty(1, *key_shape, dtype=dtype, device=device), spec)
            or has_bits_of_trainer(name, num_heads, key_shape, spec, dtype, device)
        ):
            what = f"a window of {window} keys" if spec.window else f"heads of size {key_shape[1]}"
            return f"the attention backend {name!r} gives one query other bits than the same query in a pack ({what})"
    return None


def _adapter_problem(model: PreTrainedModel, device: torch.device, lora: LoraConfig) -> str | None:
    if lora.rank and device.type != "cpu":
        return f"with adapters (lora.rank={lora.rank}), sampler and trainer were compared on a CPU only"
    if lora.rank and needs_merging(model):
        return "sampler and trainer were not compared bit by bit with adapters of experts or routers"
    return None


def _matmul_problem(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, num_slots: int) -> str | None:
    layers = layers_of_model(model)
    assert layers is not None
    return trial(layers, num_slots, device, dtype).problem


def _leaves(layers: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for layer in layers:
        for name, module in layer.named_modules():
            if not any(True for _ in module.children()):
                yield name, module


def _is_row_invariant(module: nn.Module, device: torch.device) -> bool:
    """Return whether `module`, which has no child modules, gives a token the same output bits in every batch.

    Some norms and activations are run on a CPU to find this out. Linear layers count as True; `row_trial` checks them.
    """
    name = type(module).__name__
    if isinstance(module, LEAVES) or name.endswith("RMSNorm"):
        return True
    is_activation = "activation" in type(module).__module__.rpartition(".")[2]
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    if is_activation and not has_state:
        return True
    # Other norms and activations are tried on a CPU. On a GPU, the sampler may compile them differently.
    return (
        device.type == "cpu"
        and (is_activation or name.endswith("Norm"))
        and is_row_invariant(module, device, torch.float32)
    )
