"""Decide whether a run is finished, before anything is loaded or written.

    newest checkpoint    after run.steps steps, or at the end of the data (checked with the run's batcher); a run that
                         ended without a checkpoint has `end.json` instead
    data                 unchanged
    evaluation.jsonl     contains the last evaluation
    events.jsonl         the model was exported after the last step
    settings             the settings of evaluation and export are unchanged; other settings no longer have an effect

If any condition fails, the run resumes from the checkpoint as usual and does what is missing. A run with `end.json`
has no such checkpoint, so it is refused if training would have to continue (`padfree.train.end_record`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import latest_in
from padfree.checkpoint.manifest import read_manifest
from padfree.config import Config
from padfree.errors import UserError
from padfree.record.file_names import CHECKPOINTS, EVALUATION
from padfree.rollout.collect.queue_state import KEY as QUEUE
from padfree.tasks.reading import TrainingData
from padfree.train.end_record import is_complete, last_line, read_end
from padfree.train.global_batch import KEY as ROLLOUTS
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.resume import changed_settings, data_record
from padfree.train.training_data import make_batcher

AFTER_TRAINING = ("eval.", "checkpoint.export", "checkpoint.best", "checkpoint.better", "lora.export")
"""Prefixes of the settings that control what happens after the last step."""


def finished_step(config: Config, source: TrainingData) -> int | None:
    """Return the number of steps of the run if it is finished, or None if something is left to do."""
    folder = Path(config.run.folder)
    extra = read_end(Path(config.run.folder), resume=config.checkpoint.resume)
    if extra is None:
        newest = latest_in(folder / CHECKPOINTS) if config.checkpoint.resume else None
        if newest is None:
            return None
        extra = {}
        with suppress(CheckpointError, OSError):  # loading the checkpoint will report the error
            extra = read_manifest(newest, "remove it")["extra"]
    if MADE_WITH not in extra or not _all_trained(config, source, extra):
        return None
    record, step = extra[MADE_WITH], int(extra["step"])
    if record["data"] is None or record["data"]["digest"] != data_record(source.samples, source.day)["digest"]:
        return None
    if any(name.startswith(AFTER_TRAINING) for name in changed_settings(record["settings"], config)):
        return None
    if config.eval.path and last_line(folder / EVALUATION).get("step") != step:
        return None
    return step if is_complete(folder, step, exports=config.checkpoint.export) else None


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
