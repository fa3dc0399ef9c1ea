"""Weights that rank 0 takes from transformers, on the CPU, and broadcasts tensor by tensor.

There are two sources of such weights:

    initialised            random weights from a seed, as transformers would draw them
    through_transformers   weights from files whose tensors transformers changes when it loads them
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from padfree.choices import ModelHead
from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.model.model_files import one_line, opened
from padfree.model.named_tensors import clean_name, local_part, local_region, named_tensors
from padfree.model.scalar_head import OTHER_HEADS, scalar_config
from padfree.model.scalar_head import WEIGHT as SCALAR_WEIGHT
from padfree.model.structure import auto_class, model_from_config


def initialised(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, seed: int, head: ModelHead = "tokens"
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_from_config(copy.deepcopy(config), dtype, trust_remote_code, head)


def through_transformers(
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
            loaded: Any = (AutoModelForSequenceClassification if scalar else auto_class(config)).from_pretrained(
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
            "model",
            f"{folder} does not match its config ({found})",
            "give complete files and the config that belongs to them",
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
    """Context manager that hides the tables that transformers logs while loading; padfree reports problems in
    one line.
    """
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _unlike_config(
    files: Mapping[str, Path], config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> str | None:
    """Compare the tensors in the files with the tensors that `save_pretrained` would write for a model of this config.

    Returns a description of the first tensor that is missing, unexpected or has a different shape, or None if all
    tensors agree.
    """
    with torch.device("meta"):
        model = model_from_config(copy.deepcopy(config), dtype, trust_remote_code)
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


def broadcast_weights(
    targets: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], source_model: Callable[[], PreTrainedModel]
) -> None:
    """Fill the tensors `targets` of all ranks with the values of a model that rank 0 creates on the CPU.

    Rank 0 calls `source_model` to create the model, and broadcasts one tensor at a time. `dtypes` are the dtypes of the
    tensors in that model.
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
            "hold the two tensors with different values",
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
