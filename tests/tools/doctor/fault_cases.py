"""Servers with one fault each, and healthy ones. The fault is in the server's own code: transformers' loading, its
logits processors, a KV cache, or the arithmetic of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from padfree.testing.models import build
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer
from tests.tools.doctor.openai_server import Abilities, OpenAiService

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

Serve = Callable[[Path, int], OpenAiService]


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model as a server loads it, with changes of its config."""
    make: Any = AutoModelForCausalLM
    return make.from_pretrained(folder, dtype=dtype, **config)


def tokenizer_of(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def healthy(folder: Path, seed: int, **options: Any) -> OpenAiService:
    return OpenAiService(loaded(folder), tokenizer_of(folder), **options)


def save(folder: Path, architecture: str, seed: int, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny model with a tokenizer whose texts begin with a bos token, and a chat template."""
    tokenizer = tiny_tokenizer("chatml", kind="bos")
    sizes = {"vocab_size": len(tokenizer), **SMALL}
    model = build(architecture, seed=seed, **{**sizes, **changes})
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A model, a server with a fault, and the cause that `padfree doctor` must name."""

    cause: str
    serve: Serve
    architecture: str = "qwen3"
    changes: Mapping[str, Any] = field(default_factory=dict)
    previous: bool = False  # the folder `previous` has older weights
    adapter: bool = False  # the model is an adapter folder
    temperature: float = 1.0
    says: str = ""  # a part of the explanation


def served_config(**config: Any) -> Serve:
    return lambda folder, seed: OpenAiService(loaded(folder, **config), tokenizer_of(folder))


def processed(*processors: Any, **options: Any) -> Serve:
    return lambda folder, seed: healthy(folder, seed, processors=processors, **options)


def stale(parts: str) -> Serve:
    """The tensors whose name contains `parts` are those of the folder `previous`."""

    def serve(folder: Path, seed: int) -> OpenAiService:
        service, old = healthy(folder, seed), loaded(folder.parent / "previous").state_dict()
        with torch.no_grad():
            for name, tensor in service.model.state_dict().items():
                if parts in name:
                    tensor.copy_(old[name])
        return service

    return serve


class NarrowCache(DynamicCache):
    """A KV cache that stores float8: what is read is what was rounded, for the prompt too."""

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> Any:
        narrow = [states.to(torch.float8_e4m3fn).to(states.dtype) for states in (key_states, value_states)]
        return super().update(*narrow, *arguments, **options)


def narrow_routers(folder: Path, seed: int) -> OpenAiService:
    service = healthy(folder, seed)
    for module in service.model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.forward = _narrow(module)
    return service


def _narrow(router: Any) -> Any:
    def forward(hidden: Any) -> Any:
        hidden = hidden.reshape(-1, router.hidden_dim)
        logits = torch.nn.functional.linear(hidden.bfloat16(), router.weight.bfloat16())
        probabilities = torch.softmax(logits, dtype=torch.float, dim=-1)
        values, indices = torch.topk(probabilities, router.top_k, dim=-1)
        if router.norm_topk_prob:
            values = values / values.sum(dim=-1, keepdim=True)
        return logits.float(), values, indices

    return forward


def wrong_scale(folder: Path, seed: int) -> OpenAiService:
    """Attention scaled by the head size, not by what the config says."""
    service = healthy(folder, seed)
    for layer in service.model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    return service


def tied_head(folder: Path, seed: int) -> OpenAiService:
    service = healthy(folder, seed)
    service.model.lm_head.weight = service.model.model.embed_tokens.weight
    return service


def other_tokenizer(folder: Path, seed: int) -> OpenAiService:
    """A tokenizer with the same vocabulary and a part of its merges."""
    import json

    tokenizer = tokenizer_of(folder)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][: 20 + seed]
    make: Any = PreTrainedTokenizerFast
    other = make(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>", eos_token="<|im_end|>")
    other.chat_template = tokenizer.chat_template
    return OpenAiService(loaded(folder), other)


def other_template(folder: Path, seed: int) -> OpenAiService:
    service = healthy(folder, seed)
    service.tokenizer.chat_template = TEMPLATES["no_system"]
    return service


def base_model(folder: Path, seed: int) -> OpenAiService:
    return OpenAiService(loaded(folder.parent / "base"), tokenizer_of(folder.parent / "base"))


def int8_weights(folder: Path, seed: int) -> OpenAiService:
    service = healthy(folder, seed)
    with torch.no_grad():
        for name, weight in service.model.named_parameters():
            if weight.ndim == 2 and ".layers." in name:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round().clamp(-127, 127) * scale)
    return service


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
FAULTS: dict[str, Fault] = {
    "stale weights": Fault(cause="stale weights", serve=stale(""), previous=True, says="all tensors"),
    "stale head": Fault(cause="stale weights", serve=stale("lm_head"), previous=True, says="lm_head.weight"),
    "stale layer": Fault(cause="stale weights", serve=stale("layers.1."), previous=True, says="layer 1"),
    "stale norms": Fault(cause="stale weights", serve=stale("norm"), previous=True, says="norm"),
    "tied head": Fault(cause="tied head", serve=tied_head),
    "temperature": Fault(cause="temperature", serve=lambda f, s: healthy(f, s, temperature=0.6 + 0.05 * s)),
    "raw log-probabilities": Fault(
        cause="temperature", serve=lambda f, s: healthy(f, s, temperature=1.0), temperature=0.7, says="at temperature 1"
    ),
    "top-p": Fault(cause="top-p", serve=processed(TopPLogitsWarper(0.9))),
    "top-k": Fault(cause="top-k", serve=processed(TopKLogitsWarper(20)), says="top_k=20"),
    "min-p": Fault(cause="min-p", serve=processed(MinPLogitsWarper(0.05))),
    "repetition penalty": Fault(
        cause="repetition penalty", serve=processed(RepetitionPenaltyLogitsProcessor(1.1)), says="1.1"
    ),
    "bfloat16": Fault(cause="dtype", serve=served_config(dtype=torch.bfloat16), says="bfloat16"),
    "RoPE base": Fault(cause="RoPE base", serve=served_config(**ROPE)),
    "RoPE scaling": Fault(
        cause="RoPE scaling",
        changes={"rope_parameters": YARN},
        serve=served_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        says="ignores",
    ),
    "RoPE attention factor": Fault(
        cause="RoPE attention factor",
        changes={"rope_parameters": YARN},
        serve=served_config(rope_parameters={**YARN, "attention_factor": 1.0}),
    ),
    "chat template": Fault(cause="chat template", serve=other_template),
    "no generation prompt": Fault(
        cause="chat template",
        serve=lambda f, s: healthy(f, s, generation_prompt=False),
        says="no generation prompt",
    ),
    "double bos": Fault(cause="special tokens twice", serve=lambda f, s: healthy(f, s, bos_twice=True)),
    "another tokenizer": Fault(cause="tokenizer", serve=other_tokenizer),
    "adapter": Fault(cause="adapter not loaded", serve=base_model, adapter=True),
    "KV cache": Fault(cause="KV cache type", serve=lambda f, s: healthy(f, s, make_cache=lambda _: NarrowCache())),
    "experts flipped": Fault(cause="experts flipped", architecture="qwen3_moe", serve=narrow_routers),
    "experts per token": Fault(
        cause="number of experts", architecture="qwen3_moe", serve=served_config(num_experts_per_tok=1)
    ),
    "sliding window": Fault(
        cause="sliding window", architecture="mistral", serve=served_config(sliding_window=None), says="ignores"
    ),
    "logit soft cap": Fault(
        cause="logit soft cap", architecture="gemma2", serve=served_config(final_logit_softcapping=None)
    ),
    "attention scale": Fault(cause="attention scale", architecture="gemma3", serve=wrong_scale),
    "int8 weights": Fault(cause="quantised weights", serve=int8_weights, says="int8"),
}
"""By name. `cause` must be the first cause of the report."""

ABILITIES = {
    "all": Abilities(),
    "echo": Abilities(prompt_logprobs=False),
    "responses only": Abilities(prompt_logprobs=False, echo=False),
    "OpenAI's own fields": Abilities(
        prompt_logprobs=False, echo=False, token_ids=False, prompt_ids=False, tokenize=False
    ),
}


def write_case(folder: Path, fault: Fault, seed: int) -> Path:
    """Write the model of a case, with older weights or as an adapter; return the folder to give to the doctor."""
    if fault.adapter:
        from peft import LoraConfig, get_peft_model

        save(folder / "base", fault.architecture, seed, **fault.changes)
        base: Any = loaded(folder / "base")
        torch.manual_seed(seed)
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
        adapted.save_pretrained(folder / "model")
        return folder / "model"
    save(folder / "model", fault.architecture, seed, **fault.changes)
    if fault.previous:
        model = loaded(folder / "model")
        generator = torch.Generator().manual_seed(100 + seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / "previous")
        tokenizer_of(folder / "model").save_pretrained(folder / "previous")
    return folder / "model"
