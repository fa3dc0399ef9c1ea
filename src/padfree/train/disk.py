"""Check that the disk can hold what a run writes: its first checkpoint, if it saves any, and the exported model.

    checkpoint    float32 weights, and the optimizer state of the trained weights (with adapters: only the adapters);
                  also the critic and its optimizer state
    export        the whole model in `checkpoint.export_dtype`, or the adapters

The check is a lower bound: it leaves out log files and later checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from padfree.checkpoint.background import shown_size
from padfree.config import Config
from padfree.errors import UserError
from padfree.model.lora import add_adapters
from padfree.model.parts import freeze
from padfree.model.structure import model_skeleton, skeleton
from padfree.optim.optimizer import make_groups, state_bytes

FLOAT32 = 4
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
INODES = 64
"""A file system with fewer free inodes than this is refused, because a run creates at least this many files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskUse:
    """The number of bytes that a run writes for one checkpoint and for the exported model."""

    checkpoint: int
    export: int
    saves: bool = True  # False: the run writes a checkpoint only if a signal stops it

    @property
    def all(self) -> int:
        return (self.checkpoint if self.saves else 0) + self.export


def disk_use(config: Config, model: PreTrainedModel) -> DiskUse:
    """Return how many bytes a run of this model writes. `model` must be on the meta device and without adapters."""
    code = config.model.trust_remote_code
    parameters = _count(model)
    if config.lora.rank:
        adapted = model_skeleton(config)
        add_adapters(adapted, config.lora)
        trained = _count(adapted, trained=True)
        checkpoint = trained * FLOAT32 + state_bytes(make_groups(adapted, config.optimizer))
    else:
        trained = _count(model, trained=True)
        freeze(model, config.model.freeze)
        checkpoint = parameters * FLOAT32 + state_bytes(make_groups(model, config.optimizer))
    if config.loss.advantage == "gae":
        path = config.critic.path or config.model.path
        critic = skeleton(
            path, trust_remote_code=code, setting="critic.path", head="scalar", vision=config.model.vision
        )
        checkpoint += _count(critic) * FLOAT32 + state_bytes(make_groups(critic, config.optimizer.without_groups()))
    export = 0
    if config.checkpoint.export:
        alone = config.lora.rank > 0 and config.lora.export == "adapter"
        chosen = config.checkpoint.export_dtype
        if chosen == "base":
            chosen = str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")  # type: ignore[assignment]
        export = trained * FLOAT32 if alone else parameters * BYTES.get(chosen, FLOAT32)
    saves = config.checkpoint.every is not None or config.checkpoint.best is not None
    return DiskUse(checkpoint=checkpoint, export=export, saves=saves)


def _count(model: nn.Module, *, trained: bool = False) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad or not trained)


def free_space(folder: Path) -> tuple[int, int | None]:
    """Return the free bytes and the free inodes (how many more files fit) of the file system of `folder`.

    The number of inodes is None if the file system does not limit it.
    """
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    found = os.statvfs(nearest)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def check_disk(config: Config, model: PreTrainedModel) -> None:
    """Raise a `UserError` if the disk of `run.folder` cannot hold the first checkpoint and the exported model."""
    use, folder = disk_use(config, model), Path(config.run.folder)
    free, inodes = free_space(folder)
    if free < use.all:
        parts = [("a checkpoint", use.checkpoint)] if use.saves else []
        parts += [("the exported model", use.export)] if use.export else []
        sizes = " and ".join(f"{name} takes about {shown_size(size)}" for name, size in parts)
        cure = ", or set checkpoint.export=false" if use.export and free >= use.all - use.export else ""
        raise UserError(
            "run.folder",
            f"{folder} has {shown_size(free)} free, but {sizes}",
            f"free space, or give a folder on another disk{cure}",
        )
    if inodes is not None and inodes < INODES:
        raise UserError(
            "run.folder",
            f"the file system of {folder} has space for only {inodes} more files",
            "delete files, or give a folder on another disk",
        )


def disk_line(config: Config, model: PreTrainedModel) -> str:
    """Return the line of a dry run about disk space: the bytes that the run will write, and the free bytes."""
    use, free = disk_use(config, model), free_space(Path(config.run.folder))[0]
    export = f", the exported model {shown_size(use.export)}" if use.export else ""
    when = "" if use.saves else " (written only after a signal)"
    return f"disk: a checkpoint{when} takes {shown_size(use.checkpoint)}{export}; {shown_size(free)} are free"
