"""Whether a name is a model or a data set of the Hugging Face Hub, asked once and quickly.

    models/qwen, ./qwen, /data/qwen, ~/qwen      more than owner/name, or a path: it must be on this disk
    Qwen/Qwen3-0.6B                              on this disk, or in the Hub's cache, or on the Hub

Libraries ask the Hub many times over and wait between, so that a mistyped name takes most of a minute without a
network, and then is said to lack some file. Here the Hub is asked once for the name alone. Its answer counts, and so
does a connection that cannot be made. A slow answer decides nothing: whoever loads the files may wait for longer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from padfree.config.config import Config
from padfree.config.functions import model_of
from padfree.config.inputs import check_regular
from padfree.errors import UserError

SECONDS = 10.0
"""How long the Hub may take for a first answer."""

KINDS = {"model": ("config.json", "tokenizer_config.json"), "dataset": ("README.md", ".gitattributes")}
"""What is in the Hub's cache if a model or a data set is."""


DATA_FILES = (".jsonl", ".json", ".parquet")


GIVEN_TEXT = ("rollout.reward", "eval.reward")
"""Settings that name a model which is given text, and makes tokens of it with its own tokenizer."""


def named_models(config: Config) -> dict[str, str]:
    """Every folder or Hub id of a model that the run names, by its setting."""
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
    """Refuse models, and files of data, that a run names and that are nowhere. Nothing is loaded, and no torch."""
    for setting, model in named_models(config).items():
        check_name(model, setting)
    for part, names in (("data", config.data.paths), ("eval.path", config.eval.path)):
        for name in names:
            if Path(name).suffix in DATA_FILES and len(name) < 255 and not Path(name).expanduser().exists():
                raise UserError(part, f"{name} does not exist", "give a file, a folder or a Hub id")


def shortened(name: str) -> str:
    """A name in a message."""
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def check_name(name: str, setting: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Refuse what is neither on this disk nor on the Hub, in one line that begins with `setting`."""
    try:
        if Path(name).expanduser().exists():
            check_regular(Path(name).expanduser(), setting)
            return
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be looked into, no such user
        reason = getattr(error, "strerror", None) or error
        raise UserError(setting, f"{shortened(name)} cannot be read ({reason})", "give another") from None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(setting, "does not exist", "correct the path, or give a Hub id (owner/name)", value=name)
    reason = _unknown(name, kind)
    if reason is not None:
        raise UserError(
            setting, f"is not on this disk, and {reason}", "correct the name, or give a folder that exists", value=name
        )


def _unknown(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why nothing can be loaded under this name; None where something can, or where it is not known."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) for file in KINDS[kind]):
        return None
    if constants.HF_HUB_OFFLINE:
        return "the Hub is not asked in offline mode (HF_HUB_OFFLINE)"
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except GatedRepoError:
        return None  # it is there; whether it may be loaded is for the loader to say
    except (RepositoryNotFoundError, HFValidationError):
        return f"the Hub has no {kind} of this name that you may see"
    except OfflineModeIsEnabled:
        return "the Hub is not asked in offline mode (HF_HUB_OFFLINE)"
    except Exception as error:  # of the HTTP library, which is another one from version to version of huggingface_hub
        if type(error).__name__ in ("ConnectError", "ConnectionError"):
            return f"the Hub cannot be reached ({' '.join(str(error).split())})"
    return None
