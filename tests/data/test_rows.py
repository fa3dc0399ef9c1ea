"""Rows with several samples: names, limits, reports, digests; and several sources as one data set."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.data import MixedDataset, TokenizedDataset
from padfree.data.records import DataReport, SkippedRow, labelled
from tests.data.stores import Made, write_store


def made(length: int, trained: int, first: int = 0) -> Made:
    """A sample of this many tokens; the last `trained` of them are trained."""
    return list(range(first, first + length)), [0] * (length - trained) + [1] * trained


ROWS = [[made(4, 2)], [made(5, 2, 10), made(8, 3, 20), made(12, 2, 30)], [made(3, 1, 50)], [made(6, 1), made(9, 6)]]


def test_samples_of_a_row_have_names_of_their_own_and_a_common_group(tmp_path: Path) -> None:
    data = TokenizedDataset(write_store(tmp_path, ROWS))
    row = "train.jsonl:2"
    uids = ["train.jsonl:1", f"{row} turn 1", f"{row} turn 2", f"{row} turn 3", "train.jsonl:3"]
    assert [sample.uid for sample in data][:5] == uids
    assert [sample.group for sample in data] == [None, row, row, row, None, "train.jsonl:4", "train.jsonl:4"]
    assert data.row_starts.tolist() == [0, 1, 4, 5, 7]
    assert data.place(2) == f"{row} turn 2"
    assert {sample.source for sample in data} == {"train.jsonl"}
    assert data.first_token_from(41) == (3, 41)
    report = data.report
    assert (report.num_rows, report.num_used, report.num_samples) == (4, 4, 7)
    assert report.summary() == "4 rows: 7 samples, 47 tokens; 0 skipped, 0 dropped, 0 truncated"


def test_too_long_is_an_error_that_names_the_turn(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"7, but 3 of 7 samples are longer \(the first is train\.jsonl:2 turn 2 with 8 tok"
    ):
        TokenizedDataset(write_store(tmp_path, ROWS), max_length=7)


def test_dropping_leaves_out_the_whole_conversation(tmp_path: Path) -> None:
    """The whole row is dropped, as if it were one sample."""
    data = TokenizedDataset(write_store(tmp_path, ROWS), max_length=8, overlong="drop")
    assert [sample.uid for sample in data] == ["train.jsonl:1", "train.jsonl:3"]
    assert data.row_starts.tolist() == [0, 1, 2]
    assert data.report.dropped == (
        SkippedRow(file="train.jsonl", line=2, reason="turn 3 has 12 tokens, over data.max_length 8"),
        SkippedRow(file="train.jsonl", line=4, reason="turn 2 has 9 tokens, over data.max_length 8"),
    )
    assert data.report.num_used == 2


def test_truncating_keeps_the_turns_that_have_something_to_train_on(tmp_path: Path) -> None:
    data = TokenizedDataset(write_store(tmp_path, ROWS), max_length=8, overlong="truncate")
    assert [sample.uid for sample in data][1:3] == ["train.jsonl:2 turn 1", "train.jsonl:2 turn 2"]
    assert [sample.uid for sample in data][4:] == ["train.jsonl:4 turn 1", "train.jsonl:4 turn 2"]
    assert data.row_starts.tolist() == [0, 1, 3, 4, 6]
    assert data.lengths.tolist() == [4, 5, 8, 3, 6, 8]
    assert data.report.truncated == (
        SkippedRow(
            file="train.jsonl",
            line=2,
            reason="turn 3 has 12 tokens, over data.max_length 8; dropped because no trained token is left: turn 3",
        ),
        SkippedRow(file="train.jsonl", line=4, reason="turn 2 has 9 tokens, over data.max_length 8"),
    )
    short = TokenizedDataset(tmp_path, max_length=3, overlong="truncate")
    assert [sample.uid for sample in short] == ["train.jsonl:1", "train.jsonl:3"]
    reason = "turn 1 has 5 tokens, over data.max_length 3, and no token before the limit is trained"
    assert short.report.dropped[0] == SkippedRow(file="train.jsonl", line=2, reason=reason)
    assert (short.report.num_used, len(short.report.dropped)) == (2, 2)


def test_what_is_one_row_is_part_of_the_identity(tmp_path: Path) -> None:
    """The digest changes if the same tokens are divided into other rows."""
    together = TokenizedDataset(write_store(tmp_path / "a", ROWS))
    apart = TokenizedDataset(write_store(tmp_path / "b", [[sample] for row in ROWS for sample in row]))
    again = TokenizedDataset(write_store(tmp_path / "c", ROWS))
    assert together.digest != apart.digest
    assert together.digest == again.digest == pickle.loads(pickle.dumps(together)).digest


def test_sources_of_a_mixture_follow_one_another_under_their_names(tmp_path: Path) -> None:
    one = TokenizedDataset(write_store(tmp_path / "a", ROWS, "a.jsonl"))
    two = TokenizedDataset(write_store(tmp_path / "b", ROWS[1:], "train.jsonl"))
    data = MixedDataset({"a.jsonl": one, "math": two})
    assert len(data) == 13
    assert data.row_starts.tolist() == [0, 1, 4, 5, 7, 10, 11, 13]
    assert data.lengths.tolist() == [*one.lengths.tolist(), *two.lengths.tolist()]
    for index in range(13):
        part = one[index] if index < 7 else two[index - 7]
        np.testing.assert_array_equal(data[index].tokens, part.tokens)
        np.testing.assert_array_equal(data[index].mask, part.mask)
    assert [data[index].uid for index in (0, 2, 7)] == ["a.jsonl:1", "a.jsonl:2 turn 2", "math/train.jsonl:1 turn 1"]
    assert [data[index].group for index in (0, 2, 7)] == [None, "a.jsonl:2", "math/train.jsonl:1"]
    assert [data[index].source for index in (0, 12)] == ["a.jsonl", "math"]
    assert data[-1].uid == data[12].uid == data.place(12) == "math/train.jsonl:3 turn 2"
    assert len({sample.uid for sample in data}) == 13
    assert data.first_token_from(51) == (4, 51)
    assert data.first_token_from(52) == (4, 52)
    assert data.first_token_from(99) is None
    assert data.report.rows_per_file == {"a.jsonl": 4, "math/train.jsonl": 3}
    assert data.digest != MixedDataset({"math": two, "a.jsonl": one}).digest
    copy = pickle.loads(pickle.dumps(data))
    assert (copy.digest, copy[9].uid) == (data.digest, data[9].uid)
    for index in (13, -14):
        with pytest.raises(IndexError, match=f"sample {index} of 13"):
            data[index]


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("math", "train.jsonl:1", "math/train.jsonl:1"),
        ("a.jsonl", "a.jsonl:1 turn 2", "a.jsonl:1 turn 2"),
        ("a.jsonl", "a.jsonl", "a.jsonl"),
        ("a", "ab:1", "a/ab:1"),
        ("a", 7, "a/7"),
    ],
)
def test_labels(name: str, label: Any, expected: str) -> None:
    assert labelled(name, label) == expected


def test_reports_of_sources_add_up() -> None:
    one = DataReport(num_rows=3, num_samples=5, num_tokens=50, rows_per_file={"a": 3}, used=2, skipped=(ROW,))
    two = DataReport(num_rows=2, num_samples=1, num_tokens=7, rows_per_file={"a": 2}, dropped=(ROW,))
    both = DataReport.merged({"a": one, "b": two})
    assert (both.num_rows, both.num_samples, both.num_tokens, both.num_used) == (5, 6, 57, 3)
    assert both.rows_per_file == {"a": 3, "b/a": 2}
    assert both.dropped[0].file == "b/a"


ROW = SkippedRow(file="a", line=1, reason="why")
