"""The images of a sample: the indices of their placeholder tokens, and a function that loads their pixel inputs.

For example, the tokens 7 8 * * * * 9 * * 5 have the placeholder token * at the indices 2 to 5 for one image, and at 7
and 8 for another image.

Images with the same `digest` have the same pixel inputs. The vision tower encodes such images once per pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import token_array
from padfree.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Image:
    """One image of a sample.

    `load()` returns the inputs of the vision tower by name. A pack concatenates its images along the first axis of each
    array, which counts patches, tiles or images.
    """

    digest: str  # identifies the tower's inputs
    positions: NDArray[np.int64]  # [m] indices of its placeholder tokens in the sample, ascending
    load: Callable[[], Mapping[str, NDArray[Any]]]
    grid: tuple[int, int, int] | None = None  # (time, height, width) in patches, if position ids depend on it

    def __post_init__(self) -> None:
        if not self.digest:
            raise UserError("digest", "is empty", "give a text that identifies the image")
        positions = token_array(self.positions, "positions of an image").astype(np.int64, copy=False)
        if not len(positions) or positions[0] < 0 or (np.diff(positions) <= 0).any():
            raise UserError(
                "positions",
                "are not one or more ascending indices of tokens",
                "give the indices of the image's placeholder tokens in ascending order",
            )
        object.__setattr__(self, "positions", positions)


def check_images(
    images: Sequence[Image], tokens: NDArray[Any], sampled: NDArray[np.bool_], name: str
) -> tuple[Image, ...]:
    """Return the images as a tuple. Raise `UserError` unless they cover exactly the placeholder tokens in `tokens` [n],
    in ascending order.

    Tokens that a policy sampled (True in `sampled` [n]) need no image. `name` names the sample in messages.
    """
    images = tuple(images)
    if not images:
        return images
    for image in images:
        if not isinstance(image, Image):
            raise UserError("images", f"{name} has a {type(image).__name__} as an image", "give padfree.Image objects")
    positions = np.concatenate([image.positions for image in images])
    if (np.diff(positions) <= 0).any():
        raise UserError(
            "images",
            f"the images of {name} are not in the order of their placeholder tokens",
            "sort the images by their positions",
        )
    if positions[-1] >= len(tokens):
        raise UserError(
            "images",
            f"an image of {name} has a placeholder at index {positions[-1]}, but there are only {len(tokens)} tokens",
            "remove images whose placeholders were cut off",
        )
    placeholder = tokens[positions[0]]  # all images have the same placeholder token
    if (tokens[positions] != placeholder).any() or without_image(images, tokens, sampled, placeholder).any():
        raise UserError(
            "images",
            f"the images of {name} do not cover exactly the tokens with id {placeholder}",
            "give each image the indices of its placeholder tokens",
        )
    return images


def without_image(
    images: Sequence[Image], tokens: NDArray[Any], sampled: NDArray[np.bool_], placeholder: int
) -> NDArray[np.bool_]:
    """Return bools [n] that mark placeholder tokens without an image. Tokens that a policy sampled (True in `sampled`
    [n]) are not marked.
    """
    missing: NDArray[np.bool_] = (tokens == placeholder) & ~sampled
    for image in images:
        missing[image.positions] = False
    return missing


def truncated_images(images: Sequence[Image], length: int) -> tuple[Image, ...]:
    """Return the images of the first `length` tokens. Raises `UserError` if the cut is inside an image."""
    kept = tuple(image for image in images if image.positions[0] < length)
    if kept and kept[-1].positions[-1] >= length:
        raise UserError("length", f"{length} cuts an image", "cut before or after all of its placeholder tokens")
    return kept


def prefix_keys(tokens: Sequence[NDArray[Any]], images: Sequence[Sequence[Image]]) -> list[NDArray[Any]]:
    """Return each sample's token ids [n] with image placeholders replaced by a negative number for each distinct image.

    Equal ids then mean equal text and images.
    """
    numbers: dict[str, int] = {}
    keys: list[NDArray[Any]] = []
    for ids, shown in zip(tokens, images, strict=True):
        key = ids
        if shown:
            key = ids.astype(np.int64)
            for image in shown:
                key[image.positions] = -1 - numbers.setdefault(image.digest, len(numbers))
        keys.append(key)
    return keys
