"""Build a model without its weights, restore its buffers, and find the list of its layers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from padfree.choices import ModelHead
from padfree.config import Config
from padfree.errors import UserError
from padfree.model.model_files import one_line
from padfree.model.named_tensors import named_tensors
from padfree.model.scalar_head import scalar_model
from padfree.model.vision.families import FAMILIES, family_of, language_part, why_refused
from padfree.model.wrapper import language_config


def skeleton(
    path: str,
    *,
    trust_remote_code: bool = False,
    setting: str = "model.path",
    head: ModelHead = "tokens",
    vision: bool | None = False,
) -> PreTrainedModel:
    """Build a model on the meta device, from a folder, a Hub id or a config file.

    `vision`: whether to build the whole vision-language model (None: if padfree supports it), or only its language
    model.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if vision:
            check_vision(config)
        elif vision is False or not is_supported_vision(config):
            config = extracted_config(config, head) or config
        with torch.device("meta"):
            if head == "scalar":
                return scalar_model(config, torch.float32, trust_remote_code)
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config can contain anything, so config classes can raise any error
        why = f"{error.problem}, {error.fix}" if isinstance(error, UserError) else str(error)
        reason = " ".join(why.split())[:250]
        raise UserError(
            setting, f"the config of {path!r} cannot be used ({reason})", "give a folder, a Hub id or a config file"
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def model_skeleton(config: Config) -> PreTrainedModel:
    """Build the model that a run trains, on the meta device and without weights."""
    model = config.model
    return skeleton(model.path, trust_remote_code=model.trust_remote_code, head=config.loss.head, vision=model.vision)


def vision_class(config: PreTrainedConfig) -> str | None:
    """Return the name of the config's image-text class in transformers, or None if transformers has no such class."""
    mapping: Any = AutoModelForImageTextToText._model_mapping
    return mapping[type(config)].__name__ if type(config) in mapping else None


def extracted_config(config: PreTrainedConfig, head: ModelHead) -> PreTrainedConfig | None:
    """Return the config of the language model in a multimodal config, or None for any other config.

    Raises `UserError` if the language model is to have a scalar head, because an export could not put such a language
    model back into the multimodal checkpoint.
    """
    inner = language_config(config)
    if inner is not None and head == "scalar":
        raise UserError(
            "model",
            f"{config.name_or_path or type(config).__name__} is multimodal, and only the whole model, not its "
            "language model alone, can have a scalar head (reward model, critic)",
            "set model.vision=true, or give a model that is not multimodal",
        )
    return inner


def is_supported_vision(config: PreTrainedConfig) -> bool:
    """Return whether the config belongs to a vision-language model that padfree supports."""
    return vision_class(config) in FAMILIES


def check_vision(config: PreTrainedConfig) -> None:
    """Raise `UserError` unless the config belongs to a vision-language model that can be trained on images."""
    name = vision_class(config)
    mapping: Any = AutoModelForImageTextToText._model_mapping
    reason = "this is not a supported vision-language model" if name is None else why_refused(mapping[type(config)])
    if reason is None:
        return
    raise UserError(
        "model.vision",
        f"true, but {name or type(config).__name__} cannot be trained on images: {reason}",
        "set model.vision=false, which trains the language model on text",
    )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class (`AutoModelFor...`) that builds and loads the model of this config."""
    return AutoModelForImageTextToText if is_supported_vision(config) else AutoModelForCausalLM


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the model's decoder layers. Raises `UserError` if it cannot be found.

    For a vision-language model, these are the layers of its language model, not those of its tower.
    """
    language = language_part(model)
    wanted = int(language.config.num_hidden_layers)
    for module in language.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UserError(
        "model",
        f"{type(model).__name__} has no nn.ModuleList with its {wanted} layers, which padfree needs",
        "use a model of another architecture",
    )


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks (layers) of the vision tower. The list is empty for a language model."""
    family = family_of(model)
    if family is None:
        return []
    parts = [getattr(model.base_model, name) for name in family.encoders]
    lists = [
        each
        for part in parts
        if isinstance(part, nn.Module)
        for each in part.modules()
        if isinstance(each, nn.ModuleList) and all(isinstance(block, GradientCheckpointingLayer) for block in each)
    ]
    return [block for each in lists for block in each]


def model_from_config(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, head: ModelHead = "tokens"
) -> PreTrainedModel:
    """Return a new model with this config, on torch's default device. transformers initialises its weights."""
    if head == "scalar":
        return scalar_model(config, dtype, trust_remote_code)
    auto = auto_class(config)
    if type(config) not in auto._model_mapping and not hasattr(config, "auto_map"):
        raise UserError(
            "model",
            "is not a causal language model of transformers",
            "give a causal language model",
            value=config.model_type,
        )
    try:
        model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a config can hold anything
        raise UserError(
            "model",
            f"the config does not describe a valid model ({one_line(error)})",
            "give the config of a causal language model",
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert tensors to float32 in place if the architecture always keeps them in float32, as `from_pretrained` does.

    `dtype` is the dtype of the model's other tensors.
    """
    for part, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in named_tensors(model).items():
            if re.search(rf"(^|\.){re.escape(part)}(\.|$)", name):
                tensor.data = tensor.data.to(kept)


def restored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the values of the non-persistent buffers (such as rotary frequencies) of a model on the meta device.

    The result maps the names of the buffers to CPU tensors. Raises `UserError` if the model's `_init_weights` does not
    compute a buffer.
    """
    for tensor in named_tensors(model).values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    runs: list[dict[str, Tensor]] = []
    for filling in (0, 1):
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                if buffer is not None:
                    module._buffers[name] = torch.full_like(buffer, filling, device="cpu")
        model.initialize_weights()  # type: ignore[no-untyped-call]
        runs.append({name: buffer.clone() for name, buffer in model.named_non_persistent_buffers()})
    for name, buffer in runs[0].items():
        if not torch.equal(buffer, runs[1][name]):
            raise UserError(
                "model",
                f"_init_weights of {type(model).__name__} does not initialise the buffer {name}",
                "initialise the buffer in the model's code",
            )
    return runs[0]
