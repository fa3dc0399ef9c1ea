"""Rewards of a response: two built in, and the user's own by import path.

    reward = load_reward("number_after_hashes")          or "exact_match", or "my_rewards:length_penalty"
    reward("6 + 1 = 7\\n#### 7", {"answer": "#### 7.0"}, uid="train.jsonl:3")      -> 1.0

A reward function takes the response and the row that its prompt came from, with all columns, and returns a number:

    def length_penalty(response: str, row: Mapping[str, Any]) -> float: ...

It is code of its own, so what it raises or returns is checked, and the error names the sample.

A recipe names the function, and a recipe may come from somebody else. So the standard library, whose `os.system`,
`subprocess.run` or `builtins.eval` would take two arguments as well, is no place for a reward; and
`check_reward_name` says what is wrong with a name without importing anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from padfree.data.records import LARGEST, shown, shown_error

RewardFunction = Callable[[str, Mapping[str, Any]], float]

_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*[$€£]?\s*(?P<minus>[-\u2212]?)(?P<digits>[\d.,]*\d[\d.,]*)(?P<power>[eE][-+]?\d+)?"
)
_DIGITS = re.compile(r"(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """1 where the response is the row's `answer`, white space at the ends aside; else 0."""
    return float(response.strip() == str(_answer(row)).strip())


def number_after_hashes(response: str, row: Mapping[str, Any]) -> float:
    """1 where the number after `####` is the one in the row's `answer` (after its `####`, if it has one); else 0.

    `#### 1,234.50`, `####$1234.5` and `#### +1234.5.` are the same number. The last `####` counts.
    """
    answer = str(_answer(row))
    expected = hashed_number(answer) if "####" in answer else leading_number(answer)
    if expected is None:
        raise ValueError(f"answer: {shown(answer)} has no number; give one, alone or after '####'")
    return float(hashed_number(response) == expected)


def hashed_number(text: str) -> Decimal | None:
    """The number behind the last `####`; None without one."""
    _, found, behind = text.rpartition("####")
    return leading_number(behind) if found else None


def leading_number(text: str) -> Decimal | None:
    """The number a text begins with: sign, currency sign, thousands separators and a full stop behind it allowed."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    power = match["power"] or ""
    digits = match["digits"] if power else match["digits"].rstrip(".,")
    if not _DIGITS.fullmatch(digits) or len(power) > 5:
        return None
    sign = "-" if match["sign"] in ("-", "\u2212") or match["minus"] else ""
    return Decimal(sign + digits.replace(",", "") + power)


def _answer(row: Mapping[str, Any]) -> str | int | float:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"answer: {shown(answer)} in the row; give a string or a number to compare the response with")
    return answer


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "number_after_hashes": number_after_hashes}


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function under the name it was asked for; calling it checks what comes back."""

    name: str
    function: RewardFunction

    def __call__(self, response: str, row: Mapping[str, Any], uid: str | int) -> float:
        try:
            value: Any = self.function(response, row)
        except Exception as error:
            raise ValueError(
                f"reward: {self.name} raised {shown_error(error)} for sample {uid!r}; correct the function or the row"
            ) from error
        if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)) or not -LARGEST < value < LARGEST:
            raise ValueError(
                f"reward: {self.name} returned {shown(value)} ({type(value).__name__}) for sample {uid!r}; "
                "return a finite number"
            )
        return float(value)


def check_reward_name(name: str) -> None:
    """Refuse a name that cannot be a reward's. Nothing is imported: no code but padfree's own runs.

    Whether the module has such a function, and what it takes, only `load_reward` can tell.
    """
    if name in BUILT_IN:
        return
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        raise ValueError(f"reward: {name!r}; use one of {', '.join(BUILT_IN)}, or 'module:function'")
    package = name.partition(":")[0].partition(".")[0]
    if package in sys.stdlib_module_names:
        raise ValueError(
            f"reward: {name!r}: {package} is Python's own, and none of its functions is a reward; "
            "write one in a module of your own and name that"
        )
    with _current_folder() as folder:
        # a package is found without being imported, a module inside it is not
        found = package in sys.modules or importlib.util.find_spec(package) is not None
    if not found:
        raise ValueError(
            f"reward: {name!r}: there is no module {package}; give a module that is installed or in {folder}"
        )


def load_reward(name: str) -> Reward:
    """A built-in reward, or `module:function` from the installed packages or the current folder, which is imported."""
    check_reward_name(name)
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name])
    module_name, _, function_name = name.partition(":")
    function = getattr(_imported(module_name, name), function_name, None)
    if not callable(function):
        what = "no" if function is None else "a value but no function"
        raise ValueError(f"reward: {name!r}: the module has {what} {function_name!r}; correct the name")
    _check_function(name, function)
    return Reward(name, function)


@contextmanager
def _current_folder() -> Iterator[str]:
    """Modules of the current folder can be found, as with `python -m`."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        sys.path.remove(folder)


def _imported(module_name: str, name: str) -> Any:
    with _current_folder() as folder:
        try:
            return importlib.import_module(module_name)
        except Exception as error:  # importing runs the user's module
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            itself = missing is not None and f"{module_name}.".startswith(f"{missing}.")
            cure = f"give a module that is installed or in {folder}" if itself else "correct the module"
            raise ValueError(
                f"reward: {name!r}: importing {module_name} raised {shown_error(error)}; {cure}"
            ) from error


def _check_function(name: str, function: Callable[..., Any]) -> None:
    """A plain function of (response, row), written in Python and not by Python."""
    home = str(getattr(function, "__module__", None)).partition(".")[0]
    if inspect.isbuiltin(function) or inspect.isclass(function) or home in sys.stdlib_module_names - {"functools"}:
        what = "a class" if inspect.isclass(function) else f"a function of {home}, which is Python's own"
        raise ValueError(f"reward: {name!r} is {what}; write a function of (response, row) and name that")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(f"reward: {name!r} is async or a generator; make it a plain function that returns a number")
    try:
        inspect.signature(function).bind("response", {})
    except TypeError as error:
        raise ValueError(
            f"reward: {name!r} cannot be called with (response, row): {error}; take these two arguments"
        ) from None
