"""`padfree export MODEL FILE.gguf`: writes a model and its tokenizer to one GGUF file in bfloat16, for llama.cpp."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from padfree.cli.main import COMMANDS
from padfree.config.inputs import path_word
from padfree.errors import UserError
from padfree.tools.talk.find_model import find_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "export",
        help=COMMANDS["export"][1],
        description="Write a model and its tokenizer to one GGUF file in bfloat16. Adapters are merged.",
        epilog="example: padfree export runs/sft sft.gguf",
    )
    command.add_argument(
        "model",
        type=path_word("MODEL"),
        metavar="MODEL",
        help="a model folder, a run folder, an adapter folder or a Hub id",
    )
    command.add_argument(
        "file", type=path_word("FILE"), metavar="FILE", help="the file to write; its name ends in .gguf"
    )
    command.add_argument(
        "--base",
        type=path_word("--base"),
        metavar="MODEL",
        help="the base model of adapters, if not the one that they name",
    )
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    path = Path(settings.file)
    if path.suffix != ".gguf":
        raise UserError("FILE", "is not a name of a GGUF file", "give a name that ends in .gguf", value=settings.file)
    if path.exists():
        raise UserError("FILE", f"{path} exists", "give another name, or remove this file")
    if not path.absolute().parent.is_dir():
        raise UserError("FILE", f"the folder {path.parent} does not exist", "create the folder, or give another name")
    if find_spec("gguf") is None:
        raise UserError("FILE", "the package gguf is missing", "install it with pip install 'padfree[gguf]'")
    files = find_model(settings.model, base=settings.base)

    from transformers.utils import logging

    from padfree.tools.talk.export_gguf import export_gguf

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    architecture = export_gguf(files, path)
    print(f"{path}: {architecture}, bfloat16, {path.stat().st_size / 1e6:.1f} MB")
