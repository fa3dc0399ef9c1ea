"""Folders of tiny vision-language models: weights, tokenizer, chat template and processor.

    folder = vision_folder(path, "qwen3_vl")     float32 weights of `build_vision`, patches of 4 x 4 pixels
    drawn(seed, width, height)                   a Pillow image of random pixels

The processors need Pillow but not torchvision, because they do not support videos.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers

from padfree.testing.tokenizers import tiny_tokenizer
from padfree.testing.vision_models import build_vision


class _Kind(NamedTuple):
    """The tokenizer and processor settings of one model type.

    `tokens` maps fields of the model's config to special tokens. `written` is the text that the chat template puts in
    place of an image.
    """

    tokens: dict[str, str]
    written: str
    processor: str
    image_processor: str
    image_settings: dict[str, Any]
    settings: dict[str, Any]
    attributes: dict[str, str] = {}  # noqa: RUF012  special tokens that the tokenizer has as attributes


_QWEN = _Kind(
    tokens={
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    written="<|vision_start|><|image_pad|><|vision_end|>",
    processor="Qwen2VLProcessor",
    image_processor="Qwen2VLImageProcessorPil",
    image_settings={
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    settings={},
)
_IDEFICS = _Kind(
    tokens={"image_token_id": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>"},
    written="<image>",
    processor="Idefics3Processor",
    image_processor="Idefics3ImageProcessorPil",
    image_settings={"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    settings={"image_seq_len": 4},
)
KINDS: dict[str, _Kind] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN._replace(processor="Qwen2_5_VLProcessor"),
    "qwen3_vl": _QWEN._replace(processor="Qwen3VLProcessor"),
    "qwen3_vl_moe": _QWEN._replace(processor="Qwen3VLProcessor"),
    "qwen3_5": _QWEN._replace(processor="Qwen3VLProcessor"),
    "internvl": _Kind(
        tokens={"image_token_id": "<IMG_CONTEXT>", "start": "<img>", "end": "</img>", "video": "<video>"},
        written="<IMG_CONTEXT>",
        processor="InternVLProcessor",
        image_processor="GotOcr2ImageProcessorPil",
        image_settings={"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 4},
        settings={"image_seq_length": 4},
        attributes={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "llava_onevision": _Kind(
        tokens={"image_token_id": "<image>", "video_token_id": "<video>"},
        written="<image>",
        processor="LlavaOnevisionProcessor",
        image_processor="LlavaOnevisionImageProcessorPil",
        image_settings={
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        },
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": _IDEFICS,
}
"""The models whose processors work without torchvision."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vision_folder(folder: str | Path, name: str, *, seed: int = 0) -> Path:
    """Write a tiny vision-language model with tokenizer and processor to `folder`, and return the path."""
    folder, kind = Path(folder), KINDS[name]
    tokenizer = tiny_tokenizer()
    extra = {f"extra_{index}": text for index, text in enumerate(kind.tokens.values())}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *extra.values()]})
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", kind.written)
    ids = {field: tokenizer.convert_tokens_to_ids(text) for field, text in kind.tokens.items()}
    model = build_vision(
        name, seed, vocabulary=len(tokenizer), **{field: ids[field] for field in ids if field.endswith("_id")}
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind.attributes:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "extra_special_tokens": kind.attributes}))
    images = getattr(transformers, kind.image_processor)(**kind.image_settings)
    images.save_pretrained(folder)
    path = folder / "processor_config.json"
    path.write_text(json.dumps({"processor_class": kind.processor, **kind.settings}))
    return folder


def drawn(seed: int, width: int, height: int) -> Any:
    """A Pillow image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Any, kind: str = "PNG") -> bytes:
    """The bytes of an image file."""
    target = io.BytesIO()
    image.save(target, kind)
    return target.getvalue()
