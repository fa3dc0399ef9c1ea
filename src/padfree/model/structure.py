"""Build a model without its weights, and find the list of its layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from padfree.choices import ModelHead
from padfree.errors import UserError
from padfree.model.scalar_head import scalar_model
from padfree.model.wrapper import language_config


def skeleton(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.path", head: ModelHead = "tokens"
) -> PreTrainedModel:
    """The model of a folder, a Hub id or a config file on the meta device, without weights.

    `setting` is the name of the setting that holds the path, for error messages.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        config = language_config(config) or config
        with torch.device("meta"):
            if head == "scalar":
                return scalar_model(config, torch.float32, trust_remote_code)
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a config can contain anything, so config classes can raise any error
        why = f"{error.problem}, {error.fix}" if isinstance(error, UserError) else str(error)
        reason = " ".join(why.split())[:250]
        raise UserError(
            setting, f"the config of {path!r} cannot be used ({reason})", "give a folder, a Hub id or a config file"
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's decoder layers. Raises `UserError` if it cannot be found."""
    wanted = int(model.config.num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UserError(
        "model",
        f"{type(model).__name__} has no nn.ModuleList with its {wanted} layers, which padfree needs",
        "use a model of another architecture",
    )
