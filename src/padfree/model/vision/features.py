"""Run a vision-language model on a pack: its tower once per distinct image, its language model once per pack.

    pixel_values   patches or tiles of the distinct images      -> features [F, D]     the model's own tower
    features       gathered for the M placeholders of the pack  -> [M, D]              gradients of shared images add up
    input_ids      embedded, features at the placeholders       -> hidden [1, T, D]    the model's own forward

Qwen3-VL adds further features of the tower (deep stack) to the hidden states of its first layers. These are gathered
for the placeholders in the same way.

A pack without images encodes the smallest possible image and adds 0 times its features to the hidden states. This has
two purposes. Under FSDP2, all ranks must gather the tower's weights the same number of times, although only some of
their packs may have images. And the parameters of the tower get a gradient of 0, not None, from every such pack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, cat
from transformers import PreTrainedModel

from padfree.attention.copies import take_copies
from padfree.batch import LocalBatch, LocalImages
from padfree.errors import UserError
from padfree.model.vision.families import VisionFamily

STACKED = "deepstack_features"


def vision_hidden_states(base: PreTrainedModel, family: VisionFamily, batch: LocalBatch) -> Tensor:
    """The last hidden states [1, T, D] of an attached base model for a pack with or without images."""
    inputs = replace(batch, images=None).model_inputs()
    if batch.images is None:
        device = batch.input_ids.device
        output = family.encode(base, {name: one.to(device) for name, one in family.filler(base.config).items()})
        hidden: Tensor = base(**inputs).last_hidden_state
        unused = [_joined(output.pooler_output), *map(_joined, getattr(output, STACKED, None) or ())]
        return hidden + 0.0 * sum(features.sum() for features in unused).to(hidden.dtype)  # type: ignore[union-attr]
    _check_images(base, family, batch, batch.images)
    output = family.encode(base, batch.images.packed.inputs)
    _place(output, batch.images)
    hidden = base(**inputs, mm_encoder_outputs={"image": output}).last_hidden_state
    return hidden


def _check_images(base: PreTrainedModel, family: VisionFamily, batch: LocalBatch, images: LocalImages) -> None:
    name, packed = type(base).__name__, images.packed
    if packed.placeholder != base.config.image_token_id:
        raise UserError(
            "images",
            f"have the placeholder {packed.placeholder}, but {name} has {base.config.image_token_id}",
            "tokenise the samples with the processor of this model",
        )
    if sorted(packed.inputs) != sorted(family.inputs):
        raise UserError(
            "images",
            f"have the inputs {', '.join(packed.inputs)}, but {name} reads {', '.join(family.inputs)}",
            "load the images with the processor of this model",
        )
    if family.rotary and batch.rotary_positions is None:
        raise UserError(
            "rotary_positions",
            f"are missing, and those of {name} depend on the images",
            "pass each sample through padfree.model.vision.prepare_sample(model, sample)",
        )


def _joined(features: Any) -> Tensor:
    """Features [F, D] in one tensor, from a list with one tensor per image or sample, or from [tiles, n, D]."""
    return cat(tuple(features)) if isinstance(features, (list, tuple)) else features.flatten(0, -2)


def _place(output: Any, images: LocalImages) -> None:
    """Replace the features [F, D] in a tower's output by [M, D], one for each placeholder of the pack."""
    packed, found = images.packed, output.pooler_output
    joined = _joined(found)
    if isinstance(found, (list, tuple)) and len(found) == len(packed.counts):
        counts = tuple(map(len, found))
    else:  # every patch or tile has the same number of features
        counts = tuple(rows * len(joined) // sum(packed.rows) for rows in packed.rows)
    if len(joined) != packed.num_features or counts != packed.counts:
        raise UserError(
            "images",
            f"have {', '.join(map(str, packed.counts))} placeholder tokens, but the tower gives {len(joined)} features "
            f"for {', '.join(map(str, packed.rows))} rows of pixel_values",
            "tokenise the samples with the processor of this model",
        )
    taken = take_copies(joined, images.features)
    output.pooler_output = (taken,) if isinstance(found, (list, tuple)) else taken[None]
    if getattr(output, STACKED, None) is not None:
        stacked = [take_copies(_joined(features), images.features) for features in output[STACKED]]
        output[STACKED] = [(features,) for features in stacked]
