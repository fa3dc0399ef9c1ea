"""`padfree generate MODEL PROMPT ...`: generates a model's answers.

Examples:

    padfree generate runs/sft "What is the capital of France?"
    padfree generate runs/sft --prompts questions.txt --json > answers.jsonl
    cat letter.txt | padfree generate my-model - --system "Summarise the letter."
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from padfree.cli.main import COMMANDS
from padfree.cli.talk_options import OneLineHelp, Output, add_options, read_lines, speaker_of
from padfree.config.inputs import path_word
from padfree.errors import UserError

if TYPE_CHECKING:
    from padfree.tools.talk.speaker import Answer, Speaker

STDIN = "-"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = COMMANDS["generate"][1]
    command = commands.add_parser(
        "generate",
        help=text,
        usage="padfree generate MODEL [PROMPT ...] [options]",
        description="Print the answer of a model to each prompt.",
        formatter_class=OneLineHelp,
        epilog='example: padfree generate runs/sft "What is the capital of France?"',
    )
    add_options(command)
    command.add_argument("prompt", nargs="*", metavar="PROMPT", help="prompt text, or '-' for standard input")
    command.add_argument(
        "--prompts", type=path_word("--prompts"), metavar="FILE", help="file with one prompt per line, or '-' for stdin"
    )
    command.add_argument("--plain", action="store_true", help="send prompts without the chat template")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    prompts = _prompts(settings.prompt, settings.prompts)
    output = Output()
    try:
        speaker = speaker_of(settings)
        ids = [speaker.prompt(prompt, system=settings.system) for prompt in prompts]
        max_new_tokens_each = [
            speaker.max_new_tokens(one, settings.max_new_tokens) for one in ids
        ]  # raises an error for a prompt that is too long, before any output
        assert len(max_new_tokens_each) == len(prompts)
        if len(prompts) == 1 and not settings.json:
            _stream(speaker, ids[0], settings.max_new_tokens, output)
            return
        for number, answer in enumerate(_answers(speaker, ids, settings.max_new_tokens)):
            if settings.json:
                output.write_json({"prompt": prompts[number], **answer.as_json()})
            else:
                output.write(f"{'' if number == 0 else chr(10)}> {prompts[number]}\n{answer.text}\n")
    except KeyboardInterrupt:
        output.write("\n")
        raise SystemExit(130) from None


def _stream(speaker: Speaker, ids: Sequence[int], max_new_tokens: int, output: Output) -> None:
    (answer,) = speaker.answer([ids], max_new_tokens=max_new_tokens, on_text=lambda _, text: output.write(text))
    output.write("\n")
    if answer.end == "context":
        print("padfree generate: the answer was cut: the context of the model is full", file=sys.stderr)


def _answers(speaker: Speaker, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[Answer]:
    from padfree.tools.talk.speaker import BATCH

    for first in range(0, len(prompts), BATCH):
        yield from speaker.answer(prompts[first : first + BATCH], max_new_tokens=max_new_tokens, first=first)


def _prompts(words: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts: `words` from the command line, then the lines of `file` if it is given."""
    found = list(words)
    if STDIN in found:
        if found.count(STDIN) > 1 or file == STDIN:
            raise UserError("PROMPT", "standard input (-) can be read only once", "give a single '-'")
        found[found.index(STDIN)] = "\n".join(read_lines(sys.stdin, "standard input"))
    if file is not None:
        found += _lines_of(file)
    if not found:
        raise UserError("PROMPT", "missing", "give a text, - for standard input, or a file with --prompts")
    for prompt in found:
        if not prompt.strip():
            raise UserError("PROMPT", "a prompt is empty", "give a text")
    return found


def _lines_of(name: str) -> list[str]:
    if name == STDIN:
        lines = list(read_lines(sys.stdin, "--prompts"))
    else:
        path = Path(name)
        if path.exists() and not path.is_file():
            raise UserError("--prompts", f"{name} is not a file", "give a file with one prompt per line")
        try:
            with path.open(encoding="utf-8-sig") as file:
                lines = list(read_lines(file, f"--prompts: {name}"))
        except OSError as error:
            reason = error.strerror or os.strerror(error.errno or 0)
            raise UserError("--prompts", f"{name} cannot be read ({reason})", "give another file") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise UserError("--prompts", f"{name} has no prompt", "give a file with one prompt per line")
    return found
