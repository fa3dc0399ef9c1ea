"""Options and terminal output that `padfree generate` and `padfree chat` share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from padfree.config.inputs import path_word
from padfree.errors import UserError
from padfree.tools.json_objects import parsed_object
from padfree.tools.talk.find_model import find_model

if TYPE_CHECKING:
    from padfree.tools.talk.speaker import Speaker

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class OneLineHelp(argparse.HelpFormatter):
    """Help formatter whose options column is wide enough for the longest option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `padfree generate` and `padfree chat` share."""
    command.add_argument(
        "model", type=path_word("MODEL"), metavar="MODEL", help="model, run or adapter folder, or a Hub id"
    )
    command.add_argument(
        "--base", type=path_word("--base"), metavar="NAME", help="replaces the base model that an adapter names"
    )
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="maximum length of an answer (default %(default)s)"
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default 0: decode greedily)"
    )
    command.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="total probability of the tokens to sample from"
    )
    command.add_argument("--top-k", type=int, metavar="K", help="sample from this many of the likeliest tokens")
    command.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least probability relative to the likeliest token"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default 0)")
    command.add_argument(
        "--chat-template",
        type=path_word("--chat-template"),
        metavar="FILE",
        help="chat template file (default: the tokenizer's)",
    )
    command.add_argument("--template-arguments", metavar="JSON", help='template variables: {"enable_thinking": false}')
    command.add_argument("--json", action="store_true", help="print JSON lines: text, end (reason), tokens, logprobs")
    command.add_argument("--device", choices=DEVICES, default="auto", metavar="NAME", help="device: auto, cpu or cuda")
    command.add_argument(
        "--dtype", choices=DTYPES, default="auto", metavar="NAME", help="dtype: auto, float32, bfloat16, ..."
    )


def speaker_of(settings: argparse.Namespace) -> Speaker:
    """Load the model that the options name."""
    arguments = _arguments(settings.template_arguments)
    files = find_model(settings.model, base=settings.base)
    plain = getattr(settings, "plain", False)
    if plain and (settings.chat_template is not None or arguments is not None):
        raise UserError("--plain", "uses no chat template", "remove --chat-template and --template-arguments")
    plain = plain or (files.plain and settings.chat_template is None)

    from transformers.utils import logging as untyped

    from padfree.tools.talk.speaker import open_speaker

    logging: Any = untyped
    logging.disable_progress_bar()
    return open_speaker(
        files,
        plain=plain,
        chat_template=settings.chat_template,
        template_arguments=arguments,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=settings.seed,
        dtype=settings.dtype,
        device=settings.device,
    )


def _arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    found = parsed_object(text)
    if found is None:
        raise UserError("--template-arguments", "", 'give a JSON object such as {"enable_thinking": false}', value=text)
    return found


class Output:
    """Writes text to standard output. On a terminal, control characters are printed as escapes."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # for terminals with a limited character set
        self.is_terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write text and flush it, so that each token appears at once."""
        sys.stdout.write(text.translate(CONTROLS) if self.is_terminal else text)
        sys.stdout.flush()

    def write_json(self, value: dict[str, Any]) -> None:
        self.write(json.dumps(value, ensure_ascii=False) + "\n")


def read_lines(text: Any, name: str) -> Any:
    """Yield the lines of the stream `text`. Raise a `UserError` about `name` if they are not UTF-8."""
    try:
        for line in text:
            yield line.rstrip("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UserError(name, "is not UTF-8 text", "convert it to UTF-8") from None
