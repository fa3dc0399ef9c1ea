"""Write, sync, check and read the files of a checkpoint. A piece is the part of a tensor that one rank wrote.

    write_safetensors   {"model/norm.weight": tensor [3], ...} -> rank-00000.safetensors, its size and SHA-256
    Reader.fill         reads region [2:4] of a whole tensor from the pieces [0:3] and [3:5], which are in two files

A file is hashed while it is written, and its hash is checked before anything is read from it.
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
from torch import Tensor

from padfree.errors import UserError
from padfree.model.named_tensors import Region, local_region

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


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be written or read."""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file tensor by tensor, sync it to disk, and return its size in bytes and its SHA-256."""
    header: dict[str, Any] = {}
    end = 0
    ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # keeps every tensor aligned
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
    """Reads tensors whose pieces (the parts that single ranks wrote) are in several files."""

    def __init__(self, path: Path, tensors: dict[str, Any], prefix: str = "") -> None:
        self.tensors, self._prefix = tensors, prefix  # the files store a tensor under `prefix` + key
        self._path = path
        self._files: dict[str, Any] = {}

    def fill(self, key: str, local: Tensor, region: Region) -> None:
        """Read the part `region` of the tensor `key` from the files into `local`."""
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
            stored = f"{self._prefix}{key}"
            piece = self._files[file].get_slice(stored)[there] if there else self._files[file].get_tensor(stored)
            local[here].copy_(piece)
            filled += piece.numel()
        assert filled == local.numel(), f"{key}: the checkpoint has {filled} of {local.numel()} elements"

    def with_prefix(self, prefix: str) -> Reader:
        """Return a reader for the tensors whose keys start with `prefix`. The new reader's keys lack this prefix."""
        inside = {key.removeprefix(prefix): about for key, about in self.tensors.items() if key.startswith(prefix)}
        return Reader(self._path, inside, f"{self._prefix}{prefix}")

    def read_all(self, prefix: str) -> dict[str, Tensor]:
        """Read all tensors whose keys start with `prefix`. Returns them by key, with the prefix removed."""
        found = {}
        for key, about in self.tensors.items():
            if key.startswith(prefix):
                tensor = torch.empty(about["shape"], dtype=DTYPE_OF[about["dtype"]])
                self.fill(key, tensor, local_region(tensor))
                found[key.removeprefix(prefix)] = tensor
        return found


def check_file(path: Path, about: Mapping[str, Any], cure: str) -> None:
    if not path.exists():
        raise CheckpointError("checkpoint", f"{path} is missing", cure)
    size = path.stat().st_size
    if size != about["bytes"]:
        raise CheckpointError("checkpoint", f"{path} is damaged ({size} bytes instead of {about['bytes']})", cure)
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
            raise CheckpointError("checkpoint", f"{path} is damaged (its checksum does not match)", cure)


def write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_json(value: Any, where: str) -> None:
    """Raise an error for values that JSON cannot represent. `where` names the values in the error message."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(where, f"the key {key!r} is not a string", "use strings as keys")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise UserError(
            where, f"JSON cannot store a {type(value).__name__}", "give numbers, strings, or lists or dicts of these"
        )
