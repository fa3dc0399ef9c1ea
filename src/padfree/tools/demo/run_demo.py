"""The command `padfree demo`: its options, and the loop over its stages."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from padfree.config.inputs import path_word
from padfree.errors import UserError, need
from padfree.tools.demo.demo_folder import Demo, DemoSizes, console
from padfree.tools.demo.real_stages import REAL_STAGES, RealDemo, RealSizes, real_result_rows
from padfree.tools.demo.stages import STAGES, result_rows
from padfree.tools.talk.find_model import find_model

SIZES, REAL_SIZES = DemoSizes(), RealSizes()


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="plan, check, fine-tune and run RL with a tiny model, on a CPU",
        description="Make a small data set and a tiny model, then plan, check, fine-tune with and without packing, and "
        "train with rewards. Print a summary and write a report page. No GPU or network is needed.",
        epilog="example: padfree demo --folder runs/demo",
    )
    add = command.add_argument
    add(
        "--folder",
        type=path_word("--folder"),
        default="padfree-demo",
        help="output folder; an earlier demo in it is replaced (default %(default)s)",
    )
    add(
        "--real",
        type=path_word("--real"),
        nargs="?",
        const=False,
        metavar="MODEL",
        help="train a real model with SFT and GRPO instead; needs --data",
    )
    add("--model", type=path_word("--model"), help="model folder or Hub id for --real")
    add(
        "--data",
        type=path_word("--data"),
        metavar="FILE",
        help="data for --real: JSON Lines with question and answer, as in GSM8K",
    )
    add("--resume", action="store_true", help="continue a demo that was stopped")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    model = _real_model(settings)
    known = STAGES.keys() | REAL_STAGES.keys()
    demo = Demo(Path(settings.folder), console(), SIZES, known=known, resume=settings.resume)
    real = None if model is None else RealDemo(demo=demo, model=model, data=settings.data, sizes=REAL_SIZES)
    stages = STAGES if real is None else REAL_STAGES
    if demo.found.keys() - stages.keys():
        raise UserError(
            "--resume",
            f"{demo.folder} holds a demo {'without' if real is not None else 'with'} --real",
            "repeat the options with which this demo was started, or give another --folder",
        )
    begin = time.perf_counter()
    try:
        with _surroundings(demo.folder / "cache"):
            for number, (name, (title, stage)) in enumerate(stages.items(), start=1):
                demo.console.print(f"{number}/{len(stages)}  {title}", style="bold", highlight=False)
                if name in demo.found:
                    demo.say("already done")
                else:
                    demo.keep(name, stage(real or demo))
    except KeyboardInterrupt:
        again = "" if real is None else f" --real {model} --data {settings.data}"
        demo.console.print(
            f"\nstopped; continue with: padfree demo{again} --folder {settings.folder} --resume",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise SystemExit(130) from None
    rows = result_rows(demo.found) if real is None else real_result_rows(demo.found)
    rows.append(("time", f"{time.perf_counter() - begin:.0f} s"))
    rows.append(("report", demo.found["report" if real is None else "page"]["path"]))
    if real is None:
        demo.console.print()
    else:
        rows.append(("chat with the model", f"padfree chat {real.folder / 'rl'}"))
    for name, text in rows:
        demo.console.print(f"{name:42}{text}", highlight=False, markup=False, soft_wrap=True)


def _real_model(settings: argparse.Namespace) -> str | None:
    """Return the folder or Hub id of the model to train, or None for the demo with a tiny model (without `--real`).

    With `--real MODEL`, return MODEL. With `--real` alone, return the value of `--model`.
    """
    if settings.real is None:
        for name in ("model", "data"):
            need(
                getattr(settings, name) is None,
                f"--{name}",
                getattr(settings, name),
                "add --real, or remove this option",
            )
        return None
    if settings.real and settings.model is not None:
        raise UserError(
            "--model",
            f"and --real {settings.real!r} both name a model",
            "give only one of the two",
            value=settings.model,
        )
    model: str | None = settings.real or settings.model
    if model is None:
        raise UserError(
            "--real", "names no model", "give a folder or a Hub id, as in --real HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    if settings.data is None:
        raise UserError("--data", "is missing", "give a JSON Lines file with question and answer, as in GSM8K")
    find_model(model)  # fail early if the model does not exist
    return model


@contextmanager
def _surroundings(cache: Path) -> Iterator[None]:
    """Context manager for the demo's stages: caches are kept in `cache`, and transformers shows no progress bars."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    before, bars = os.environ.get("PADFREE_CACHE"), logging.is_progress_bar_enabled()
    os.environ["PADFREE_CACHE"] = str(cache)
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
