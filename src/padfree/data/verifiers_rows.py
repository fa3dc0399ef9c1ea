"""Load an environment of the verifiers package, and read its rows.

    verifiers:wordle            vf.load_environment("wordle"), rows of its training data
    verifiers:wordle#eval       rows of its held-out data

    {"example_id": 7, "prompt": [{"role": "user", ...}], "answer": "crane", "info": {...}}     a row of the environment
    {..., "tools": [{"type": "function", ...}]}                                                with its tools added

The environment is loaded once per process: its rows and its episodes come from the same object. The column `tools` is
added so that the chat template shows the tools in the prompt.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from padfree.config.functions import current_folder
from padfree.config.packaged import VERIFIERS, check_package, packaged_environment
from padfree.data.record_source import CHUNK_ROWS, Chunk, RecordSource
from padfree.errors import UserError, shown_error

TOOLS = "tools"
"""The column with the tools of a row."""


class VerifiersRows(RecordSource):
    """The training or held-out rows of an environment of the verifiers package."""

    def __init__(self, rows: list[dict[str, Any]], name: str) -> None:
        self.rows, self.name = rows, name
        self._text = json.dumps(rows, sort_keys=True, default=str)
        self.size = len(self._text)

    def digest(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Do nothing, because the rows are in memory and cannot change."""

    def first_rows(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        parts = (self.rows[start : start + CHUNK_ROWS] for start in range(0, len(self.rows), CHUNK_ROWS))
        yield from self._numbered(parts, len(self.rows))


def open_verifiers(name: str, setting: str = "data.path") -> VerifiersRows:
    """Return the training rows of an environment (`verifiers:wordle`), or its held-out rows (`verifiers:wordle#eval`).

    `setting`: the setting whose value is `name`, for messages.
    """
    held_out = packaged_environment(name, setting).held_out
    environment = load_verifiers(name.partition("#")[0], setting)
    try:
        dataset = environment.get_eval_dataset() if held_out else environment.get_dataset()
    except Exception as error:  # the data set is made by code of the environment
        raise UserError(
            setting, f": loading its rows raised {shown_error(error)}", "correct the environment's code", value=name
        ) from error
    return VerifiersRows([_with_tools(row, environment) for row in dataset.to_list()], name)


def _with_tools(row: dict[str, Any], environment: Any) -> dict[str, Any]:
    if TOOLS in row:
        return row
    info = row.get("info")
    if isinstance(info, str):
        info = json.loads(info)
    own = info.get("tool_defs") if isinstance(info, Mapping) else None
    tools = environment.tool_defs if own is None else own
    return row if not tools else {**row, TOOLS: [openai_tool(tool) for tool in tools]}


def openai_tool(tool: Any) -> dict[str, Any]:
    """Convert a tool of the verifiers package (an object or a dictionary) to OpenAI's format."""
    given = tool if isinstance(tool, Mapping) else tool.model_dump()
    function = {
        key: given[key] for key in ("name", "description", "parameters", "strict") if given.get(key) is not None
    }
    return {"type": "function", "function": function}


def load_verifiers(name: str, setting: str = "rollout.environment") -> Any:
    """Load an environment of the verifiers package by its name, such as `verifiers:wordle?mode="hard"`.

    The environment's module may be in the current folder. Later calls return the same object. `setting`: the setting
    that gave the name, for error messages.
    """
    try:
        return _load(name)
    except UserError as error:
        raise error.at(setting) from error.__cause__


@cache
def _load(name: str) -> Any:
    setting = "rollout.environment"
    given = packaged_environment(name, setting)
    check_package(VERIFIERS, setting, name)
    check_verifiers_module(given.name, name, setting)
    with current_folder(), _kept_signals():
        try:
            package = importlib.import_module(VERIFIERS)
            environment = package.load_environment(given.name, **given.arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # code of the environment, which may call sys.exit
            reason = error.__cause__ or error
            raise UserError(
                setting,
                f": loading the environment raised {shown_error(reason)}",
                "correct the environment's code",
                value=name,
            ) from error
        if not isinstance(environment, package.Environment):
            raise UserError(
                setting,
                f": load_environment returned {type(environment).__name__}",
                "return a verifiers.Environment",
                value=name,
            )
    return environment


def check_verifiers_module(own: str, name: str, setting: str) -> None:
    """Raise a `UserError` if an environment's module is missing, or belongs to Python's standard library.

    `own`: the environment's name without `verifiers:`. `name`, `setting`: its full name and setting, for error
    messages.
    """
    module = own.replace("-", "_").split("/")[-1]
    if not module.isidentifier():
        raise UserError(setting, "is not the name of an environment", "give a name such as wordle", value=name)
    if module in sys.stdlib_module_names:
        raise UserError(
            setting,
            f"names the module {module} of Python's standard library",
            "give the name of a verifiers environment",
            value=name,
        )
    with current_folder() as folder:
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            raise UserError(
                setting,
                f": there is no module {module}",
                f"install the package of the environment, or write {module}.py in {folder}",
                value=name,
            )


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Context manager that restores the handlers of SIGINT and SIGTERM at its end.

    It is needed because the creation of a `verifiers` environment replaces these handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
