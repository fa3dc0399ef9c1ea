"""Run a vision-language model on a pack: its vision tower once per distinct image, its language model once per pack.

Each image is encoded by one context rank. An all-to-all sends the features to the ranks that hold the placeholder
tokens of the image.

A rank without images encodes the smallest possible image and uses none of its features. Thus all ranks gather the
tower's weights equally often under FSDP2, and the tower's parameters get gradients of 0, not None.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, cat, split_with_sizes
from transformers import PreTrainedModel

from padfree.attention.copies import copies_of, take_copies
from padfree.batch import LocalBatch, LocalImages
from padfree.cp.ranges import to_device
from padfree.cp.row_exchange import receive_rows
from padfree.errors import UserError
from padfree.model.vision.families import VisionFamily

STACKED = "deepstack_features"


def vision_hidden_states(base: PreTrainedModel, family: VisionFamily, batch: LocalBatch) -> Tensor:
    """Run a vision-language base model with padfree's attention on a pack, and return its last hidden states [1, T, D].

    The pack may have no images.
    """
    inputs = replace(batch, images=None).model_inputs()
    inputs |= embedded(base, family, inputs.pop("input_ids")[0], batch.images)
    if batch.images is not None and family.rotary and batch.rotary_positions is None:
        raise UserError(
            "rotary_positions",
            f"are missing, but the batch has images, on which token positions in {type(base).__name__} depend",
            "pass each sample through padfree.model.vision.prepare_sample(model, sample)",
        )
    hidden: Tensor = getattr(base, family.language)(**inputs).last_hidden_state
    return hidden


def embedded(base: Any, family: VisionFamily, tokens: Tensor, images: LocalImages | None) -> dict[str, Any]:
    """Return the language model's inputs: the embeddings [1, T, D] of tokens [T], with image features at the
    placeholders.

    A placeholder id that a policy sampled stands for no image and keeps its embedding.
    """
    device = tokens.device
    if images is None:
        index = np.zeros(0, dtype=np.int64)
        nothing = copies_of(index, 0, device)
        images = LocalImages(
            inputs={}, counts=(), patches=(), placeholder=-1, tokens=to_device(index, device), features=nothing
        )
    else:
        _check_images(base, family, images)
    # Ranks with and without images call the same functions in the same order, so that collectives match in backward.
    inputs = images.inputs or {name: one.to(device) for name, one in family.filler(base.config).items()}
    features, *stacked = _of_placeholders(family.encode(base, inputs), images)
    # The vocabulary may have no embedding of the placeholder.
    embeddings = base.get_input_embeddings()(tokens.index_fill(0, images.tokens, 0))
    found: dict[str, Any] = {
        "inputs_embeds": embeddings.index_copy(0, images.tokens, features.to(embeddings.dtype))[None]
    }
    if stacked:  # Qwen3-VL adds these features to the hidden states of its first layers
        shown = torch.zeros(len(tokens), dtype=torch.bool, device=device).index_fill(0, images.tokens, True)
        found |= {"visual_pos_masks": shown[None], "deepstack_visual_embeds": stacked}
    return found


def _check_images(base: PreTrainedModel, family: VisionFamily, images: LocalImages) -> None:
    name = type(base).__name__
    if images.placeholder != base.config.image_token_id:
        raise UserError(
            "images",
            f"have placeholder tokens with id {images.placeholder}, but {name} expects id {base.config.image_token_id}",
            "tokenise the samples with the processor of this model",
        )
    if images.inputs and sorted(images.inputs) != sorted(family.inputs):
        raise UserError(
            "images",
            f"have the inputs {', '.join(images.inputs)}, but {name} reads {', '.join(family.inputs)}",
            "load the images with the processor of this model",
        )


def _joined(features: Any) -> Tensor:
    """Join the features that a vision tower returns to one tensor [F, D], where F is the number of features.

    `features` is a list with one tensor per image or sample, or one tensor [tiles, n, D].
    """
    return cat(tuple(features)) if isinstance(features, (list, tuple)) else features.flatten(0, -2)


def _of_placeholders(output: Any, images: LocalImages) -> list[Tensor]:
    """Return the features [m, D] of the vision tower for the m placeholder tokens of this rank.

    `output` is the output of the tower. Some towers also give features for the first layers of the language model.
    These features follow as further tensors [m, D].
    """
    found = output.pooler_output
    parts = [_joined(found), *map(_joined, getattr(output, STACKED, None) or ())]
    if images.inputs:
        _check_counts(found, len(parts[0]), images)
    else:  # the features of the smallest image
        parts = [part[:0] for part in parts]
    if images.exchange is not None:
        received = receive_rows(cat(parts, dim=1), images.exchange)
        parts = list(split_with_sizes(received, [part.shape[1] for part in parts], dim=1))
    return [take_copies(part, images.features) for part in parts]


def _check_counts(found: Any, num_features: int, images: LocalImages) -> None:
    """Raise `UserError` unless the vision tower gives each image as many features as the image has placeholder
    tokens.
    """
    if isinstance(found, (list, tuple)) and len(found) == len(images.counts):
        counts = tuple(map(len, found))
    else:  # every patch or tile has the same number of features
        counts = tuple(patches * num_features // sum(images.patches) for patches in images.patches)
    if num_features != sum(images.counts) or counts != images.counts:
        raise UserError(
            "images",
            f"have {', '.join(map(str, images.counts))} placeholder tokens (one number per image), but the vision "
            f"tower gives {num_features} features for their {', '.join(map(str, images.patches))} rows of pixel_values",
            "tokenise the samples with the processor of this model",
        )
