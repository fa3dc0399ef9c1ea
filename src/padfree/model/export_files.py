"""The files of an export besides the weights: what transformers can write is checked before a training.

transformers loads some files that it refuses to save, such as a generation_config.json with `temperature` but without
`do_sample`. The generation config is therefore written as it was loaded. A config or a tokenizer that cannot be saved
is refused before the training.
"""

from __future__ import annotations

import copy
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from padfree.errors import UserError
from padfree.model.model_files import one_line

GENERATION_CONFIG = "generation_config.json"


def save_model(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor], max_shard_size: str) -> None:
    """Write the weights `tensors` and the configs of a model to `folder`. The model's own weights are not read."""
    loaded = model.generation_config if model.can_generate() else None
    if loaded is not None:
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=max_shard_size)
    if loaded is not None:
        loaded.to_json_file(folder / GENERATION_CONFIG, keys_to_pop=["compile_config"])
        model.generation_config = loaded


def check_savable(model: PreTrainedModel, tokenizer: Any, *, model_setting: str, tokenizer_setting: str) -> None:
    """Raise a `UserError` if transformers refuses to save the config of the model, or the tokenizer (None: none)."""
    config: Any = copy.deepcopy(model.config)
    _try_to_save(config.save_pretrained, "config", model_setting, "correct the folder's config.json")
    if tokenizer is not None:
        _try_to_save(tokenizer.save_pretrained, "tokenizer", tokenizer_setting, "correct the files of the tokenizer")


def _try_to_save(save: Callable[[str], Any], kind: str, setting: str, fix: str) -> None:
    with tempfile.TemporaryDirectory(prefix="padfree-export-") as folder:
        try:
            save(folder)
        except Exception as error:  # the files that were loaded can hold anything
            raise UserError(
                setting,
                f"the {kind} can be loaded but not saved, so the trained model could not be exported "
                f"({one_line(error)})",
                f"{fix}, or set checkpoint.export=false",
            ) from error


def default_mode(folder: Path) -> int:
    """Return the permissions that the umask gives a new file in `folder`. safetensors writes files that only their
    owner can read, so other users, such as a vLLM server, need this mode.
    """
    probe = folder / f".padfree-mode-{os.getpid()}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode
