"""Check that a model or data set exists: on disk, in the Hub's cache or on the Hub.

    ./qwen, /data/qwen, ~/qwen, a/b/qwen         not of the form owner/name: must be on disk
    Qwen/Qwen3-0.6B                              on disk, in the Hub's cache, or on the Hub

Without a network, the libraries of the Hugging Face Hub take most of a minute to report a mistyped name. This module
asks the Hub once, and refuses a name that does not exist. If the Hub does not answer in time, the name is accepted, and
the loader reports errors later.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from padfree.config.config import Config
from padfree.config.functions import model_of
from padfree.config.inputs import check_regular, is_data_file
from padfree.errors import UserError

SECONDS = 10.0
"""Timeout of the request to the Hub, in seconds."""

KINDS = {"model": ("config.json", "tokenizer_config.json"), "dataset": ("README.md", ".gitattributes")}
"""Files that show that the Hub's cache holds a model or a data set."""


GIVEN_TEXT = ("rollout.reward", "eval.reward")
"""Settings that name a reward model. The run sends text to this model, not token ids, so the model may have any
tokenizer."""


def named_models(config: Config) -> dict[str, str]:
    """Map each setting that names a model, such as `teacher.path`, to the folder or Hub id of this model."""
    named = {
        "model.path": config.model.path,
        "model.tokenizer": config.model.tokenizer,
        "reference.path": config.reference.path,
        "teacher.path": config.teacher.path,
        "critic.path": config.critic.path,
        "rollout.reward": model_of(config.rollout.reward),
        "eval.reward": model_of(config.eval.reward),
    }
    return {setting: name for setting, name in named.items() if name is not None}


def check_names(config: Config) -> None:
    """Raise a `UserError` if a model or data file in the settings does not exist."""
    for setting, model in named_models(config).items():
        check_name(model, setting)
    for part, names in (("data", config.data.paths), ("eval.path", config.eval.path)):
        for name in names:
            if is_data_file(name) and len(name) < 255 and not Path(name).expanduser().exists():
                raise UserError(part, f"{name} does not exist", "give a file, a folder or a Hub id")


def shortened(name: str) -> str:
    """Cut a name to 200 characters, for a message."""
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def check_name(name: str, setting: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Raise a `UserError` if the model or data set `name` is neither on disk nor on the Hub.

    `setting`: the setting whose value is `name`, for error messages.
    """
    try:
        if Path(name).expanduser().exists():
            check_regular(Path(name).expanduser(), setting)
            return
    except (OSError, RuntimeError) as error:  # e.g. a long name, no permission, or an unknown ~user
        reason = getattr(error, "strerror", None) or error
        raise UserError(setting, f"{shortened(name)} cannot be read ({reason})", "give another path") from None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(setting, "does not exist", "correct the path, or give a Hub id (owner/name)", value=name)
    reason = _unknown(name, kind)
    if reason is not None:
        raise UserError(
            setting, f"was not found on disk or on the Hub: {reason}", "correct the name, or give a folder", value=name
        )


def _unknown(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return why the Hub does not give the model or data set `name`, for an error message.

    Return None if the Hub or its local cache has `name`, or if the Hub gives no clear answer (e.g. a timeout).
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) for file in KINDS[kind]):
        return None
    if constants.HF_HUB_OFFLINE:
        return "the Hub is not asked in offline mode (HF_HUB_OFFLINE)"
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except GatedRepoError:
        return None  # the name exists; if permission is missing, the loader reports it
    except (RepositoryNotFoundError, HFValidationError):
        return f"the Hub has no {kind} of this name that you can access"
    except OfflineModeIsEnabled:
        return "the Hub is not asked in offline mode (HF_HUB_OFFLINE)"
    except Exception as error:  # the type depends on the HTTP library that this version of huggingface_hub uses
        if type(error).__name__ in ("ConnectError", "ConnectionError"):
            return f"the Hub cannot be reached ({' '.join(str(error).split())})"
    return None
