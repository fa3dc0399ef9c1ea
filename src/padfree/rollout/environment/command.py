"""The words of `rollout.agent`: columns of a row in them, and words that a program would run as code.

    ["python", "agent.py", "{question}"]      {question}: that column of the row, as one argument of the program
    ["python", "agent.py", "{{question}}"]    the text {question}: doubled braces stay single ones

A column is data, and data must not be run. So a command is refused if a column stands

    in the program         ["{tool}", "x"]
    in code                ["sh", "-c", "agent {question}"], ["python", "-c", "ask('{question}')"]
    before the script      ["python", "{file}"], ["awk", "{question}", "rows.txt"]
    behind a program that hands its words to a shell       ["ssh", "host", "agent", "{question}"]

and if an interpreter gets no code at all: it would run its standard input, which is the row. Arguments behind the code
or the script are safe: `["sh", "-c", "agent \\"$1\\"", "sh", "{question}"]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from padfree.errors import UserError, closest

COLUMN = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
LONGEST_WORD = 128 * 1024 - 1
"""Bytes that Linux lets one argument have (MAX_ARG_STRLEN)."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS = _names("ash bash csh dash elvish fish hush ksh lksh mksh oksh posh pwsh rbash sh tcsh xonsh yash zsh")
INTERPRETERS = SHELLS | _names(
    """awk bun clisp cmd deno duckdb elixir emacs erl escript expect gawk groovy guile irb ipython jjs jshell julia lua
    luajit m4 mawk mysql nawk node nodejs nu octave ocaml osascript perl php powershell psql pypy python r racket raku
    rscript ruby sbcl scala sed sqlite tclsh ts-node tsx vim"""
)
"""Programs that take code as an argument, or from standard input."""
WRAPPERS = _names(
    """busybox chroot chrt conda docker doas env firejail flatpak ionice kubectl ltrace mamba micromamba nice nohup
    nsenter numactl perf pipenv pixi podman poetry runuser setsid srun stdbuf strace sudo systemd-run taskset time
    timeout toybox unbuffer unshare uv xvfb-run"""
)
"""Programs that start the program that is named among their words."""
SHELL_CALLERS = _names("at batch eval find mosh parallel rsh screen script ssh su tmux watch xargs")
"""Programs that hand their words to a shell, or make commands of them."""
CODE_OPTION = re.compile(r"-\w*[cCeErp]|--(eval|exec|execute|print|command|run)|-(exec|Command)|/[cCkK]", re.ASCII)
"""An option with code behind it: -c, -lc, -e, -ne, --eval, /c. With some programs it is another option; then what is
behind it is looked at for nothing."""


def column_names(words: Sequence[str]) -> list[str]:
    """The columns that the words name, each once."""
    return list(dict.fromkeys(found[2] for word in words for found in COLUMN.finditer(word) if found[2]))


def filled(words: Sequence[str], row: Mapping[str, Any], place: str = "the row") -> list[str]:
    """Columns of the row in the place of their names in braces; braces around anything else stay."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        name = found[2]
        if row.get(name) is None:
            has = f"has {', '.join(map(str, row))}" if name not in row else "has no value there"
            near = closest(name, [str(column) for column in row]) if name not in row else None
            cure = f"did you mean {{{near}}}?" if near is not None else "name a column that every row has"
            raise UserError(
                "rollout.agent", f"{{{name}}}, but {place} {has}", f"{cure} (a brace as such is written twice)"
            )
        held = row[name]
        return held if isinstance(held, str) else json.dumps(held, ensure_ascii=False, default=str)

    return [COLUMN.sub(value, word) for word in words]


def check_row(words: Sequence[str], row: Mapping[str, Any], place: str) -> None:
    """Refuse a row that lacks a column which the words name, or whose value cannot be an argument of a program."""
    found = filled(words, row, place)
    for word, given in zip(found, words, strict=True):
        if word == given:
            continue
        if "\0" in word:
            raise UserError(
                "rollout.agent",
                f"has a zero character in {place}, which no argument can have",
                "remove it, or read the row from standard input",
                value=given,
            )
        if (size := len(word.encode("utf-8", "surrogatepass"))) > LONGEST_WORD:
            raise UserError(
                "rollout.agent",
                f"has {size} bytes in {place}, an argument at most {LONGEST_WORD}",
                "read the row from standard input, where it is as JSON",
                value=given,
            )


def check_command(words: Sequence[str]) -> None:
    """Refuse a command in which data would be run as code."""
    problem = _danger(words)
    if problem is not None:
        raise UserError(
            "rollout.agent",
            f"{list(words)}: {problem}, so that data would be run as code",
            "give a program or script that takes the column as an argument of its own, or reads the row as JSON from "
            "standard input",
        )


def _danger(words: Sequence[str]) -> str | None:
    if column_names(words[:1]):
        return f"{words[0]!r} makes a column the program"
    reached = True  # by nothing but wrappers and their options
    for index, word in enumerate(words):
        name, behind = _name(word), words[index + 1 :]
        if reached and name in SHELL_CALLERS and (found := _first_with_column(behind)) is not None:
            return f"{name} hands {found!r} to a shell"
        if reached and name == "env" and (found := _split_string(behind)) is not None:
            return f"env makes words of {found!r}"
        known = reached and name in INTERPRETERS
        if name in INTERPRETERS or (name.endswith("sh") and "." not in name):
            problem = _interpreted(name, behind, surely=known)
            if problem is not None or known:
                return problem
        reached = reached and (index > 0 or name in WRAPPERS) and not (index > 0 and _is_script(word))
    return None


def _interpreted(name: str, words: Sequence[str], *, surely: bool) -> str | None:
    """What is wrong with these words behind an interpreter. Without `surely` its name may be only an argument."""
    has_code, index = False, 0
    while index < len(words):
        word, following = words[index], words[index + 1] if index + 1 < len(words) else None
        if word == "-m" and following is not None:
            return f"{name} runs the module {following!r}" if column_names([following]) else None
        if CODE_OPTION.fullmatch(word) and following is not None and not following.startswith("-"):
            if column_names([following]):
                return f"{name} runs {following!r}"
            if word != "-r" and _is_script(following):  # `bash -e run.sh`, where -e is another option
                return None
            has_code, index = True, index + 2
            continue
        plain = not word.startswith(("-", "+"))
        if plain and has_code:
            return None  # an argument, and so are all behind it
        if surely and column_names([word]):
            return f"{name} takes {word!r} for code or for its script"
        if plain and _is_script(word):
            return None
        index += 1
    informs = any(word in ("--version", "--help", "-V", "-h") for word in words)
    if surely and not has_code and not informs:
        return f"{name} gets no script, and runs its standard input, which is the row"
    return None


def _is_script(word: str) -> bool:
    """Whether a word looks like a file: `agent.py`, `./agent`."""
    return not word.startswith("-") and not re.search(r"\s", word) and ("." in word or "/" in word)


def _name(word: str) -> str:
    """The program that a word names: /usr/bin/python3.11 -> python."""
    name = PurePath(word.replace("\\", "/")).name.lower().removesuffix(".exe")
    return re.sub(r"[\d.]+$", "", name) or name


def _first_with_column(words: Sequence[str]) -> str | None:
    return next((word for word in words if column_names([word])), None)


def _split_string(words: Sequence[str]) -> str | None:
    """The word that `env -S` would take apart, if a column is in it."""
    for index, word in enumerate(words):
        text = words[index + 1] if word in ("-S", "--split-string") and index + 1 < len(words) else ""
        if re.match(r"-v?S.|--split-string=", word):
            text = word
        if column_names([text]):
            return text
    return None
