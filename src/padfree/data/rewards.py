"""Reward functions: two built-in ones, and user-defined ones by import path.

    reward = load_reward("number_after_hashes")          or "exact_match", or "my_rewards:length_penalty"
    reward("6 + 1 = 7\\n#### 7", {"answer": "#### 7.0"}, uid="train.jsonl:3")      -> 1.0

A reward function takes the response and the row that its prompt came from, with all columns, and returns a number:

    def length_penalty(response: str, row: Mapping[str, Any]) -> float: ...

The exceptions and return values of the function are checked, and error messages name the sample.
`padfree.config.functions` imports the function.

`model:folder` names a reward model, which scores whole batches (`padfree.train.rl.reward_model`). `check_reward_name`
checks a name without importing anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from padfree.config.functions import UserFunction, is_path, model_of
from padfree.data.records import LARGEST, shown
from padfree.errors import UserError, first_line

RewardFunction = Callable[[str, Mapping[str, Any]], float]

_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*[$€£]?\s*(?P<minus>[-\u2212]?)(?P<digits>[\d.,]*\d[\d.,]*)(?P<power>[eE][-+]?\d+)?"
)
_DIGITS = re.compile(r"(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the response equals the row's `answer`, ignoring white space at both ends, else 0."""
    return float(response.strip() == str(_answer(row)).strip())


def number_after_hashes(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the number after the last `####` in the response equals the number in the row's `answer`, else 0.

    Without `####`, an `answer` must begin with its number. `1,234.50` and `$1234.5` are the same number.
    """
    answer = str(_answer(row))
    expected = hashed_number(answer) if "####" in answer else leading_number(answer)
    if expected is None:
        raise UserError("answer", f"{shown(answer)} has no number", "begin it with a number, or put one after '####'")
    return float(hashed_number(response) == expected)


def hashed_number(text: str) -> Decimal | None:
    """Return the number after the last `####` in a text, or None if there is none."""
    _, found, after = text.rpartition("####")
    return leading_number(after) if found else None


def leading_number(text: str) -> Decimal | None:
    """Return the number that a text begins with, or None if there is none.

    The number can have a sign, a currency sign and thousands separators, and a full stop can follow it.
    """
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
        raise UserError(
            "answer", f"the row's value is {shown(answer)}", "give a string or a number to compare the response with"
        )
    return answer


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "number_after_hashes": number_after_hashes}
USER_REWARD = UserFunction(setting="reward", noun="reward", arguments=("response", "row"), result="a number")


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and the name by which it was loaded. A call runs the function and checks its result."""

    name: str
    function: RewardFunction

    def __call__(self, response: str, row: Mapping[str, Any], uid: str | int) -> float:
        try:
            value: Any = self.function(response, row)
        except KeyboardInterrupt:
            raise  # let Ctrl-C through, if the reward is called outside of a run
        except BaseException as error:  # BaseException includes SystemExit: a reward function must not end the run
            raise UserError(
                "reward",
                f"{self.name} raised {type(error).__name__}: {first_line(error)} for sample {uid!r}",
                "correct the function or the row",
            ) from error
        if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)) or not -LARGEST < value < LARGEST:
            raise UserError(
                "reward",
                f"{self.name} returned {shown(value)} ({type(value).__name__}) for sample {uid!r}",
                "return a finite number",
            )
        return float(value)


def check_reward_name(name: str) -> None:
    """Raise a `UserError` if `name` cannot be the name of a reward. Nothing is imported and no user code is run."""
    if name in BUILT_IN or model_of(name):
        return
    if not is_path(name):
        raise UserError(
            "reward",
            "is not the name of a reward",
            f"use one of {', '.join(BUILT_IN)}, or 'module:function', or 'model:folder'",
            value=name,
        )
    USER_REWARD.check(name)


def load_reward(name: str) -> Reward:
    """Load a built-in reward, or import `module:function` from the installed packages or the current folder."""
    check_reward_name(name)
    assert model_of(name) is None, "padfree.train.rl.reward_model loads reward models"
    return Reward(name, BUILT_IN[name] if name in BUILT_IN else USER_REWARD.load(name))
