"""`padfree report RUN ...`: one page of plots and tables from run folders."""

from __future__ import annotations

import argparse

from padfree.config.inputs import path_word


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "report",
        help="write an HTML report of one or more run folders",
        description="Write one HTML page with plots of all metrics, events and settings. The page needs no network.",
        epilog="example: padfree report runs/sft runs/sft-lora --output compare.html --names all,lora",
    )
    command.add_argument(
        "runs", type=path_word("RUN"), nargs="+", metavar="RUN", help="run folder (run.folder of a run)"
    )
    command.add_argument(
        "--output",
        type=path_word("--output"),
        help="file to write (default: report.html in or next to the first run folder)",
    )
    command.add_argument("--names", help="names of the runs, separated by commas (default: names of the folders)")
    command.set_defaults(run=run)


def run(settings: argparse.Namespace) -> None:
    from padfree.tools.report import default_output, write_report

    names = None if settings.names is None else [name.strip() for name in settings.names.split(",")]
    output = settings.output or default_output(settings.runs)
    for note in write_report(settings.runs, settings.output, names=names):
        print(f"note: {note}")
    print(f"written to {output}")
