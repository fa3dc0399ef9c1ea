"""Reading prompts: columns that are kept, prompts that are too long, and errors in rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from padfree.data import RolloutDataSettings
from padfree.rollout import Prompts, read_prompts
from tests.refused import refused
from tests.rollout.rollout_cases import letters_tokenizer

CHAT = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def read(
    folder: Path, rows: list[Any], *, template: str | None = None, max_new_tokens: int = 4, **settings: Any
) -> Prompts:
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    tokenizer = letters_tokenizer(template=template)
    return read_prompts(path, tokenizer, RolloutDataSettings(**settings), max_new_tokens=max_new_tokens)


def texts(found: Prompts, template: str | None = None) -> list[str]:
    tokenizer = letters_tokenizer(template=template)
    return [tokenizer.decode(prompt.tokens) for prompt in found.prompts]


def test_text_is_unchanged_without_a_template(tmp_path: Path) -> None:
    found = read(tmp_path, [{"prompt": "1+1", "answer": "2"}, {"prompt": "7", "answer": 7, "level": None}])
    assert texts(found) == ["1+1", "7"]
    assert [prompt.uid for prompt in found.prompts] == ["prompts.jsonl:1", "prompts.jsonl:2"]
    assert found.prompts[1].row == {"prompt": "7", "answer": 7, "level": None}
    assert [(len(prompt), prompt.max_new_tokens) for prompt in found.prompts] == [(7, 4), (5, 4)]
    assert (found.report.num_rows, found.report.num_samples, found.report.num_tokens) == (2, 2, 4)


def test_columns_are_mapped_and_all_are_kept(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "result": "2", "level": 3}]
    found = read(tmp_path, rows, columns={"question": "prompt", "result": "answer"})
    assert found.prompts[0].row == {**rows[0], "prompt": "1+1", "answer": "2"}
    with pytest.raises(
        ValueError, match=r"columns: 'question' is mapped to 'response', which is not a field; use one of"
    ):
        read(tmp_path, rows, columns={"question": "response"})
    with pytest.raises(ValueError, match=r"columns: prompts.jsonl has .*; expected 'prompt', or 'messages'"):
        read(tmp_path, [{"level": 3}])


def test_parquet_and_json_keep_all_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"prompt": ["1+1"], "answer": ["2"], "level": [3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "2", "hint": "no"}]))
    found = read_prompts(tmp_path, letters_tokenizer(), max_new_tokens=1)
    assert [prompt.row for prompt in found.prompts] == [
        {"prompt": "1+1", "answer": "2", "level": 3},
        {"prompt": "2", "hint": "no"},
    ]
    assert [prompt.uid for prompt in found.prompts] == ["a.parquet:1", "b.json:1"]


def test_chat_prompts_end_where_the_response_begins(tmp_path: Path) -> None:
    user = {"role": "user", "content": "1+1"}
    system = {"role": "system", "content": "sums"}
    for rows in ([{"prompt": "1+1"}], [{"prompt": [user]}], [{"messages": [user]}]):
        assert texts(read(tmp_path, rows, template=CHAT), CHAT) == ["u:1+1 a:"]
    assert texts(read(tmp_path, [{"messages": [system, user]}], template=CHAT), CHAT) == ["s:sums u:1+1 a:"]
    assert texts(read(tmp_path, [{"prompt": "1+1"}], template=CHAT, prompt_format="plain"), CHAT) == ["1+1"]
    said = {"role": "assistant", "content": "2"}
    with pytest.raises(
        ValueError, match=r"line 1: 'messages' ends with the role 'assistant'; expected the conversation to end"
    ):
        read(tmp_path, [{"messages": [user, said]}], template=CHAT)
    with refused("data.prompt_format"):
        read(tmp_path, [{"messages": [user]}])
    with pytest.raises(ValueError, match=r"line 1: 'prompt' is a list of 1; expected a string"):
        read(tmp_path, [{"prompt": [user]}])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None}, "'prompt' is null; expected a string"),
        ({"prompt": 4}, "'prompt' is 4; expected a string"),
        ({"answer": "2"}, "'prompt' is missing; expected a string"),
        ({"prompt": ""}, "'prompt' has no tokens; expected one or more"),
        ("{oops", "is not valid JSON at character 2"),
        ("[1]", "the row is a list of 1; expected a JSON object"),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_listed(row: Any, reason: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1"}, row, {"prompt": "2"}]
    with pytest.raises(ValueError, match=r"^prompts.jsonl line 2: .*on_bad_row") as caught:
        read(tmp_path, rows)
    assert reason in str(caught.value)
    found = read(tmp_path, rows, on_bad_row="skip")
    assert [prompt.uid for prompt in found.prompts] == ["prompts.jsonl:1", "prompts.jsonl:3"]
    assert [(skipped.line, reason in skipped.reason) for skipped in found.report.skipped] == [(2, True)]


def test_prompts_that_leave_too_few_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length} for length in (2, 5, 8, 9)]
    with refused("data.max_length"):
        read(tmp_path, rows, max_length=8)
    cut = read(tmp_path, rows, max_length=8, overlong="truncate")
    assert [(len(prompt.tokens), prompt.max_new_tokens) for prompt in cut.prompts] == [(2, 4), (5, 3)]
    assert [row.line for row in cut.report.truncated] == [2]
    assert [row.line for row in cut.report.dropped] == [3, 4]
    dropped = read(tmp_path, rows, max_length=8, overlong="drop")
    assert [len(prompt.tokens) for prompt in dropped.prompts] == [2]
    assert [row.line for row in dropped.report.dropped] == [2, 3, 4]
    assert dropped.report.dropped[0].reason == "5 prompt tokens and 4 response tokens exceed max_length 8"
    with refused("data", r"none of 1 rows can be used; for example, prompts.jsonl:1 is rejected: 9 prompt tokens"):
        read(tmp_path, rows[3:], max_length=8, overlong="drop")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows(content: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with refused("data", "empty.jsonl has no rows"):
        read_prompts(path, letters_tokenizer(), max_new_tokens=1)
