"""The command line of `rollout.agent`: the columns of a data row replace its placeholders, but must not run as code.

    ["python", "agent.py", "{question}"]      {question} is replaced by the column `question`, as one argument
    ["python", "agent.py", "{{question}}"]    the argument is the text {question}, because the braces are doubled

A command is rejected if a placeholder occurs in a position where the text of the column could run as code:

    the program                                 ["{tool}", "x"]
    code in an argument                         ["sh", "-c", "agent {question}"], ["python", "-c", "ask('{question}')"]
    an interpreter's script                     ["python", "{file}"], ["awk", "{question}", "rows.txt"]
    an interpreter's options before the script  ["python", "{option}", "agent.py"]
    arguments of a program that calls a shell   ["ssh", "host", "agent", "{question}"]

A command is also rejected if an interpreter gets neither code nor a script: it would run its standard input, which is
the data row. Arguments after the code or the script are safe: `["sh", "-c", "agent \\"$1\\"", "sh", "{question}"]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from padfree.errors import UserError, closest

COLUMN = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
LONGEST_ARGUMENT = 128 * 1024 - 1
"""Maximum bytes of one argument on Linux (MAX_ARG_STRLEN)."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS = _names("ash bash csh dash elvish fish hush ksh lksh mksh oksh posh pwsh rbash sh tcsh xonsh yash zsh")
INTERPRETERS = SHELLS | _names(
    """awk bun clisp cmd deno duckdb elixir emacs erl escript expect gawk groovy guile irb ipython jjs jshell julia lua
    luajit m4 mawk mysql nawk node nodejs nu octave ocaml osascript perl php powershell psql pypy python r racket raku
    rscript ruby sbcl scala sed sqlite tclsh ts-node tsx vim"""
)
"""Programs that run code from an argument or from standard input."""
WRAPPERS = _names(
    """busybox chroot chrt conda docker doas env firejail flatpak ionice kubectl ltrace mamba micromamba nice nohup
    nsenter numactl perf pipenv pixi podman poetry runuser setsid srun stdbuf strace sudo systemd-run taskset time
    timeout toybox unbuffer unshare uv xvfb-run"""
)
"""Programs that start another program, which is named in their arguments."""
SHELL_CALLERS = _names("at batch eval find mosh parallel rsh screen script ssh su tmux watch xargs")
"""Programs that pass their arguments to a shell, or run them as commands."""
CODE_OPTION = re.compile(r"-\w*[cCeErp]|--(eval|exec|execute|print|command|run)|-(exec|Command)|/[cCkK]", re.ASCII)
"""An option that is followed by code: -c, -lc, -e, -ne, --eval, /c. If such an option has another meaning in some
program, its value is checked too, which is harmless.
"""


def column_names(arguments: Sequence[str]) -> list[str]:
    """Return the column names that occur as placeholders in the arguments, without duplicates."""
    return list(dict.fromkeys(match[2] for argument in arguments for match in COLUMN.finditer(argument) if match[2]))


def filled(arguments: Sequence[str], row: Mapping[str, Any], place: str = "the row") -> list[str]:
    """Return the arguments with placeholders replaced by columns of the row. Other text in braces is kept.

    `place`: how error messages name the row.
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        name = match[2]
        if row.get(name) is None:
            has = f"has {', '.join(map(str, row))}" if name not in row else "has no value in that column"
            near = closest(name, [str(column) for column in row]) if name not in row else None
            fix = f"did you mean {{{near}}}?" if near is not None else "name a column that every row has"
            raise UserError(
                "rollout.agent",
                f"contains {{{name}}}, but {place} {has}",
                f"{fix} (write braces twice if they are plain text)",
            )
        content = row[name]
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)

    return [COLUMN.sub(value, argument) for argument in arguments]


def check_row(arguments: Sequence[str], row: Mapping[str, Any], place: str) -> None:
    """Raise a `UserError` if a row lacks the column of a placeholder, or has a value that cannot be an argument.

    `place`: how error messages name the row.
    """
    for argument, given in zip(filled(arguments, row, place), arguments, strict=True):
        if argument == given:
            continue
        if "\0" in argument:
            raise UserError(
                "rollout.agent",
                f"contains a null character in {place}, which is not possible in an argument",
                "remove the character, or let the program read the row from standard input",
                value=given,
            )
        if (size := len(argument.encode("utf-8", "surrogatepass"))) > LONGEST_ARGUMENT:
            raise UserError(
                "rollout.agent",
                f"has {size} bytes in {place}, but an argument can have at most {LONGEST_ARGUMENT}",
                "let the program read the row from standard input, where it is JSON",
                value=given,
            )


def check_command(arguments: Sequence[str]) -> None:
    """Raise a `UserError` if a command could run the text of a data row as code, e.g. `sh -c "echo {question}"`.

    `arguments`: the program and its arguments, with the names of data columns in braces.
    """
    problem = _danger(arguments)
    if problem is not None:
        raise UserError(
            "rollout.agent",
            f"{list(arguments)}: {problem}, so text of the data row would be run as code",
            "use a program or script that takes each data column as a separate argument, or reads the data row as JSON "
            "from standard input",
        )


def _danger(arguments: Sequence[str]) -> str | None:
    if column_names(arguments[:1]):
        return f"{arguments[0]!r} makes a column the program"
    reached = True  # this argument surely is a program: only wrappers precede it
    for index, argument in enumerate(arguments):
        name, rest = _name(argument), arguments[index + 1 :]
        if reached and name in SHELL_CALLERS and (found := _first_with_column(rest)) is not None:
            return f"{name} passes {found!r} to a shell"
        if reached and name == "env" and (found := _split_string(rest)) is not None:
            return f"env splits {found!r} into arguments"
        known = reached and name in INTERPRETERS
        if name in INTERPRETERS or (name.endswith("sh") and "." not in name):
            problem = _interpreted(name, rest, surely=known)
            if problem is not None or known:
                return problem
        reached = reached and (index > 0 or name in WRAPPERS) and not (index > 0 and _is_script(argument))
    return None


def _interpreted(name: str, arguments: Sequence[str], *, surely: bool) -> str | None:
    """Return how an interpreter could run text of the data row as code, or None if its arguments are safe.

    `name`: the name of the interpreter. `surely`: whether `name` is certainly run as a program. If not, `name` may be
    an argument of another program.
    """
    has_code, index = False, 0
    while index < len(arguments):
        argument, following = arguments[index], arguments[index + 1] if index + 1 < len(arguments) else None
        if argument == "-m" and following is not None:
            return f"{name} runs the module {following!r}" if column_names([following]) else None
        if CODE_OPTION.fullmatch(argument) and following is not None and not following.startswith("-"):
            if column_names([following]):
                return f"{name} runs {following!r}"
            if argument != "-r" and _is_script(following):  # `bash -e run.sh`: this -e takes no code
                return None
            has_code, index = True, index + 2
            continue
        plain = not argument.startswith(("-", "+"))
        if plain and has_code:
            return None  # this and all following arguments are passed to the code
        if surely and column_names([argument]):
            return f"{name} takes {argument!r} as code or as its script"
        if plain and _is_script(argument):
            return None
        index += 1
    informs = any(argument in ("--version", "--help", "-V", "-h") for argument in arguments)
    if surely and not has_code and not informs:
        return f"{name} gets no script, and runs its standard input, which is the row"
    return None


def _is_script(argument: str) -> bool:
    """Return whether an argument looks like the name of a file, such as `agent.py` or `./agent`."""
    return not argument.startswith("-") and not re.search(r"\s", argument) and ("." in argument or "/" in argument)


def _name(argument: str) -> str:
    """Return the name of a program without folder and version: /usr/bin/python3.11 -> python."""
    name = PurePath(argument.replace("\\", "/")).name.lower().removesuffix(".exe")
    return re.sub(r"[\d.]+$", "", name) or name


def _first_with_column(arguments: Sequence[str]) -> str | None:
    return next((argument for argument in arguments if column_names([argument])), None)


def _split_string(arguments: Sequence[str]) -> str | None:
    """Return the string that `env -S` splits into arguments if the string has a placeholder, otherwise None."""
    for index, argument in enumerate(arguments):
        text = arguments[index + 1] if argument in ("-S", "--split-string") and index + 1 < len(arguments) else ""
        if re.match(r"-v?S.|--split-string=", argument):
            text = argument
        if column_names([text]):
            return text
    return None
