"""Extract the language model from a multimodal checkpoint for training, and put it back for an export.

During training, only the language model is in memory. It has its own config (`text_config`) and its own tensor names:
`model.language_model.layers.0...` of the checkpoint is `model.layers.0...` in the language model. An export reads the
whole checkpoint again, and replaces the tensors of the language model by the trained ones.

transformers loads the whole checkpoint on rank 0, because the tensor names in files can differ from those in
transformers' classes.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from padfree.errors import UserError
from padfree.model.export_files import save_model
from padfree.model.model_files import one_line

ATTRIBUTE = "_padfree_wrapper"
PROCESSOR = "_padfree_processor"
TEMPLATE, LEGACY_TEMPLATE = "chat_template.jinja", "chat_template.json"
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    LEGACY_TEMPLATE,
    TEMPLATE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapper:
    """The folder and the config of a whole multimodal model, of which only the language model is trained."""

    folder: Path
    config: PreTrainedConfig


def language_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the language model in a multimodal config, or None for any other config."""
    if not any(getattr(config, part, None) is not None for part in config.sub_configs):
        return None
    text = config.get_text_config(decoder=True)
    if type(text) is type(config) or type(text) not in AutoModelForCausalLM._model_mapping:
        return None
    text = copy.deepcopy(text)
    text.name_or_path = config.name_or_path
    if (
        getattr(config, "tie_word_embeddings", None) is not None
    ):  # the head belongs to the multimodal model, so its config says whether the head is tied
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def remember(model: PreTrainedModel, wrapper: Wrapper) -> None:
    object.__setattr__(model, ATTRIBUTE, wrapper)


def wrapper_of(model: PreTrainedModel) -> Wrapper | None:
    found = model.__dict__.get(ATTRIBUTE)
    return found if isinstance(found, Wrapper) else None


def load_whole(wrapper: Wrapper, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the whole multimodal model on the CPU."""
    name = next(iter(wrapper.config.architectures or ()), "")
    model_class: Any = getattr(transformers, name, AutoModelForImageTextToText)
    try:
        model = model_class.from_pretrained(wrapper.folder, dtype=dtype)
    except Exception as error:  # model classes raise all kinds of errors
        raise UserError(
            "model", f"{wrapper.folder} cannot be loaded ({one_line(error)})", "copy or download the folder again"
        ) from None
    assert isinstance(model, PreTrainedModel)
    return model


def names_inside(whole: PreTrainedModel, language: PreTrainedModel) -> dict[str, str]:
    """Map the name of each tensor of the language model to its name in the whole multimodal model."""
    own = list(language.state_dict())
    # A multimodal model contains the whole language model as a module, or only its base model and a head of its own.
    classes = [(type(language), ""), (type(language.base_model), f"{language.base_model_prefix}.")]
    held = whole.state_dict().keys()
    for module_class, prefix in classes:
        for module_name, module in whole.named_modules():
            if type(module) is module_class and module is not whole:
                found = {name: _moved(name, prefix, f"{module_name}.") for name in own}
                if set(found.values()) <= held:
                    return found
    raise UserError(
        "model",
        f"{type(whole).__name__} does not contain all weights of a {type(language).__name__}",
        "give a folder with only the language model",
    )


def _moved(name: str, prefix: str, new_prefix: str) -> str:
    return new_prefix + name.removeprefix(prefix) if name.startswith(prefix) else name


def language_model(wrapper: Wrapper, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the language model of a multimodal folder, with its weights, on the CPU."""
    whole = load_whole(wrapper, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    tensors = whole.state_dict()
    model.load_state_dict({name: tensors[other] for name, other in names_inside(whole, model).items()}, assign=True)
    model.tie_weights()
    return model


def save_whole(
    wrapper: Wrapper, language: PreTrainedModel, tensors: dict[str, Tensor], folder: Path, max_shard_size: str
) -> None:
    """Write the whole multimodal model to `folder`.

    The weights of the language model come from `tensors`, all others from the folder that the model was loaded from.
    """
    whole = load_whole(wrapper, "auto")
    names = names_inside(whole, language)
    state = whole.state_dict()
    for name, tensor in tensors.items():
        state[names[name]] = tensor
    tied = {name for name in names if name not in tensors}  # second names of tied tensors
    for name in tied:
        first = next((other for other in tensors if _same(language, name, other)), None)
        if first is not None:
            state[names[name]] = tensors[first]
    whole.generation_config = language.generation_config
    save_model(whole, folder, state, max_shard_size)
    _copy_processor(wrapper.folder, folder)


def remember_processor(model: PreTrainedModel, folder: Path) -> None:
    """Store in a vision-language model the folder from which it was loaded, so that an export can copy the processor
    files.
    """
    object.__setattr__(model, PROCESSOR, folder)


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the processor files of a vision-language model to `folder`, if the model was loaded from files."""
    found = model.__dict__.get(PROCESSOR)
    if isinstance(found, Path):
        _copy_processor(found, folder)


def _copy_processor(source: Path, folder: Path) -> None:
    for file in PROCESSOR_FILES:
        if (source / file).exists() and not (folder / file).exists():
            shutil.copy2(source / file, folder / file)


def _same(model: PreTrainedModel, name: str, other: str) -> bool:
    return model.state_dict(keep_vars=True)[name] is model.state_dict(keep_vars=True)[other]
