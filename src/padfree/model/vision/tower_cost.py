"""The cost of encoding an image, in FLOPs of forward and backward, from its number of features.

    FLOPs of an image of m features = linear · m + quadratic · m²

The image has m placeholder tokens. The quadratic term is the attention between all patches of the image. It is 0 if the
vision tower reads tiles of equal size, because a patch then attends only to its tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.images import Image
from padfree.model.parts import parts_of
from padfree.model.structure import tower_blocks
from padfree.model.vision.families import family_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerCost:
    """The cost of encoding an image in a vision tower: linear · m + quadratic · m² FLOPs for an image of m features."""

    linear: float
    quadratic: float

    def __call__(self, features: ArrayLike) -> NDArray[np.float64]:
        """Return the FLOPs [n] of encoding n images, where `features` [n] are the numbers of features per image."""
        counts = np.asarray(features, dtype=np.float64)
        return self.linear * counts + self.quadratic * counts**2

    def of_samples(self, images: Iterable[Iterable[Image]]) -> NDArray[np.float64]:
        """Return, for each sample, the FLOPs of encoding its images.

        An image that several samples show is encoded once, so each of them gets an equal share of its cost.
        """
        shown = [{image.digest: len(image.positions) for image in own} for own in images]
        times: dict[str, int] = {}
        for own in shown:
            for digest in own:
                times[digest] = times.get(digest, 0) + 1
        costs = [sum(float(self(count)) / times[digest] for digest, count in own.items()) for own in shown]
        return np.array(costs, dtype=np.float64)


def tower_cost(model: PreTrainedModel) -> TowerCost | None:
    """Return the cost of encoding images with a vision-language model, or None for a language model.

    The model may be sharded.
    """
    family = family_of(model)
    if family is None:
        return None
    config, parts = model.config, parts_of(model)
    weights, trained = {"tower": 0, "projector": 0}, {"tower": False, "projector": False}
    # Outside of the blocks, only the patch embedding is applied to every patch.
    per_patch = {id(each) for block in tower_blocks(model) for each in block.parameters()}
    per_patch |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)}
    for (_, parameter), part in zip(model.named_parameters(), parts.values(), strict=True):
        if part == "language_model":
            continue
        trained[part] |= parameter.requires_grad
        if parameter.ndim >= 2 and (part == "projector" or id(parameter) in per_patch):
            weights[part] += parameter.numel()
    # One forward pass, one for the gradient of the input, and one for the gradient of the weights.
    passes = 3.0 if trained["tower"] else 1.0
    projector_passes = 1.0 + trained["tower"] + trained["projector"]
    patches = patches_per_feature(config)
    vision: Any = config.vision_config
    width, blocks = getattr(vision, "embed_dim", None) or vision.hidden_size, len(tower_blocks(model))
    window = getattr(vision, "window_size", None)
    full = len(vision.fullatt_block_indexes) if window else blocks
    pairs = 0.0  # keys that a patch sees in blocks that do not attend to the whole image, summed over these blocks
    if family.tiles:
        pairs, full = blocks * patches_per_tile(config), 0
    elif window:
        pairs = (blocks - full) * (window // vision.patch_size) ** 2
    # A (query, key) pair takes a multiplication and an addition per channel for its score, and as many for its value.
    return TowerCost(
        linear=passes * patches * (2.0 * weights["tower"] + 4.0 * width * pairs)
        + projector_passes * 2.0 * weights["projector"],
        quadratic=passes * patches**2 * 4.0 * width * full,
    )


def patches_per_tile(config: PreTrainedConfig) -> float:
    """Return the number of patches in one input of the tower: a tile, or an image of fixed size."""
    vision: Any = config.vision_config
    sides = (vision.image_size, vision.patch_size)
    image, patch = (side if isinstance(side, int) else side[0] for side in sides)
    return float((image // patch) ** 2)


def patches_per_feature(config: PreTrainedConfig) -> float:
    """Return the number of patches that the projector merges into one feature."""
    for holder in (config.vision_config, config):
        for name in ("spatial_merge_size", "scale_factor", "downsample_factor"):
            if isinstance(side := getattr(holder, name, None), int):
                return float(side**2)
    if isinstance(ratio := getattr(config, "downsample_ratio", None), float):
        return ratio**-2
    if isinstance(features := getattr(config, "mm_tokens_per_image", None), int):
        return patches_per_tile(config) / features
    return 1.0
