"""The manifest of a checkpoint: a file that lists the tensors and other values in the checkpoint. Before a checkpoint
is loaded, its manifest is compared with the model.

    "tensors": {"model/norm.weight": {"dtype": "F32", "shape": [5], "pieces": [
        ["rank-00000.safetensors", [0], [3]],
        ["rank-00001.safetensors", [3], [2]]]}, ...}

A piece is the part of a tensor in one file. Each piece has the name of the file, the offset in the whole tensor, and
the shape of the part.

The frozen weights of a model with adapters are not saved. The manifest has a hash of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from padfree.checkpoint.checkpoint_files import DTYPES, CheckpointError, hash_of
from padfree.checkpoint.optimizer_state import describe_optimizer, optimizer_tensors
from padfree.errors import UserError
from padfree.model.lora import ADAPTER, is_adapter, is_trained_with_adapters
from padfree.model.named_tensors import local_part, named_tensors

FORMAT = 1
MANIFEST = "manifest.json"
CRITIC = "critic/"
"""The prefix of the keys of a critic's tensors."""


# Contents


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint stores, by name: all or, with adapters, only the trained ones."""
    tensors = named_tensors(model)
    if not any(map(is_adapter, tensors)):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if is_trained_with_adapters(name)}


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights of a model with adapters, by name. The dict is empty for a model without adapters."""
    tensors, saved = named_tensors(model), saved_tensors(model)
    return {name: tensor for name, tensor in tensors.items() if name not in saved and tensor.is_floating_point()}


def bits_of(tensor: Tensor) -> int:
    """Return a checksum of the part of a tensor that this rank holds.

    The part is rounded to bfloat16, and the 16 bits of each value are added as integers.
    """
    return int(local_part(tensor).bfloat16().reshape(-1).view(torch.int16).sum(dtype=torch.int64))


def describe_adapters(model: nn.Module, base: str | None) -> dict[str, Any] | None:
    """Return the manifest's entry about adapters: their scale, and `base`, a hash of the frozen weights. None if there
    are no adapters.
    """
    if base is None:
        return None
    config = getattr(model, "peft_config")[ADAPTER]  # noqa: B009  nn.Module types attributes as tensors or modules
    return {"scale": config.lora_alpha / config.r, "base": base}


def state_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the tensors of a model and its optimizer by their keys in a checkpoint, such as `model/<name>`."""
    tensors = {f"model/{name}": tensor for name, tensor in saved_tensors(model).items()}
    if optimizer is not None:
        tensors |= {f"optimizer/{key}": tensor for key, tensor in optimizer_tensors(model, optimizer).items()}
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise UserError(
                "checkpoint",
                f"{key} has dtype {tensor.dtype}, which cannot be saved",
                f"convert it to one of {', '.join(DTYPES.values())}",
            )
    return tensors


class TrainedModel(NamedTuple):
    """A model that this run trains, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer


def critic_tensors(critic: TrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a critic and its optimizer, by their keys in the checkpoint."""
    return {f"{CRITIC}{key}": tensor for key, tensor in state_tensors(*critic).items()}


def class_name(model: nn.Module) -> str:
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


# Checks against the model


def check_model(
    content: dict[str, Any], path: Path, model: nn.Module, optimizer: Optimizer | None, base: str | None = None
) -> None:
    """Raise a `CheckpointError` if the checkpoint does not fit the model or the optimizer.

    `content` is the manifest, `path` the folder of the checkpoint, and `base` a hash of the model's frozen
    weights (None without adapters).
    """
    there, here = content.get("adapters"), describe_adapters(model, base)
    differs, cure = None, "give the folder of this run"
    if content["model"] != class_name(model):
        differs = f"it is a {content['model']}, not a {class_name(model)}"
    elif there and not here:
        differs, cure = (
            "the checkpoint has adapters, but this run has none",
            "set lora.rank, or give another run.folder",
        )
    elif here and not there:
        differs, cure = (
            "the checkpoint has no adapters, but this run has some",
            "set lora.rank to 0, or give another run.folder",
        )
    elif unlike := _first_difference(content["tensors"], "model/", saved_tensors(model)):
        differs = unlike
    elif there and here and there["scale"] != here["scale"]:
        differs, cure = (
            "the checkpoint's adapters were trained with another lora.alpha",
            "restore the earlier lora.alpha",
        )
    elif there != here:
        differs = "the checkpoint's adapters were trained on other frozen weights"
        cure = "restore the earlier model.path and its files; for random weights also the earlier run.seed"
    if differs:
        raise CheckpointError("checkpoint", f"{path} belongs to another model ({differs})", cure)
    if optimizer is None:
        return
    if content["optimizer"] is None:
        raise CheckpointError("checkpoint", f"{path} was saved without an optimizer", "start from its weights instead")
    names = [group["params"] for group in describe_optimizer(model, optimizer)["groups"]]
    if names != [group["params"] for group in content["optimizer"]["groups"]]:
        raise CheckpointError(
            "checkpoint",
            f"{path} was saved with other parameter groups in the optimizer",
            "restore the optimizer settings that it was saved with",
        )


def check_reference(content: dict[str, Any], path: Path, reference: Mapping[str, Tensor]) -> bool:
    """Return whether the checkpoint holds a reference model. Raise an error if its tensors do not fit `reference`."""
    if not any(key.startswith("reference/") for key in content["tensors"]):
        return False
    if differs := _first_difference(content["tensors"], "reference/", reference):
        raise CheckpointError(
            "checkpoint",
            f"{path} has another reference model ({differs})",
            "keep reference.path and lora, or give another run.folder",
        )
    return True


def check_critic(content: dict[str, Any], path: Path, critic: TrainedModel) -> None:
    """Raise an error if the checkpoint's critic is missing or does not fit `critic`."""
    differs = _first_difference(content["tensors"], f"{CRITIC}model/", saved_tensors(critic.model))
    if content.get("critic") is None or differs:
        reason = differs if content.get("critic") is not None else "it has no critic"
        raise CheckpointError(
            "checkpoint", f"{path} does not fit the critic ({reason})", "keep critic.path, or give another run.folder"
        )


def _first_difference(tensors: Mapping[str, Any], prefix: str, wanted: Mapping[str, Tensor]) -> str | None:
    """Describe the first tensor whose shape or dtype differs between checkpoint and model, or return None.

    `tensors` are the entries of the manifest, and `wanted` the tensors of the model. Only entries whose keys start with
    `prefix` are compared.
    """
    saved = {
        key.removeprefix(prefix): (about["shape"], about["dtype"])
        for key, about in tensors.items()
        if key.startswith(prefix)
    }
    asked = {name: (list(tensor.shape), DTYPES[tensor.dtype]) for name, tensor in wanted.items()}
    if saved == asked:
        return None
    name = min(name for name in saved.keys() | asked.keys() if saved.get(name) != asked.get(name))
    there, here = (" ".join(map(str, table[name])) if name in table else "missing" for table in (saved, asked))
    return f"{name} is {there} in the checkpoint and {here} in this run"


# Reading and writing


def join_manifest(content: dict[str, Any], gathered: list[Any]) -> dict[str, Any]:
    """Return the manifest: `content`, and what each rank has written (`gathered`): files, parts of tensors, states."""
    tensors: dict[str, Any] = {key: {**about, "pieces": []} for key, about in content["tensors"].items()}
    files: dict[str, Any] = {}
    for file, size, digest, offsets, shapes, _ in gathered:
        files[file] = {"bytes": size, "sha256": digest}
        for key, offset in offsets.items():
            tensors[key]["pieces"].append([file, offset, shapes[key]])
    return {**content, "tensors": tensors, "files": files, "rank_state": [rank[-1] for rank in gathered]}


def read_manifest(path: Path, cure: str) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointError("checkpoint", f"{path} does not exist or is incomplete (no {MANIFEST})", cure)
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("sha256") != hash_of(manifest.get("content")):
        raise CheckpointError("checkpoint", f"{file} is damaged (its checksum does not match)", cure)
    content: dict[str, Any] = manifest["content"]
    if content["format"] != FORMAT:
        raise CheckpointError("checkpoint", f"{path} has format {content['format']}, not {FORMAT}", cure)
    return content
