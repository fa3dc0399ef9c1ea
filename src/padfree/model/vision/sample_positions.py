"""The positions of the tokens of a sample with images, computed by the model's own function.

In this example, * are the placeholder tokens of an image of 2 x 2 features:

    tokens    7 * * * * 9 5
    time      0 1 1 1 1 3 4
    height    0 1 1 2 2 3 4
    width     0 1 2 1 2 3 4

The model's `get_rope_index` reads no weights, so the model may be on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from padfree.errors import UserError
from padfree.model.vision.families import need_family
from padfree.sample import Sample

IMAGE = 1
"""The token type of image placeholders in transformers."""


def prepare_sample(model: PreTrainedModel, sample: Sample) -> Sample:
    """Return the sample, with `rotary_positions` if its token positions in this model depend on images.

    Raises `UserError` if the model cannot be trained on images, or on the images of this sample.
    """
    family = need_family(model)
    if not sample.images:
        return sample
    base: Any = model.base_model
    name = type(model).__name__
    placeholder = int(sample.tokens[sample.images[0].positions[0]])
    if placeholder != base.config.image_token_id:
        raise UserError(
            "images",
            f"have placeholder tokens with id {placeholder}, but {name} expects id {base.config.image_token_id}",
            "tokenise the sample with the processor of this model",
        )
    if family.one_image is not None and len(sample.images) > 1:
        raise UserError(
            "images",
            f"{name} cannot read {len(sample.images)} images in one sample: {family.one_image}",
            "give one image per sample",
        )
    if family.rotary or family.whole_images:
        _check_apart(sample)
    if not family.rotary:
        return sample
    grids = [image.grid for image in sample.images]
    side = base.config.vision_config.spatial_merge_size
    for image, grid in zip(sample.images, grids, strict=True):
        if grid is None or int(np.prod(grid)) != len(image.positions) * side**2:
            raise UserError(
                "grid",
                f"is {grid} for an image with {len(image.positions)} placeholder tokens",
                f"give (time, height, width) in patches, {side} x {side} of them per placeholder",
            )
        if image.positions[-1] - image.positions[0] + 1 != len(image.positions):
            raise UserError(
                "images",
                "have other tokens between the placeholder tokens of one image",
                "tokenise with the model's processor",
            )
    types = np.zeros(len(sample), dtype=np.int32)
    types[np.concatenate([image.positions for image in sample.images])] = IMAGE
    with torch.device("cpu"):
        positions, _ = base.get_rope_index(
            torch.from_numpy(sample.tokens.astype(np.int64))[None],
            mm_token_type_ids=torch.from_numpy(types)[None],
            image_grid_thw=torch.tensor(grids),
        )
    return replace(sample, rotary_positions=positions[:, 0].numpy())


def _check_apart(sample: Sample) -> None:
    """Raise `UserError` if two images are adjacent. The model would take two such images for one."""
    for one, other in zip(sample.images, sample.images[1:], strict=False):
        if one.positions[-1] + 1 == other.positions[0]:
            raise UserError(
                "images", "follow each other without a token between them", "tokenise with the model's processor"
            )
