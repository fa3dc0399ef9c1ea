"""The folder of a demo: what its stages have found so far, and where to show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.cli.demo.recipes import Sizes, gpu_config, rl_config, sft_config
from padfree.config import Config
from padfree.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

STATE = "demo.json"
LEAVES: Mapping[str, tuple[str, ...]] = {
    "data": ("data", "model"),
    "plan": ("plan.html",),
    "check": ("check.json",),
    "padded": (),
    "packed": ("sft",),
    "reward": ("rl",),
    "gpu": ("gpu",),
    "report": ("report.html",),
    # of a demo with a real model
    "rows": ("real",),
    "before": (),
    "tuned": (),
    "rewarded": (),
    "page": (),
}
"""What each stage leaves in the folder."""

OWN = {STATE, f"{STATE}.writing", "cache", *(name for names in LEAVES.values() for name in names)}
"""A folder that has more than this is somebody's, and is not removed."""


class Demo:
    """The folder of a demo, what its stages have found so far, and where to show it."""

    def __init__(self, folder: Path, console: Console, sizes: Sizes, *, resume: bool) -> None:
        self.folder, self.console, self.sizes = folder, console, sizes
        self.found: dict[str, Any] = {}
        state = folder / STATE
        if resume:
            if not state.exists():
                raise UserError(
                    "--resume", f"{folder} holds no demo", "leave --resume out, or give the demo's --folder"
                )
            self.found = _read_state(state, "--resume")
            return
        if folder.exists() and not state.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("--folder", f"{folder} holds other things", "give a new folder or an empty one")
        if state.exists():
            from padfree.record.run_folder import check_not_in_use

            _read_state(state, "--folder")
            if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN):
                raise UserError("--folder", f"{folder} has {others[0]} besides a demo", "give a new or an empty folder")
            for run in ("sft", "rl", "real/sft", "real/rl"):
                check_not_in_use(folder / run)
            shutil.rmtree(folder)  # an earlier demo
        try:
            folder.mkdir(parents=True, exist_ok=True)
            state.write_text("{}", encoding="utf-8")
        except OSError as error:
            raise UserError("--folder", f"{folder} cannot be written ({error.strerror})", "give another") from None

    def keep(self, stage: str, found: Mapping[str, Any]) -> None:
        self.found[stage] = found
        beside = self.folder / f"{STATE}.writing"
        beside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        beside.replace(self.folder / STATE)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(f"     {text}", style=style, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """A bar on a terminal, now and then a line elsewhere: the function takes what is done, and a text."""
        if not self.console.is_terminal:
            often = max((total or 1) // 5, 1)
            yield lambda done, text: self.say(f"{done}/{total}  {text}") if total and done % often == 0 else None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = (MofNCompleteColumn(),) if total else ()
        columns = (TextColumn("    "), BarColumn(), *counted, TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)

    @property
    def sft(self) -> Config:
        return sft_config(self.folder, self.sizes)

    @property
    def rl(self) -> Config:
        return rl_config(self.folder, self.sizes)

    @property
    def gpu(self) -> Config:
        return gpu_config(self.folder, self.sizes)


def _read_state(path: Path, setting: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not found.keys() <= LEAVES.keys():
        raise UserError(setting, f"{path} is not what a demo writes", "give another --folder, new or empty")
    return found
