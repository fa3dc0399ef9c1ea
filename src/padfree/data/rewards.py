"""Rewards of a response: two built in, and the user's own by import path.

    reward = load_reward("number_after_hashes")          or "exact_match", or "my_rewards:length_penalty"
    reward("6 + 1 = 7\\n#### 7", {"answer": "#### 7.0"}, uid="train.jsonl:3")      -> 1.0

A reward function takes the response and the row that its prompt came from, with all columns, and returns a number:

    def length_penalty(response: str, row: Mapping[str, Any]) -> float: ...

It is code of its own, so what it raises or returns is checked, and the error names the sample.
`padfree.config.functions` finds it. `model:folder` is a reward model, which judges whole batches
(`padfree.train.rl.reward_model`). `check_reward_name` says what is wrong with a name without importing anything.
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
    """1 where the response is the row's `answer`, white space at the ends aside; else 0."""
    return float(response.strip() == str(_answer(row)).strip())


def number_after_hashes(response: str, row: Mapping[str, Any]) -> float:
    """1 where the number after `####` is the one in the row's `answer` (after its `####`, if it has one); else 0.

    `#### 1,234.50`, `####$1234.5` and `#### +1234.5.` are the same number. The last `####` counts.
    """
    answer = str(_answer(row))
    expected = hashed_number(answer) if "####" in answer else leading_number(answer)
    if expected is None:
        raise UserError("answer", f"{shown(answer)} has no number", "give one, alone or after '####'")
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
        raise UserError(
            "answer", f"{shown(answer)} in the row", "give a string or a number to compare the response with"
        )
    return answer


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "number_after_hashes": number_after_hashes}
USER_REWARD = UserFunction(setting="reward", noun="reward", arguments=("response", "row"), result="a number")


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function under the name it was asked for; calling it checks what comes back."""

    name: str
    function: RewardFunction

    def __call__(self, response: str, row: Mapping[str, Any], uid: str | int) -> float:
        try:
            value: Any = self.function(response, row)
        except KeyboardInterrupt:
            raise  # a signal, outside of a run
        except BaseException as error:  # SystemExit, too: a reward does not end the run
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
    """Refuse a name that cannot be a reward's. Nothing is imported: no code but padfree's own runs."""
    if name in BUILT_IN or model_of(name):
        return
    if not is_path(name):
        raise UserError(
            "reward", "", f"use one of {', '.join(BUILT_IN)}, or 'module:function', or 'model:folder'", value=name
        )
    USER_REWARD.check(name)


def load_reward(name: str) -> Reward:
    """A built-in reward, or `module:function` from the installed packages or the current folder, which is imported."""
    check_reward_name(name)
    assert model_of(name) is None, "a model is no function: padfree.train.rl.reward_model"
    return Reward(name, BUILT_IN[name] if name in BUILT_IN else USER_REWARD.load(name))
