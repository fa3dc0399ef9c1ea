"""The command line of the demo: one stage after the other, those that are done already left out."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.cli.demo.folder import Demo
from padfree.cli.demo.real import REAL_SIZES, REAL_STAGES, RealDemo, show_real_result
from padfree.cli.demo.recipes import SIZES
from padfree.cli.demo.stages import STAGES
from padfree.cli.demo.table import show_result
from padfree.errors import UserError, need
from padfree.talk.find import find_model

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
    command.add_argument(
        "--real", nargs="?", const="", metavar="MODEL", help="SFT and GRPO of a real model instead, with --data"
    )
    command.add_argument("--model", help="model folder or Hub id for --real")
    command.add_argument("--data", metavar="FILE", help="rows for --real: JSON Lines as GSM8K has")
    command.add_argument("--resume", action="store_true", help="go on with a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    model = _real_model(settings)
    demo = Demo(Path(settings.folder), console(), SIZES, resume=settings.resume)
    begin = time.perf_counter()
    stages: Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]
    if model is None:
        stages = {name: (stage.title, partial(stage.run, demo)) for name, stage in STAGES.items()}
        again = ""
    else:
        real = RealDemo(demo=demo, model=model, data=settings.data, sizes=REAL_SIZES)
        stages = {name: (title, partial(stage, real)) for name, (title, stage) in REAL_STAGES.items()}
        again = f" --real {model} --data {settings.data}"
    if others := demo.found.keys() - stages.keys():
        raise UserError(
            "--resume", f"{demo.folder} holds another kind of demo (it has {min(others)})", "give its --folder"
        )
    try:
        with _cache(demo.folder / "cache"):
            for number, (name, (title, stage)) in enumerate(stages.items(), start=1):
                demo.console.print(f"{number}/{len(stages)}  {title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("done before")
                    continue
                demo.keep(name, stage())
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: padfree demo{again} --folder {settings.folder} --resume")
        raise SystemExit(130) from None
    seconds = time.perf_counter() - begin
    if model is None:
        show_result(demo, seconds)
    else:
        show_real_result(real, seconds)


def _real_model(settings: argparse.Namespace) -> str | None:
    """The model of `--real`; None: it is not asked for."""
    if settings.real is None:
        for name in ("model", "data"):
            need(getattr(settings, name) is None, f"--{name}", getattr(settings, name), "give --real with it")
        return None
    if settings.real and settings.model is not None:
        raise UserError("--model", f", but --real names {settings.real!r}", "give one of them", value=settings.model)
    model: str | None = settings.real or settings.model
    if model is None:
        raise UserError(
            "--real", "no model", "give a folder or a Hub id, as in --real HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    if settings.data is None:
        raise UserError("--data", "missing", "give a JSON Lines file with question and answer, as GSM8K has")
    find_model(model)  # before anything is made
    return model


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
        raise UserError("demo", "the package rich is missing", "pip install rich") from error
    return Console()
