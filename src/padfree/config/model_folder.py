"""Check that a model folder holds the necessary files, by their names: no file is opened, and torch is not imported.

config.json                                             the config
model.safetensors, or model.safetensors.index.json      the weights
tokenizer*                                              the tokenizer
"""

from __future__ import annotations

import re
from pathlib import Path

from padfree.config.config import Config
from padfree.config.hub import named_models
from padfree.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".safetensors")


def check_model_folders(config: Config) -> None:
    """Refuse models on this disk whose folder has no config, no weights or no tokenizer."""
    for setting, name in named_models(config).items():
        folder = Path(name).expanduser()
        if not folder.is_dir() or setting == "model.tokenizer":
            continue
        try:
            check_config_file(folder)
            if setting != "model.path":
                check_weight_files(folder, None)
            elif config.model.init == "weights":
                check_weight_files(folder, "model.init")
        except UserError as error:
            raise error.at(setting, "model") from None
    check_tokenizer_files(config)


def check_config_file(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        raise UserError("model", f"{folder} has no {CONFIG}", "give a Hugging Face model folder")


def check_weight_files(folder: Path, init_setting: str | None) -> None:
    """Refuse a folder without weights. `init_setting`: the setting that asks for random weights, if there is one."""
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


def check_tokenizer_files(config: Config) -> bool:
    """Whether the run has a tokenizer. Refuses a run that needs one and has none.

    A run on rollout files is not refused, because the files may contain token ids. If they contain text instead,
    `read_rollouts` asks for a tokenizer.
    """
    path = Path(config.model.tokenizer or config.model.path)
    if not path.exists() or has_tokenizer(path):
        return True
    given = not config.loss.task.in_rows and config.rollout.source is None
    if given and config.model.tokenizer is None:
        return False
    raise UserError("model.tokenizer", f"{path} has no tokenizer", "give a folder or Hub id that has one")


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder on this disk holds a tokenizer."""
    return Path(path).is_dir() and any(Path(path).glob("tokenizer*"))
