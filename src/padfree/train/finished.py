"""Determine from the run folder whether an earlier start has finished the run, and whether the run can continue.

A run is finished if its last step, its evaluation and its export are done, and if the data and the settings of
evaluation and export are unchanged. Otherwise it resumes from its newest checkpoint.

A run with `checkpoint.every=none` writes `end.json` at its end instead of a checkpoint. It cannot train further,
because only the exported model holds its last weights.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import latest_in
from padfree.checkpoint.manifest import read_manifest
from padfree.config import CheckpointConfig, Config, RunConfig
from padfree.errors import UserError
from padfree.record.file_names import CHECKPOINTS, END, EVALUATION, EVENTS, MODEL
from padfree.record.run_folder import read_json, write_json, writing
from padfree.record.start_over import resumes
from padfree.rollout.collect.queue_state import KEY as QUEUE
from padfree.tasks.reading import TrainingData
from padfree.train.batcher import make_batcher
from padfree.train.global_batch import KEY as ROLLOUTS
from padfree.train.resume import KEY as MADE_WITH
from padfree.train.resume import changed_settings, check_settings, data_record

AFTER_TRAINING = ("eval.", "checkpoint.export", "checkpoint.best", "checkpoint.better", "lora.export")
"""Prefixes of the settings that matter after the last step: those of evaluation, of export and of the best model.

If one of them is changed, a finished run has to evaluate or export again.
"""


def finished_step(config: Config, source: TrainingData) -> int | None:
    """Return the number of steps of the run if it is finished, or None if something is left to do."""
    folder, extra = Path(config.run.folder), _last_extra(config)
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
    with suppress(UserError):  # the checkpoint was made with other settings; resuming will report them
        batcher.load_state_dict(extra["batcher"])
        return next(iter(batcher), None) is None
    return False


# A run that ended without a checkpoint of its last step


def write_end(folder: Path, extra: Mapping[str, Any]) -> None:
    with writing(folder):
        write_json(folder / END, dict(extra))


def read_end(folder: Path, *, resume: bool) -> dict[str, Any] | None:
    """Return the contents of `end.json`, which a run without checkpoints writes into its folder at its end.

    Returns None if there is no such file, or if `resume` is false.
    """
    return read_json(folder / END) if resume else None


def remove_end(folder: Path) -> None:
    with writing(folder):
        (folder / END).unlink(missing_ok=True)


def is_complete(folder: Path, step: int, *, exports: bool) -> bool:
    """Return whether the run in the folder ended after `step` steps and, if `exports`, has exported its model."""
    last = last_line(folder / EVENTS)
    wanted = "export" if exports else "end"
    return (not exports or (folder / MODEL).is_dir()) and (last.get("kind"), last.get("step")) == (wanted, step)


def check_can_continue(run: RunConfig, checkpoint: CheckpointConfig, *, raised_steps_only: bool = False) -> None:
    """Raise a `UserError` if the run in the folder ended without a checkpoint, so that it cannot train further.

    `raised_steps_only`: raise the error only if `run.steps` has grown. Otherwise, call this only if `finished_step`
    returns None.
    """
    folder = Path(run.folder)
    end = read_end(folder, resume=resumes(run, checkpoint))
    if end is None or latest_in(folder / CHECKPOINTS) is not None:
        return
    settings, step = end["made_with"]["settings"], int(end["step"])
    if not is_complete(folder, step, exports=settings["checkpoint.export"]):
        return  # the run was killed before its end, so starting over loses no result
    steps = run.steps
    raised = steps != settings["run.steps"] and (steps is None or steps > step)
    if raised_steps_only and not raised:
        return
    model = f" and model.path={folder / MODEL}" if settings["checkpoint.export"] else ""
    problem = (
        f"the run in {folder} ended after {step} steps and wrote no checkpoint to continue from (checkpoint.every was "
        "none)"
    )
    fix = f"give another run.folder{model}, or start over with checkpoint.resume=false"
    if raised:
        raise UserError("run.steps", f", but {problem}", fix, value=steps)
    raise UserError("run.folder", f"{problem}, but settings or data have changed since", fix)


def last_line(path: Path) -> dict[str, Any]:
    """Return the last JSON line of a file of the run folder as a dict, which is empty if there is no such line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The newest checkpoint


def check_newest(config: Config) -> None:
    """Raise an error if the newest checkpoint in the run folder cannot be resumed with these settings.

    This check loads no model and no data.
    """
    newest, extra = _newest_extra(config)
    if newest is not None and MADE_WITH in extra:
        check_settings(newest, extra[MADE_WITH]["settings"], config, inside=ROLLOUTS in extra)


def _newest_extra(config: Config) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that the run would resume from, and its `extra` dict; (None, {}) for a new run.

    The `extra` dict holds everything besides models and optimizers, such as the position in the data.
    """
    newest = latest_in(Path(config.run.folder) / CHECKPOINTS) if resumes(config.run, config.checkpoint) else None
    extra: dict[str, Any] = {}
    if newest is not None:
        with suppress(CheckpointError, OSError):  # the error is reported when the checkpoint is loaded
            extra = read_manifest(newest, "remove it")["extra"]
    return newest, extra


def _last_extra(config: Config) -> dict[str, Any]:
    """Return the record in `end.json`, which a run without checkpoints writes at its end.

    If there is no such file, return the `extra` dict of the newest checkpoint; {} for a new run.
    """
    resume = resumes(config.run, config.checkpoint)
    return read_end(Path(config.run.folder), resume=resume) or _newest_extra(config)[1]


def data_day(config: Config) -> datetime.date:
    """Return the date that chat templates write: the date that an earlier start stored, otherwise today.

    The date is stored in `end.json` or in the checkpoint to resume from.
    """
    with suppress(KeyError, TypeError, ValueError, OSError):  # no date is stored; damaged files are reported at loading
        extra = _last_extra(config)
        return datetime.date.fromisoformat(extra[MADE_WITH]["data"]["day"])
    return today()


def today() -> datetime.date:
    return datetime.date.today()
