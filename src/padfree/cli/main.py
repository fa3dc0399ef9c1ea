"""`padfree COMMAND`: finds the command, prints mistakes and bugs, and sets the exit code.

A mistake of the user (`UserError`) is one line. Any other exception is a bug and shows its traceback.

Only the module of the command that was asked for is imported: help, and a mistake in a setting, need not wait for
torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import NoReturn

from padfree.cli.flags import OVERRIDE, meant, understood
from padfree.cli.output import NotedStream, hold_standard_descriptors, noted_stdout, surviving_streams
from padfree.config.loss import TASKS
from padfree.config.recipe_files import default_recipe
from padfree.errors import EXIT_BUG, UserError, bug_note, system_error
from padfree.stop_signals import StopRequested, StopSignals
from padfree.warning import PadfreeWarning

COMMANDS = {
    "chat": ("padfree.cli.chat", "chat with a model, turn by turn"),
    "check": ("padfree.cli.check", "compare packed training of your model with one sample at a time"),
    "data": ("padfree.cli.data", "show rows of the data as the model sees them"),
    "demo": ("padfree.tools.demo", "plan, check, fine-tune and reinforce a tiny model, on a CPU"),
    "env": ("padfree.cli.env", "print versions, devices and kernels, for a bug report"),
    "eval": ("padfree.cli.eval", "measure a model on held-out data, as a recipe's [eval] says"),
    "generate": ("padfree.cli.generate", "let a model answer prompts"),
    "launch": ("padfree.cli.launch", "run a command on several hosts, over ssh and torchrun"),
    "plan": ("padfree.cli.plan", "plan an epoch: packs, balance, time and memory"),
    "recipes": ("padfree.cli.recipes", "list the recipes that come with padfree, or print one"),
    "report": ("padfree.cli.report", "make one HTML page of a run folder, or of several"),
    "settings": ("padfree.cli.settings", "list the settings of a recipe, with types, defaults and meanings"),
    **{name: ("padfree.cli.train", task.help) for name, task in TASKS.items()},
}
"""By name: the module that has the command, and what it does in a line."""

TRAINING = tuple(TASKS)
STOPPED = 75
"""The exit code of a run that a signal has stopped, and that goes on if it is started again (EX_TEMPFAIL)."""

GO_ON_WITHOUT_OUTPUT = (*TRAINING, "demo", "launch")
"""Commands whose work is in files: what happens to their output must not end them."""

CALL_USER_CODE = (*TRAINING, "eval")
"""Commands that call functions of the user: rewards, losses, engines, environments."""


def parser(loaded: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The whole command line; of commands that are not `loaded` it knows the name and the line only."""
    commands = argparse.ArgumentParser(
        prog="padfree",
        description="Padding-free training of Hugging Face language models.",
        epilog="example: padfree sft model.path=my-model data.path=rows.jsonl",
        add_help=False,
    )
    commands.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # so that all fits on one screen
    added = commands.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {COMMANDS[name][0] for name in loaded if name in COMMANDS}
    for name, (module, text) in COMMANDS.items():
        if module not in modules:
            added.add_parser(name, help=text)
        elif name not in added.choices:  # a module may have two commands
            importlib.import_module(module).add_command(added)
    return commands


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words of a command line, understood; argparse exits with 2 if they cannot be."""
    commands = parser(words[:1])
    settings, rest = commands.parse_known_args(understood(words))
    if hasattr(settings, "prompt") and all(word == "-" or not word.startswith("-") for word in rest):
        settings.prompt = [*settings.prompt, *rest]  # prompts behind a flag, where argparse no longer takes them
        return settings
    taken = next((name for name in ("overrides", "settings") if hasattr(settings, name)), None)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (overrides != rest or taken is None):
        unknown = next((word for word in rest if word not in overrides), rest[0])
        commands.error(f"unrecognized arguments: {' '.join(rest)}{meant(unknown, words[0])}")
    if overrides and taken is not None:  # settings behind a flag, where argparse no longer takes them
        setattr(settings, taken, [*getattr(settings, taken), *overrides])
    if settings.command in TRAINING and (settings.recipe is None or OVERRIDE.match(settings.recipe)):
        settings.overrides = [*([settings.recipe] if settings.recipe else []), *settings.overrides]
        settings.recipe = default_recipe(settings.command)
        if settings.recipe is None:
            commands.error("the following arguments are required: recipe; `padfree recipes` lists those to start from")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, see docs/training.md (argparse itself exits with 2)."""
    if arguments is None:
        hold_standard_descriptors()
        if not sys.warnoptions:  # this is the command itself, and nobody gave -W or PYTHONWARNINGS
            show_own_warnings_only()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # it flushes; a stream that cannot be written is looked at later
                stream.reconfigure(errors="backslashreplace")  # an ASCII terminal, a file name that is not UTF-8
    settings = parsed(list(sys.argv[1:] if arguments is None else arguments))
    command: str = settings.command
    goes_on = command in GO_ON_WITHOUT_OUTPUT and not getattr(settings, "dry_run", False)
    listening = StopSignals(partial(say, command)) if command != "launch" else nullcontext()
    refusing = exits_refused() if command in CALL_USER_CODE else nullcontext()
    printed: NotedStream | None = None
    with surviving_streams(command) if goes_on else nullcontext():
        try:
            with (
                nullcontext() if goes_on else noted_stdout() as printed,
                listening as settings.signals,
                refusing,
            ):
                code: int | None = settings.run(settings)
        except StopRequested as stop:
            return 128 + stop.number  # the signal was answered with a line when it came
        except OSError as error:
            if printed is None or error is not printed.failure:
                return report(command, system_error(error) or error)  # of another file
            if isinstance(error, BrokenPipeError):
                return 0  # whoever read the output has seen enough
            say(command, f"stdout: cannot be written ({error.strerror}); free space, or send the output elsewhere")
            return 1
        except Exception as error:
            return report(command, error)
        except BaseException as error:
            if command not in CALL_USER_CODE:
                raise  # SystemExit with the exit code of the command
            say(command, raised_by_user_code(error))
            return 1
    return code or 0


def report(command: str, error: Exception) -> int:
    """One line for a `UserError`, the traceback of a bug; the exit code."""
    if isinstance(error, UserError):
        say(command, str(error))
        return 1
    with suppress(OSError):
        traceback.print_exception(error, file=sys.stderr)
    say(command, bug_note())
    return EXIT_BUG


def say(command: str, line: str) -> None:
    """One line on stderr, if there is one."""
    with suppress(OSError):
        print(f"padfree {command}: {line}", file=sys.stderr, flush=True)


def raised_by_user_code(error: BaseException) -> str:
    """What is no error of Python's (`sys.exit`, `KeyboardInterrupt`) and no signal: the run did not end by itself."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen"))  # exit() is there
    shown = f"{type(error).__name__}({error})" if str(error) else type(error).__name__
    return (
        f"{place.filename}:{place.lineno} in {place.name} raised {shown}, which would end the run in silence; raise an "
        "Exception there, or return"
    )


@contextmanager
def exits_refused() -> Iterator[None]:
    """`os._exit` raises in this process, so that a function of the user cannot end a run without a word.

    Processes that are forked from it end by `os._exit`, as they must.
    """
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        caller = traceback.extract_stack(limit=2)[0]
        raise UserError(
            f"os._exit({status})",
            f"{caller.filename}:{caller.lineno} in {caller.name} called it, which would end the run in silence",
            "raise an Exception there, or return",
        )

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def show_own_warnings_only() -> None:
    """Hide third-party warnings. Show each padfree warning once."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", PadfreeWarning)
