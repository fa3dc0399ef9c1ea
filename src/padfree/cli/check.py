"""`padfree check`: compares packed training with training on one sample at a time, for a given model and data.

Examples:

    padfree check --model my-model --data train.jsonl
    padfree check --model my-model --data prompts.jsonl --sampler
    torchrun --nproc-per-node 4 -m padfree check --model my-model --data train.jsonl --layout dp=2,cp=2
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padfree.cli.json_report import clear_status, json_target, show_status, write_json
from padfree.config import DataConfig, ModelConfig, load_config
from padfree.config.hub import check_name
from padfree.config.inputs import path_word
from padfree.config.processes import processes_of
from padfree.errors import UserError

if TYPE_CHECKING:
    from padfree.tools.check import CheckReport

DTYPES = ("float32", "bfloat16")
LOSSES = ("nll", "dpo", "kto", "distill", "reward", "value")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "check",
        usage="padfree check --model MODEL [--data FILE ...] [data.name=value ...] [options]",
        help="compare packed training of your model with one sample at a time",
        description="Compare the gradients with plain Hugging Face code. Exit code 1: they differ.",
        epilog="example: padfree check --model my-model --data train.jsonl --dtype bfloat16",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=26),
    )
    add = command.add_argument
    add(
        "--model",
        type=path_word("--model"),
        required=True,
        metavar="PATH",
        help="model: folder, Hub id, or config (random weights)",
    )
    add("overrides", nargs="*", help=argparse.SUPPRESS)
    add(
        "--data",
        type=path_word("--data"),
        nargs="+",
        metavar="FILE",
        help="SFT data or rollouts (default: random tokens)",
    )
    add("--samples", type=int, default=8, metavar="N", help="number of samples, short and long ones (default 8)")
    add("--max-length", type=int, default=1024, metavar="N", help="cut samples to N tokens (default 1024)")
    add(
        "--tokenizer",
        type=path_word("--tokenizer"),
        metavar="PATH",
        help="tokenizer: folder or Hub id (default: the model's)",
    )
    add(
        "--sampler",
        action="store_true",
        help="compare the bits of sampler and trainer instead",
    )
    add("--loss", default="nll", metavar="NAME", help="nll (default), dpo, kto, distill, reward or value")
    add("--layers", type=int, metavar="N", help="check the first N layers (default: a few)")
    add("--full", action="store_true", help="check all layers")
    add("--dtype", metavar="NAME", help="float32 or bfloat16 (default: bfloat16 on a GPU)")
    add("--backend", default="auto", metavar="NAME", help="attention backend (default auto)")
    add(
        "--float8",
        nargs="?",
        type=float,
        default=False,
        metavar="BUDGET",
        help="also measure how float8 changes gradients",
    )
    add("--layout", metavar="dp=N,cp=N", help="number of data and context ranks (needs torchrun)")
    add("--device", default="auto", metavar="NAME", help="device: auto, cpu or cuda")
    add("--json", type=path_word("--json"), metavar="FILE", help="also write the report to this file")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    processes = processes_of()
    context = context_ranks(settings.layout, processes.world)
    for name, least in (("samples", 2), ("max_length", 2), ("layers", 1)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}", "", f"give {least} or more", value=value)
    if settings.dtype is not None and settings.dtype not in DTYPES:
        raise UserError("--dtype", "", f"choose one of {', '.join(DTYPES)}", value=settings.dtype)
    if settings.loss not in LOSSES:
        raise UserError("--loss", "", f"choose one of {', '.join(LOSSES)}", value=settings.loss)
    measured = settings.float8 is not False
    budget: float | None = settings.float8 if measured else None
    if budget is not None and not 0 < budget < math.inf:
        raise UserError("--float8", "", "give a budget above 0, or --float8 without a budget", value=budget)
    if settings.layers is not None and settings.full:
        raise UserError("--layers", f"{settings.layers} cannot be combined with --full", "give only one of them")
    data, vision = data_settings(settings)
    if vision:
        _check_vision_options(settings)
    first = processes.is_first
    if settings.sampler:
        _check_sampler_options(settings, processes.world)
    target = json_target(settings.json, writes=first)
    if target is not None and target.exists():
        from padfree.tools.check.check_report import is_report

        if not is_report(target):
            raise UserError("--json", f"{target} exists and is not a report of padfree check", "give another file")
    check_name(settings.model, "--model")
    if settings.tokenizer is not None:
        check_name(settings.tokenizer, "--tokenizer")

    import torch

    from padfree.model.structure import skeleton
    from padfree.tools.check import check_model, chosen_samples
    from padfree.tools.check.samples import has_tokenizer
    from padfree.train.training_data import image_settings

    skeleton(settings.model, trust_remote_code=settings.trust_remote_code, setting="--model", vision=vision)

    samples, origin = settings.samples, ""
    if data is not None:
        model = ModelConfig(path=settings.model, vision=vision, trust_remote_code=settings.trust_remote_code)
        tokenizer = settings.tokenizer or (settings.model if has_tokenizer(settings.model) else None)
        samples = chosen_samples(
            data,
            settings.samples,
            tokenizer=tokenizer,
            max_length=settings.max_length,
            trust_remote_code=settings.trust_remote_code,
            pairs=settings.loss in ("dpo", "reward"),
            labels=settings.loss == "kto",
            images=image_settings(model, data),
        )
        cut = sum(len(sample) == settings.max_length for sample in samples)
        origin = f"of {', '.join(data.paths)}" + (f" ({cut} cut to --max-length)" if cut else "")
    if settings.sampler:
        _run_sampler_check(settings, samples, origin, target)
        return
    report = check_model(
        settings.model,
        samples,
        loss=settings.loss,
        origin=origin,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        backend=settings.backend,
        context=context,
        layers=settings.layers,
        full=settings.full,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        float8=measured,
        float8_budget=budget,
        vision=vision,
        on_progress=show_status if first else None,
    )
    if first:
        show(report)
        write_json(target, report.to_dict())
    if not report.passed:
        raise SystemExit(1)


def _check_sampler_options(settings: argparse.Namespace, processes: int) -> None:
    if processes > 1:
        raise UserError("--sampler", f"cannot run in {processes} processes", "start padfree check without torchrun")
    for name, given in (("--layout", settings.layout is not None), ("--loss", settings.loss != "nll")):
        if given:
            raise UserError(name, "cannot be combined with --sampler", "leave one of them out")


def _check_vision_options(settings: argparse.Namespace) -> None:
    for name, given, fix in (
        ("--sampler", settings.sampler, "leave one of them out"),
        ("--layers", settings.layers, "remove --layers: all layers of a vision-language model are checked"),
        ("--tokenizer", settings.tokenizer, "remove --tokenizer: the model's own processor makes the tokens"),
    ):
        if given:
            raise UserError(
                name, f"{'' if given is True else f'{given} '}cannot be combined with model.vision=true", fix
            )


def _run_sampler_check(settings: argparse.Namespace, samples: Any, origin: str, target: Path | None) -> None:
    """Compare the log-probabilities of the sampler with those of the trainer. The first half of each sample is the
    prompt.
    """
    import torch

    from padfree.tools.check import check_sampler_of

    report = check_sampler_of(
        settings.model,
        samples,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        backend=settings.backend,
        layers=settings.layers,
        full=settings.full,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )
    print(f"{report.model}, {report.dtype}, prompts {origin or 'of random tokens'}")
    if report.problem is not None:
        print(f"a run has rollout.exact=false: {report.problem}")
    print(report.verdict)
    write_json(target, asdict(report))
    if not report.passed:
        raise SystemExit(1)


def data_settings(settings: argparse.Namespace) -> tuple[DataConfig | None, bool]:
    """Return the `[data]` section and the value of `model.vision`, both from a command line.

    The section has the files of --data and the settings `data.*`. Without --data, the section is None.
    """
    words = [*settings.overrides, *(settings.data or [])]
    changes = [word for word in words if re.match(r"\w+(\.\w+)+\s*=", word)]
    files = [word for word in words if word not in changes]
    other = next((word for word in changes if not word.startswith(("data.", "model.vision="))), None)
    if other is not None:
        fix = "give data settings such as data.on_bad_row=skip, or model.vision=true"
        raise UserError("override", "", fix, value=other)
    if settings.data is None:
        if words:
            raise UserError("--data", f"missing, but {words[0]!r} is given", "name the data files with --data")
        return None, False
    # A `Config` needs these settings, but a check does not use them.
    unused = ["model.path=unused", "batch.samples=1", "batch.max_tokens=1", "run.folder=unused"]
    given = [] if not files else [f"data.path={json.dumps(files, ensure_ascii=False)}"]
    found = load_config(None, [*unused, *given, *changes])
    return found.data, found.model.vision


def context_ranks(layout: str | None, processes: int) -> int:
    """Return the number of context ranks (ranks that share each sequence) in a layout, e.g. 2 for `dp=2,cp=2`.

    Raise a `UserError` if dp times cp is not the number of processes.
    """
    if layout is None:
        return 1
    sizes = {"dp": 1, "cp": 1}
    for entry in layout.split(","):
        name, _, size = entry.strip().partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise UserError("--layout", "", "give numbers of data and context ranks, such as dp=2,cp=2", value=layout)
        sizes[name] = int(size)
    wanted = sizes["dp"] * sizes["cp"]
    if wanted != processes:
        raise UserError(
            "--layout",
            f"needs {wanted} processes, but there are {processes}",
            f"use torchrun --nproc-per-node {wanted} -m padfree check ...",
            value=layout,
        )
    return sizes["cp"]


def show(report: CheckReport) -> None:
    """Print the table of a check report, with the verdict as the last line."""
    from padfree.tools.check.check_report import FLOAT8_HEADER, HEADER

    clear_status()
    for line in report.heading():
        print(line)
    print()
    _print_table([HEADER, *report.cells()], right=(1, 2, 3))
    for skipped in report.skipped:
        print(f"{skipped.check}: not run ({skipped.reason})")
    if report.float8:
        print()
        _print_table([FLOAT8_HEADER, *report.float8_cells()], right=(1, 2))
        print(report.float8_line())
    print()
    print(report.verdict)


def _print_table(table: Sequence[tuple[str, ...]], *, right: tuple[int, ...]) -> None:
    """Print a table. `right`: the indices of the columns that are aligned to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
