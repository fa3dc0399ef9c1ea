"""`padfree COMMAND`: runs a command, prints errors, and returns the exit code.

A mistake of the user (`UserError`) is printed as one line. Any other exception is a bug and is printed with its
traceback.

Only the module of the given command is imported, so that help and error messages about settings do not wait for torch.
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
from typing import Any, NoReturn

from padfree.cli.flags import OVERRIDE, normalised_words, suggestion, with_marks, without_mark
from padfree.cli.output import ErrorRecordingStream, error_recording_stdout, open_closed_descriptors, surviving_streams
from padfree.config.inputs import PathWord, user_path
from padfree.config.loss import TASKS
from padfree.config.recipe_files import default_recipe
from padfree.errors import EXIT_BUG, UserError, bug_note, system_error
from padfree.stop_signals import StopRequested, StopSignals
from padfree.warning import PadfreeWarning

COMMANDS = {
    "chat": ("padfree.cli.chat", "chat with a model, turn by turn"),
    "check": ("padfree.cli.check", "compare packed training of your model with one sample at a time"),
    "data": ("padfree.cli.data", "show data rows as the model sees them"),
    "demo": ("padfree.tools.demo.run_demo", "plan, check, fine-tune and run RL with a tiny model, on a CPU"),
    "doctor": ("padfree.cli.doctor", "say why a server's log-probabilities differ from a model's"),
    "env": ("padfree.cli.env", "print versions, devices and kernels, for a bug report"),
    "eval": ("padfree.cli.eval", "evaluate a model on held-out data"),
    "export": ("padfree.cli.gguf", "write a model to a GGUF file, for llama.cpp"),
    "generate": ("padfree.cli.generate", "generate a model's answers to prompts"),
    "launch": ("padfree.cli.launch", "run a command on several hosts, over ssh or Slurm"),
    "plan": ("padfree.cli.plan", "plan an epoch: packs, load balance, time and memory"),
    "recipes": ("padfree.cli.recipes", "list the recipes that come with padfree, or print one"),
    "report": ("padfree.cli.report", "write an HTML report of one or more run folders"),
    "settings": ("padfree.cli.settings", "list the settings of a recipe, with types, defaults and meanings"),
    **{name: ("padfree.cli.train", task.help) for name, task in TASKS.items()},
}
"""The module and the help text of each command."""

TRAINING = tuple(TASKS)
STOPPED = 75
"""Exit code of a run that was stopped by a signal and can be resumed (EX_TEMPFAIL)."""

GO_ON_WITHOUT_OUTPUT = (*TRAINING, "demo", "launch")
"""Commands that write their results to files. They therefore continue if stdout or stderr cannot be written."""

CALL_USER_CODE = (*TRAINING, "eval")
"""Commands that call user functions: rewards, losses, engines, environments."""


class CommandHelp(argparse.HelpFormatter):
    """Help formatter that shows each command on one line. Its column of names is wide enough for the longest name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 4 + max(map(len, COMMANDS))  # names are indented by four spaces


def parser(loaded: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Only the commands in `loaded` are imported and get their options. All other commands get just a help line.
    """
    commands = argparse.ArgumentParser(
        prog="padfree",
        description="Padding-free training of Hugging Face language models.",
        epilog="example: padfree sft model.path=my-model data.path=rows.jsonl",
        formatter_class=CommandHelp,
        add_help=False,
    )
    commands.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # keeps the help within one screen
    added = commands.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {COMMANDS[name][0] for name in loaded if name in COMMANDS}
    for name, (module, text) in COMMANDS.items():
        if module not in modules:
            added.add_parser(name, help=text)
        elif name not in added.choices:  # a module may define several commands
            importlib.import_module(module).add_command(added)
    return commands


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command line; argparse exits with code 2 if that fails."""
    commands = parser(words[:1])
    settings, rest = commands.parse_known_args(normalised_words(with_marks(words)))
    takes_rest = all(word == "-" or not word.startswith("-") for word in rest)
    rest = [without_mark(word) for word in rest]
    for name, value in vars(settings).items():
        setattr(settings, name, without_mark(value))
    if hasattr(settings, "prompt") and takes_rest:
        settings.prompt = [*settings.prompt, *rest]  # argparse leaves prompts that follow a flag in `rest`
        return settings
    taken = next((name for name in ("overrides", "settings") if hasattr(settings, name)), None)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (overrides != rest or taken is None):
        unknown = next((word for word in rest if word not in overrides), rest[0])
        meant = "; write -- before a prompt that begins with -" if hasattr(settings, "prompt") else ""
        commands.error(f"unrecognized arguments: {' '.join(rest)}{suggestion(unknown, words[0])}{meant}")
    if overrides and taken is not None:  # argparse leaves settings that follow a flag in `rest`
        setattr(settings, taken, [*getattr(settings, taken), *overrides])
    if settings.command in TRAINING and (settings.recipe is None or OVERRIDE.match(settings.recipe)):
        settings.overrides = [*([settings.recipe] if settings.recipe else []), *settings.overrides]
        settings.recipe = default_recipe(settings.command)
        if settings.recipe is None:
            commands.error("the following arguments are required: recipe; `padfree recipes` lists the recipes")
    return settings


def checked_paths(value: Any) -> Any:
    """Return the value of an argument, with `~` expanded if it is a path or a list of paths. Raise a `UserError` if a
    path is empty or names an unknown home.
    """
    if isinstance(value, list):
        return [checked_paths(entry) for entry in value]
    return user_path(value, value.option) if isinstance(value, PathWord) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. docs/guides/runs.md lists the codes.

    `arguments`: the words of the command line. None: the arguments of this process. Wrong usage exits with code 2.
    """
    if arguments is None:
        open_closed_descriptors()
        if not sys.warnoptions:  # no -W and no PYTHONWARNINGS
            show_own_warnings_only()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # `reconfigure` flushes the stream; if that fails, it is handled later
                stream.reconfigure(errors="backslashreplace")  # for ASCII terminals and file names that are not UTF-8
    settings = parsed(list(sys.argv[1:] if arguments is None else arguments))
    command: str = settings.command
    goes_on = command in GO_ON_WITHOUT_OUTPUT and not getattr(settings, "dry_run", False)
    listening = StopSignals(partial(say, command)) if command != "launch" else nullcontext()
    refusing = refuse_os_exit() if command in CALL_USER_CODE else nullcontext()
    printed: ErrorRecordingStream | None = None
    with surviving_streams(command) if goes_on else nullcontext():
        try:
            with (
                nullcontext() if goes_on else error_recording_stdout() as printed,
                listening as settings.signals,
                refusing,
            ):
                for name, value in list(vars(settings).items()):
                    setattr(settings, name, checked_paths(value))
                code: int | None = settings.run(settings)
        except StopRequested as stop:
            return 128 + stop.number  # `StopSignals` has printed the message
        except OSError as error:
            if printed is None or error is not printed.failure:
                return report(command, system_error(error) or error)  # the error is about another file than stdout
            if isinstance(error, BrokenPipeError):
                return 0  # the program that reads the pipe has ended
            say(command, f"stdout: cannot be written ({error.strerror}); free space, or redirect the output")
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
    """Print a `UserError` as one line, and any other exception with its traceback as a bug. Return the exit code."""
    if isinstance(error, UserError):
        say(command, str(error))
        return 1
    with suppress(OSError):
        traceback.print_exception(error, file=sys.stderr)
    say(command, bug_note())
    return EXIT_BUG


def say(command: str, line: str) -> None:
    """Print one line to stderr, if stderr is open."""
    with suppress(OSError):
        print(f"padfree {command}: {line}", file=sys.stderr, flush=True)


def raised_by_user_code(error: BaseException) -> str:
    """Return the error message for a `SystemExit` or `KeyboardInterrupt` that the user's own code raised.

    The exception cannot come from a signal, because signals raise `StopRequested`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen"))  # skips exit()
    shown = f"{type(error).__name__}({error})" if str(error) else type(error).__name__
    return (
        f"{place.filename}:{place.lineno} in {place.name} raised {shown}, which would end the run without a "
        "message; raise an Exception there, or return"
    )


@contextmanager
def refuse_os_exit() -> Iterator[None]:
    """Context manager in which `os._exit` raises a `UserError`, so that user code cannot end a run without a message.

    Forked processes still end with `os._exit`.
    """
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        caller = traceback.extract_stack(limit=2)[0]
        raise UserError(
            f"os._exit({status})",
            f"{caller.filename}:{caller.lineno} in {caller.name} calls this function, which would end the run without "
            "a message",
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
