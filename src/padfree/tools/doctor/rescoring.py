"""Score token ids with a model, or with variants of the model that share its weights.

sequences -> packs -> attached model -> hidden states -> logits [E, V]      as in training; E: scored tokens
variant(model, {"sliding_window": None})                                    another config, the same tensors
variant(model, tensors={"lm_head.weight": w})                               other tensors, the same config
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from padfree.cp import shard
from padfree.model import hidden_states
from padfree.model.adapter import attach_variant
from padfree.model.interface import attention as packed_attention
from padfree.model.outputs import described_head
from padfree.model.routers import RouterRecorder, routers_of
from padfree.model.structure import layers_of, model_from_config, restored_buffers
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.tools.check.exact import USABLE, float64_bytes, float64_throughout, free_memory, make_float64
from padfree.tools.doctor.evidence import Evidence, Floats, Ids

PACK_TOKENS = 8192

FLOAT8 = {"fp8 (e4m3)": torch.float8_e4m3fn, "fp8 (e5m2)": torch.float8_e5m2}


@torch.no_grad()
def logits_of(model: PreTrainedModel, evidence: Evidence) -> Tensor:
    """Return the model's logits [E, V] for the E tokens whose log-probabilities a server reports (`evidence`).

    The logits are in float32 on the CPU.
    """
    found: list[Tensor] = []
    for numbers in _packs(evidence.sequences):
        samples = [Sample(tokens=evidence.sequences[number]) for number in numbers]
        hidden = hidden_states(model, shard(collate(samples).to(model.device)))
        starts = dict(zip(numbers, np.cumsum([0, *(len(sample) for sample in samples)])[:-1], strict=True))
        inside = np.isin(evidence.sequence, numbers)
        rows = [
            starts[sequence] + position - 1
            for sequence, position in zip(evidence.sequence[inside], evidence.positions[inside], strict=True)
        ]
        found.append(_head_logits(model, hidden[torch.tensor(rows, device=hidden.device, dtype=torch.int64)]))
    return torch.cat(found)


def _packs(sequences: Sequence[Ids]) -> Iterator[list[int]]:
    """Divide the sequences into packs of consecutive sequences. Yield the indices of the sequences of each pack."""
    pack: list[int] = []
    for number, sequence in enumerate(sequences):
        if pack and sum(len(sequences[each]) for each in pack) + len(sequence) > PACK_TOKENS:
            yield pack
            pack = []
        pack.append(number)
    yield pack


def _head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    head = described_head(model)
    assert head is not None
    return head.logits(hidden).float().cpu()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, evidence: Evidence) -> Tensor:
    """Return the logits [E, V] for the E tokens whose log-probabilities a server reports (`evidence`).

    `model`: a plain transformers model. It runs on one sequence at a time, not on packs.
    """
    found = []
    for number, sequence in enumerate(evidence.sequences):
        rows = torch.from_numpy(evidence.positions[evidence.sequence == number] - 1).to(model.device)
        ids = torch.from_numpy(sequence)[None].to(model.device)
        found.append(model(input_ids=ids, use_cache=False).logits[0][rows].float().cpu())
    return torch.cat(found)


def chosen(log_p: Tensor, evidence: Evidence) -> Floats:
    """Pick one log-probability from each row of `log_p` [E, V]: that of the token id in `evidence.tokens` [E]."""
    found: Floats = log_p.gather(1, torch.from_numpy(evidence.tokens)[:, None])[:, 0].double().numpy()
    return found


def logprobs_of(logits: Tensor, evidence: Evidence, temperature: float | None = None) -> Floats:
    """Return the log-probabilities [E] of the token ids `evidence.tokens` [E], computed from `logits` [E, V].

    `temperature`: the temperature by which the logits are divided; None: `evidence.temperature`.
    """
    return chosen((logits / (temperature or evidence.temperature)).log_softmax(-1), evidence)


def rescored(model: PreTrainedModel, evidence: Evidence) -> Floats:
    return logprobs_of(logits_of(model, evidence), evidence)


# Variations


def variant(
    model: PreTrainedModel,
    changes: Mapping[str, Any] | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    attached: bool = True,
) -> PreTrainedModel:
    """Return a copy of `model` with other config values (`changes`) or other tensors (`tensors`, by name).

    The copy and `model` share all tensors that are not replaced. With `attached`, the copy runs on packs. Otherwise it
    is a plain transformers model.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if changes or not attached:
        config = copy.deepcopy(model.config)
        for name, value in (changes or {}).items():
            setattr(config, name, value)
        config._attn_implementation = "eager"  # every architecture supports it
        with torch.device("meta"):
            other = model_from_config(config, model.dtype, False)
        buffers = restored_buffers(other)
        for module_name, module in other.named_modules():
            for name in module._non_persistent_buffers_set:
                if module._buffers[name] is not None:
                    module._buffers[name] = buffers[f"{module_name}.{name}".lstrip(".")].to(model.device)
    else:
        shared = [*model.parameters(), *model.buffers()]
        other = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    missing = other.load_state_dict({**own, **(tensors or {})}, strict=False, assign=True).missing_keys
    assert not missing, missing
    other.requires_grad_(False)
    other.train(False)
    return attach_variant(other, model) if attached else other


def in_dtype(model: PreTrainedModel, dtype: torch.dtype, *, attached: bool = True) -> PreTrainedModel:
    """Return a copy of the model that stores weights and computes in another dtype. Rotary angles stay in float32."""
    held = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    return variant(model, tensors=held, attached=attached)


def exact_scores(model: PreTrainedModel, evidence: Evidence) -> Floats | None:
    """Return the log-probabilities [E] of `evidence.tokens` [E], computed by plain transformers code in float64.

    Return None if there is not enough memory, or if a kernel of the model does not support float64.
    """
    samples = [Sample(tokens=sequence) for sequence in evidence.sequences]
    if model.device.type == "mps" or float64_bytes(model, samples) > USABLE * free_memory(model.device):
        return None
    wide = variant(model, tensors={name: tensor.clone() for name, tensor in model.state_dict().items()}, attached=False)
    make_float64(wide)
    try:
        with float64_throughout():
            return logprobs_of(plain_logits(wide, evidence), evidence)
    except (RuntimeError, TypeError, NotImplementedError):  # a kernel does not support float64
        return None


def layer_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each matrix in the decoder layers."""
    layers = layers_of(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    for name, parameter in model.named_parameters():
        if name.startswith(f"{prefix}.") and parameter.ndim >= 2:
            yield name, parameter.detach()


def fp8(weight: Tensor) -> Tensor:
    """Round a weight to float8 (e4m3) with one scale per matrix."""
    scale = weight.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def int8(weight: Tensor) -> Tensor:
    """Round a weight to int8 with one scale per output feature."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127.0
    return (weight / scale).round() * scale


@contextmanager
def fp8_inputs(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: linear layers of the decoder layers get inputs rounded to float8 with one scale per token."""

    def rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (states,) = args
        scale = states.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return ((states / scale).to(torch.float8_e4m3fn).to(states.dtype) * scale,)

    routers = {id(router.module) for router in routers_of(model)}
    linears = [part for part in layers_of(model).modules() if isinstance(part, nn.Linear) and id(part) not in routers]
    hooks = [module.register_forward_pre_hook(rounded) for module in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def with_cache(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a variant of the model that rounds keys and values to `dtype`, like a KV cache without scales."""
    name = f"padfree_cache_{str(dtype).removeprefix('torch.')}"
    limit = torch.finfo(dtype).max

    def cached(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        key, value = (states.clamp(-limit, limit).to(dtype).to(states.dtype) for states in (key, value))
        return packed_attention(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(name, cached)
    other = variant(model)
    other.set_attn_implementation(name)
    return other


class NarrowRouters(TorchFunctionMode):
    """Context manager in which the routers of a model compute their logits in bfloat16."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._weights = {id(router.module.weight) for router in routers_of(model)}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear and id(args[1]) in self._weights:
            narrow = (each.to(torch.bfloat16) if isinstance(each, Tensor) else each for each in args)
            return function(*narrow, **(kwargs or {})).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def routes_of(model: PreTrainedModel, evidence: Evidence) -> tuple[Floats, Tensor]:
    """Return the log-probabilities [E] of the token ids `evidence.tokens` [E], and the experts that the routers choose.

    The experts are an array [tokens x layers, k]: for each token and layer, the k chosen experts in ascending order.
    """
    recorder = RouterRecorder(routers_of(model))
    recorder.record(True)
    scores = rescored(model, evidence)
    recorder.record(False)
    return scores, torch.cat([choices.sort(-1).values for _, _, choices in recorder.calls])
