"""`padfree doctor`: says why the log-probabilities of a server or a rollout file differ from a model's.

Examples:

    padfree doctor my-model --server http://127.0.0.1:8000
    padfree doctor my-model --rollouts rollouts.jsonl --temperature 0.7 --previous runs/rl/model-10
"""

from __future__ import annotations

import argparse
from pathlib import Path

from padfree.cli.json_report import clear_status, json_target, show_status, write_json
from padfree.cli.main import COMMANDS
from padfree.cli.talk_options import DEVICES, DTYPES, OneLineHelp
from padfree.config.hub import check_name
from padfree.config.inputs import path_word
from padfree.errors import UserError, check_choice, need
from padfree.tools.talk.find_model import find_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help=COMMANDS["doctor"][1],
        usage="padfree doctor MODEL (--server URL | --rollouts FILE) [options]",
        description="Say why the log-probabilities of a server or a rollout file differ from the model's. Exit code 1: "
        "they differ.",
        formatter_class=OneLineHelp,
        epilog="example: padfree doctor runs/rl --server http://127.0.0.1:8000",
    )
    add = command.add_argument
    add("model", type=path_word("MODEL"), metavar="MODEL", help="model, run or adapter folder, or a Hub id")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--server", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    source.add_argument(
        "--rollouts", type=path_word("--rollouts"), metavar="FILE", help="file of rollouts with log-probabilities"
    )
    add("--name", metavar="NAME", help="name of the served model (default: the first)")
    add(
        "--previous",
        type=path_word("--previous"),
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="earlier weights that the server may still have",
    )
    add("--base", type=path_word("--base"), metavar="NAME", help="other base model for an adapter folder")
    add("--temperature", type=float, default=1.0, metavar="T", help="temperature of the responses (default 1)")
    add("--dtype", default="auto", metavar="NAME", help="dtype that the server should use (default: auto)")
    add(
        "--chat-template",
        type=path_word("--chat-template"),
        metavar="FILE",
        help="chat template file (default: the tokenizer's)",
    )
    add("--samples", type=int, default=16, metavar="N", help="number of rollouts to score (default 16)")
    add("--max-length", type=int, default=4096, metavar="N", help="cut rollouts to N tokens (default 4096)")
    add("--device", default="auto", metavar="NAME", help="device: auto, cpu or cuda")
    add("--json", type=path_word("--json"), metavar="FILE", help="also write the report to this file")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    check_choice("--device", settings.device, DEVICES)
    check_choice("--dtype", settings.dtype, DTYPES)
    need(0.01 <= settings.temperature <= 100, "--temperature", settings.temperature, "give 0.01 to 100")
    need(settings.samples >= 1, "--samples", settings.samples, "give 1 or more")
    need(settings.max_length >= 2, "--max-length", settings.max_length, "give 2 or more")
    if settings.name is not None and settings.server is None:
        raise UserError("--name", "has no effect on rollouts", "remove --name", value=settings.name)
    for folder in settings.previous:
        check_name(folder, "--previous")
    target = json_target(settings.json)
    files = find_model(settings.model, base=settings.base)
    if settings.rollouts is not None and not Path(settings.rollouts).exists():
        raise UserError("--rollouts", "does not exist", "give a file with rollouts", value=settings.rollouts)

    import torch
    from transformers.utils import logging

    from padfree.tools.doctor import examine_rollouts, examine_server, open_patient, read_some_rollouts
    from padfree.tools.talk.speaker import device_named

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    patient = open_patient(
        settings.model,
        files,
        previous=settings.previous,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        chat_template=settings.chat_template,
        device=device_named(settings.device),
    )
    if settings.server is not None:
        report = examine_server(
            patient, settings.server, name=settings.name, temperature=settings.temperature, say=show_status
        )
    else:
        report = examine_rollouts(
            patient,
            read_some_rollouts(patient, settings.rollouts, settings.samples, max_length=settings.max_length),
            subject=settings.rollouts,
            temperature=settings.temperature,
            say=show_status,
        )
    clear_status()
    for line in report.lines():
        print(line)
    write_json(target, report.to_dict())
    if not report.healthy:
        raise SystemExit(1)
