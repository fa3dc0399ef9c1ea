"""Find the files of a model by its name.

    example of a name    what it is                                        files
    Qwen/Qwen3-0.6B      a Hub id, or a folder with config.json            its weights and tokenizer
    runs/sft             a run folder (run.json)                           runs/sft/model
    runs/lora/model      an adapter folder (adapter_config.json)           its adapters, and the base model they name

This module does not import torch, so that an error about a wrong name is printed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from padfree.config.hub import check_name
from padfree.errors import UserError
from padfree.record.file_names import BEST_MODEL, CONFIG, MARKER, MODEL
from padfree.tools.json_objects import read_object

SETTING = "MODEL"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """The locations of a model's weights, tokenizer and adapter.

    `weights` and `tokenizer` are folders or Hub ids.
    """

    weights: str
    tokenizer: str
    adapter: Path | None = None
    plain: bool = False  # the run trained on plain prompts, without a chat template


def find_model(name: str, *, base: str | None = None) -> ModelFiles:
    """Find the files of a model. `name`: a model folder, a Hub id, a run folder or an adapter folder.

    `base` replaces the base model that an adapter's config names.
    """
    check_name(name, SETTING)
    folder = Path(name).expanduser()
    if not folder.exists():
        return _without_base(ModelFiles(weights=name, tokenizer=name), base)
    if not folder.is_dir():
        raise UserError(SETTING, f"{name} is a file", "give a model folder, a run folder or a Hub id")
    if (folder / MARKER).exists():
        return _of_run(folder, base)
    return _of_folder(folder, base)


def _of_run(folder: Path, base: str | None) -> ModelFiles:
    exported = folder / MODEL
    if not exported.is_dir():
        best = f", or give {folder / BEST_MODEL}" if (folder / BEST_MODEL).is_dir() else ""
        raise UserError(
            SETTING,
            f"the run {folder} has not exported its model to {MODEL}/ yet",
            f"finish the run with checkpoint.export=true{best}",
        )
    settings = read_object(folder / CONFIG) or {}
    data: Any = settings.get("data")
    data = data if isinstance(data, dict) else {}
    return replace(_of_folder(exported, base), plain=data.get("prompt_format") == "plain")


def _of_folder(folder: Path, base: str | None) -> ModelFiles:
    if (folder / ADAPTER_CONFIG).exists():
        return _of_adapter(folder, base)
    if not (folder / "config.json").exists():
        raise UserError(
            SETTING,
            f"{folder} has neither config.json nor {ADAPTER_CONFIG} nor {MARKER}",
            "give a model folder, an adapter folder or a run folder",
        )
    if not _has_tokenizer(folder):
        raise UserError(SETTING, f"{folder} has no tokenizer (tokenizer.json)", "copy the tokenizer's files into it")
    return _without_base(ModelFiles(weights=str(folder), tokenizer=str(folder)), base)


def _of_adapter(folder: Path, base: str | None) -> ModelFiles:
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(SETTING, f"{folder} has no {ADAPTER_WEIGHTS}", "copy the adapter's weights into the folder")
    config = read_object(folder / ADAPTER_CONFIG)
    if config is None:
        raise UserError(SETTING, f"{folder / ADAPTER_CONFIG} cannot be read", "copy the adapter folder again")
    named = config.get("base_model_name_or_path")
    if base is None and (not isinstance(named, str) or not named):
        raise UserError(
            SETTING, f"{folder / ADAPTER_CONFIG} does not name a base model", "give the base model with --base"
        )
    setting = "--base" if base is not None else f"base_model_name_or_path of {folder / ADAPTER_CONFIG}"
    weights = str(named) if base is None else base
    try:
        check_name(weights, setting)
    except UserError as error:
        raise (
            error if base is not None else UserError(setting, error.problem, f"{error.fix} (with --base)", error.value)
        ) from None
    tokenizer = str(folder) if _has_tokenizer(folder) else weights
    if Path(tokenizer).is_dir() and not _has_tokenizer(Path(tokenizer)):
        raise UserError(
            SETTING, f"neither {folder} nor {weights} has a tokenizer", "copy the tokenizer's files into one of them"
        )
    return ModelFiles(weights=weights, tokenizer=tokenizer, adapter=folder)


def _without_base(files: ModelFiles, base: str | None) -> ModelFiles:
    if base is not None:
        raise UserError(
            "--base", f"has no effect, because {files.weights} is not an adapter folder", "remove --base", value=base
        )
    return files


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))
