"""Start a run folder over: `checkpoint.resume=false` moves the files of the earlier run away.

    runs/first/checkpoints, metrics.jsonl, model, ...    the earlier run
    runs/first/starting-over/                            created first; the files are moved into it
    runs/first/replaced/                                 its name when all files are moved

From the moment that `starting-over/` exists, no start resumes the earlier run: after a kill, the next start moves the
rest. The files stay in `replaced/` until a run in this folder has ended, because the earlier run may have the only
trained weights. If `replaced/` already exists, it is kept, and the files of the unfinished run since are deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from padfree.config import CheckpointConfig, RunConfig
from padfree.model.export import not_an_export, sync
from padfree.record.file_names import (
    BEST_MODEL,
    CHECKPOINTS,
    CONFIG,
    CRITIC_MODEL,
    END,
    EVALUATION,
    EVENTS,
    FAILURES,
    METRICS,
    MODEL,
    NONFINITE,
    REPLACED,
    RESPONSE_LOG,
    ROLLOUTS,
    ROWS,
    STARTING_OVER,
    TENSORBOARD,
    TRACKERS,
)
from padfree.record.run_folder import writing

FILES = (
    CHECKPOINTS,
    END,
    RESPONSE_LOG,
    METRICS,
    EVALUATION,
    EVENTS,
    ROWS,
    ROLLOUTS,
    FAILURES,
    CONFIG,
    TENSORBOARD,
    TRACKERS,
)
EXPORTS = (MODEL, BEST_MODEL, CRITIC_MODEL)


def resumes(run: RunConfig, checkpoint: CheckpointConfig) -> bool:
    """Return whether the run continues what it finds in its folder. Otherwise it starts over."""
    return checkpoint.resume and not (Path(run.folder) / STARTING_OVER).exists()


def start_over(run: RunConfig, checkpoint: CheckpointConfig) -> None:
    """Move the files of the earlier run to `replaced/`, unless the run resumes. Call this on rank 0 only."""
    if resumes(run, checkpoint):
        return
    folder = Path(run.folder)
    moving, replaced, found = folder / STARTING_OVER, folder / REPLACED, _files_of_run(folder)
    with writing(folder):
        if not found and not moving.exists():
            return
        moving.mkdir(exist_ok=True)
        sync(folder)
        for path in found:
            path.rename(moving / path.name)
        if replaced.exists():
            shutil.rmtree(moving)
        else:
            moving.rename(replaced)
        sync(folder)


def replaced_line(folder: Path) -> str | None:
    """Return a note that says where the files of the earlier run are, or None if there are none."""
    replaced = folder / REPLACED
    if not replaced.exists():
        return None
    return f"the run starts over; {replaced} holds the files of the earlier run, until a run in {folder} has ended"


def remove_replaced(folder: Path) -> None:
    """Remove the files of the earlier run. Call this on rank 0 only, after the new run has ended."""
    with writing(folder):
        if (folder / REPLACED).exists():
            shutil.rmtree(folder / REPLACED)


def _files_of_run(folder: Path) -> list[Path]:
    exports = [name for name in EXPORTS if not_an_export(folder / name) is None]  # not a user's own folder
    names = [folder / name for name in (*FILES, *exports)]
    return [*(path for path in names if path.exists()), *sorted(folder.glob(NONFINITE.format(step="*")))]
