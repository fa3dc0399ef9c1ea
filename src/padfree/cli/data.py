"""`padfree data show`: rows of a recipe's data as the model sees them, on the terminal or as an HTML page.

Examples:

    padfree data show sft model.path=my-model data.path=train.jsonl
    padfree data show sft data.path=train.jsonl --row train.jsonl:17
    padfree data show dpo data.path=pairs.jsonl --rows 50 --page pairs.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from padfree.cli.main import COMMANDS
from padfree.config import load_config
from padfree.config.inputs import path_word
from padfree.config.output_sections import check_output
from padfree.errors import UserError

if TYPE_CHECKING:
    from padfree.tools.page import Page
    from padfree.train.data_view import ShownRow, ShownSample

COLOURS = "\033[30;42m", "\033[0m"
MARKS = "[[", "]]"
"""The brackets around trained text if the output is not a terminal. A terminal shows trained text in colour."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "data",
        help=COMMANDS["data"][1],
        description="Show rows of a recipe's data as the model sees them: the text, the trained part, the number of "
        "tokens, and the position of each message.",
        epilog="example: padfree data show sft data.path=train.jsonl --row train.jsonl:17",
    )
    command.add_argument("action", choices=("show",))
    command.add_argument(
        "recipe", type=path_word("recipe"), help="recipe of the run: a TOML file, or a name from `padfree recipes`"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="section.name=value", help="settings that replace those of the recipe"
    )
    command.add_argument("--row", default="1", metavar="N", help="first row to show: a number or file:line (default 1)")
    command.add_argument("--rows", type=int, default=1, metavar="K", help="number of rows (default 1)")
    command.add_argument("--eval", action="store_true", help="show held-out data (eval.path)")
    command.add_argument(
        "--page", type=path_word("--page"), metavar="FILE", help="write an HTML page instead of printing"
    )
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    config = load_config(settings.recipe, settings.overrides)
    if settings.rows < 1:
        raise UserError("--rows", "", "give 1 or more", value=settings.rows)

    if settings.page is not None:
        from padfree.tools.page.page import refuse_foreign

        check_output(settings.page, "--page", makes_folder=True)
        refuse_foreign(Path(settings.page), "--page")

    from padfree.train.data_view import shown_rows
    from padfree.train.training_data import image_settings, load_tokenizer, load_training_data

    if settings.eval:
        config = config.with_held_out_data()
    tokenizer = load_tokenizer(config)
    source = load_training_data(config, tokenizer, import_reward=False)
    rows = shown_rows(
        config.data,
        source,
        tokenizer,
        turns=config.loss.task.turns,
        first=settings.row,
        count=settings.rows,
        images=image_settings(config.model, config.data),
    )
    about = [*source.notes, f"data: {source.report.summary()}"]
    if settings.page is None:
        for line in (*about, "", *lines(rows, coloured=sys.stdout.isatty())):
            print(line)
        return
    from padfree.tools.page import Page

    page = Page(f"Data of {Path(settings.recipe).name}", about[-1])
    for note in about[:-1]:
        page.add_text(note)
    fill_page(page, rows)
    page.write(settings.page)
    print(f"written to {settings.page}")


def lines(rows: list[ShownRow], *, coloured: bool) -> Iterator[str]:
    """Yield data rows as lines of text. The part that is trained is in colour if `coloured` is True, otherwise in
    brackets.
    """
    begin, end = COLOURS if coloured else MARKS
    for row in rows:
        for sample in row.samples:
            yield f"{sample.name}: {counts(sample)}"
            text = "".join(f"{begin}{part.text}{end}" if part.trained else part.text for part in sample.parts)
            yield from (f"    {line}" for line in text.split("\n"))
            for number, role, tokens, trained in message_table(sample):
                yield f"  message {number:<3} {role:<10} {tokens:<16} {trained}"
            yield ""


def fill_page(page: Page, rows: list[ShownRow]) -> None:
    for row in rows:
        page.add_heading(row.place)
        for sample in row.samples:
            page.add_marked(f"{sample.name}: {counts(sample)}", [(part.text, part.trained) for part in sample.parts])
            if sample.messages:
                page.add_table("Messages", ["message", "role", "where", "trained"], list(message_table(sample)))


def counts(sample: ShownSample) -> str:
    facts = "".join(f", {name}: {value}" for name, value in sample.facts.items())
    return f"{sample.num_tokens:,} tokens, {sample.num_trained:,} trained{facts}"


def message_table(sample: ShownSample) -> Iterator[tuple[str, str, str, str]]:
    for message in sample.messages:
        where = f"tokens {message.first} to {message.end - 1}"
        yield str(message.number), message.role, where, f"{message.num_trained} trained" if message.num_trained else ""
