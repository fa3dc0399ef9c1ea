"""The file `end.json` of a run that ended without a checkpoint of its last step (`checkpoint.every=none`).

The file tells later starts whether the run is finished: it holds the last step, the position in the data, and the
settings and data that the run was made with. The weights of the last step are in the exported model only, so such a run
cannot be continued. The next start that trains in the folder removes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padfree.checkpoint.checkpointer import latest_in
from padfree.config import CheckpointConfig, RunConfig
from padfree.errors import UserError
from padfree.record.file_names import CHECKPOINTS, END, EVENTS, MODEL
from padfree.record.run_folder import read_json, write_json, writing


def write_end(folder: Path, extra: Mapping[str, Any]) -> None:
    with writing(folder):
        write_json(folder / END, dict(extra))


def read_end(folder: Path, *, resume: bool) -> dict[str, Any] | None:
    """Return the contents of `end.json`; None if there is no such file, or if the run must not resume."""
    return read_json(folder / END) if resume else None


def remove_end(folder: Path) -> None:
    with writing(folder):
        (folder / END).unlink(missing_ok=True)


def is_complete(folder: Path, step: int, *, exports: bool) -> bool:
    """Whether the run in the folder ended after `step` steps and, with `exports`, has exported its model since."""
    last = last_line(folder / EVENTS)
    wanted = "export" if exports else "end"
    return (not exports or (folder / MODEL).is_dir()) and (last.get("kind"), last.get("step")) == (wanted, step)


def check_can_continue(run: RunConfig, checkpoint: CheckpointConfig, *, raised_steps_only: bool = False) -> None:
    """Raise a `UserError` if training would have to continue after a run that ended without a checkpoint.

    `raised_steps_only`: check only whether `run.steps` was raised, which is known before the data is read.
    """
    folder = Path(run.folder)
    end = read_end(folder, resume=checkpoint.resume)
    if end is None or latest_in(folder / CHECKPOINTS) is not None:
        return
    settings, step = end["made_with"]["settings"], int(end["step"])
    if not is_complete(folder, step, exports=settings["checkpoint.export"]):
        return  # the run was killed before its end, so there is no result that starting over could lose
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
