"""Events of a run other than steps: `events.jsonl` in the run folder, one JSON line per event, append-only.

    {"time": "2026-03-01T12:00:30+00:00", "kind": "compile", "step": 0, "graphs": 2, "seconds": 21.3}

    kind            meaning of the event, or the content of its fields
    start           versions, device, processes and their layout
    resolved_auto   the value of each `auto` setting, and the reason
    resume          the checkpoint, and the settings that have changed
    note            a note that was shown when the run started
    compile         layers were compiled in this step
    float8          how much float8 changes the gradient of each layer
    nonfinite       the file with the samples of a step whose loss or gradient was not finite
    stop            a signal stopped the run
    end             all steps are done
    export          the trained model is in the folder
    failed          the error that ended the run

`step`: the number of optimizer steps done before the event.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from padfree.distributed import Mesh
from padfree.record.file_names import EVENTS
from padfree.record.run_folder import writing
from padfree.version import __version__

Kind = Literal[
    "start", "resolved_auto", "note", "resume", "compile", "float8", "stop", "end", "export", "failed", "nonfinite"
]  # fmt: skip


class Events:
    """`events.jsonl` in the run folder. Only rank 0 writes."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.path = folder / EVENTS
        self._writes = rank == 0
        if self._writes:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: Kind, *, step: int, **fields: Any) -> None:
        """Append an event with `fields` to the file. If a killed run left an incomplete last line, the event starts a
        new line.
        """
        if not self._writes:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "kind": kind, "step": step, **fields}) + "\n"
        with writing(self.path), self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())


def _context(mesh: Mesh) -> str:
    return f"1 to {max(mesh.contexts)}" if mesh.contexts else f"{mesh.context.size}"


def _experts(mesh: Mesh) -> str:
    return "" if mesh.experts is None else f", experts over {mesh.experts['expert'].size()}"


def environment(mesh: Mesh, *, replicate: int = 1) -> dict[str, Any]:
    """Return the fields of a `start` event: versions, device, number of processes and their layout.

    `replicate`: number of replicas of the sharded model.
    """
    device = mesh.device
    shard = mesh.data.size // replicate
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "padfree": __version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": mesh.loss.size,
        "layout": f"{replicate} replicate x {shard} shard x {_context(mesh)} context{_experts(mesh)}",
    }
