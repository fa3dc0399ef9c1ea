"""Models with a scalar head: one number per hidden state instead of logits over the vocabulary.

    hidden [n, D]  ->  score.weight [1, D]  ->  [n]

A reward model uses the number at the last token of a conversation. A critic uses the number at every position.

`AutoModelForSequenceClassification` loads an export of such a model. transformers has this class for few
vision-language models. For others, padfree creates and registers it (`vision_class_with_head`).
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification

from padfree.errors import UserError
from padfree.model.interface import text_config
from padfree.model.named_tensors import named_tensors
from padfree.model.outputs import base_of
from padfree.model.vision.families import FAMILIES, scalar_name

HEAD = "score"
WEIGHT = f"{HEAD}.weight"

OTHER_HEADS = r"(lm_head|embed_out|output)\.(weight|bias)"
"""A regular expression for the names of language-model heads in checkpoint files, such as lm_head.weight."""

_PLAIN_HEADS: WeakSet[PreTrainedModel] = WeakSet()
"""The models whose head passed the check of `scalar_head_of`. The check runs only once per model, because
`scalar_head_of` is called for every micro-batch.
"""


def scalar_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the config with one label, so that it describes a model with a scalar head."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def scalar_model(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of this config with a scalar head (one number per hidden state) instead of a
    language-model head.
    """
    if (made := vision_class_with_head(config)) is not None:
        AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
    known = type(config) in AutoModelForSequenceClassification._model_mapping
    if not known and "AutoModelForSequenceClassification" not in (getattr(config, "auto_map", None) or {}):
        raise UserError(
            "model",
            f"transformers has no scalar head for {config.model_type!r} (AutoModelForSequenceClassification)",
            "give a model of another architecture",
        )
    model = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        scalar_config(config), dtype=dtype, trust_remote_code=trust_remote_code
    )
    assert isinstance(model, PreTrainedModel)
    scalar_head_of(model)
    return model


def vision_class_with_head(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Create the class with a scalar head (`...ForSequenceClassification`) of a vision-language model.

    Returns None if transformers already has this class, if the config does not belong to a vision-language model, or if
    padfree does not support the model.
    """
    images: Any = AutoModelForImageTextToText._model_mapping
    if type(config) in AutoModelForSequenceClassification._model_mapping or type(config) not in images:
        return None
    whole = images[type(config)]
    if whole.__name__ not in FAMILIES:
        return None
    name = scalar_name(whole.__name__)
    renamings = get_checkpoint_conversion_mapping(whole.__name__)  # type: ignore[no-untyped-call]
    if renamings is not None:  # the names of tensors in files differ from those in the model
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
    # transformers reads the source of the class's module to find out whether the attention can be replaced.
    values = {"__module__": whole.__module__, "config_class": type(config)}
    return type(name, (GenericForSequenceClassification, whole.__bases__[0]), values)


def without_other_heads(model: PreTrainedModel, files: Mapping[str, Path]) -> dict[str, Path]:
    """Return `files` (the checkpoint file of each tensor) without language-model heads that `model` does not have.

    For example, a model with a scalar head does not use the language-model head in the checkpoint.
    """
    own = set(named_tensors(model))
    return {name: path for name, path in files.items() if name in own or not re.fullmatch(OTHER_HEADS, name)}


def scalar_head_of(model: PreTrainedModel) -> Tensor:
    """Return the current weight [1, D] of the model's scalar head (one number per hidden state).

    Raises `UserError` if the head is more than one matrix.
    """
    head, base = getattr(model, HEAD, None), base_of(model)
    if model in _PLAIN_HEADS:
        assert isinstance(head, nn.Linear)
        return head.weight
    below = {id(parameter) for parameter in base.parameters()}
    own = [name for name, parameter in model.named_parameters() if id(parameter) not in below]
    if base is model or not isinstance(head, nn.Linear) or own != [WEIGHT] or len(head.weight) != 1:
        raise UserError(
            "model",
            f"the head of {type(model).__name__} is not a single matrix ({WEIGHT} [1, D])",
            "give a causal language model, or a reward model with one label",
        )
    _PLAIN_HEADS.add(model)
    return head.weight


def scalar_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the scores [n] of hidden states [n, D], in float32, or in float64 if the inputs are float64."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return linear(hidden.to(wide), weight.to(wide))[:, 0]


def first_weight(shape: torch.Size, spread: float, seed: int) -> Tensor:
    """Return the initial weight of a new scalar head, on the CPU, the same on all ranks.

    The weight is drawn from a normal distribution with standard deviation `spread`.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed} {WEIGHT}".encode()).digest()[:7], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)) * spread


def use_pad_token(model: PreTrainedModel, tokenizer: Any) -> None:
    """Set `pad_token_id` in the model's config.

    The padding token is the tokenizer's own, else that of the config, else the tokenizer's end-of-sequence token.
    """
    if tokenizer is None:
        return
    config = text_config(model.config)
    own = tokenizer.pad_token_id
    if own is None:
        own = config.pad_token_id if config.pad_token_id is not None else tokenizer.eos_token_id
    config.pad_token_id = own


def pad_token_of(model: PreTrainedModel) -> int | None:
    """Return the id of the padding token, which does not count as the end of a text."""
    found: int | None = text_config(model.config).pad_token_id
    return found
