"""The model to check: a Hugging Face folder, Hub id or config, with all layers or only the first few.

By default, enough layers are kept to include every layer type of the config (sliding or full attention, dense or
sparse). These layers, the embeddings, the last norm and the head keep their weights.

With weight files, the shortened model is a temporary folder of links to these files, with a config and an index for the
kept layers. If transformers would rename or merge tensors on loading, the kept tensors are copied to new files instead.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from padfree.config.model_folder import INDEX
from padfree.errors import UserError
from padfree.model import attach, lm_head_of
from padfree.model.load import matching_names, opened_together
from padfree.model.model_files import PARTIAL
from padfree.model.structure import check_vision, model_from_config
from padfree.model.wrapper import language_config
from padfree.sizes import ModelSizes
from padfree.train.check_data import ModelLimits

FEW_LAYERS = 4
"""Number of layers that are checked by default. If they lack a layer type of the model, more layers are checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The model to check. `source` is the argument with which `load_model` loads this model."""

    source: str | Path | PreTrainedConfig
    config: PreTrainedConfig  # the config with the kept layers only
    name: str  # name of the model's class
    num_layers: int
    total_layers: int
    random_weights: bool
    limits: ModelLimits
    vision: bool = False  # the whole vision-language model, not only its language model


@contextmanager
def model_source(
    source: str | Path | PreTrainedConfig,
    *,
    layers: int | None = None,
    full: bool = False,
    backend: str = "auto",
    trust_remote_code: bool = False,
    vision: bool = False,
) -> Iterator[ModelSource]:
    """Context manager that yields the model to check, or its first `layers` layers. `full`: take all layers.

    `vision`: yield a whole vision-language model, with all layers. A model that does not support packing raises a
    `UserError`, with or without `vision`.
    """
    if layers is not None and layers < 1:
        raise UserError("layers", "is not a positive number", "give 1 or more", value=layers)
    if layers is not None and full:
        raise UserError("layers", f"{layers} cannot be combined with full=True", "give only one of the two arguments")
    if vision and layers is not None:
        raise UserError(
            "layers", f"is {layers}, but a vision-language model is checked with all its layers", "omit this argument"
        )
    config, files = opened_together(source, trust_remote_code=trust_remote_code)
    if vision:
        check_vision(config)
    # The files of a multimodal model also hold layers of other parts, e.g. of a vision encoder. Load all layers.
    elif (inner := language_config(config)) is not None:
        config, full, layers = inner, files is not None or full, None if files is not None else layers
    with torch.device("meta"):
        model = model_from_config(copy.deepcopy(config), torch.float32, trust_remote_code)
    lm_head_of(attach(model, backend))  # raises early if the model does not support packing
    limits = ModelLimits.of(model)
    text = config.get_text_config(decoder=True)
    if text is not config:  # a whole vision-language model
        full, layers = True, None
    total = int(text.num_hidden_layers)
    kept = total if full else min(total, layers or default_layers(config))
    short = config if kept == total else first_layers(config, kept)

    def found(where: str | Path | PreTrainedConfig) -> ModelSource:
        return ModelSource(
            source=where,
            config=short,
            name=type(model).__name__,
            num_layers=kept,
            total_layers=total,
            random_weights=files is None,
            limits=limits,
            vision=vision,
        )

    if files is None:
        yield found(short)
    elif kept == total:
        yield found(source)
    else:
        with tempfile.TemporaryDirectory(prefix="padfree-check-") as name:
            _write_first_layers(Path(name), short, files, kept, trust_remote_code)
            yield found(Path(name))


def default_layers(config: PreTrainedConfig) -> int:
    """Return how many layers to check by default: `FEW_LAYERS`, or more if that does not include every layer type."""
    total = int(config.num_hidden_layers)
    lists = [value for value in config.to_dict().values() if _is_per_layer(value, total)]
    kinds = [repr([value[layer] for value in lists]) for layer in range(total)]
    last_new = max(kinds.index(kind) for kind in kinds)
    sparse = ModelSizes.of(config).sparse
    first = sparse.index(True) if any(sparse) else 0
    return min(total, max(FEW_LAYERS, last_new + 1, first + 1))


def first_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return a copy of the config with only `count` layers. Lists with one entry per layer are shortened to match."""
    total = int(config.num_hidden_layers)
    values: dict[str, Any] = {
        name: list(value[:count]) if _is_per_layer(value, total) else value for name, value in config.to_dict().items()
    }
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
    return type(config).from_dict(values)


def _is_per_layer(value: Any, total: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == total


def layer_number(name: str) -> int | None:
    """Return the number of the layer that a stored tensor belongs to; None if it belongs to none.

    `model.layers.3.mlp.experts.7.up_proj.weight` -> 3
    """
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return None if match is None else int(match[1])


def _write_first_layers(
    folder: Path, config: PreTrainedConfig, files: Mapping[str, Path], count: int, trust_remote_code: bool
) -> None:
    config.save_pretrained(folder)
    kept = {name: path for name, path in files.items() if (layer_number(name) or 0) < count}
    with torch.device("meta"):
        model = model_from_config(config, torch.float32, trust_remote_code)
    direct = matching_names(model, kept) is not None
    # If every process can read its slices of the files, the files are linked.
    # Otherwise rank 0 copies the kept tensors, and no other rank reads files.
    copies = not direct and (not dist.is_initialized() or dist.get_rank() == 0)
    for path in sorted(set(kept.values())):
        if copies:
            names = [name for name, where in kept.items() if where == path]
            with safe_open(path, framework="pt") as file:
                save_file({name: file.get_tensor(name) for name in names}, folder / path.name, {"format": "pt"})
        else:
            (folder / path.name).symlink_to(path.resolve())
    for path in next(iter(files.values())).parent.glob("*.py"):  # custom code of the model, for trust_remote_code
        (folder / path.name).symlink_to(path.resolve())
    mapping = {name: path.name for name, path in kept.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {PARTIAL: True}, "weight_map": mapping}), encoding="utf-8")
