"""In which state a run is, from what its folder holds.

    events.jsonl            a process holds run.lock     nobody holds it
    nothing                 starting                     ended before its first step
    ... start               running                      killed
    ... stop                stopped by a signal
    ... nonfinite, failed   stopped or failed, with the reason
    ... end                 writing its model            finished

The lock is the system's: it is tried, shared and for a moment, and nothing is written. For a holder on another machine
the lock may not say anything, and neither does the page.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.record.file_names import HOLDER, LOCK, MARKER

ENDS = {
    "end": "finished",
    "stop": "stopped by a signal",
    "nonfinite": "stopped: a number was not finite",
    "failed": "failed",
}
REASON_LETTERS = 300


def state_of(folder: Path, events: Sequence[Mapping[str, Any]], *, has_nonfinite: bool) -> str:
    """What the last process of the run did, and whether it still runs."""
    marks = [event for event in events if event.get("kind") in ("start", *ENDS)]
    held = is_held(folder)
    if marks and marks[-1]["kind"] != "start":
        return _ended(marks, held)
    if not marks and not (folder / MARKER).exists():
        return ENDS["nonfinite"] if has_nonfinite else "not recorded"
    if held is None:
        return "no end recorded: it runs on another machine, or it was killed"
    if marks:
        return "running" if held else "no end recorded: it was killed"
    return "starting" if held else "ended before its first step"


def _ended(marks: Sequence[Mapping[str, Any]], held: bool | None) -> str:
    kinds = [event["kind"] for event in marks]
    if kinds[-1] == "failed":
        if kinds[-2:-1] == ["nonfinite"]:
            return ENDS["nonfinite"]
        reason = str(marks[-1].get("error", ""))[:REASON_LETTERS]
        return f"{ENDS['failed']}: {reason}" if reason else ENDS["failed"]
    return "all steps are done; it writes its model" if kinds[-1] == "end" and held else ENDS[kinds[-1]]


def is_held(folder: Path) -> bool | None:
    """Whether a process writes to the folder now; None: that cannot be seen from here."""
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
    """The machine of the process that has not given the folder back."""
    try:
        found = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return str(found.get("host")) if isinstance(found, dict) else None
