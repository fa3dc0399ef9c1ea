"""The arguments with which plain transformers code calls a vision-language model for one sample.

The arguments of a sample's images are joined in the form that the model class needs: pixel values, patch grids, image
sizes, token types.

In training, padfree instead computes the image features of a whole pack (`padfree.model.vision.features`). A check
against plain transformers code therefore also tests these features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.images import Image
from padfree.sample import Sample

ONE_SIZE = ("mistral3", "lighton_ocr")
"""The model types whose processors pad the images of a sample to the size of the largest one."""

IN_SAMPLES = ("smolvlm", "idefics3")
"""The model types whose image inputs have an additional first dimension, which runs over samples."""


def has_images(samples: Sequence[Sample]) -> bool:
    """Return whether any of the samples has an image."""
    return any(sample.images for sample in samples)


def share_images(samples: Sequence[Sample]) -> bool:
    """Return whether two or more samples show the same image."""
    shown = [digest for sample in samples for digest in {image.digest for image in sample.images}]
    return len(set(shown)) < len(shown)


def image_inputs(model: PreTrainedModel, sample: Sample) -> dict[str, Any]:
    """Return the arguments of the model's forward for the images of a sample; {} if the sample has no images."""
    if not sample.images:
        return {}
    config: Any = model.config
    loaded: list[Mapping[str, NDArray[Any]]] = [image.load() for image in sample.images]
    if config.model_type in ONE_SIZE:
        loaded = _padded(loaded)
    found: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([one[name] for one in loaded])).to(model.device) for name in loaded[0]
    }
    if config.model_type == "lighton_ocr":
        found["image_sizes"] = [tuple(size) for size in found["image_sizes"].tolist()]
    if config.model_type == "llava_onevision":
        found["batch_num_images"] = torch.ones(1, dtype=torch.int64)
    if config.model_type in IN_SAMPLES:
        found = {name: tensor[None] for name, tensor in found.items()}
    if config.model_type == "gemma3":
        found["token_type_ids"] = _types(sample, model.device)
    if "image_grid_thw" in found:
        found["mm_token_type_ids"] = _types(sample, model.device)
    return found


def _types(sample: Sample, device: torch.device) -> Tensor:
    """Return the types of the tokens [1, n]: 1 for a placeholder of an image, 0 for text."""
    types = np.zeros((1, len(sample)), dtype=np.int64)
    for image in sample.images:
        types[0, image.positions] = 1
    return torch.from_numpy(types).to(device)


def _padded(loaded: Sequence[Mapping[str, NDArray[Any]]]) -> list[Mapping[str, NDArray[Any]]]:
    """Pad the images of a sample with zeros to the largest height and the largest width."""
    sides = [one["pixel_values"].shape[2:] for one in loaded]
    height, width = (max(side[axis] for side in sides) for axis in (0, 1))
    padded: list[Mapping[str, NDArray[Any]]] = []
    for one, (rows, columns) in zip(loaded, sides, strict=True):
        pixels = np.zeros((1, 3, height, width), dtype=np.float32)
        pixels[:, :, :rows, :columns] = one["pixel_values"]
        padded.append({**one, "pixel_values": pixels})
    return padded


def with_other_images(sample: Sample) -> Sample:
    """Return the sample with other images of the same sizes, whose pixels have another order and the opposite sign."""
    return replace(sample, images=tuple(_other(image) for image in sample.images))


def _other(image: Image) -> Image:
    return replace(image, digest=f"{image.digest}-other", load=partial(_other_inputs, image))


def _other_inputs(image: Image) -> dict[str, NDArray[Any]]:
    return {
        name: np.ascontiguousarray(-array[..., ::-1]) if name == "pixel_values" else array
        for name, array in image.load().items()
    }
