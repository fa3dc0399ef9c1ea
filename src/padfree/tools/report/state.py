"""Determine the state of a run (running, killed, finished, ...) from its folder.

A running process holds a file lock on `run.lock`. The state follows from the lock and the last event in `events.jsonl`:

    last event              if the lock is held    if it is not held
    none                    starting               ended before its first step
    start                   running                killed
    stop                    stopped by a signal    stopped by a signal
    nonfinite, failed       failed, and why        failed, and why
    end                     exporting its model    finished

If the process runs on another machine, its lock may be invisible on this machine. The state is then unknown.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.record.file_names import HOLDER, LOCK, MARKER
from padfree.tools.json_objects import read_object

ENDS = {
    "end": "finished",
    "stop": "stopped by a signal",
    "nonfinite": "stopped: the loss or a gradient was not finite",
    "failed": "failed",
}
REASON_LETTERS = 300


def state_of(folder: Path, events: Sequence[Mapping[str, Any]], *, has_nonfinite: bool) -> str:
    """Return the state of a run as text, e.g. "running". After a resume, it is the state of the newest process.

    `has_nonfinite`: whether a step had a non-finite loss or gradient. It matters only for runs that recorded no events.
    """
    marks = [event for event in events if event.get("kind") in ("start", *ENDS)]
    held = is_held(folder)
    if marks and marks[-1]["kind"] != "start":
        return _ended(marks, held)
    if not marks and not (folder / MARKER).exists():
        return ENDS["nonfinite"] if has_nonfinite else "not recorded"
    if held is None:
        return "unknown: it is running on another machine, or was killed"
    if marks:
        return "running" if held else "killed: it stopped without recording an end"
    return "starting" if held else "ended before its first step"


def _ended(marks: Sequence[Mapping[str, Any]], held: bool | None) -> str:
    kinds = [event["kind"] for event in marks]
    if kinds[-1] == "failed":
        if kinds[-2:-1] == ["nonfinite"]:
            return ENDS["nonfinite"]
        reason = str(marks[-1].get("error", ""))[:REASON_LETTERS]
        return f"{ENDS['failed']}: {reason}" if reason else ENDS["failed"]
    return "exporting its model after the last step" if kinds[-1] == "end" and held else ENDS[kinds[-1]]


def is_held(folder: Path) -> bool | None:
    """Return whether a process is writing to the folder; None if this machine cannot tell."""
    lock = folder / LOCK
    if not lock.is_file():
        return False
    try:
        import fcntl

        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return None
    return None if _holder_host(folder) not in (None, socket.gethostname()) else False


def _holder_host(folder: Path) -> str | None:
    """Return the host of the process that holds the lock, according to `run.holder.json`; None without this file."""
    found = read_object(folder / HOLDER)
    return None if found is None else str(found.get("host"))
