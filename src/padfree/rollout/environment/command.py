"""The command line of `rollout.agent`: columns of the data row replace its placeholders, but must not run as code.

    ["python", "agent.py", "{question}"]                  {question} is replaced by the column `question`
    ["python", "agent.py", "{{question}}"]                the argument is the text {question}
    ["sh", "-c", "agent {question}"]                      rejected: the shell runs the column
    ["ssh", "host", "agent", "{question}"]                rejected: ssh passes its arguments to a shell
    ["sh", "-c", "agent \\"$1\\"", "sh", "{question}"]      accepted: the column is an argument of the code

A command is also rejected if an interpreter gets neither code nor a script. It would run its standard input, which is
the data row.
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
OPTIONS_ANYWHERE = _names("duckdb emacs mysql octave psql sed sqlite vim")
"""Interpreters that also take options, and therefore code, after their other arguments."""
CODE_IS_REST = _names("cmd powershell pwsh")
"""Interpreters that join all arguments after the option `-Command` or `/c`, and run the result as code."""
CODE_IS_LAST = SHELLS - CODE_IS_REST | _names("ipython pypy python")
"""Interpreters that pass all arguments after code (`-c CODE`) to the code, even if they look like options."""
CODE_OPTION = re.compile(r"-\w*[cCeErp]|--(eval|exec|execute|print|command|run)|-(exec|Command)|/[cCkK]", re.ASCII)
"""Options after which an interpreter may expect code, such as -c, -lc, -e, -ne, --eval and /c."""
CODE_OPTIONS = {
    **dict.fromkeys(SHELLS, re.compile(r"-\w*c", re.ASCII)),
    **dict.fromkeys(CODE_IS_REST, re.compile(r"[-/](c|k|command|encodedcommand)", re.IGNORECASE)),
    **dict.fromkeys(_names("guile ipython pypy python"), re.compile(r"-\w*c", re.ASCII)),
    **dict.fromkeys(_names("bun node nodejs ts-node tsx"), re.compile(r"-(e|p|pe)|--(eval|print)")),
    **dict.fromkeys(_names("php"), re.compile(r"-[rBRE]")),
    **dict.fromkeys(_names("perl ruby"), re.compile(r"-\w*[eE]", re.ASCII)),
}
"""The options of well-known interpreters after which they certainly expect code."""
FLAGS = {
    **dict.fromkeys(SHELLS, re.compile(r"[-+][abefhiklmnprtuvx]+")),
    **dict.fromkeys(CODE_IS_REST, re.compile(r"-(file|noprofile|noninteractive|nologo)", re.IGNORECASE)),
    **dict.fromkeys(_names("ipython pypy python"), re.compile(r"-[bBdEiIOPqsSuvx]+")),
    **dict.fromkeys(_names("bun node nodejs ts-node tsx"), re.compile(r"--no-[\w-]+|--enable-source-maps")),
    **dict.fromkeys(_names("perl ruby"), re.compile(r"-[aslnptTw]+")),
}
"""The options of well-known interpreters that certainly have no value, so that the next argument may be the script."""


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
            has = f"has only the columns {', '.join(map(str, row))}" if name not in row else "has null in this column"
            near = closest(name, [str(column) for column in row]) if name not in row else None
            fix = f"did you mean {{{near}}}?" if near is not None else "name a column that every row has"
            raise UserError(
                "rollout.agent",
                f"the placeholder {{{name}}} has no value, because {place} {has}",
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
                f"is {size} bytes long with the values of {place}, but an argument can have at most {LONGEST_ARGUMENT}",
                "let the program read the row as JSON from standard input",
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
            problem = _interpreted(name, rest) if known else _maybe_interpreted(name, rest)
            if problem is not None or known:
                return problem
        reached = reached and (index > 0 or name in WRAPPERS) and not (index > 0 and _is_script(argument))
    return None


def _interpreted(name: str, arguments: Sequence[str]) -> str | None:
    """Return how the interpreter `name` could run text of the data row as code, or None if its `arguments` are safe.

    Columns after the script are safe, because they are arguments of the script.
    """
    column = _first_with_column(arguments)
    if name in OPTIONS_ANYWHERE and column is not None:
        return f"{name} may take {column!r} as an option with code"
    has_code, may_be_value, index = False, False, 0
    while index < len(arguments):
        argument, following = arguments[index], arguments[index + 1] if index + 1 < len(arguments) else None
        if column_names([argument]):
            return f"{name} may take {argument!r} as code, as an option or as its script"
        if argument == "--" and has_code:
            return None  # later arguments are arguments of the code
        if argument == "-m" and following is not None and name in CODE_IS_LAST:
            return f"{name} runs the module {following!r}" if column_names([following]) else None
        if name in CODE_OPTIONS and CODE_OPTIONS[name].fullmatch(argument) and following is not None:
            code = _first_with_column(arguments[index + 1 :] if name in CODE_IS_REST else [following])
            if code is not None:
                return f"{name} runs {code!r}"
            if name in CODE_IS_LAST:
                return None  # later arguments are arguments of the code
            has_code, may_be_value, index = True, False, index + 2
            continue
        if argument.startswith(("-", "+")):
            flag = name in FLAGS and FLAGS[name].fullmatch(argument)
            may_be_value = not flag and "=" not in argument and argument != "--"
        elif may_be_value:  # in `node -r dotenv/config {file}`, dotenv/config is not the script
            may_be_value = False
        else:
            return None  # the script, or the first argument of the code
        index += 1
    informs = any(argument in ("--version", "--help", "-V", "-h") for argument in arguments)
    if not has_code and not informs:
        return f"{name} gets no script, and runs its standard input, which is the row"
    return None


def _maybe_interpreted(name: str, arguments: Sequence[str]) -> str | None:
    """Return how the `arguments` could run text of the data row as code if `name`, an argument, is an interpreter."""
    for index, argument in enumerate(arguments[:-1]):
        following = arguments[index + 1]
        if argument == "-m":
            return f"{name} runs the module {following!r}" if column_names([following]) else None
        if CODE_OPTION.fullmatch(argument) and not following.startswith("-"):
            return f"{name} runs {following!r}" if column_names([following]) else None
        if _is_script(argument):
            return None
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
    """Return the text after `env -S` if it contains a column in braces, e.g. `{question}`. Otherwise, return None."""
    for index, argument in enumerate(arguments):
        text = arguments[index + 1] if argument in ("-S", "--split-string") and index + 1 < len(arguments) else ""
        if re.match(r"-v?S.|--split-string=", argument):
            text = argument
        if column_names([text]):
            return text
    return None
