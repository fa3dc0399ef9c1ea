"""The arguments of `rollout.agent`: the columns they name, and commands that would run data as code."""

from __future__ import annotations

import pytest

from padfree.rollout.environment.command import LONGEST_ARGUMENT, check_command, check_row, column_names, filled
from tests.refused import refused

ROW = {"question": "2+2?", "answer": 4, "tags": ["a", "ü"], "empty": None}


def test_placeholders_are_replaced_by_columns() -> None:
    arguments = ["agent", "{question}", "n={answer}", "{tags}", "{{question}}", "{not a name}", "{}"]
    assert column_names(arguments) == ["question", "answer", "tags"]
    assert filled(arguments, ROW) == ["agent", "2+2?", "n=4", '["a", "ü"]', "{question}", "{not a name}", "{}"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "{qestion}",
            r"rollout.agent: the placeholder \{qestion\} has no value, because d.jsonl:3 has only the columns "
            r"question, .*; did you mean \{question\}\?",
        ),
        ("x{xyz}", r"the placeholder \{xyz\} has no value, because d.jsonl:3 has .*; name a column that every row has"),
        ("{empty}", r"the placeholder \{empty\} has no value, because d.jsonl:3 has null in this column"),
    ],
)
def test_a_column_that_a_row_does_not_have(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_row(["agent", argument], ROW, "d.jsonl:3")


def test_values_that_cannot_be_arguments() -> None:
    check_row(["agent", "{q}"], {"q": "x" * LONGEST_ARGUMENT}, "d.jsonl:1")
    with pytest.raises(ValueError, match=r"is 131072 bytes long with the values of d.jsonl:1, but an argument can"):
        check_row(["agent", "{q}"], {"q": "x" * (LONGEST_ARGUMENT + 1)}, "d.jsonl:1")
    with pytest.raises(ValueError, match=r"null character in d.jsonl:1"):
        check_row(["agent", "{q}"], {"q": "a\0b"}, "d.jsonl:1")


RUN_AS_CODE = [
    ["sh", "-c", "agent {question}"],
    ["/bin/bash", "-lc", "agent '{question}'"],
    ["zsh", "-c", "{question}"],
    ["dash", "-ec", "x={question}; agent"],
    ["bash", "-e", "-c", "agent {question}"],
    ["bash", "-o", "pipefail", "-c", "agent {question} | tail -1"],
    ["bash", "-c{question}"],
    ["newsh", "-c", "agent {question}"],  # a shell that is not in the list
    ["pwsh", "-Command", "agent {question}"],
    ["cmd.exe", "/c", "agent {question}"],
    ["env", "sh", "-c", "agent {question}"],
    ["env", "A=1", "nice", "-n", "5", "bash", "-c", "agent {question}"],
    ["env", "-S", "agent {question}"],
    ["timeout", "5", "sh", "-c", "agent {question}"],
    ["unknown-wrapper", "--", "bash", "-c", "agent {question}"],
    ["docker", "exec", "repo/image", "sh", "-c", "agent {question}"],
    ["python", "-c", "print('{question}')"],
    ["/usr/bin/python3.11", "-X", "dev", "-c", "print('{question}')"],
    ["python", "-m", "{question}"],
    ["python", "{question}"],
    ["perl", "-ne", "print '{question}'"],
    ["perl", "-e", "1", "-e", "print '{question}'"],
    ["node", "--eval={question}"],
    ["node", "-r", "./setup.js", "-e", "ask('{question}')"],
    ["ruby", "-e", "ask('{question}')"],
    ["awk", "{question}"],
    ["sed", "s/x/{question}/"],
    ["psql", "-c", "select '{question}'"],
    ["ssh", "host", "agent", "{question}"],
    ["xargs", "agent", "{question}"],
    ["eval", "agent {question}"],
    ["{question}", "x"],
    ["tools/{question}", "x"],
    ["bash"],  # its standard input is the row
    ["sh", "-s"],
    ["python", "-"],
    ["env", "python3"],
    # The argument before the column may be the value of an option, so that the column is the script.
    ["node", "-r", "dotenv/config", "{file}"],
    ["node", "-C", "development", "{file}"],
    ["ruby", "-r", "json", "{file}"],
    ["ruby", "-C", "/tmp", "{file}"],
    ["php", "-c", "php.ini", "{file}"],
    ["julia", "-p", "4", "{file}"],
    ["lua", "-l", "json", "{file}"],
    ["bash", "--rcfile", "./rc.sh", "{file}"],
    ["timeout", "5", "perl", "-I", "./lib", "{file}"],
    # Text such as -e... would be an option.
    ["perl", "-e", "print @ARGV", "{question}"],
    ["node", "-e", "ask(process.argv)", "{question}"],
    ["lua", "-e", "x = 1", "{question}"],
    ["sed", "s/x/y/", "{file}"],
    ["pwsh", "-NoProfile", "-c", "agent", "{question}"],
    ["cmd", "/c", "agent", "--text", "{question}"],
    ["sqlite3", "my.db", "{question}"],
]
SAFE = [
    ["python", "agent.py", "{question}"],
    ["python", "-u", "-X", "dev", "agent.py", "-c", "{question}"],
    ["python", "-m", "agent", "{question}"],
    ["python", "-c", "import sys; print(sys.argv[1])", "{question}"],
    ["sh", "-c", 'agent "$1"', "sh", "{question}"],
    ["bash", "-e", "run.sh", "{question}"],
    ["bash", "./run", "--text={question}"],
    ["env", "A=1", "python", "agent.py", "{question}"],
    ["uv", "run", "agent.py", "--language", "python", "{question}"],
    ["docker", "run", "repo/image", "{question}"],
    ["docker", "exec", "box", "python", "/app/agent.py", "{question}"],
    ["agent", "-c", "{question}"],
    ["agent", "--language", "python", "{question}"],
    ["./agent.sh", "-c", "{question}"],
    ["flash", "{question}"],
    ["python", "-c", ""],
    ["node", "agent.js", "{question}"],
    ["sh", "-c", "agent {{question}}"],
    ["node", "-e", "ask(process.argv)", "--", "{question}"],
    ["node", "--import", "tsx", "agent.ts", "{question}"],
    ["node", "--no-warnings", "--max-old-space-size=4096", "agent.js", "{question}"],
    ["bash", "-eu", "-o", "pipefail", "run.sh", "{question}"],
    ["ruby", "-w", "agent.rb", "{question}"],
    ["Rscript", "agent.R", "{question}"],
    ["pwsh", "-NoProfile", "-File", "agent.ps1", "{question}"],
    ["nice", "-n", "5", "perl", "agent.pl", "-e", "{question}"],
]


@pytest.mark.parametrize("arguments", RUN_AS_CODE, ids=" ".join)
def test_data_is_not_run_as_code(arguments: list[str]) -> None:
    with refused("rollout.agent", ".* text of the data row would be run as code"):
        check_command(arguments)


@pytest.mark.parametrize("arguments", SAFE, ids=" ".join)
def test_arguments_of_a_program_are_safe(arguments: list[str]) -> None:
    check_command(arguments)
