"""Rollout files: every form of a row, arrays aligned with tokens, and every kind of bad row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.data import RolloutData, RolloutDataSettings, SkippedRow, read_rollouts
from padfree.sample import Sample, common_fields
from padfree.testing.tokenizers import tiny_tokenizer
from tests.refused import refused

CHAT = tiny_tokenizer("chatml")
BASE = tiny_tokenizer(kind="bos")
EOS = "<|im_end|>"
Read = Callable[..., RolloutData]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reading(rows: list[Any], tokenizer: Any = None, **changes: Any) -> RolloutData:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / "r.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        return read_rollouts(tmp_path / "r.jsonl", RolloutDataSettings(**changes), tokenizer=tokenizer)

    return reading


def one(rollouts: RolloutData) -> Sample:
    (sample,) = rollouts.samples
    return sample


ROW = {"tokens": [5, 6, 7, 8, 9], "response_length": 3, "reward": 1.0}


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        ({"tokens": [5, 6, 7, 8, 9], "response_length": 3}, [0, 0, 1, 1, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "loss_mask": [False, False, True, False, True]}, [0, 0, 1, 0, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "response_length": 3, "loss_mask": [1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "response_length": 3, "loss_mask": [0, 0, 1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"prompt_tokens": [5, 6], "response_tokens": [7, 8, 9]}, [0, 0, 1, 1, 1]),
        ({"prompt_tokens": [5, 6], "response_tokens": [7, 8, 9], "loss_mask": [1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"prompt_tokens": [5, 6], "response_tokens": [7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]}, [0, 0, 1, 0, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "response_length": 5}, [1, 1, 1, 1, 1]),
        ({"tokens": [5, 6, 7, 8, 9], "response_length": 0}, [0, 0, 0, 0, 0]),
        ({"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 0, 0], "group": 1}, [0, 0, 0, 0, 0]),
        ({"prompt_tokens": [], "response_tokens": [5, 6, 7, 8, 9]}, [1, 1, 1, 1, 1]),
    ],
)
def test_every_form_of_token_ids(read: Read, row: dict[str, Any], mask: list[int]) -> None:
    sample = one(read([{**row, "reward": -0.5, "prompt": "text is not needed", "response": "where tokens are"}]))
    assert sample.tokens.tolist() == [5, 6, 7, 8, 9]
    assert sample.mask.tolist() == [bool(value) for value in mask]
    assert (sample.reward, sample.uid, sample.source) == (-0.5, "r.jsonl:1", "r.jsonl")


@pytest.mark.parametrize("field", ["logprobs", "ref_logprobs", "advantages", "returns", "values"])
def test_arrays_lie_on_their_tokens(read: Read, field: str) -> None:
    response = np.array([0, 0, -0.1, -0.2, -0.3], dtype=np.float32)
    for values in ([-0.1, -0.2, -0.3], [0, 0, -0.1, -0.2, -0.3], [None, None, -0.1, -0.2, -0.3]):
        assert np.array_equal(getattr(one(read([{**ROW, field: values}])), field), response)
    tool = {"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1], "reward": 0}
    expected = np.array([0, 0, -0.1, 0, -0.3], dtype=np.float32)
    assert np.array_equal(getattr(one(read([{**tool, field: [-0.1, None, -0.3]}])), field), expected)
    assert getattr(one(read([ROW])), field) is None


def test_groups_are_named_or_follow_from_the_prompt(read: Read) -> None:
    rows = [
        ROW,
        {"prompt_tokens": [5, 6], "response_tokens": [1], "reward": 0},
        {"prompt_tokens": [5], "response_tokens": [6, 1], "reward": 0},
    ]
    first = read(rows[:1]).samples[0].group
    second, third = (sample.group for sample in read(rows[1:]).samples)
    assert first == second != third
    assert str(first).startswith("prompt:")
    masked = one(read([{"tokens": [5, 6, 1], "loss_mask": [0, 0, 1], "reward": 0}]))
    assert masked.group == first
    named = read([{**ROW, "group": 3, "uid": "a", "raw_reward": {"parts": [1]}}, {**ROW, "group": "g", "uid": 0}])
    assert [(sample.group, sample.uid) for sample in named.samples] == [(3, "a"), ("g", 0)]
    assert named.samples[0].raw_reward == {"parts": [1]}


def test_columns_are_mapped(read: Read) -> None:
    row = {"ids": [5, 6], "n": 1, "is_correct": True, "tokens": "of another kind"}
    sample = one(read([row], columns={"ids": "tokens", "n": "response_length", "is_correct": "reward"}))
    assert (sample.tokens.tolist(), sample.reward) == ([5, 6], 1.0)


def test_text_with_a_tokenizer(read: Read) -> None:
    row = {"prompt": "Hi", "response": "Hello", "reward": 1}
    sample = one(read([row], CHAT))
    assert CHAT.decode(sample.tokens) == f"<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\nHello{EOS}"
    assert CHAT.decode(sample.tokens[sample.mask]) == f"Hello{EOS}"
    plain = one(read([row], BASE))
    assert BASE.decode(plain.tokens) == f"<s>HiHello{EOS}"
    assert BASE.decode(plain.tokens[plain.mask]) == f"Hello{EOS}"
    unfinished = one(read([row], CHAT, append_eos=False, prompt_format="plain"))
    assert CHAT.decode(unfinished.tokens) == "HiHello"
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "!"},
    ]
    sample = one(read([{**row, "prompt": turns}], CHAT))
    assert CHAT.decode(sample.tokens[~sample.mask]) == CHAT.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    # a chat template includes bos itself
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    assert BASE.decode(one(read([row], BASE, chat_template=template)).tokens) == f"<s>Hi:Hello{EOS}"
    with refused("model.tokenizer"):
        read([row])


def test_log_probabilities_of_a_text_are_those_of_its_tokens(read: Read) -> None:
    row = {"prompt": "Hi", "response": "Hello", "reward": 1}
    count = int(one(read([row], CHAT)).mask.sum())
    sample = one(read([{**row, "logprobs": [-0.5] * count}], CHAT))
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == [-0.5 if trained else 0.0 for trained in sample.mask]
    with pytest.raises(ValueError, match=rf"'logprobs' has {count + 1} entries; expected {len(sample)} .* or {count} "):
        read([{**row, "logprobs": [-0.5] * (count + 1)}], CHAT)


NAN = float("nan")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"{", r"is not valid JSON at character 2"),
        ({"tokens": [5], "response_length": 1}, r"'reward' is missing; expected a number"),
        ({**ROW, "reward": None}, r"'reward' is null; expected a number"),
        ({**ROW, "reward": "1"}, r"'reward' is '1'; expected a finite number"),
        ({**ROW, "reward": NAN}, r"'reward' is nan; expected a finite number"),
        ({**ROW, "reward": 10**400}, r"'reward' is a huge integer; expected a finite number"),
        ({**ROW, "tokens": []}, r"'response_length' is 3; expected an integer from 0 to 0"),
        ({**ROW, "tokens": [], "response_length": 0}, r"the row has no tokens; expected one or more"),
        ({**ROW, "tokens": [5, -1, 7, 8]}, r"tokens\[1\] is -1; expected a token id"),
        ({**ROW, "tokens": [5, 2**31, 7, 8]}, r"tokens\[1\] is 2147483648; expected a token id"),
        ({**ROW, "tokens": [5, 1.5, 7, 8]}, r"tokens\[1\] is 1\.5; expected a token id"),
        ({**ROW, "tokens": [[5, 6, 7]]}, r"tokens\[0\] is a list of 3; expected a token id"),
        ({**ROW, "tokens": None}, r"'tokens' is null; expected a list of token ids"),
        ({**ROW, "response_length": 6}, r"'response_length' is 6; expected an integer from 0 to 5"),
        ({**ROW, "response_length": "3"}, r"'response_length' is '3'; expected an integer"),
        ({"tokens": [5, 6], "reward": 1}, r"'response_length' and 'loss_mask' are both missing"),
        ({"tokens": [5, 6], "reward": 1, "loss_mask": [1]}, r"'loss_mask' has 1 entries; expected 2"),
        (
            {"tokens": [5], "reward": 1, "loss_mask": [0]},
            r"'loss_mask' has no 1, .*; add 'response_length' or 'gro",
        ),
        ({**ROW, "loss_mask": [1, 1]}, r"'loss_mask' has 2 entries; expected 5 .* or 3 "),
        ({**ROW, "loss_mask": [0, 1, 1, 1, 1]}, r"loss_mask is 1 at token 1, which belongs to the prompt"),
        ({**ROW, "loss_mask": [0, 2, 1]}, r"loss_mask\[1\] is 2; expected 0 or 1"),
        ({**ROW, "loss_mask": [0, None, 1]}, r"loss_mask\[1\] is null; expected 0 or 1"),
        ({**ROW, "loss_mask": "111"}, r"'loss_mask' is '111'; expected a list of 0 and 1"),
        (
            {**ROW, "logprobs": [-0.1]},
            r"'logprobs' has 1 entries; expected 5 \(one per token\) or 3 \(one per token of the r",
        ),
        ({**ROW, "logprobs": [-0.1, None, -0.2]}, r"logprobs\[1\] is null; expected a log-probability"),
        ({**ROW, "logprobs": [-0.1, NAN, -0.2]}, r"logprobs\[1\] is nan; expected a log-probability"),
        (
            {**ROW, "logprobs": [-0.1, 0.9, -0.2]},
            r"logprobs\[1\] is 0\.9; expected a log-probability \(finite, 0 or less",
        ),
        ({**ROW, "ref_logprobs": [-0.1, "x", -0.2]}, r"ref_logprobs\[1\] is 'x'; expected a log-probability"),
        ({**ROW, "advantages": [1.0, 10**400, 1.0]}, r"advantages\[1\] is a huge integer; expected a finite number"),
        ({**ROW, "values": [1.0, True, 1.0]}, r"values\[1\] is true; expected a finite number"),
        ({**ROW, "returns": 1.0}, r"'returns' is 1\.0; expected a list of numbers"),
        ({**ROW, "group": 1.5}, r"'group' is 1\.5; expected a string or an integer"),
        ({**ROW, "group": [1]}, r"'group' is a list of 1; expected a string or an integer"),
        ({**ROW, "uid": True}, r"'uid' is true; expected a string or an integer"),
    ],
)
def test_a_bad_row_names_line_field_and_what_was_expected(read: Read, row: Any, words: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^r\.jsonl line 2: {words}.*; correct the row, or set data.on_bad_row=skip to skip rows like this$",
    ):
        read([ROW, row])
    rollouts = read([ROW, row, ROW], on_bad_row="skip")
    assert [sample.uid for sample in rollouts.samples] == ["r.jsonl:1", "r.jsonl:3"]
    assert [(row.file, row.line) for row in rollouts.report.skipped] == [("r.jsonl", 2)]


def test_a_mask_cannot_come_with_text(read: Read) -> None:
    with pytest.raises(ValueError, match="'loss_mask' needs token ids, but the row has text"):
        read([{"prompt": "Hi", "response": "Hello", "reward": 1, "loss_mask": [1]}], CHAT)


def test_small_positive_log_probabilities_are_rounding(read: Read) -> None:
    assert one(read([{**ROW, "logprobs": [1e-5, 0, -1]}])).logprobs is not None


def test_overlong_rollouts_are_truncated_or_dropped_and_listed(read: Read) -> None:
    short = {"tokens": [1, 2], "response_length": 1, "reward": 0, "logprobs": [-1]}
    rows = [short, {**ROW, "logprobs": [-0.1, -0.2, -0.3]}]
    note = SkippedRow(file="r.jsonl", line=2, reason="5 tokens, over data.max_length 4")
    cut = read(rows, max_length=4, overlong="truncate")
    assert cut.samples[1].tokens.tolist() == [5, 6, 7, 8]
    assert cut.samples[1].logprobs is not None
    assert len(cut.samples[1].logprobs) == len(cut.samples[1].mask) == 4
    assert (cut.report.truncated, cut.report.dropped) == ((note,), ())
    kept = read(rows, max_length=4, overlong="drop")
    assert len(kept.samples) == 1
    assert (kept.report.truncated, kept.report.dropped) == ((), (note,))
    assert kept.report.summary() == "2 rows: 1 samples, 2 tokens; 0 skipped, 1 dropped, 0 truncated"


@pytest.mark.parametrize("lacking", [{}, {"loss_mask": None}])
def test_a_loss_mask_is_in_all_rows_or_in_none(read: Read, lacking: dict[str, None]) -> None:
    for row in (ROW, {"prompt_tokens": [5, 6], "response_tokens": [7, 8, 9], "reward": 1.0}):
        given, without = {**row, "loss_mask": [1, 0, 1]}, {**row, **lacking}
        for first, second in ((given, without), (without, given)):
            with pytest.raises(ValueError, match=r"^r\.jsonl line 2: 'loss_mask' is .*in all rows or in none"):
                read([first, second])
            assert len(read([first, first]).samples) == 2


def test_lines_stay_with_their_samples_if_rows_without_a_group_are_skipped(read: Read) -> None:
    found = read([{**ROW, "group": "a"}, ROW, {**ROW, "group": "b"}], on_bad_row="skip")
    assert list(zip([sample.group for sample in found.samples], found.lines, strict=True)) == [("a", 1), ("b", 3)]


def test_a_folder_of_rollouts(tmp_path: Path) -> None:
    for name in ("step-2.jsonl", "step-1.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROW) + "\n")
    rollouts = read_rollouts(tmp_path)
    assert [sample.uid for sample in rollouts.samples] == ["step-1.jsonl:1", "step-2.jsonl:1"]
    assert rollouts.samples[0].group == rollouts.samples[1].group


def test_gsm8k_solutions_as_rollouts(read: Read, gsm8k_solutions: list[dict[str, Any]]) -> None:
    """1,319 questions and four models: groups of four texts, rewarded if the answer is right."""
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    rows = [
        {"question": row["question"], "prompt_id": index, **row[model]}
        for index, row in enumerate(gsm8k_solutions[:100])
        for model in models
    ]
    columns = {"question": "prompt", "solution": "response", "is_correct": "reward"}
    rollouts = read(rows, CHAT, columns=columns)
    assert len(rollouts.samples) == 400
    assert set(Counter(sample.group for sample in rollouts.samples).values()) == {4}
    named = read(rows, CHAT, columns={**columns, "prompt_id": "group"})
    assert [sample.group for sample in named.samples] == [row["prompt_id"] for row in rows]
    for sample, row in zip(rollouts.samples, rows, strict=True):
        assert sample.reward == float(row["is_correct"])
        assert CHAT.decode(sample.tokens[sample.mask]) == row["solution"] + EOS
    assert common_fields(rollouts.samples) == ()


def test_a_row_without_a_group_among_grouped_ones_is_a_bad_row(read: Read) -> None:
    rows = [{**ROW, "group": 1}, {**ROW, "group": 1}, ROW, {**ROW, "group": None}]
    with pytest.raises(
        ValueError, match=r"^r\.jsonl line 3: has no group, but r\.jsonl line 1 has one; give every row a gr"
    ):
        read(rows)
    with pytest.raises(ValueError, match=r"^r\.jsonl line 1: has no group, but r\.jsonl line 2 has one"):
        read([ROW, {**ROW, "group": 0}])
    found = read(rows, on_bad_row="skip")
    assert [sample.uid for sample in found.samples] == ["r.jsonl:1", "r.jsonl:2"]
    assert [row.line for row in found.report.skipped] == [3, 4]
    assert len(read([ROW, ROW]).samples) == 2, "without any group, prompts make them"
