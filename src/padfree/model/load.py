"""Load a model from a Hugging Face folder. Collective.

1. Build the model on the meta device from config.json.
2. Call the caller's function `shard(model)`, for example to add adapters or apply FSDP2.
3. Allocate this rank's part of the model, and fill it.

With FSDP2 over 2 ranks, rank 0 reads rows [0:3] of a weight [6, 3], and rank 1 reads rows [3:6]. If ranks cannot read
their slices directly, rank 0 loads the weights with transformers and broadcasts them.

Weights that are not finite raise an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from padfree.choices import Init, ModelHead
from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.model.broadcast_weights import broadcast_weights, initialised, through_transformers
from padfree.model.export_files import GENERATION_CONFIG
from padfree.model.interface import text_config
from padfree.model.lora import initial_values, is_adapter
from padfree.model.model_files import one_line, open_model, opened
from padfree.model.named_tensors import Region, clean_name, local_part, local_region, named_tensors
from padfree.model.nonfinite_tensors import nonfinite_weight
from padfree.model.random_weights import DRAWN_ON, draw_weights, recipes_of
from padfree.model.scalar_head import WEIGHT as SCALAR_WEIGHT
from padfree.model.scalar_head import first_weight, without_other_heads
from padfree.model.stored_experts import StoredNames, stored_names
from padfree.model.structure import (
    check_vision,
    extracted_config,
    is_supported_vision,
    keep_in_float32,
    model_from_config,
    restored_buffers,
)
from padfree.model.wrapper import Wrapper, language_model, remember, remember_processor


def load_model(
    source: str | Path | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Callable[[PreTrainedModel], None] | None = None,
    offload: bool = False,  # keep the parameters on the CPU, and move only the buffers to `device`
    init: Init = "weights",
    seed: int = 0,  # of random weights, of adapters, and of a scalar head that is not in the files
    trust_remote_code: bool = False,
    head: ModelHead = "tokens",
    spread: float | None = None,  # standard deviation of a scalar head that is not in the files; None: from the config
    vision: bool | None = False,  # load the whole of a vision-language model; None: if padfree supports the model
) -> PreTrainedModel:
    """Load a causal language model in training mode, or with `head="scalar"` a model with a scalar head. Collective.

    `source` is a folder, a Hub id or a config. A config gives random weights. `shard` is called with the model on the
    meta device.
    """
    config, files = opened_together(source, init=init, trust_remote_code=trust_remote_code)
    wrapper = None
    if vision is None:
        vision = is_supported_vision(config)
    if vision:
        check_vision(config)
    elif (inner := extracted_config(config, head)) is not None:
        if files is not None:
            wrapper = Wrapper(folder=next(iter(files.values())).parent, config=config)
        config = inner
    name = config.name_or_path or type(config).__name__
    with torch.device("meta"):
        model = model_from_config(config, dtype, trust_remote_code, head)
    keep_in_float32(model, dtype)
    restored = restored_buffers(model)
    fresh = head == "scalar" and (files is None or SCALAR_WEIGHT not in files)
    if files is not None and head == "scalar":
        files = without_other_heads(model, files)
    names = None if files is None or wrapper is not None else matching_names(model, files, fresh=fresh)
    recipes = None
    if files is None and torch.device(device).type in DRAWN_ON:
        recipes = recipes_of(config, dtype, trust_remote_code, head)
    dtypes = {tensor_name: tensor.dtype for tensor_name, tensor in named_tensors(model).items()}
    if shard is not None:
        shard(model)
    if apart := {tensor_name for tensor_name in named_tensors(model) if not is_adapter(tensor_name)} ^ dtypes.keys():
        raise UserError(
            "shard",
            f"separates {min(apart)} from the tensor it is tied to",
            "shard the two tensors in one fully_shard unit",
        )
    ties = _ties(model)
    model.to_empty(device="cpu" if offload else device)
    for (module, attribute), (first, first_attribute) in ties:  # tied parameters stay one object
        setattr(module, attribute, getattr(first, first_attribute))
    for module in model.modules():
        for buffer_name, buffer in module._buffers.items():
            module._buffers[buffer_name] = None if buffer is None else buffer.to(device)
    tensors = named_tensors(model)
    stored = {tensor_name: tensors[tensor_name] for tensor_name in dtypes}
    with torch.no_grad():
        if names is not None:
            assert files is not None
            _read_slices({key: stored[key] for key in stored if key in names}, names, files, name)
        elif recipes is not None:
            draw_weights(stored, recipes, torch.device(device), seed)
        else:

            def source_model() -> PreTrainedModel:
                if files is None:
                    return initialised(config, dtype, trust_remote_code, seed, head)
                if wrapper is not None:
                    return language_model(wrapper, config, dtype)
                return through_transformers(files, config, dtype, trust_remote_code, head)

            broadcast_weights(stored, dtypes, source_model)
        if fresh:
            drawn = first_weight(tensors[SCALAR_WEIGHT].shape, _spread(config) if spread is None else spread, seed)
            local_part(tensors[SCALAR_WEIGHT]).copy_(drawn[local_region(tensors[SCALAR_WEIGHT])])
        for tensor_name in tensors.keys() - dtypes.keys():
            tensor = tensors[tensor_name]
            local_part(tensor).copy_(initial_values(tensor_name, tensor.shape, seed)[local_region(tensor)])
        for module_name, module in model.named_modules():
            for buffer_name in module._non_persistent_buffers_set:
                buffer = module._buffers[buffer_name]
                if buffer is not None:
                    buffer.copy_(restored[clean_name(f"{module_name}.{buffer_name}")])
    _check_finite(model, tensors, files or {}, name)
    if head == "tokens" and (generation_config := loaded_generation_config(files)) is not None:
        model.generation_config = generation_config
    if wrapper is not None:
        remember(model, wrapper)
    if vision and files is not None:
        remember_processor(model, next(iter(files.values())).parent)
    model.train()
    return model


def loaded_generation_config(files: Mapping[str, Path] | None) -> GenerationConfig | None:
    """Return the generation config in the folder of these weight files, or None if there is none."""
    folder = None if files is None else next(iter(files.values())).parent
    if folder is None or not (folder / GENERATION_CONFIG).exists():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # the file can hold anything
        raise UserError(
            "model",
            f"{folder / GENERATION_CONFIG} cannot be read ({one_line(error)})",
            "correct or remove the file",
        ) from None


def _ties(model: nn.Module) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """Return each tied parameter as two pairs (module, attribute): where the parameter appears again, and where it
    appears first in the order of modules.
    """
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner = first.setdefault(id(parameter), (module, name))
            if owner != (module, name):
                ties.append(((module, name), owner))
    return ties


def opened_together(
    source: str | Path | PreTrainedConfig, *, init: Init = "weights", trust_remote_code: bool = False
) -> tuple[PreTrainedConfig, dict[str, Path] | None]:
    """Return the config of a model, and the file of each tensor (None if the weights are to be random). Collective.

    If `open_model` fails on any rank, all ranks raise the error.
    """
    found, error = None, None
    try:
        found = open_model(source, init=init, trust_remote_code=trust_remote_code)
    except UserError as caught:
        error = caught
    raise_together(error)
    assert found is not None
    return found


def matching_names(model: PreTrainedModel, files: Mapping[str, Path], *, fresh: bool = False) -> StoredNames | None:
    """Map the model's tensors to their names in the files, or return None if the ranks cannot read slices of the files
    directly.

    If `fresh` is True, the model has a new scalar head, which need not be in the files.
    """
    names = stored_names(model, files)
    if names is None:
        return None
    tensors = named_tensors(model)
    wanted = set(tensors) - ({SCALAR_WEIGHT} if fresh else set())
    tied = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    buffers = {name for name, _ in model.named_non_persistent_buffers()}
    ignored = re.compile("|".join((r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ()))))
    unexpected = {name for name in names.keys() - wanted - tied - buffers if not ignored.search(name)}
    stacked = {name for name, own in names.items() if not isinstance(own, str)}
    if unexpected or not wanted <= names.keys() or tied & names.keys() or not stacked <= tensors.keys():
        return None
    fits = all(tensors[name].ndim > 1 and len(tensors[name]) == len(names[name]) for name in stacked)
    return names if fits else None


def _spread(config: PreTrainedConfig) -> float:
    return float(getattr(text_config(config), "initializer_range", None) or 0.02)


def _read_slices(tensors: Mapping[str, Tensor], names: StoredNames, files: Mapping[str, Path], model_name: str) -> None:
    open_files: dict[Path, Any] = {}

    def file_of(name: str) -> Any:
        path = files[name]
        if path not in open_files:
            open_files[path] = opened(path)
        return open_files[path]

    error = None
    try:
        for key, tensor in tensors.items():
            own, local, region = names[key], local_part(tensor), local_region(tensor)
            if isinstance(own, str):
                _read_one(file_of(own), own, local, region, tensor.shape, files[own])
                continue
            experts, rows, *rest = region
            for target, parts in zip(local, own[experts], strict=True):
                size = tensor.shape[1] // len(parts)
                for index, name in enumerate(parts):  # part `index` has the rows begin to begin + size of its expert
                    begin = index * size
                    first, last = max(rows.start, begin), min(rows.stop, begin + size)
                    if first < last:
                        part = (slice(first - begin, last - begin), *rest)
                        whole = torch.Size([size, *tensor.shape[2:]])
                        into = target[first - rows.start : last - rows.start]
                        _read_one(file_of(name), name, into, part, whole, files[name])
    except UserError as caught:
        error = caught
    except (SafetensorError, OSError) as caught:
        error = UserError("model", f"{model_name}: {one_line(caught)}", "copy or download the weights again")
    raise_together(error)


def _read_one(file: Any, name: str, local: Tensor, region: Region, shape: torch.Size, path: Path) -> None:
    """Read the part `region` of the tensor `name` from an open safetensors file into the tensor `local`.

    The whole tensor in the file must have the shape `shape`.
    """
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(shape):
        raise UserError(
            "model",
            f"{name} has shape {list(stored.get_shape())} in {path}, but {list(shape)} according to the config",
            "give the config that belongs to the weights",
        )
    if local.numel():
        local.copy_(stored[region] if shape else file.get_tensor(name))


def _check_finite(model: nn.Module, tensors: Mapping[str, Tensor], files: Mapping[str, Path], model_name: str) -> None:
    """Raise a `UserError` on all ranks if the weights on any rank contain NaN or infinity."""
    found, error = nonfinite_weight(model), None
    if found is not None:
        where = files.get(found, model_name)
        problem, fix = "has values that are not finite", "copy or download the weights again"
        if found in files:
            with opened(files[found]) as file:
                stored = file.get_tensor(found)
            if torch.isfinite(stored).all():
                largest, dtype = float(stored.abs().max()), str(tensors[found].dtype).removeprefix("torch.")
                problem, fix = (
                    f"has values up to {largest:.3g}, which exceed the range of {dtype}",
                    f"use another dtype, or weights in the range of {dtype}",
                )
        error = UserError("model", f"{found} of {where} {problem}", fix)
    raise_together(error)
