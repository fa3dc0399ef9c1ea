"""Check that a model folder has the necessary files, and that they are complete. Torch is not imported.

config.json                                             the config: a JSON object, not of a quantized model
model.safetensors, or model.safetensors.index.json      the weights: all files that the index names, each complete
tokenizer*                                              the tokenizer

Only the headers of weight files are read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from padfree.config.config import Config
from padfree.config.hub import named_models
from padfree.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".safetensors")


def check_model_folders(config: Config) -> None:
    """Raise a `UserError` if a folder that the settings name as a model lacks a config, weights or a tokenizer."""
    for setting, name in named_models(config).items():
        folder = Path(name).expanduser()
        if not folder.is_dir() or setting == "model.tokenizer":
            continue
        try:
            check_config_file(folder)
            check_config(folder)
            if setting != "model.path" or config.model.init == "weights":
                check_weight_files(folder, "model.init" if setting == "model.path" else None)
                check_headers(folder)
        except UserError as error:
            raise error.at(setting, "model") from None
    check_tokenizer_files(config)


def check_config_file(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        raise UserError("model", f"{folder} has no {CONFIG}", "give a Hugging Face model folder")


def check_weight_files(folder: Path, init_setting: str | None) -> None:
    """Raise a `UserError` if a model folder has no weights.

    `init_setting`: the setting that makes a run start from random weights, such as `model.init`. The message suggests
    it. None if there is no such setting.
    """
    names = {path.name for path in folder.iterdir()}
    if WEIGHTS in names or INDEX in names or any(SHARD.fullmatch(name) for name in names):
        return
    others = sorted(name for name in names if Path(name).suffix in OTHER_WEIGHTS)
    if others:
        raise UserError(
            "model",
            f"{folder} has {others[0]} but no {WEIGHTS}",
            "convert the weights to safetensors with save_pretrained (other formats can run code when loaded)",
        )
    random = "" if init_setting is None else f", or set {init_setting}=random for random weights"
    raise UserError("model", f"{folder} has no weights ({WEIGHTS} or {INDEX})", f"copy or download the weights{random}")


def check_config(folder: Path) -> None:
    """Raise a `UserError` if a model's config is not a JSON object, or describes a quantized model."""
    path = folder / CONFIG
    config = _read_json(path)
    if not isinstance(config, dict):
        raise UserError(
            "model",
            f"the config of {folder} cannot be used ({path} is not a JSON object)",
            "give the config of a causal language model",
        )
    if config.get("quantization_config") is not None:
        raise UserError(
            "model",
            f"{folder} is quantized, and quantized weights cannot be trained",
            "give the unquantized model",
        )


def read_index(path: Path) -> tuple[dict[str, str], Any]:
    """Read the index of the weight files. Return the file name of each tensor, and the metadata of the index."""
    index = _read_json(path)
    mapping = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise UserError("model", f"{path} has no valid weight_map", "copy or download the file again")
    return mapping, index.get("metadata")


def check_headers(folder: Path) -> None:
    """Raise a `UserError` if weight files of a folder are missing or incomplete."""
    names = {path.name for path in folder.iterdir()}
    if INDEX in names:
        files = sorted(set(read_index(folder / INDEX)[0].values()))
    else:
        files = [WEIGHTS] if WEIGHTS in names else []
    for file in files:
        if Path(file).name != file or not (folder / file).exists():
            raise UserError(
                "model", f"{folder / file} is missing, although {INDEX} names it", "copy or download the file"
            )
        problem = _header_problem(folder / file)
        if problem is not None:
            raise UserError("model", f"{folder / file} cannot be read ({problem})", "copy or download the file again")


def _header_problem(path: Path) -> str | None:
    """Return what is wrong with the size or the header of a safetensors file; None if nothing is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                return f"a file of {size:,} bytes without a safetensors header"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except OSError as error:
        return error.strerror or type(error).__name__
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "its header is not valid"
    return None if size == wanted else f"it has {size:,} bytes and should have {wanted:,}"


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def check_tokenizer_files(config: Config) -> bool:
    """Return whether the run has a tokenizer. Raise a `UserError` if the run needs a tokenizer and has none.

    A run on rollout files that contain only token ids needs no tokenizer.
    """
    path = Path(config.model.tokenizer or config.model.path)
    if not path.exists() or has_tokenizer(path):
        return True
    given = not config.loss.task.in_rows and config.rollout.source is None
    if given and config.model.tokenizer is None:
        return False  # if the rollout files contain text, `read_rollouts` raises an error later
    raise UserError("model.tokenizer", f"{path} has no tokenizer", "give a folder or Hub id that has one")


def has_tokenizer(path: str | Path) -> bool:
    """Return whether `path` is a folder on this disk that holds a tokenizer."""
    return Path(path).is_dir() and any(Path(path).glob("tokenizer*"))
