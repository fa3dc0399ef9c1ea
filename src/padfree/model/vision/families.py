"""The vision-language models that can be trained on packs, and how they differ.

Each model embeds the tokens, replaces the embeddings of placeholder tokens by image features, and calls its language
model. `padfree.model.vision.features` does the same for a pack. A `VisionFamily` says where the parts of a model are
and what its vision tower reads.

A tower encodes all images of a pack in one call, in which no image attends to another. `why_refused` says why a model
is not supported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from padfree.errors import UserError

Inputs = Mapping[str, Tensor]

_WHOLE, _SCALAR = "ForConditionalGeneration", "ForSequenceClassification"


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFamily:
    """How padfree runs one class of vision-language models: where its parts are, and what its vision tower reads."""

    language: str  # attribute of the base model: the language model
    encoders: tuple[str, ...]  # attributes of the base model: all modules and parameters that only images use
    projector: tuple[str, ...]  # the part of the encoders that maps to the width of the language model, by path
    inputs: tuple[str, ...]  # the tower's inputs, as the model's processor names them
    encode: Callable[[Any, Inputs], Any]  # the base model and the inputs -> the output of its get_image_features
    filler: Callable[[PreTrainedConfig], dict[str, Tensor]]  # the inputs of the smallest image
    rotary: bool = False  # the base model has get_rope_index: positions in three dimensions
    one_image: str | None = None  # why a sample cannot have several images
    tiles: bool = False  # the tower reads tiles of equal size, which do not attend to each other
    whole_images: bool = False  # the tokens of an image attend to each other in the language model


def _encode(base: Any, inputs: Inputs) -> Any:
    return base.get_image_features(**inputs, return_dict=True)


def _encode_tiles(base: Any, inputs: Inputs) -> Any:
    """Encode the images of a pack with Idefics3 or SmolVLM.

    These models expect the tiles [B, tiles, ...] of B samples, so the pack is passed as one sample.
    """
    return base.get_image_features(**{name: tensor[None] for name, tensor in inputs.items()}, return_dict=True)


def _encode_sized(base: Any, inputs: Inputs) -> Any:
    """Encode the images of a pack with LLaVA-OneVision.

    The model divides an image into tiles only if the image is alone in its sample, so each image is passed as a sample
    of its own.
    """
    images = torch.ones(len(inputs["image_sizes"]), dtype=torch.int64)
    return base.get_image_features(**inputs, batch_num_images=images, return_dict=True)


def _encode_listed(base: Any, inputs: Inputs) -> Any:
    """Encode images with LightOnOCR, which reads the sizes of images as tuples of numbers instead of a tensor."""
    sizes = [tuple(size) for size in inputs["image_sizes"].tolist()]
    return base.get_image_features(inputs["pixel_values"], image_sizes=sizes, return_dict=True)


def _patch_filler(config: PreTrainedConfig) -> dict[str, Tensor]:
    vision = config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}


def _tile(config: PreTrainedConfig) -> Tensor:
    """Return one tile for a filler image (the input of the tower if a pack has no images).

    The tile is filled with ones, because Idefics3 and SmolVLM drop a tile of zeros.
    """
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.ones(1, 3, height, width)


def _cut_filler(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the filler image (the input of the vision tower if a pack has no images) for towers that crop each image
    to its size in `image_sizes`.

    The image is large enough for two placeholder tokens, because Mistral 3 fails with one.
    """
    side = config.vision_config.patch_size * config.spatial_merge_size
    return {"pixel_values": torch.ones(1, 3, side, 2 * side), "image_sizes": torch.tensor([[side, 2 * side]])}


def _tile_filler(config: PreTrainedConfig) -> dict[str, Tensor]:
    return {"pixel_values": _tile(config)}


def _sized_filler(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the filler image (the tower's input if a pack has no images) of LLaVA-OneVision.

    The tower reads an image scaled to one tile, followed by its tiles. The filler image is the same tile
    twice.
    """
    tile = _tile(config)
    return {"pixel_values": torch.cat([tile, tile]), "image_sizes": torch.tensor([tile.shape[2:]])}


def _masked_tile_filler(config: PreTrainedConfig) -> dict[str, Tensor]:
    tile = _tile(config)
    return {"pixel_values": tile, "pixel_attention_mask": torch.ones(1, *tile.shape[2:], dtype=torch.bool)}


_GRID = ("pixel_values", "image_grid_thw")
_QWEN = VisionFamily(
    language="language_model",
    encoders=("visual",),
    projector=("visual.merger", "visual.deepstack_merger_list"),
    inputs=_GRID,
    encode=_encode,
    filler=_patch_filler,
    rotary=True,
)
_GLM = replace(_QWEN, projector=("visual.merger", "visual.downsample"))
_TILES = VisionFamily(
    language="language_model",
    encoders=("vision_tower", "multi_modal_projector"),
    projector=("multi_modal_projector",),
    inputs=("pixel_values",),
    encode=_encode,
    filler=_tile_filler,
    tiles=True,
)
_MISTRAL = replace(_TILES, inputs=("pixel_values", "image_sizes"), filler=_cut_filler, tiles=False)
_ONEVISION = VisionFamily(
    language="language_model",
    encoders=("vision_tower", "multi_modal_projector", "image_newline"),
    projector=("multi_modal_projector", "image_newline"),
    inputs=("pixel_values", "image_sizes"),
    encode=_encode_sized,
    filler=_sized_filler,
    tiles=True,
    one_image="the number of features of an image depends on how many images its sample has",
)
_IDEFICS = VisionFamily(
    language="text_model",
    encoders=("vision_model", "connector"),
    projector=("connector",),
    inputs=("pixel_values", "pixel_attention_mask"),
    encode=_encode_tiles,
    filler=_masked_tile_filler,
    tiles=True,
)

FAMILIES: dict[str, VisionFamily] = {
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Glm46VForConditionalGeneration": _GLM,
    "GlmOcrForConditionalGeneration": _GLM,
    "Gemma3ForConditionalGeneration": replace(_TILES, whole_images=True),
    "InternVLForConditionalGeneration": _TILES,
    "LlavaForConditionalGeneration": _TILES,
    "AyaVisionForConditionalGeneration": _TILES,
    "Cohere2VisionForConditionalGeneration": _TILES,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "LightOnOcrForConditionalGeneration": replace(
        _MISTRAL,
        encoders=("vision_encoder", "vision_projection"),
        projector=("vision_projection",),
        encode=_encode_listed,
    ),
    "LlavaOnevisionForConditionalGeneration": _ONEVISION,
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "SmolVLMForConditionalGeneration": _IDEFICS,
}
"""The `VisionFamily` of each supported model class. For each class, padfree's tests compare the results for a pack with
those of transformers for one sample at a time.
"""

REFUSED = {
    "paligemma": "the tokens of a prompt attend to each other, and a sample does not say where its prompt ends",
    "got_ocr2": "transformers cannot set the attention of the language model separately",
    "mllama": "the language model attends to images by cross-attention, not at placeholder tokens",
}
"""The reason why a model cannot be trained on images, by `model_type` of its config."""


def why_refused(model_class: type) -> str | None:
    """Return why a class of image-text models cannot be trained on images, or None if the class is supported."""
    if model_class.__name__ in FAMILIES:
        return None
    kind = getattr(getattr(model_class, "config_class", None), "model_type", "")
    if kind in REFUSED:
        return REFUSED[kind]
    base = _base_class(model_class)
    read = inspect.signature(getattr(base, "get_image_features", base.forward)).parameters
    names = [name for name in read if "pixel" in name or "image" in name or "size" in name or "patch" in name]
    reads = f" ({', '.join(names)})" if names else ""
    return f"padfree has no code for the inputs of its vision tower{reads}, and no test of its results"


def _base_class(model_class: type) -> Any:
    """Return the class of the base model (the model without its language-model head) for a model class.

    A class that has no such head is returned unchanged.
    """
    module = sys.modules[model_class.__module__]
    return getattr(module, model_class.__name__.replace(_WHOLE, "Model"), model_class)


def family_of(model: nn.Module) -> VisionFamily | None:
    """Return the `VisionFamily` of a model, or None if padfree does not support the model.

    The model may have a scalar head or no head. Subclasses of supported classes are not supported, because they may
    compute something else.
    """
    # FSDP2 replaces the class of a model that it shards by a subclass.
    own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    name = own.__name__
    if not own.__module__.startswith("transformers.models."):
        return None
    for end in ("Model", _SCALAR):
        if name.endswith(end):
            name = f"{name.removesuffix(end)}{_WHOLE}"
    return FAMILIES.get(name)


def scalar_name(name: str) -> str:
    """Return the name of the class with a scalar head: LlavaForConditionalGeneration becomes
    LlavaForSequenceClassification.
    """
    return name.replace(_WHOLE, _SCALAR)


def language_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model of a vision-language model. Any other model is returned as it is."""
    family = family_of(model)
    part = model if family is None else getattr(model.base_model, family.language)
    assert isinstance(part, PreTrainedModel)
    return part


def unsupported_vision(config: PreTrainedConfig) -> str | None:
    """Return the reason why a model with this config cannot be trained on images, or None if it can.

    This function only checks whether the vision config has a dropout rate or drop-path rate above 0.
    """
    vision = config.vision_config
    for name, value in vision.to_dict().items():
        if ("dropout" in name or "drop_path" in name) and isinstance(value, float) and value > 0:
            return f"vision_config.{name} is {value:g}, but samples share the encoding of an image, dropout included"
    return None


def is_image_text(model: nn.Module) -> bool:
    """Return whether transformers lists the class of this model as an image-text model."""
    return type(model).__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def need_family(model: nn.Module) -> VisionFamily:
    """Return the `VisionFamily` of a model. Raises `UserError` with the reason if the model cannot be trained on
    images.
    """
    family = family_of(model)
    if family is None:
        reason = why_refused(type(model)) if is_image_text(model) else "the model is not a vision-language model"
        raise UserError(
            "model",
            f"{type(model).__name__} cannot be trained on images: {reason}",
            f"use one of {', '.join(FAMILIES)}, or train the language model on text",
        )
    return family
