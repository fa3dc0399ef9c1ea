"""The vision-language model of a run, as the readers of data see it (`model.vision`).

model.path -> config       placeholder token, inputs of the tower
           -> processor    image -> placeholder tokens and tower inputs        padfree.data.image_processor
           -> model        sample -> rotary positions, on the meta device      padfree.model.vision
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from transformers import PreTrainedModel

from padfree.config import DataConfig, ModelConfig
from padfree.data.image_processor import ImageSettings
from padfree.errors import UserError
from padfree.model.structure import skeleton
from padfree.model.vision import prepare_sample
from padfree.model.vision.families import need_family
from padfree.sample import Sample
from padfree.tasks.reading import Samples


class PrepareSample:
    """Adds the positions that a model gives to the tokens of a sample. It is pickled as the name of the model."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.path, self.trust_remote_code = path, trust_remote_code

    def __call__(self, sample: Sample) -> Sample:
        return prepare_sample(_skeleton(self.path, self.trust_remote_code), sample) if sample.images else sample


def image_settings(model: ModelConfig, data: DataConfig) -> ImageSettings | None:
    """Return what reads the images of a run's data, or None if the run trains on text."""
    if not model.vision:
        return None
    path, code = model.path, model.trust_remote_code
    if model.tokenizer is not None and model.tokenizer != path:
        raise UserError(
            "model.tokenizer",
            f"{model.tokenizer}, but with model.vision the model's own processor makes the tokens",
            "leave it out",
        )
    built = _skeleton(path, code)
    family = need_family(built)
    return ImageSettings(
        path=path,
        placeholder=int(built.config.image_token_id),
        inputs=family.inputs,
        one_image=family.one_image,
        trust_remote_code=code,
        folder=data.image_folder,
        max_pixels=data.max_image_pixels,
        prepare=PrepareSample(path, code),
    )


@lru_cache(maxsize=4)
def _skeleton(path: str, trust_remote_code: bool) -> PreTrainedModel:
    return skeleton(path, trust_remote_code=trust_remote_code, vision=True)


MOST_LOOKED_AT = 1000
"""The maximum number of samples that `image_share` reads."""


def image_share(model: ModelConfig, samples: Samples) -> float:
    """Return the largest share of a sample's tokens that stand for images, over evenly spread samples."""
    if not model.vision:
        return 0.0
    chosen = np.unique(np.linspace(0, len(samples) - 1, MOST_LOOKED_AT, dtype=np.int64)).tolist()
    found = (samples[index] for index in chosen)
    shares = (sum(len(image.positions) for image in one.images) / len(one) for one in found)
    return max(shares, default=0.0)
