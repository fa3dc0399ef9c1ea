"""Rewards: equal numbers in different spellings, and errors of user functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.data.rewards import (
    Reward,
    check_reward_name,
    exact_match,
    hashed_number,
    leading_number,
    load_reward,
    number_after_hashes,
)
from tests.refused import refused


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("####18", "18"),
        ("so\n####  18.", "18"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### 1234567.5 dollars", "1234567.5"),
        ("#### $1,000", "1000"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### −5", "-5"),
        ("#### +5", "5"),
        ("#### - 5", "-5"),
        ("#### .5", "0.5"),
        ("#### 0.50%", "0.5"),
        ("#### 18kg", "18"),
        ("#### 1e3", "1000"),
        ("#### 1.5E-1", "0.15"),
        ("#### 5, because", "5"),
        ("#### 3 no, wait\n#### 4", "4"),
        ("#### 007", "7"),
        ("#### -0", "0"),
        ("#### €5", "5"),
    ],
)
def test_numbers_that_are_read(text: str, number: str) -> None:
    assert hashed_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        *("", "18", "### 18", "####", "#### ", "#### eighteen", "#### ,", "#### -", "#### 4 #### none"),
        *("#### 1,2", "#### 1,23,456", "#### 12,3456", "#### 1.2.3", "#### 1e99999999999"),
    ],
)
def test_texts_without_a_number(text: str) -> None:
    assert hashed_number(text) is None
    assert number_after_hashes(text, {"answer": "18"}) == 0.0


def test_number_after_hashes() -> None:
    row = {"answer": "6 + 1 = 7\n#### 1,007"}
    assert number_after_hashes("It is 1007.\n#### 1007.0", row) == 1.0
    assert number_after_hashes("1007", row) == 0.0
    assert number_after_hashes("#### 1008", row) == 0.0
    for answer in (1007, 1007.0, "1,007", " $1007 "):
        assert number_after_hashes("#### 1007", {"answer": answer}) == 1.0
    with refused("answer"):
        number_after_hashes("#### 7", {"answer": "many"})
    assert leading_number("7 apples") == 7


def test_exact_match() -> None:
    assert exact_match(" Paris\n", {"answer": "Paris "}) == 1.0
    assert exact_match("paris", {"answer": "Paris"}) == 0.0
    assert exact_match("7", {"answer": 7}) == 1.0
    for answer in (None, True, [1]):
        with refused("answer"):
            exact_match("7", {"answer": answer})


def test_every_answer_of_gsm8k_is_right_by_its_own_reward(gsm8k: Path) -> None:
    path = gsm8k / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {number_after_hashes(row["answer"], row) for row in rows} == {1.0}
    wrong = [number_after_hashes(one["answer"], other) for one, other in pairwise(rows)]
    assert np.mean(wrong) < 0.1


def test_the_built_in_ones_are_found_by_name() -> None:
    assert load_reward("exact_match")("a", {"answer": "a"}, "uid") == 1.0
    assert load_reward("number_after_hashes")("#### 2", {"answer": "2"}, "uid") == 1.0


MODULE = """
import functools
from collections.abc import Mapping
import beside

def length(response, row):
    return beside.scale * len(response) / row["target"]

class Scorer:
    def __call__(self, response, row):
        return 0.25

scorer = Scorer()
half = functools.partial(lambda factor, response, row: factor, 0.5)
VALUE = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current folder, which is not on sys.path, and another module that it imports."""
    (tmp_path / "rewards_of_mine.py").write_text(MODULE)
    (tmp_path / "beside.py").write_text("scale = 2")
    (tmp_path / "broken_reward.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "rewards_of_mine"
    assert sys.path == path
    for name in ("rewards_of_mine", "beside", "broken_reward"):
        sys.modules.pop(name, None)


def test_a_function_of_the_current_folder(module: str) -> None:
    reward = load_reward(f"{module}:length")
    assert reward("abc", {"target": 3}, "a.jsonl:1") == 2.0
    with refused("reward", r"rewards_of_mine:length raised KeyError: 'target' for sample 'a\.jsonl:1'"):
        reward("abc", {}, "a.jsonl:1")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a:b:c", r"use one of"),
        (":f", r"use one of"),
        ("../x:f", r"use one of"),
        ("rewards_of_mine:VALUE", r"the module has 'VALUE', which is not a function"),
        (
            "rewards_of_mine.deeper:f",
            r"importing rewards_of_mine\.deeper raised ModuleNotFoundError.*; give a module that is installed or in ",
        ),
        ("1abc:f", r"use one of"),
    ],
)
@pytest.mark.usefixtures("module")
def test_what_cannot_be_loaded_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_reward(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("scorer", 0.25), ("half", 0.5)])
def test_what_can_be_called_like_a_function_is_one(module: str, name: str, value: float) -> None:
    assert load_reward(f"{module}:{name}")("abc", {}, 1) == value


def test_a_name_is_checked_without_importing_the_module(module: str, tmp_path: Path) -> None:
    (tmp_path / "imports_leave_a_trace.py").write_text("import pathlib; pathlib.Path('trace').touch()")
    for name in (f"{module}:length", f"{module}:absent", "broken_reward:f", "imports_leave_a_trace:f", "exact_match"):
        check_reward_name(name)
    assert not {module, "broken_reward", "imports_leave_a_trace"} & set(sys.modules)
    assert not (tmp_path / "trace").exists()
    for name in ("builtins:eval", "os.path:join", "no_such_module:f", "exact", "a:b:c"):
        with refused("reward", "'.*") as caught:
            check_reward_name(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("nan"), None, "1", [1.0], 1 + 2j, 10**400, torch.tensor(1.0)]
)
def test_what_is_no_finite_number_is_refused_with_the_sample(value: Any) -> None:
    reward = Reward("mine:f", lambda response, row: value)
    with refused("reward", "mine:f returned .* for sample 7"):
        reward("a", {}, 7)


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_of_all_sorts_are_taken(value: Any) -> None:
    result = Reward("mine:f", lambda response, row: value)("a", {}, 7)
    assert type(result) is float
    assert result == 1.0


def test_a_process_that_judges_starts_without_torch() -> None:
    """Importing torch would make each start ten times as slow."""
    program = "import sys, padfree.data.reward_worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
