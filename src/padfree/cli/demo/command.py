"""The command line of the demo: one stage after the other, those that are done already left out."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.cli.demo.folder import Demo
from padfree.cli.demo.recipes import SIZES
from padfree.cli.demo.stages import STAGES
from padfree.cli.demo.table import show_result

if TYPE_CHECKING:
    from rich.console import Console


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="plan, check, fine-tune and reinforce a tiny model, on a CPU",
        description="Makes a small data set and a tiny model, then plans, checks, fine-tunes packed and padded side by "
        "side, and trains by rewards. Ends with a table and a report page. Needs no GPU and no network.",
        epilog="example: padfree demo --folder runs/demo",
    )
    command.add_argument(
        "--folder",
        default="padfree-demo",
        help="for everything; an earlier demo in it is replaced (default %(default)s)",
    )
    command.add_argument("--resume", action="store_true", help="go on with a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    demo = Demo(Path(settings.folder), console(), SIZES, resume=settings.resume)
    begin = time.perf_counter()
    try:
        with _cache(demo.folder / "cache"):
            for number, (name, stage) in enumerate(STAGES.items(), start=1):
                demo.console.print(f"{number}/{len(STAGES)}  {stage.title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("done before")
                    continue
                demo.keep(name, stage.run(demo))
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: padfree demo --folder {settings.folder} --resume")
        raise SystemExit(130) from None
    show_result(demo, time.perf_counter() - begin)


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Tokenised data in the demo's own folder; and no bars of transformers among ours."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before, bars = os.environ.get("PADFREE_CACHE"), logging.is_progress_bar_enabled()
    os.environ["PADFREE_CACHE"] = str(folder)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PADFREE_CACHE"]
        else:
            os.environ["PADFREE_CACHE"] = before
        if bars:
            logging.enable_progress_bar()


def console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ValueError("demo: the package rich is missing; pip install rich") from error
    return Console()
