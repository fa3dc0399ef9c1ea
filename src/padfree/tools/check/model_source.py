"""The model to check: a Hugging Face folder, Hub id or config, or the first layers of one.

    folder of 36 layers      config.json, model-00001-of-00004.safetensors, ...
    the first 4 of them      config.json (4 layers), an index that names their tensors, links to the same files

The first layers are kept with their own weights, between the model's own embeddings and its norm and head. Enough are
kept to have every kind of layer that a list of the config names (sliding, full; dense, sparse). Files are linked, not
copied, except where transformers renames or merges tensors on loading: it reads whole files, so that the kept tensors
are written to files of their own.
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

from padfree.errors import UserError
from padfree.model import attach, lm_head_of
from padfree.model.load import _from_config, _names_match, opened_together
from padfree.model.model_files import INDEX, PARTIAL
from padfree.model.wrapper import language_config
from padfree.sizes import ModelSizes
from padfree.train.limits import ModelLimits

FEW_LAYERS = 4
"""How many are kept where nothing else is asked for, and where every kind of layer is among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """What `load_model` is given."""

    source: str | Path | PreTrainedConfig
    config: PreTrainedConfig  # of the layers that are kept
    name: str  # of the model's class
    num_layers: int
    total_layers: int
    random_weights: bool
    limits: ModelLimits


@contextmanager
def model_source(
    source: str | Path | PreTrainedConfig,
    *,
    layers: int | None = None,
    full: bool = False,
    backend: str = "auto",
    trust_remote_code: bool = False,
) -> Iterator[ModelSource]:
    """The model, or its first `layers` layers, for the length of a block. A model that cannot be packed is refused."""
    if layers is not None and layers < 1:
        raise UserError("layers", "", "give 1 or more", value=layers)
    if layers is not None and full:
        raise UserError("layers", f"{layers} together with full", "give one of them")
    config, files = opened_together(source, trust_remote_code=trust_remote_code)
    if (inner := language_config(config)) is not None:  # its layers lie among others in the files: all are loaded
        config, full, layers = inner, files is not None or full, None if files is not None else layers
    with torch.device("meta"):
        model = _from_config(copy.deepcopy(config), torch.float32, trust_remote_code)
    lm_head_of(attach(model, backend))  # refused before anything is computed
    limits = ModelLimits.of(model)
    total = int(config.num_hidden_layers)
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
    """`FEW_LAYERS`, or as many as it takes to meet every kind of layer."""
    total = int(config.num_hidden_layers)
    lists = [value for value in config.to_dict().values() if _is_per_layer(value, total)]
    kinds = [repr([value[layer] for value in lists]) for layer in range(total)]
    last_new = max(kinds.index(kind) for kind in kinds)
    sparse = ModelSizes.of(config).sparse
    first = sparse.index(True) if any(sparse) else 0
    return min(total, max(FEW_LAYERS, last_new + 1, first + 1))


def first_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """The same config with `count` layers, and with lists of one entry per layer cut to match."""
    total = int(config.num_hidden_layers)
    values: dict[str, Any] = {
        name: list(value[:count]) if _is_per_layer(value, total) else value for name, value in config.to_dict().items()
    }
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
    return type(config).from_dict(values)


def _is_per_layer(value: Any, total: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == total


def layer_number(name: str) -> int | None:
    """The layer that a stored tensor belongs to: `model.layers.3.mlp.experts.7.up_proj.weight` -> 3."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return None if match is None else int(match[1])


def _write_first_layers(
    folder: Path, config: PreTrainedConfig, files: Mapping[str, Path], count: int, trust_remote_code: bool
) -> None:
    config.save_pretrained(folder)
    kept = {name: path for name, path in files.items() if (layer_number(name) or 0) < count}
    with torch.device("meta"):
        model = _from_config(config, torch.float32, trust_remote_code)
    direct = _names_match(model, kept)
    # Every process reads its slices of files that fit, and only the first one lets transformers read the others.
    copies = not direct and (not dist.is_initialized() or dist.get_rank() == 0)
    for path in sorted(set(kept.values())):
        if copies:
            names = [name for name, where in kept.items() if where == path]
            with safe_open(path, framework="pt") as file:
                save_file({name: file.get_tensor(name) for name in names}, folder / path.name, {"format": "pt"})
        else:
            (folder / path.name).symlink_to(path.resolve())
    for path in next(iter(files.values())).parent.glob("*.py"):  # a model's own code, run if it is trusted
        (folder / path.name).symlink_to(path.resolve())
    mapping = {name: path.name for name, path in kept.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {PARTIAL: True}, "weight_map": mapping}), encoding="utf-8")
