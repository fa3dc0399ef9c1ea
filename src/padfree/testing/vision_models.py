"""Tiny vision-language models with random weights, and samples with random images.

model = build_vision("qwen3_vl")              float32, on the CPU
image = picture(model, 0, rows=2, columns=3)  image number 0 with 6 features, the same at each call
sample = shown(model, [5, image, 4, image])   5 text tokens, the image, 4 text tokens, the same image
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.images import Image
from padfree.model.vision import prepare_sample
from padfree.sample import Sample

VOCABULARY = 64
PLACEHOLDER = 60
START, END = 58, 59
"""The tokens around an image."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {"depth": 3, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 61, "vision_start_token_id": START, "vision_end_token_id": END}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_GLM_VISION = {
    **_VISION, "out_hidden_size": 64, "intermediate_size": 48, "image_size": 16, "attention_bias": False,
}  # fmt: skip
_QWEN_VISION = {**_VISION, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 16}
_QWEN_TEXT: dict[str, Any] = {**_TEXT, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
_QWEN_HYBRID: dict[str, Any] = {
    **_QWEN_TEXT,
    "rope_parameters": {**_QWEN_TEXT["rope_parameters"], "partial_rotary_factor": 1.0},
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_COHERE: dict[str, Any] = {
    "text_config": {**_TEXT, "model_type": "cohere2", "sliding_window": 6, "logit_scale": 1.0},
    "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 16},
    "image_token_id": PLACEHOLDER,
    "downsample_factor": 2,
}
_IDEFICS: dict[str, Any] = {
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": {**_TOWER, "image_size": 16},
    "image_token_id": PLACEHOLDER,
    "scale_factor": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

VISION_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            "vision_config": {**_VISION, "embed_dim": 32, "hidden_size": 64},
            **_IDS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            # windows of 2 x 2 features in the first and last layer, so that images have several windows
            "vision_config": {
                **_VISION, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_IDS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
            **_IDS,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": {**_QWEN_TEXT, **_EXPERTS},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
            **_IDS,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": _QWEN_HYBRID,
            "vision_config": _QWEN_VISION,
            **_IDS,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "text_config": {**_QWEN_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 32},
            "vision_config": _QWEN_VISION,
            **_IDS,
        },
    ),
    "glm4v": ("Glm4v", {"text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": _GLM_VISION, **_IDS}),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            "text_config": {
                **_TEXT, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}, "n_routed_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 16,
            },
            "vision_config": _GLM_VISION,
            **_IDS,
        },
    ),
    "glm46v": (
        "Glm46V",
        {
            "text_config": {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _ROPE},
            "vision_config": {**_GLM_VISION, "model_type": "glm4v_vision"},
            **_IDS,
        },
    ),
    "glm_ocr": (
        "GlmOcr",
        {"text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _ROPE}, "vision_config": _GLM_VISION, **_IDS},
    ),
    "gemma3": (
        "Gemma3",
        {
            # a window that is shorter than an image of several tiles, in all layers but the second
            "text_config": {
                **_TEXT, "head_dim": 16, "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**_TOWER, "image_size": 16},
            "mm_tokens_per_image": 4,
            "image_token_index": PLACEHOLDER,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "image_size": 8, "projection_dim": 32},
            "image_token_id": PLACEHOLDER,
        },
    ),
    "aya_vision": (
        "AyaVision",
        {**_COHERE, "vision_feature_select_strategy": "full", "alignment_intermediate_size": 48},
    ),
    "cohere2_vision": ("Cohere2Vision", {**_COHERE, "alignment_intermediate_size": 48}),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
            "image_token_id": PLACEHOLDER,
            "spatial_merge_size": 2,
        },
    ),
    "lighton_ocr": (
        "LightOnOcr",
        {
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
            "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
            "image_token_id": PLACEHOLDER,
            "spatial_merge_size": 2,
        },
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": PLACEHOLDER,
            "downsample_ratio": 0.5,
        },
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
            "image_token_id": PLACEHOLDER,
            "video_token_id": 61,
        },
    ),
    "idefics3": ("Idefics3", _IDEFICS),
    "smolvlm": ("SmolVLM", _IDEFICS),
}  # fmt: skip
"""For each model: the prefix of its classes in transformers, and values of its config."""


def build_vision(name: str, seed: int = 0, *, vocabulary: int = VOCABULARY, **values: Any) -> PreTrainedModel:
    """Return a tiny vision-language model. Its weights are large, so that a wrong image changes the first digits of
    logits.
    """
    prefix, usual = VISION_MODELS[name]
    values = {**usual, "text_config": {**usual["text_config"], "vocab_size": vocabulary}, **values}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**values)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.train()
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A random image: the inputs of the vision tower, and the number of image tokens."""

    digest: str
    inputs: dict[str, NDArray[Any]]
    grid: tuple[int, int, int] | None
    num_tokens: int


def picture(model: PreTrainedModel, number: int, *, rows: int = 2, columns: int = 2) -> Picture:
    """Return an image of random pixels. Calls with equal arguments return equal images.

    Most models make `rows` x `columns` features of the image. For a model that divides images into tiles, the image has
    `rows` tiles.
    """
    generator = np.random.default_rng([number, rows, columns])
    vision: Any = model.config.vision_config
    digest = f"{number}-{rows}-{columns}"
    if hasattr(vision, "temporal_patch_size"):
        side = vision.spatial_merge_size
        grid = (1, rows * side, columns * side)
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = generator.standard_normal((int(np.prod(grid)), width), dtype=np.float32)
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([grid])}
        return Picture(digest=digest, inputs=inputs, grid=grid, num_tokens=rows * columns)
    kind = model.config.model_type
    if kind in ("mistral3", "lighton_ocr"):
        size = vision.patch_size * model.config.spatial_merge_size
        columns = max(columns, 2)  # transformers' Mistral 3 fails with one feature
        pixels = generator.standard_normal((1, 3, rows * size, columns * size), dtype=np.float32)
        inputs = {"pixel_values": pixels, "image_sizes": np.array([[rows * size, columns * size]])}
        return Picture(digest=digest, inputs=inputs, grid=None, num_tokens=rows * columns)
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    inputs = {"pixel_values": generator.standard_normal((rows, 3, size, size), dtype=np.float32)}
    if kind == "llava_onevision":  # it encodes the whole image, and `rows` tiles above each other
        pixels = generator.standard_normal((rows + 1, 3, size, size), dtype=np.float32)
        inputs = {"pixel_values": pixels, "image_sizes": np.array([[size * rows, size]])}
        return Picture(digest=digest, inputs=inputs, grid=None, num_tokens=16 + 4 * rows * 5)
    if kind in ("smolvlm", "idefics3"):
        inputs["pixel_attention_mask"] = np.ones((rows, size, size), dtype=np.bool_)
    return Picture(digest=digest, inputs=inputs, grid=None, num_tokens=4 * rows)


def shown(
    model: PreTrainedModel, parts: Sequence[int | Picture], *, seed: int = 0, uid: str | None = None, group: Any = None
) -> Sample:
    """Return a sample of text and images. An integer n in `parts` stands for n random text tokens with a loss."""
    generator = np.random.default_rng(seed)
    tokens: list[int] = []
    images: list[Image] = []
    for part in parts:
        if isinstance(part, int):
            tokens += generator.integers(0, START, part).tolist()
            continue
        tokens.append(START)
        positions = np.arange(len(tokens), len(tokens) + part.num_tokens)
        images.append(Image(digest=part.digest, positions=positions, load=partial(dict, part.inputs), grid=part.grid))
        tokens += [PLACEHOLDER] * part.num_tokens + [END]
    array = np.array(tokens)
    sample = Sample(tokens=array, loss_mask=array < START, images=tuple(images), uid=uid, group=group)
    return prepare_sample(model, sample)
