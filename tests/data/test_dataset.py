"""`TokenizedDataset`: samples, lengths, limits, and pickling."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from padfree.data.array_files import open_array
from padfree.data.dataset import TokenizedDataset
from padfree.data.records import SkippedRow
from padfree.data.store import Writer
from tests.refused import refused

SAMPLES = [
    ([1, 2, 3], [0, 1, 1]),
    ([4, 5, 6, 7, 8], [0, 0, 0, 0, 1]),
    ([9, 10], [1, 1]),
    ([11, 12, 13, 14], [0, 1, 0, 1]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four samples of two files: lines 1, 2 and 4 of one (line 3 was skipped), line 1 of the other."""
    with Writer(tmp_path) as writer:
        for (tokens, mask), file, line in zip(SAMPLES, (0, 0, 0, 1), (1, 2, 4, 1), strict=True):
            writer.append(
                np.array(tokens, dtype=np.int32),
                np.array(mask, dtype=np.bool_),
                np.array([len(tokens)], dtype=np.int64),
                file,
                np.array([line], dtype=np.int64),
            )
        writer.skipped.append(SkippedRow(file="a.jsonl", line=3, reason="not JSON"))
        files = [{"name": "a.jsonl", "unit": "line", "rows": 4}, {"name": "b/c.json", "unit": "record", "rows": 1}]
        writer.finish({"files": files})
    return tmp_path


def test_samples_and_where_they_come_from(folder: Path) -> None:
    data = TokenizedDataset(folder)
    assert len(data) == 4
    assert data.lengths.tolist() == [3, 5, 2, 4]
    assert [sample.uid for sample in data] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "b/c.json:1"]
    assert [sample.source for sample in data] == ["a.jsonl", "a.jsonl", "a.jsonl", "b/c.json"]
    for sample, (tokens, mask) in zip(data, SAMPLES, strict=True):
        assert sample.tokens.tolist() == tokens
        assert sample.mask.tolist() == [bool(value) for value in mask]
        assert type(sample.tokens) is np.ndarray
    assert data[-1].uid == data[np.int64(3)].uid == "b/c.json:1"
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"sample {index} of 4"):
            data[index]
    with pytest.raises(TypeError):
        data["a"]  # type: ignore[index]


def test_the_report(folder: Path) -> None:
    report = TokenizedDataset(folder).report
    assert report.summary() == "5 rows: 4 samples, 14 tokens; 1 skipped, 0 dropped, 0 truncated"
    assert report.rows_per_file == {"a.jsonl": 4, "b/c.json": 1}
    assert report.skipped == (SkippedRow(file="a.jsonl", line=3, reason="not JSON"),)


def test_too_long_is_an_error_unless_a_setting_says_otherwise(folder: Path) -> None:
    with refused("data.max_length"):
        TokenizedDataset(folder, max_length=3)
    assert len(TokenizedDataset(folder, max_length=5)) == 4


def test_dropping_is_listed(folder: Path) -> None:
    data = TokenizedDataset(folder, max_length=3, overlong="drop")
    assert data.lengths.tolist() == [3, 2]
    assert [sample.uid for sample in data] == ["a.jsonl:1", "a.jsonl:4"]
    assert data.report.summary() == "5 rows: 2 samples, 5 tokens; 1 skipped, 2 dropped, 0 truncated"
    assert data.report.dropped[1] == SkippedRow(file="b/c.json", line=1, reason="4 tokens, over data.max_length 3")


def test_truncation_is_listed_and_what_it_leaves_untrained_is_dropped(folder: Path) -> None:
    data = TokenizedDataset(folder, max_length=3, overlong="truncate")
    assert data.lengths.tolist() == [3, 2, 3]
    assert data[2].tokens.tolist() == [11, 12, 13]
    assert data[2].mask.tolist() == [False, True, False]
    assert data.report.summary() == "5 rows: 3 samples, 8 tokens; 1 skipped, 1 dropped, 1 truncated"
    assert data.report.truncated == (SkippedRow(file="b/c.json", line=1, reason="4 tokens, over data.max_length 3"),)
    assert data.report.dropped[0].reason == "5 tokens, over data.max_length 3, and no token before the limit is trained"


def test_no_sample_left_is_an_error(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        number = np.array([5], dtype=np.int64)
        writer.append(np.arange(5, dtype=np.int32), np.ones(5, dtype=np.bool_), number, 0, number)
        writer.finish({"files": [{"name": "a", "unit": "line", "rows": 1}]})
    with refused("data.max_length"):
        TokenizedDataset(tmp_path, max_length=3, overlong="drop")


def test_a_pickle_holds_the_place_and_not_the_tokens(folder: Path) -> None:
    data = TokenizedDataset(folder, max_length=3, overlong="truncate")
    content = pickle.dumps(data)
    assert len(content) < 500
    copy = pickle.loads(content)
    assert copy.report == data.report
    assert [sample.tokens.tolist() for sample in copy] == [sample.tokens.tolist() for sample in data]


def test_lengths_are_known_without_reading_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tokens(folder: Path, name: str, shape: tuple[int, ...]) -> object:
        return object() if name == "tokens" else open_array(folder, name, shape)

    monkeypatch.setattr("padfree.data.dataset.open_array", no_tokens)
    data = TokenizedDataset(folder, max_length=3, overlong="truncate")
    assert data.lengths.tolist() == [3, 2, 3]
    with pytest.raises(IndexError, match="too many indices"):
        data[0]
