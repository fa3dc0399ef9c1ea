"""The folder of a demo, the results of its finished stages, and the console to print on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.config import Config
from padfree.errors import UserError
from padfree.record.file_names import METRICS
from padfree.record.run_folder import check_not_in_use
from padfree.testing.arithmetic import Sizes
from padfree.tools.json_objects import read_object

if TYPE_CHECKING:
    from rich.console import Console

STATE = "demo.json"
OWN = {STATE, f"{STATE}.writing", "cache", "data", "model", "plan.html", "check.json", "sft", "rl", "gpu", "real"}
OWN |= {"report.html"}
"""Names of all files and folders that a demo writes. A new demo replaces the folder of an earlier demo only if it holds
nothing else."""

Found = dict[str, Any]
"""The result of a stage, as stored in `demo.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSizes(Sizes):
    """Numbers of steps and sizes of models in the demo."""

    compared: int = 12  # number of SFT steps that also run padded
    gpu_hidden: int = 1024  # hidden size of the model for the GPU stage
    gpu_layers: int = 8
    gpu_samples: int = 512  # samples per step
    gpu_steps: int = 16
    gpu_set_up: int = 3  # the first steps, which are not timed, because they compile layers and allocate memory


def console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise UserError("demo", "the package rich is missing", "pip install rich") from error
    return Console()


class Demo:
    """A demo: its folder, the results of its finished stages, and the console to print on."""

    def __init__(
        self, folder: Path, console: Console, sizes: DemoSizes, *, known: Collection[str], resume: bool
    ) -> None:
        """Open a new folder, or with `resume` the folder of an earlier demo.

        `known`: the names of all stages. A folder with results of an unknown stage raises a `UserError`.
        """
        self.folder, self.console, self.sizes = folder, console, sizes
        self.found: dict[str, Found] = {}
        state = folder / STATE
        if resume:
            if not state.exists():
                raise UserError(
                    "--resume", f"{folder} does not hold a demo", "remove --resume, or give the demo's --folder"
                )
            self.found = _read_state(state, known, "--resume")
            return
        if state.exists():
            _read_state(state, known, "--folder")
            if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN):
                raise UserError(
                    "--folder",
                    f"{folder} holds {others[0]} in addition to an earlier demo",
                    "give a new or empty folder",
                )
            for run in ("sft", "rl", "real/sft", "real/rl"):
                check_not_in_use(folder / run)
            shutil.rmtree(folder)  # an earlier demo
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("--folder", f"{folder} is not empty", "give a new or empty folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            state.write_text("{}", encoding="utf-8")
        except OSError as error:
            raise UserError(
                "--folder", f"{folder} cannot be written ({error.strerror})", "give another folder"
            ) from None

    def keep(self, stage: str, found: Found) -> None:
        self.found[stage] = found
        temporary = self.folder / f"{STATE}.writing"
        temporary.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        temporary.replace(self.folder / STATE)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(f"     {text}", style=style, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """Context manager that yields a function `update(done, text)`, which shows progress on the console.

        Progress is a bar on a terminal. If the output is not a terminal, it is a few printed lines.
        """
        if not self.console.is_terminal:
            interval = max((total or 1) // 5, 1)
            yield lambda done, text: self.say(f"{done}/{total}  {text}") if total and done % interval == 0 else None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = (MofNCompleteColumn(),) if total else ()
        columns = (TextColumn("    "), BarColumn(), *counted, TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)

    def train(self, config: Config, name: str, digits: str) -> list[dict[str, Any]]:
        """Start or resume a run, and return the metrics of every step. The progress bar shows the metric `name`."""
        from padfree.train import train

        with self.bar(config.run.steps) as bar:
            result = train(config, on_step=lambda step: bar(step["step"] + 1, f"{name} {step[name]:{digits}}"))
        if result.stopped:
            raise KeyboardInterrupt
        return _metrics(Path(config.run.folder))

    def write_report(self, folder: Path, names: list[str]) -> Found:
        from padfree.tools.report import write_report

        with self.bar(None) as bar:
            bar(0, "plots")
            write_report([folder / "sft", folder / "rl"], folder / "report.html", names=names)
        return {"path": str(folder / "report.html")}


def _read_state(path: Path, known: Collection[str], setting: str) -> dict[str, Found]:
    found = read_object(path)
    if found is None or not found.keys() <= set(known):
        raise UserError(setting, f"{path} was not written by a demo", "give a new or empty --folder")
    return found


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
