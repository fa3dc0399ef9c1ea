"""The files of a Hugging Face model: its config, and the file of each tensor.

    folder                 config.json, model.safetensors
    or, in shards          config.json, model.safetensors.index.json, model-00001-of-00002.safetensors, ...
    a config file          no weights: the model gets random weights
    a Hub id               the folder is downloaded

Missing weights are an error. Random weights must be requested explicitly (`init="random"`, or a config file). The
headers of the files are checked before any tensor is read.

Only safetensors files are read. Pickle files raise an error.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from padfree.choices import Init
from padfree.config.model_folder import INDEX, SHARD, WEIGHTS, check_config_file, check_weight_files, read_index
from padfree.errors import UserError, system_error

PARTIAL = "padfree_partial"
"""A key in the metadata of model.safetensors.index.json. If its value is true, the safetensors files may hold tensors
that the index does not list, such as the later layers of a model. These tensors are ignored.
"""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".safetensors")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_model(
    source: str | Path | PreTrainedConfig,
    *,
    init: Init = "weights",
    init_setting: str | None = "init",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedConfig, dict[str, Path] | None]:
    """Return the config of a model, and the file of each tensor (None if the weights are to be random).

    `init_setting` is the name of the setting that requests random weights, for error messages, or None if there is no
    such setting.
    """
    if isinstance(source, PreTrainedConfig):
        return copy.deepcopy(source), None
    path = Path(source)
    downloaded = not path.exists()
    if downloaded:
        path = _download(str(source), trust_remote_code, weights=init == "weights")
    if path.is_dir():
        check_config_file(path)
    config = read_config(path, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            "model",
            f"{source} is quantized, and quantized weights cannot be trained",
            "give the unquantized model",
        )
    if init == "random" or not path.is_dir():
        return config, None
    files = weight_files(path)
    if files is None and downloaded:
        raise UserError("model", f"{source} has no safetensors files on the Hub", "convert its weights to safetensors")
    if files is None:
        check_weight_files(path, init_setting)
    return config, files


def read_config(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the config in a model folder or a config file."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config can contain anything, so config classes can raise any error
        raise UserError(
            "model",
            f"the config of {path} cannot be used ({one_line(error)})",
            "give the config of a causal language model",
        ) from None
    assert isinstance(config, PreTrainedConfig)
    return config


def base_dtype(config: PreTrainedConfig, files: dict[str, Path] | None) -> torch.dtype:
    """Return the dtype that most weights in the files have.

    If `files` is None, return the dtype that the config names, or float32 if the config names none.
    """
    if files is None:
        named = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return next((dtype for dtype in FLOATS.values() if str(dtype) == f"torch.{named}"), torch.float32)
    numbers: Counter[torch.dtype] = Counter()
    for path in sorted(set(files.values())):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118  a file, not a mapping
                stored = file.get_slice(name)
                if (dtype := FLOATS.get(stored.get_dtype())) is not None:
                    numbers[dtype] += torch.Size(stored.get_shape()).numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


def weight_files(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor of a model folder, or None if the folder has no weights.

    Raises `UserError` if files are missing or inconsistent.
    """
    shards = sorted(path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))
    if (folder / INDEX).exists():
        return _indexed(folder, shards)
    if (folder / WEIGHTS).exists():
        with opened(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), folder / WEIGHTS)
    if shards:
        raise UserError(
            "model",
            f"{folder / shards[0]} is one of several files, but their index, {INDEX}, is missing",
            "copy or download the index",
        )
    return None


def _indexed(folder: Path, shards: list[str]) -> dict[str, Path]:
    """Return the file of each tensor according to the index file.

    Raises `UserError` if the index and the files do not match.
    """
    mapping, metadata = read_index(folder / INDEX)
    partial = isinstance(metadata, dict) and bool(metadata.get(PARTIAL))
    named = sorted(set(mapping.values()))
    for file in named:
        if Path(file).name != file or not (folder / file).exists():
            raise UserError(
                "model", f"{folder / file} is missing, although {INDEX} names it", "copy or download the file"
            )
    for file in [*shards, *([WEIGHTS] if (folder / WEIGHTS).exists() else [])]:
        if file not in named:
            raise UserError(
                "model",
                f"{folder / file} is not named in {INDEX}",
                "remove the file or the index, whichever does not belong to the model",
            )
    found: dict[str, Path] = {}
    for file in named:
        with opened(folder / file) as content:
            held = set(content.keys())
        for name in sorted(name for name, where in mapping.items() if where == file):
            if name not in held:
                raise UserError(
                    "model",
                    f"{name} is not in {folder / file}, although {INDEX} says that it is",
                    "copy or download both files again",
                )
        if partial:
            held &= mapping.keys()
        found |= {name: folder / file for name in held if mapping.get(name, file) == file}
    return found


def opened(path: Path) -> Any:
    """Open a safetensors file and read its header."""
    try:
        with path.open("rb"):
            pass  # safetensors calls a file without permission missing
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        known = system_error(error, "model") if isinstance(error, OSError) else None
        raise known or UserError(
            "model", f"{path} cannot be read ({one_line(error)})", "copy or download the file again"
        ) from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _download(repository: str, trust_remote_code: bool, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository) or repository.startswith("."):
        raise UserError("model", f"{repository} does not exist", "give a model folder, a config file or a Hub id")
    patterns = ["*.json", *(["*.safetensors"] if weights else []), *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise UserError(
            "model",
            f"{repository} is not a local folder, and it cannot be downloaded from the Hub ({one_line(error)})",
            "correct the name, or give a folder",
        ) from None
