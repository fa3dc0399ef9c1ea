"""The files of one checkpoint: what they hold, how they are written, checked and read.

    manifest.json            {"sha256": of the content, "content": {step, world, model, optimizer, extra, rank_state,
        "tensors": {"model/norm.weight": {"dtype": "F32", "shape": [5], "pieces": [
            ["rank-00000.safetensors", [0], [3]],           file, offset in the whole tensor, shape of the piece
            ["rank-00001.safetensors", [3], [2]]]}, ...},
        "files": {"rank-00000.safetensors": {"bytes": 412, "sha256": ...}, ...}}}

A model with adapters is saved without the weights below them, which every start reads from where they came from; what
is kept of them is a fingerprint, so that the adapters are not put on other weights.

Nothing here talks to other ranks; `padfree.checkpoint.checkpointer` does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from padfree.model.load import Region, local_part, local_region, named_tensors
from padfree.model.lora import ADAPTER, is_adapter

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes; they stay those of the run that resumes."""


class CheckpointError(ValueError):
    """A checkpoint could not be written or read; the message is one line and says what to do."""


# What a checkpoint holds


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What of a model is saved, by name: its adapters if it has any, and else everything."""
    tensors = named_tensors(model)
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)} or tensors


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What lies below adapters; empty for a model without adapters."""
    tensors, saved = named_tensors(model), saved_tensors(model)
    return {name: tensor for name, tensor in tensors.items() if name not in saved and tensor.is_floating_point()}


def bits_of(tensor: Tensor) -> int:
    """The sum of the bits of this rank's part.

    Rounded to bfloat16 first, so that the dtype that the weights are held in does not show.
    """
    return int(local_part(tensor).bfloat16().reshape(-1).view(torch.int16).sum(dtype=torch.int64))


def describe_adapters(model: nn.Module, base: str | None) -> dict[str, Any] | None:
    """What of adapters is no tensor; `base` is the fingerprint of the weights below them."""
    if base is None:
        return None
    config = getattr(model, "peft_config")[ADAPTER]  # noqa: B009  nn.Module types it as a tensor or a module
    return {"scale": config.lora_alpha / config.r, "base": base}


def state_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Whole tensors by key: `model/<name>` and `optimizer/<kind of state>/<name of the parameter>`."""
    parameters = named_tensors(model)
    tensors = {f"model/{name}": tensor for name, tensor in saved_tensors(model).items()}
    states = {} if optimizer is None else optimizer.state
    for name, parameter in parameters.items():
        for kind, value in states.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise ValueError(
                    f"optimizer: the state {kind!r} of {name} is this rank's alone; use an optimizer whose state is "
                    "sharded as the parameters are"
                )
            tensors[f"optimizer/{kind}/{name}"] = value
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"checkpoint: {key} is {tensor.dtype}; only {', '.join(DTYPES.values())} can be saved")
    return tensors


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What of an optimizer is no tensor: the groups with names for parameters, and plain values of the state."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        strangers = [parameter for parameter in group["params"] if id(parameter) not in names]
        if strangers:
            raise ValueError("optimizer: has parameters that are not the model's; make it after the model is sharded")
        options = {
            key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
        }
        groups.append({**options, "params": [names[id(parameter)] for parameter in group["params"]]})
    values = {
        names[id(parameter)]: {kind: value for kind, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    described = {"groups": groups, "values": values}
    check_json(described, "optimizer")
    return described


def load_optimizer(model: nn.Module, optimizer: Optimizer, described: dict[str, Any], reader: Reader) -> None:
    """Fill an optimizer whose groups hold the parameters that `described` names."""
    parameters = named_tensors(model)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, described["groups"], strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in saved.items():
            if key != "params" and key not in IMPLEMENTATION:
                options[key] = _like(value, options.get(key))
        first = len(state)
        for name in saved["params"]:
            state[len(state)] = dict(described["values"].get(name, {}))
        groups.append({**options, "params": list(range(first, len(state)))})
    numbers = {name: number for number, name in enumerate(n for group in described["groups"] for n in group["params"])}
    for key, about in reader.tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            parameter, dtype = parameters[name], DTYPE_OF[about["dtype"]]
            value = (
                torch.empty_like(parameter, dtype=dtype)
                if kind != "step" and about["shape"] == list(parameter.shape)
                else torch.empty(about["shape"], dtype=dtype)
            )
            reader.fill(key, local_part(value), local_region(value))
            state[numbers[name]][kind] = value.detach()
    filled = {number: values for number, values in state.items() if values}
    optimizer.load_state_dict({"state": filled, "param_groups": groups})
    # torch has cast the state to the parameters' dtype; an optimizer that keeps more digits gets them back.
    for name, number in numbers.items():
        own = optimizer.state.get(parameters[name], {})
        for kind, value in filled.get(number, {}).items():
            if isinstance(value, Tensor) and own[kind].dtype != value.dtype:
                own[kind] = value


def _like(value: Any, current: Any) -> Any:
    """A value out of JSON as the type that the optimizer keeps it in."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


def class_name(model: nn.Module) -> str:
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def check_model(
    content: dict[str, Any], path: Path, model: nn.Module, optimizer: Optimizer | None, base: str | None = None
) -> None:
    """Refuse a checkpoint of another model; `base` is the fingerprint of the weights below its adapters, if it has."""
    there, here = content.get("adapters"), describe_adapters(model, base)
    differs, cure = None, "give the folder of this run"
    if content["model"] != class_name(model):
        differs = f"it is a {content['model']}, not a {class_name(model)}"
    elif there and not here:
        differs, cure = "it has adapters", "set lora.rank, or give another run.folder"
    elif here and not there:
        differs, cure = "it has no adapters, this run has", "set lora.rank to 0, or give another run.folder"
    elif unlike := _different(content["tensors"], "model/", saved_tensors(model)):
        differs = unlike
    elif there and here and there["scale"] != here["scale"]:
        differs, cure = "its adapters were trained with another alpha / rank", "keep lora.alpha"
    elif there != here:
        differs = "its adapters were trained with other weights below them"
        cure = "keep model.path and what is there, and run.seed for random weights"
    if differs:
        raise CheckpointError(f"checkpoint: {path} is of another model ({differs}); {cure}")
    if optimizer is None:
        return
    if content["optimizer"] is None:
        raise CheckpointError(f"checkpoint: {path} was saved without an optimizer; start from its weights instead")
    names = [group["params"] for group in describe_optimizer(model, optimizer)["groups"]]
    if names != [group["params"] for group in content["optimizer"]["groups"]]:
        raise CheckpointError(
            f"checkpoint: {path} was saved with other groups of parameters in the optimizer; keep its settings"
        )


def check_reference(content: dict[str, Any], path: Path, reference: Mapping[str, Tensor]) -> bool:
    """Whether the checkpoint holds the weights of a reference model, which must then be of this one's shapes."""
    if not any(key.startswith("reference/") for key in content["tensors"]):
        return False
    if differs := _different(content["tensors"], "reference/", reference):
        raise CheckpointError(
            f"checkpoint: {path} has another reference model ({differs}); keep reference.path and lora, "
            "or give another run.folder"
        )
    return True


def _different(tensors: Mapping[str, Any], prefix: str, wanted: Mapping[str, Tensor]) -> str | None:
    """The first of the tensors below `prefix` that has not the shape and dtype that is wanted."""
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
    return f"{name} is {there} there and {here} here"


# Files


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write and sync a safetensors file, one tensor in host memory at a time; its bytes and SHA-256."""
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # so that every one is aligned
    for key in ordered:
        tensor = tensors[key]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for key in ordered:
            content = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


class Reader:
    """The pieces of a checkpoint's tensors, each file opened when it is needed."""

    def __init__(self, path: Path, tensors: dict[str, Any]) -> None:
        self.tensors = tensors
        self._path = path
        self._files: dict[str, Any] = {}

    def fill(self, key: str, local: Tensor, region: Region) -> None:
        """Copy what lies in `region` of the whole tensor into `local`."""
        filled = 0
        for file, offset, shape in self.tensors[key]["pieces"]:
            bounds = [
                (max(part.start, begin), min(part.stop, begin + size))
                for part, begin, size in zip(region, offset, shape, strict=True)
            ]
            if any(begin >= end for begin, end in bounds):
                continue
            if file not in self._files:
                self._files[file] = safe_open(self._path / file, framework="pt")
            there = tuple(slice(b - start, e - start) for (b, e), start in zip(bounds, offset, strict=True))
            here = tuple(slice(b - part.start, e - part.start) for (b, e), part in zip(bounds, region, strict=True))
            piece = self._files[file].get_slice(key)[there] if there else self._files[file].get_tensor(key)
            local[here].copy_(piece)
            filled += piece.numel()
        assert filled == local.numel(), f"{key}: {filled} of {local.numel()} entries are in the checkpoint"

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose keys begin so, by the rest of their keys."""
        found = {}
        for key, about in self.tensors.items():
            if key.startswith(prefix):
                tensor = torch.empty(about["shape"], dtype=DTYPE_OF[about["dtype"]])
                self.fill(key, tensor, local_region(tensor))
                found[key.removeprefix(prefix)] = tensor
        return found


def join_manifest(content: dict[str, Any], told: list[Any]) -> dict[str, Any]:
    """The whole manifest from what every rank told: file, size, checksum, offsets and shapes of pieces, rank state."""
    tensors: dict[str, Any] = {key: {**about, "pieces": []} for key, about in content["tensors"].items()}
    files: dict[str, Any] = {}
    for file, size, digest, offsets, shapes, _ in told:
        files[file] = {"bytes": size, "sha256": digest}
        for key, offset in offsets.items():
            tensors[key]["pieces"].append([file, offset, shapes[key]])
    return {**content, "tensors": tensors, "files": files, "rank_state": [rank[-1] for rank in told]}


def read_manifest(path: Path, cure: str) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.exists():
        raise CheckpointError(f"checkpoint: {path} is not there or not complete (no {MANIFEST}); {cure}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("sha256") != hash_of(manifest.get("content")):
        raise CheckpointError(f"checkpoint: {file} is damaged (its checksum does not match); {cure}")
    content: dict[str, Any] = manifest["content"]
    if content["format"] != FORMAT:
        raise CheckpointError(f"checkpoint: {path} has format {content['format']}, not {FORMAT}; {cure}")
    return content


def check_file(path: Path, about: Mapping[str, Any], cure: str) -> None:
    if not path.exists():
        raise CheckpointError(f"checkpoint: {path} is missing; {cure}")
    size = path.stat().st_size
    if size != about["bytes"]:
        raise CheckpointError(f"checkpoint: {path} is damaged ({size} bytes of {about['bytes']}); {cure}")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
            raise CheckpointError(f"checkpoint: {path} is damaged (its checksum does not match); {cure}")


def write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON would change or cannot hold."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is no text; JSON has no other keys")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ValueError(f"{where}: {type(value).__name__}; give numbers, text, lists or dicts of them")
