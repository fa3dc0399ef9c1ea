"""Decide whether a run is finished, before anything is loaded or written.

    newest checkpoint    after run.steps steps, or at the end of the data (checked with the run's batcher)
    data                 unchanged
    evaluation.jsonl     contains the last evaluation
    events.jsonl         the model was exported after the last step
    settings             the settings of evaluation and export are unchanged; other settings no longer have an effect

If any condition fails, the run resumes from the checkpoint as usual and does what is missing.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import latest_in
from padfree.checkpoint.manifest import read_manifest
from padfree.config import Config
from padfree.errors import UserError
from padfree.record.file_names import CHECKPOINTS, EVALUATION, EVENTS, MODEL
from padfree.rollout.collect.queue_state import KEY as QUEUE
from padfree.tasks.reading import TrainingData
from padfree.train.global_batch import KEY as ROLLOUTS
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.resume import changed_settings, data_record
from padfree.train.training_data import make_batcher

AFTER_TRAINING = ("eval.", "checkpoint.export", "checkpoint.best", "checkpoint.better", "lora.export")
"""Prefixes of the settings that control what happens after the last step."""


def finished_step(config: Config, source: TrainingData) -> int | None:
    """Return the number of steps of the run if it is finished, or None if something is left to do."""
    folder = Path(config.run.folder)
    newest = latest_in(folder / CHECKPOINTS) if config.checkpoint.resume else None
    if newest is None:
        return None
    extra: dict[str, Any] = {}
    with suppress(CheckpointError, OSError):  # loading the checkpoint will report the error
        extra = read_manifest(newest, "remove it")["extra"]
    if MADE_WITH not in extra or not _all_trained(config, source, extra):
        return None
    record, step = extra[MADE_WITH], int(extra["step"])
    if record["data"] is None or record["data"]["digest"] != data_record(source.samples, source.day)["digest"]:
        return None
    if any(name.startswith(AFTER_TRAINING) for name in changed_settings(record["settings"], config)):
        return None
    if config.eval.path and _last_line(folder / EVALUATION).get("step") != step:
        return None
    last = _last_line(folder / EVENTS)
    wanted = "export" if config.checkpoint.export else "end"
    exported = not config.checkpoint.export or (folder / MODEL).is_dir()
    return step if exported and (last.get("kind"), last.get("step")) == (wanted, step) else None


def _all_trained(config: Config, source: TrainingData, extra: dict[str, Any]) -> bool:
    if config.run.steps is not None and extra["step"] >= config.run.steps:
        return True
    if ROLLOUTS in extra or extra.get(QUEUE):
        return False
    batcher = make_batcher(config, source.samples, source.parts)
    with suppress(UserError):  # the checkpoint has other settings; resuming will report them
        batcher.load_state_dict(extra["batcher"])
        return next(iter(batcher), None) is None
    return False


def _last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a JSON Lines file as a dict; an empty dict if there is no such line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
