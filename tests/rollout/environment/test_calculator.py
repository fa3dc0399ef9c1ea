"""The calculator: token ids and masks equal those written by hand, and only arithmetic is evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.rollout.environment.calculator import calculate, episode
from tests.rollout.environment.environment_cases import CHAT, EOS, VOCABULARY, ids, play, prompt, text

QUESTION = "48 clips and half as many pens?\n"
SCRIPT = {
    QUESTION: "half: <<48/2=$",
    QUESTION + "half: <<48/2=$24>>": "all: <<48+24=$",
    QUESTION + "half: <<48/2=$24>>all: <<48+24=$72>>": "\n#### 72$",
}


def right(answer: str, row: dict[str, str]) -> float:
    return float(answer.endswith("#### 72"))


def test_ids_masks_and_logprobs_equal_what_is_written_by_hand() -> None:
    (played,) = play(episode, SCRIPT, prompt(QUESTION, max_new_tokens=60), reward=right)
    (leaf,) = played.leaves
    turns = [
        (QUESTION, 0),
        ("half: <<48/2=$", 1),
        ("24>>", 0),
        ("all: <<48+24=$", 1),
        ("72>>", 0),
        ("\n#### 72$", 1),
    ]
    assert leaf.tokens.tolist() == ids("".join(said for said, _ in turns))
    assert leaf.sampled.tolist() == [bool(mask) for said, mask in turns for _ in said]
    expected = [-(position + 1) / 8 if mask else 0.0 for said, mask in turns for position in range(len(said))]
    assert leaf.logprobs.tolist() == expected
    assert (leaf.reward, leaf.ended, leaf.turns) == (1.0, True, 3)
    assert leaf.text == "".join(said for said, _ in turns[1:])[:-1].replace("$", "<eos>")
    assert played.metrics == {"calls": 2, "wrong_calls": 0}


def test_an_episode_written_out_by_hand() -> None:
    (played,) = play(episode, {"2?": "<<1/4=$", "2?<<1/4=$0.25>>": "x"}, prompt("2?", max_new_tokens=15), reward=right)
    (leaf,) = played.leaves
    v = VOCABULARY
    assert leaf.tokens.tolist() == [
        *(v["2"], v["?"]),
        *(v["<"], v["<"], v["1"], v["/"], v["4"], v["="], EOS),
        *(v["0"], v["."], v["2"], v["5"], v[">"], v[">"]),
        v["x"],
    ]
    assert leaf.sampled.astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert not leaf.ended


def test_with_a_chat_template_the_answer_is_a_message() -> None:
    question = "[u]2+3?[a]"
    script = {question: "<<2+3=$", question + "<<2+3=$[u]5>>[a]": "#### 5$"}
    (played,) = play(episode, script, prompt(question), template=CHAT, reward=right)
    (leaf,) = played.leaves
    assert text(leaf.tokens.tolist()) == "[u]2+3?[a]<<2+3=$[u]5>>[a]#### 5$"
    assert "".join(map(str, leaf.sampled.astype(int))) == "0" * 10 + "1" * 7 + "0" * 9 + "1" * 7


@pytest.mark.parametrize(
    ("said", "max_new_tokens", "calls"),
    [
        ("#### 3$", 60, 0),  # no question
        ("<<1+1=", 6, 0),  # truncated before the turn ends
        ("<<1+1=$", 9, 1),  # too few tokens left for the answer
        ("<<1+1=$", 10, 1),  # tokens left for the answer only
        ("<<import=$", 400, 16),  # questions that are not arithmetic, repeatedly
    ],
)
def test_ends(said: str, max_new_tokens: int, calls: int) -> None:
    (played,) = play(
        episode, lambda context, key: said, prompt("1?", max_new_tokens=max_new_tokens), reward=lambda answer, row: 0.0
    )
    (leaf,) = played.leaves
    assert len(leaf.tokens) <= 2 + max_new_tokens
    assert played.metrics["calls"] == calls
    assert played.metrics["wrong_calls"] == (calls if "import" in said else 0)
    assert leaf.sampled[2:].any()
    assert not leaf.sampled[:2].any()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("48/2", "24"),
        (" 1,000 * 2.5 ", "2500"),
        ("1/3", "0.333333"),
        ("-2/3", "-0.666667"),
        ("0-0.0000001", "0"),
        ("(1+2)*-3", "-9"),
        ("0.1+0.2", "0.3"),
        ("1/0", None),
        ("2**9", None),
        ("9**9**9**9", None),
        ("1//2", None),
        ("", None),
        ("x+1", None),
        ("1e9", None),
        ("()" * 40, None),
        ("(" * 99, None),
        ("1" * 101, None),
        ("__import__('os')", None),
    ],
)
def test_calculate(question: str, answer: str | None) -> None:
    assert calculate(question) == answer


def test_numbers_as_large_as_a_question_can_make_them() -> None:
    assert calculate("9" * 50 + "*" + "9" * 49) == str(int("9" * 50) * int("9" * 49))
    assert np.isclose(float(calculate("1/" + "9" * 98) or "1"), 0.0)
