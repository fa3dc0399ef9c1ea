"""Write a model and its tokenizer to one GGUF file in bfloat16, for llama.cpp and programs that read its format.

    model.layers.0.mlp.gate_proj.weight  [I, D]   ->   blk.0.ffn_gate.weight   bfloat16
    model.norm.weight                    [D]      ->   output_norm.weight      float32, as are all vectors

Some tensors are converted to llama.cpp's conventions, for example the order of the rows of q and k. A config that
llama.cpp would compute differently is refused, for example one with YaRN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.model.export import sync, whole_tensors
from padfree.model.gguf_vocabulary import gguf_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""GGUF's architecture for each `model_type`."""

GEMMA3_PERIOD, GEMMA3_SLIDING_THETA = 6, 10_000.0
"""llama.cpp's constants for Gemma 3: every sixth layer has full attention, and the other layers have this RoPE base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _GgufRope:
    theta: float
    factor: float | None = None  # linear scaling
    frequencies: Tensor | None = None  # [head_dim / 2], Llama 3 scaling


def write_gguf(model: PreTrainedModel, tokenizer: Any, path: Path) -> None:
    """Write a model and its tokenizer, with its chat template, to the file `path`, which must not exist."""
    from gguf import GGUFWriter

    if path.exists():
        raise UserError("FILE", f"{path} exists", "give another name, or remove it")
    config: Any = model.config
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            "MODEL",
            f"the architecture {config.model_type} cannot be written to a GGUF file",
            f"give a model of {', '.join(ARCHITECTURES)}",
        )
    rope = _checked_rope(model)
    temporary = path.with_name(f".{path.name}.writing")
    writer = GGUFWriter(temporary, ARCHITECTURES[config.model_type])
    try:
        _add_settings(writer, config, rope, path.stem)
        _add_tokenizer(writer, model, tokenizer)
        _write_tensors(writer, model, rope)
        writer.close()
        sync(temporary)
        temporary.rename(path)
        sync(path.absolute().parent)
    except OSError as error:
        raise UserError("FILE", f"{path} cannot be written ({error.strerror or error})", "give another file") from error
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


# The config


def _checked_rope(model: PreTrainedModel) -> _GgufRope:
    """Return what the GGUF file needs to know about the model's RoPE.

    Raises `UserError` for a config that llama.cpp would compute differently.
    """
    config: Any = model.config
    gemma = config.model_type == "gemma3_text"
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation != ("gelu_pytorch_tanh" if gemma else "silu"):
        raise _refused(config, f"the activation {activation}")
    pattern = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    expected = [
        "sliding_attention" if gemma and (index + 1) % GEMMA3_PERIOD else "full_attention"
        for index in range(config.num_hidden_layers)
    ]
    if pattern != expected:
        raise _refused(config, f"the layers {', '.join(pattern)}")
    if not gemma:
        return _rope_of(model, config.rope_parameters)
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise _refused(config, f"{name}={getattr(config, name)}")
    # llama.cpp recognises the 27B model by its 62 layers and scales its queries by another width.
    width = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
    if config.query_pre_attn_scalar != width:
        raise _refused(config, f"query_pre_attn_scalar={config.query_pre_attn_scalar}, not {width}")
    sliding = config.rope_parameters["sliding_attention"]
    if sliding["rope_type"] != "default" or sliding["rope_theta"] != GEMMA3_SLIDING_THETA:
        raise _refused(config, f"the RoPE of sliding layers {sliding}")
    return _rope_of(model, config.rope_parameters["full_attention"])


def _rope_of(model: PreTrainedModel, parameters: Any) -> _GgufRope:
    kind, theta = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(model.config, f"partial_rotary_factor={parameters['partial_rotary_factor']}")
    if kind == "default":
        return _GgufRope(theta=theta)
    if kind == "linear":
        return _GgufRope(theta=theta, factor=float(parameters["factor"]))
    if kind == "llama3" and model.config.model_type == "llama":
        scaled = next(module.inv_freq for module in model.modules() if hasattr(module, "inv_freq"))
        assert isinstance(scaled, Tensor)
        plain = theta ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
        return _GgufRope(theta=theta, frequencies=(plain / scaled.cpu().double()).float())
    raise _refused(model.config, f"RoPE scaling {kind}")


def _refused(config: Any, fact: str) -> UserError:
    return UserError(
        "MODEL", f"a GGUF file cannot describe {config.model_type} with {fact}", "export the model folder instead"
    )


def _add_settings(writer: GGUFWriter, config: Any, rope: _GgufRope, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType, RopeScalingType

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.theta)
    if rope.factor is not None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


# The tokenizer


def _add_tokenizer(writer: GGUFWriter, model: PreTrainedModel, tokenizer: Any) -> None:
    config: Any = model.config
    found = gguf_vocabulary(tokenizer, config.vocab_size)
    writer.add_tokenizer_model(found.model)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    if found.pre is not None:
        writer.add_tokenizer_pre(found.pre)
    if found.merges:
        writer.add_token_merges(found.merges)
    if found.scores is not None:
        writer.add_token_scores(found.scores)
    if found.space_prefix is not None:
        writer.add_add_space_prefix(found.space_prefix)
    for identity, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if identity is not None and identity < config.vocab_size:  # a padding token may have no embedding
            add(identity)
    stops = getattr(model.generation_config, "eos_token_id", None)
    listed = [stop for stop in (stops if isinstance(stops, list) else []) if stop < config.vocab_size]
    others = [stop for stop in listed if stop != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


# The tensors


def _write_tensors(writer: GGUFWriter, model: PreTrainedModel, rope: _GgufRope) -> None:
    """Write the GGUF header (names, shapes and dtypes of all tensors), then convert and write one tensor at a time."""
    from gguf import GGMLQuantizationType

    for name, tensor in _named_tensors(model, rope):
        vector = tensor.ndim == 1
        kind = GGMLQuantizationType.F32 if vector else GGMLQuantizationType.BF16
        dtype = np.dtype(np.float32 if vector else np.int16)
        writer.add_tensor_info(name, tuple(tensor.shape), dtype, tensor.numel() * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _named_tensors(model, rope):
        writer.write_tensor_data(_array(name, tensor))


def _named_tensors(model: PreTrainedModel, rope: _GgufRope) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model with its name in the GGUF file."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config: Any = model.config
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.model_type])
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    if rope.frequencies is not None:  # they divide the frequencies of plain RoPE
        yield "rope_freqs.weight", rope.frequencies
    for name, tensor in whole_tensors(model):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise _refused(config, f"the tensor {name}")
        # llama.cpp rotates the pairs (0 1) (2 3) of a head of 4 rows, transformers the pairs (0 2) (1 3).
        if config.model_type == "llama" and ".q_proj." in name:
            tensor = _neighbours(tensor, config.num_attention_heads)
        elif config.model_type == "llama" and ".k_proj." in name:
            tensor = _neighbours(tensor, config.num_key_value_heads)
        elif config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor.float() + 1  # GGUF stores 1 + weight
        yield found, tensor


def _neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Interleave the two halves of the rows of each head in a tensor [heads * head_dim, ...].

    For a head of 4 rows, the new order of the rows is 0 2 1 3.
    """
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _array(name: str, tensor: Tensor) -> NDArray[Any]:
    whole = tensor.detach().cpu().to(torch.float32 if tensor.ndim == 1 else torch.bfloat16).contiguous()
    if not torch.isfinite(whole).all():
        raise UserError("MODEL", f"{name} has values that are not finite in bfloat16", "give another checkpoint")
    array: NDArray[Any] = (whole if tensor.ndim == 1 else whole.view(torch.int16)).numpy()
    return array
