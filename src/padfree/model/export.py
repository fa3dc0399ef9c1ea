"""From a trained model, sharded or not, back to a Hugging Face folder.

    export_model(model, "out", tokenizer)      -> out/config.json, model*.safetensors, generation_config.json, tokenizer

Every rank calls it; each tensor is gathered in turn, and rank 0 keeps it and writes. Names, layout (experts one by one,
where transformers stores them so) and file sizes are those of `save_pretrained`, which does the writing for an empty
copy of the model's class: wrappers around the trained model do not show.

The folder is written beside and renamed into place, so whoever finds it finds it complete.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.model.load import named_tensors, raise_together

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Of the files that an export can have; a folder with others is not replaced."""


def export_model(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write `folder`, which `AutoModelForCausalLM.from_pretrained` loads; an export that is there is replaced.

    `dtype` is that of the parameters in the files; None leaves them as they are.
    """
    folder = Path(folder)
    first = not dist.is_initialized() or dist.get_rank() == 0
    raise_together(_occupied(folder) if first else None)
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model).items():
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()  # every rank takes part
        if first:
            if dtype is not None and isinstance(tensor, torch.nn.Parameter):
                whole = whole.to(dtype)
            tensors[name] = whole.cpu().contiguous()
    error = None
    if first:
        try:
            _write(model, tensors, folder, tokenizer, dtype, max_shard_size)
        except (OSError, SafetensorError) as caught:
            error = f"export: {folder} cannot be written ({' '.join(str(caught).split())}); give a folder with space"
    raise_together(error)
    return folder


def _occupied(folder: Path) -> str | None:
    """Why this folder must not be replaced; None: it may."""
    if not folder.exists():
        return None
    paths = list(folder.iterdir()) if folder.is_dir() else [folder]
    foreign = [path.name for path in paths if not path.is_file() or path.suffix not in SUFFIXES]
    if foreign or (paths and folder / "config.json" not in paths):
        held = foreign[0] if foreign else "no config.json"
        return f"export: {folder} is no earlier export (it has {held}); give a new folder"
    return None


def _write(
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    folder: Path,
    tokenizer: Any,
    dtype: torch.dtype | None,
    max_shard_size: str,
) -> None:
    beside, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("writing", "replaced"))
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)  # an earlier export ended between the two renames below
    for path in (beside, replaced):
        shutil.rmtree(path, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        empty = _empty_copy(model, dtype or model.dtype)
        empty.save_pretrained(beside, state_dict=tensors, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        for path in (*beside.iterdir(), beside):
            sync(path)
        if folder.exists():
            folder.rename(replaced)
        beside.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _empty_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    # fully_shard gives a model a class of its own, made of FSDPModule and the model's class.
    original = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    assert issubclass(original, PreTrainedModel)
    with torch.device("meta"):
        empty = original._from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
        )
    assert isinstance(empty, PreTrainedModel)
    empty.generation_config = copy.deepcopy(model.generation_config)
    return empty


def sync(path: Path) -> None:
    """Wait until this file or folder is on disk: a rename must not overtake the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
