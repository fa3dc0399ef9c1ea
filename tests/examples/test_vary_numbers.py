"""examples/gsm8k/vary_numbers.py: variants of word problems, whose results a reader can check."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.test_examples import FOLDER, example

CLIPS = {
    "question": "Natalia sold 48 clips in April and 20 more in May. She gave half to 4 friends. How many has each?",
    "answer": "In May <<48+20=68>>68. All: 48+68 = <<48+68=116>>116. Each: <<116/2/4=14.5>>14.5.\n#### 14.5",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER / "gsm8k"))
    return example("vary_numbers", monkeypatch)


def test_the_result_follows_from_the_new_numbers(script: ModuleType) -> None:
    problem = script.read_problem(CLIPS)
    seen = set()
    for seed in range(20):
        variant = problem.variant(random.Random(seed))
        april, more, friends = map(int, re.findall(r"\d+", variant["question"]))
        assert variant["question"] == CLIPS["question"].replace("48", str(april)).replace("20", str(more)).replace(
            "4 friends", f"{friends} friends"
        )
        result = Fraction(2 * april + more, 2 * friends)
        assert Fraction(variant["answer"].removeprefix("#### ")) == result
        assert more % 10 == 0
        assert 24 <= april <= 96
        seen.add((april, more, friends))
    assert len(seen) > 10


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2 boxes of 6 eggs and 12 more", "answer": "<<2*6=12>>12, <<12+12=24>>24\n#### 24"},  # which 12?
        {"question": "5 cats and 7 dogs", "answer": "<<5+7=13>>13\n#### 13"},  # a wrong calculation
        {"question": "5 cats and 7 dogs", "answer": "<<5+7=12>>12\n#### 11"},  # another result
        {"question": "5 cats and 7 dogs", "answer": "12\n#### 12"},  # no calculation
        {"question": "5 cats and 7 dogs", "answer": "<<5**7=78125>>\n#### 78125"},  # another operator
        {"question": "5 cats and 7 dogs", "answer": "<<5/0*7=0>>\n#### 0"},
        {"question": "some cats and 7 dogs", "answer": "<<7*2=14>>\n#### 14"},  # one number only
        {"question": "5 cats and 7 dogs", "answer": "<<__import__('os').getpid()=1>>\n#### 1"},
    ],
    ids=range(8),
)
def test_an_unclear_problem_is_left_out(script: ModuleType, row: dict[str, str]) -> None:
    assert script.read_problem(row) is None


def test_numbers_keep_their_order_and_thousands_are_read(script: ModuleType) -> None:
    row = {"question": "A car costs $12,500, paid in 40 parts. A part?", "answer": "<<12500/40=312.5>>\n#### 312.5"}
    variant = script.read_problem(row).variant(random.Random(1))
    price, parts = re.findall(r"\d+", variant["question"])
    assert int(parts) < int(price) != 12500
    assert Fraction(variant["answer"].removeprefix("#### ")) == Fraction(int(price), int(parts))


def test_the_command_writes_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [CLIPS] * 3), encoding="utf-8")
    script, read, written = FOLDER / "gsm8k" / "vary_numbers.py", tmp_path / "train.jsonl", tmp_path / "out.jsonl"
    command = [sys.executable, str(script), str(read), str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert "3 problems, of which 3 can be varied: 6 variants" in done.stdout
    assert len(rows) == 6
    assert all(set(row) == {"question", "answer"} for row in rows)
