"""Load a model from a Hugging Face folder. Each rank reads only its part of the weights.

    config.json      -> the model on the meta device: names, shapes and ties, no memory
    shard(model)     -> the caller's transformations there (attach, adapters, checkpointing, compile, FSDP2)
    to_empty(device) -> memory for this rank's part
    *.safetensors    -> this rank's part of every tensor, cast to the parameter's dtype

    weight [6, 3] in a file, FSDP2 over 2 ranks        rank 0 reads [0:3], rank 1 reads [3:6]

The tensors are filled from one of three sources:

- Files with the model's own tensor names: every rank reads its slices.
- Files whose tensors transformers renames or merges on loading (experts stored one by one): rank 0 loads them with
  transformers on the CPU and broadcasts each tensor.
- Random weights, if requested: rank 0 initialises them on the CPU from `seed`, as transformers would, and broadcasts
  each tensor. The values do not depend on the number of ranks.

Tied parameters stay one object under two names after `to_empty`. Buffers that are not in the files (rotary frequencies)
come from transformers' own `_init_weights`. It runs twice, with these buffers filled with 0 and with 1 beforehand. If a
buffer differs between the two runs, the model's code does not restore it, and loading raises an error.

Adapters added by `shard` (`padfree.model.lora`) are initialised from `seed`; the adapted tensors keep their names. If
`shard` changes the dtype of a parameter, the values are cast while they are read.

From a multimodal folder only the language model is loaded (`padfree.model.wrapper`), by transformers on rank 0.

`padfree.model.model_files` checks the files. Weights that are not finite raise an error with the file and the tensor.
Loading is collective.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from padfree.choices import Init, ModelHead
from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.model.lora import initial_values, is_adapter
from padfree.model.model_files import one_line, open_model, opened
from padfree.model.nonfinite_tensors import nonfinite_tensor
from padfree.model.scalar_head import WEIGHT as SCALAR_WEIGHT
from padfree.model.scalar_head import first_weight, scalar_config, scalar_model
from padfree.model.wrapper import Wrapper, language_config, language_model, remember

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.")
"""Parts that activation checkpointing, torch.compile and PEFT add to the names of parameters."""

OTHER_HEADS = r"(lm_head|embed_out|output)\.(weight|bias)"
"""Names of the heads of causal language models in files."""

Region = tuple[slice, ...]


def load_model(
    source: str | Path | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Callable[[PreTrainedModel], None] | None = None,
    offload: bool = False,
    init: Init = "weights",
    seed: int = 0,
    trust_remote_code: bool = False,
    head: ModelHead = "tokens",
    spread: float | None = None,
) -> PreTrainedModel:
    """Load a causal language model in training mode, or with `head="scalar"` a model with a scalar head.

    `source`: a folder, a Hub id, or a config (file or object). A config gives random weights, and so does
    `init="random"`. `shard` is called with the model on the meta device. With `offload`, the parameters stay on the
    CPU, as FSDP2's offloading requires, and only the buffers go to `device`. A scalar head that is not in the files is
    initialised from `seed` with the standard deviation `spread` (None: the config's).
    """
    config, files = opened_together(source, init=init, trust_remote_code=trust_remote_code)
    wrapper = None
    if (inner := language_config(config)) is not None:
        if head == "scalar":
            raise UserError(
                "model",
                f"{config.name_or_path or type(config).__name__} is multimodal and cannot have a scalar head",
                "give a language model",
            )
        if files is not None:
            wrapper = Wrapper(folder=next(iter(files.values())).parent, config=config)
        config = inner
    name = config.name_or_path or type(config).__name__
    with torch.device("meta"):
        model = _from_config(config, dtype, trust_remote_code, head)
    keep_in_float32(model, dtype)
    restored = restored_buffers(model)
    fresh = head == "scalar" and (files is None or SCALAR_WEIGHT not in files)
    if files is not None and head == "scalar":
        files = without_other_heads(model, files)
    direct = files is not None and wrapper is None and _names_match(model, files, fresh=fresh)
    dtypes = {tensor_name: tensor.dtype for tensor_name, tensor in named_tensors(model).items()}
    if shard is not None:
        shard(model)
    if apart := {tensor_name for tensor_name in named_tensors(model) if not is_adapter(tensor_name)} ^ dtypes.keys():
        raise UserError(
            "shard", f"separates {min(apart)} from the tensor it is tied to", "shard the two in one fully_shard unit"
        )
    ties = _ties(model)
    model.to_empty(device="cpu" if offload else device)
    for (module, attribute), (first, first_attribute) in ties:
        setattr(module, attribute, getattr(first, first_attribute))
    for module in model.modules():
        for buffer_name, buffer in module._buffers.items():
            module._buffers[buffer_name] = None if buffer is None else buffer.to(device)
    tensors = named_tensors(model)
    stored = {tensor_name: tensors[tensor_name] for tensor_name in dtypes}
    with torch.no_grad():
        if direct:
            assert files is not None
            _read_slices({key: stored[key] for key in stored if key in files}, files, name)
        else:

            def source_model() -> PreTrainedModel:
                if files is None:
                    return _initialised(config, dtype, trust_remote_code, seed, head)
                if wrapper is not None:
                    return language_model(wrapper, config, dtype)
                return _through_transformers(files, config, dtype, trust_remote_code, head)

            _broadcast(stored, dtypes, source_model)
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
    if files is not None and head == "tokens":
        folder = next(iter(files.values())).parent
        if (folder / "generation_config.json").exists():
            model.generation_config = _generation_config(folder)
    if wrapper is not None:
        remember(model, wrapper)
    model.train()
    return model


def _generation_config(folder: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # the file can hold anything
        raise UserError(
            "model",
            f"{folder / 'generation_config.json'} cannot be read ({one_line(error)})",
            "correct or remove the file",
        ) from None


# Names, ties and regions


def clean_name(name: str) -> str:
    """The name of a parameter in HF files: its name without the wrappers of training."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.lstrip(".")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once, by its name in HF files. Tied tensors have their first name.

    Under FSDP2 these are the sharded tensors: units left unsharded by a forward without backward are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors: dict[str, Tensor] = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[clean_name(f"{module_name}.{name}")] = buffer
    return tensors


def local_region(tensor: Tensor) -> Region:
    """The part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh of its own parameters"
    return region_of(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def region_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Region:
    """The part of a tensor of this shape that the rank at `coordinate` of the mesh holds.

    [5, 2] sharded in dim 0 over 2 ranks -> rows [0:3] at coordinate 0, rows [3:5] at coordinate 1.
    """
    bounds = [(0, size) for size in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        assert type(placement) is Shard, f"{placement}: only Shard and Replicate are known here"
        begin, end = bounds[placement.dim]
        part = -(-(end - begin) // size)
        bounds[placement.dim] = (min(begin + index * part, end), min(begin + (index + 1) * part, end))
    return tuple(slice(begin, end) for begin, end in bounds)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _ties(model: nn.Module) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """For every parameter that is tied to an earlier one: (module, attribute) of this and of the earlier parameter."""
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
    """`open_model` on every rank. If it fails on one machine, for example because of missing files, all ranks raise."""
    found, error = None, None
    try:
        found = open_model(source, init=init, trust_remote_code=trust_remote_code)
    except UserError as caught:
        error = caught
    raise_together(error)
    assert found is not None
    return found


# The model without weights


def _from_config(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, head: ModelHead = "tokens"
) -> PreTrainedModel:
    if head == "scalar":
        return scalar_model(config, dtype, trust_remote_code)
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise UserError(
            "model",
            "is not a causal language model of transformers",
            "give a causal language model",
            value=config.model_type,
        )
    try:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a config can hold anything
        raise UserError(
            "model",
            f"the config does not describe a valid model ({one_line(error)})",
            "give the config of a causal language model",
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert tensors that the architecture always keeps in float32, as `from_pretrained` does."""
    for part, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in named_tensors(model).items():
            if re.search(rf"(^|\.){re.escape(part)}(\.|$)", name):
                tensor.data = tensor.data.to(kept)


def restored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The non-persistent buffers of `model`, which is on the meta device: values on the CPU, by name."""
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


# Filling the tensors


def _names_match(model: PreTrainedModel, files: Mapping[str, Path], *, fresh: bool = False) -> bool:
    """Whether the files hold all tensors of the model under the model's own names.

    With `fresh`, the scalar head, which is new, need not be in the files.
    """
    if get_model_conversion_mapping(model, add_legacy=False):
        return False
    wanted = set(named_tensors(model)) - ({SCALAR_WEIGHT} if fresh else set())
    tied = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    buffers = {name for name, _ in model.named_non_persistent_buffers()}
    ignored = re.compile("|".join((r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ()))))
    unexpected = {name for name in files.keys() - wanted - tied - buffers if not ignored.search(name)}
    return not unexpected and wanted <= files.keys() and not tied & files.keys()


def without_other_heads(model: PreTrainedModel, files: Mapping[str, Path]) -> dict[str, Path]:
    """The files of a causal language model without its head, which `model` replaces with another head."""
    own = set(named_tensors(model))
    return {name: path for name, path in files.items() if name in own or not re.fullmatch(OTHER_HEADS, name)}


def _spread(config: PreTrainedConfig) -> float:
    return float(getattr(config, "initializer_range", None) or 0.02)


def _read_slices(tensors: Mapping[str, Tensor], files: Mapping[str, Path], model_name: str) -> None:
    open_files: dict[Path, Any] = {}
    error = None
    try:
        for name, tensor in tensors.items():
            path = files[name]
            if path not in open_files:
                open_files[path] = opened(path)
            _read_one(open_files[path], name, tensor, path)
    except UserError as caught:
        error = caught
    except (SafetensorError, OSError) as caught:
        error = UserError("model", f"{model_name}: {one_line(caught)}", "copy or download the weights again")
    raise_together(error)


def _read_one(file: Any, name: str, tensor: Tensor, path: Path) -> None:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise UserError(
            "model",
            f"{name} has shape {list(stored.get_shape())} in {path}, but {list(tensor.shape)} according to the config",
            "give the config that belongs to the weights",
        )
    local = local_part(tensor)
    if local.numel():
        local.copy_(stored[local_region(tensor)] if tensor.ndim else file.get_tensor(name))


def nonfinite_weight(model: nn.Module) -> str | None:
    """The name in HF files of the first tensor whose part on this rank is not finite; None if all are."""
    return nonfinite_tensor(named_tensors(model), {clean_name(name) for name, _ in model.named_parameters()})


def _check_finite(model: nn.Module, tensors: Mapping[str, Tensor], files: Mapping[str, Path], model_name: str) -> None:
    """Raise on all ranks if the weights hold NaN or infinity on any rank."""
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


def _initialised(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, seed: int, head: ModelHead = "tokens"
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_config(copy.deepcopy(config), dtype, trust_remote_code, head)


def _through_transformers(
    files: Mapping[str, Path],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    head: ModelHead = "tokens",
) -> PreTrainedModel:
    scalar = head == "scalar"
    folder = next(iter(files.values())).parent
    try:
        with _no_load_report():
            loaded: Any = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_pretrained(
                folder,
                config=scalar_config(config) if scalar else copy.deepcopy(config),
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=trust_remote_code,
            )
    except RuntimeError as error:  # tensors that transformers merges are missing or have other shapes
        found = _unlike_config(files, config, dtype, trust_remote_code) or f"tensors do not fit ({one_line(error)})"
        raise UserError(
            "model", f"{folder}: {found}", "give complete files and the config that belongs to them"
        ) from None
    model, info = loaded
    for kind, cure in (
        ("missing", "give complete files, or the config that belongs to them"),
        ("unexpected", "give the config that belongs to the files"),
        ("mismatched", "give the config that belongs to the files"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in info[f"{kind}_keys"])
        if scalar:  # the files of a causal language model hold a different head
            names = [name for name in names if name != SCALAR_WEIGHT and not re.fullmatch(OTHER_HEADS, name)]
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            verb = "is" if len(names) == 1 else "are"
            what = {"missing": "missing", "unexpected": "unknown to the config, but", "mismatched": "of another shape"}
            raise UserError("model", f"{names[0]}{others} {verb} {what[kind]} in {files.get(names[0], folder)}", cure)
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Hide the tables that transformers logs while loading; padfree reports problems in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _unlike_config(
    files: Mapping[str, Path], config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> str | None:
    """A description of the first tensor that differs from what `save_pretrained` would write; None if none does."""
    with torch.device("meta"):
        model = _from_config(copy.deepcopy(config), dtype, trust_remote_code)
    tied = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - set(named_tensors(model))
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    wanted = {name: list(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    for name in sorted(wanted.keys() | files.keys() - tied):
        if name not in files:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} in {files[name].name} is not part of the model of this config"
        with opened(files[name]) as file:
            shape = file.get_slice(name).get_shape()
        if shape != wanted[name]:
            return f"{name} has shape {shape} in {files[name].name}, but {wanted[name]} according to the config"
    return None


def _broadcast(
    targets: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], source_model: Callable[[], PreTrainedModel]
) -> None:
    """Fill `targets` one by one from a model that rank 0 creates on the CPU by calling `source_model`.

    `dtypes` are the dtypes of the tensors in that model.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    whole: dict[str, Tensor] = {}
    error = None
    if not several or dist.get_rank() == 0:
        try:
            whole = named_tensors(source_model())
        except UserError as caught:
            error = caught
        except (ValueError, OSError, RuntimeError, SafetensorError) as caught:  # raised by transformers
            error = UserError("model", one_line(caught), "give complete files and the config that belongs to them")
    if error is None and whole and whole.keys() != targets.keys():
        error = UserError(
            "model",
            f"{min(whole.keys() ^ targets.keys())} is tied to another tensor according to the config, but the files "
            "hold both with different values",
            "set tie_word_embeddings to false in config.json",
        )
    raise_together(error)
    for name, tensor in targets.items():
        full = whole[name].detach() if whole else torch.empty(tensor.shape, dtype=dtypes[name])
        assert (full.shape, full.dtype) == (tensor.shape, dtypes[name]), name
        if several:
            full = full.contiguous()
            dist.broadcast(full, 0)
        local_part(tensor).copy_(full[local_region(tensor)])
