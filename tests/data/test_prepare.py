"""From files to a data set: formats of rows, bad rows, the cache, and several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from padfree.data import SFTDataSettings, SkippedRow, TokenizedDataset, load_sft, sources
from padfree.data.array_files import ArrayWriter
from padfree.errors import UserError
from padfree.packing import collate
from padfree.sample import Sample
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer
from tests.ranks import rank_server
from tests.refused import refused

CHAT = tiny_tokenizer("chatml")
BASE = tiny_tokenizer(kind="bos")
EOS = "<|im_end|>"
Load = Callable[..., TokenizedDataset]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write rows (objects, or bytes as they are) into a file of this name and load it."""

    def loaded(
        rows: list[Any], tokenizer: Any = CHAT, *, name: str = "a.jsonl", num_workers: int | None = 0, **changes: Any
    ) -> TokenizedDataset:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        settings = SFTDataSettings(**changes)
        return load_sft(tmp_path / name, tokenizer, settings, cache=tmp_path / "cache", num_workers=num_workers)

    return loaded


def texts(sample: Sample, tokenizer: PreTrainedTokenizerFast = CHAT) -> tuple[str, str]:
    """The whole text of a sample, and its trained text."""
    return tokenizer.decode(sample.tokens), tokenizer.decode(sample.tokens[sample.mask])


MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Four"},
]
HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_messages(load: Load) -> None:
    whole = CHAT.apply_chat_template(MESSAGES, tokenize=False)
    row = {"messages": MESSAGES, "id": 7}
    assert texts(load([row])[0]) == (whole, f"Hello{EOS}Four{EOS}")
    assert texts(load([row], loss_on="last")[0]) == (whole, f"Four{EOS}")
    assert texts(load([row], loss_on="all")[0]) == (whole, whole)


def test_prompt_and_response_through_the_template(load: Load) -> None:
    row = {"prompt": "Hi", "response": "Hello"}
    assert texts(load([row])[0]) == (f"{HI}Hello{EOS}\n", f"Hello{EOS}")
    assert texts(load([row], loss_on="all")[0])[1] == f"{HI}Hello{EOS}\n"
    conversation = {"prompt": MESSAGES[:3], "response": "Four"}
    assert texts(load([conversation])[0]) == (CHAT.apply_chat_template(MESSAGES, tokenize=False), f"Four{EOS}")
    other = TEMPLATES["chatml"].replace("<|im_start|>", "<s>")
    assert texts(load([row], BASE, chat_template=other)[0], BASE)[0] == "<s>user\nHi<|im_end|>\n<s>assistant\nHello" + (
        f"{EOS}\n"
    )


@pytest.mark.parametrize(("tokenizer", "changes"), [(BASE, {}), (CHAT, {"prompt_format": "plain"})])
def test_prompt_and_response_as_they_are(
    load: Load, tokenizer: PreTrainedTokenizerFast, changes: dict[str, Any]
) -> None:
    beginning = "<s>" if tokenizer is BASE else ""
    row = {"prompt": "2+2=", "response": "4"}
    assert texts(load([row], tokenizer, **changes)[0], tokenizer) == (f"{beginning}2+2=4{EOS}", f"4{EOS}")
    assert texts(load([row], tokenizer, append_eos=False, **changes)[0], tokenizer)[1] == "4"
    assert texts(load([row], tokenizer, loss_on="all", **changes)[0], tokenizer)[1] == f"{beginning}2+2=4{EOS}"


def test_text_is_trained_on_whole(load: Load) -> None:
    assert texts(load([{"text": "Hello there"}])[0]) == (f"Hello there{EOS}", f"Hello there{EOS}")
    assert texts(load([{"text": "Hello"}], BASE)[0], BASE)[0] == f"<s>Hello{EOS}"


def test_tools_reach_the_template(load: Load) -> None:
    template = "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}" + TEMPLATES["chatml"]
    data = load(
        [{"messages": MESSAGES[:2], "tools": [{"name": "add"}]}, {"messages": MESSAGES[:2], "tools": None}],
        chat_template=template,
    )
    assert texts(data[0])[0] == f"[add]{HI}Hello{EOS}\n"
    assert texts(data[1])[0] == f"{HI}Hello{EOS}\n"


GOOD = {"prompt": "Hi", "response": "Hello"}
BAD = [
    (b'{"prompt": "Hi", "resp', r"is not valid JSON at character 18 .*; expected one JSON object"),
    (b'{"prompt": "\xff", "response": "x"}', r"byte 13 is not UTF-8; expected a JSON object in UTF-8"),
    (b"[]", r"the row is a list of 0; expected a JSON object"),
    ({"prompt": "Hi"}, r"'response' is missing; expected a string \(the row has 'prompt'\)"),
    ({"prompt": "Hi", "response": None}, r"'response' is null; expected a string"),
    ({"prompt": "Hi", "response": 10**30}, r"'response' is a huge integer; expected a string"),
    ({"prompt": ["Hi"], "response": "x"}, r"prompt\[0\] is 'Hi'; expected an object with role and content"),
    ({"prompt": {"a": 1}, "response": "x"}, r"'prompt' is an object; expected a string"),
    ({"prompt": "Hi", "response": "\ud83d"}, r"'response' has a lone surrogate"),
    ({"prompt": "Hi", "response": "x", "tools": "add"}, r"'tools' is 'add'; expected a list of tools"),
]


@pytest.mark.parametrize(("bad", "words"), BAD)
def test_a_bad_row_stops_with_file_line_field_and_what_was_expected(load: Load, bad: Any, words: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^a\.jsonl line 3: {words}.*; correct the row, or set data.on_bad_row=skip to skip rows like this$",
    ):
        load([GOOD, b"", bad, GOOD])


def test_bad_rows_are_skipped_and_listed(load: Load, tmp_path: Path) -> None:
    rows = [GOOD, b"", *(bad for bad, _ in BAD), GOOD]
    data = load(rows, on_bad_row="skip")
    assert [sample.uid for sample in data] == ["a.jsonl:1", f"a.jsonl:{len(rows)}"]
    assert [row.line for row in data.report.skipped] == list(range(3, len(rows)))
    assert data.report.num_rows == len(rows) - 1
    assert data.report.skipped[2] == SkippedRow(
        file="a.jsonl", line=5, reason="the row is a list of 0; expected a JSON object"
    )
    with pytest.raises(
        ValueError, match=r"^a\.jsonl line 3: is not valid JSON"
    ):  # from the cache, which holds the list
        load(rows, on_bad_row="error")
    data.report.write(tmp_path / "skipped.jsonl")
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == len(BAD)


@pytest.mark.parametrize("first", [{"prompt": "x"}, {"other": 1}, {}, 7])
def test_first_rows_without_a_needed_column_are_skipped(load: Load, tmp_path: Path, first: Any) -> None:
    good = {"prompt": "2+2?", "response": "4"}
    for bad in ([first], [first, first]):
        data = load([*bad, good, good], on_bad_row="skip")
        assert (len(data), [row.line for row in data.report.skipped]) == (2, list(range(1, len(bad) + 1)))
    with pytest.raises(UserError):
        load([first, good] if first != 7 else [{"prompt": "x"}, good])
    with pytest.raises(UserError, match=r"data\.columns: .*expected"):
        load([{"other": 1}, {"another": 1}], on_bad_row="skip")


def test_a_row_with_nothing_to_train_on_is_bad(load: Load) -> None:
    with pytest.raises(
        ValueError, match=r"a\.jsonl line 2: has 1 tokens and none to train on; expected a trained token aft"
    ):
        load([{"text": "Hello"}, {"text": ""}])
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: no message has the role 'assistant'"):
        load([{"messages": MESSAGES[:1]}])


def test_several_files_of_different_kinds(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": "Hello"}) + "\n")
    (folder / "b.json").write_text(json.dumps([GOOD, GOOD]))
    # Parquet gives every message the keys of all; the null ones are not the template's business
    messages = [{**MESSAGES[0], "id": "x"}, MESSAGES[1]]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), folder / "c.parquet")
    (folder / "d.jsonl").write_text("")
    data = load_sft(folder, CHAT, cache=tmp_path / "cache")
    assert [sample.uid for sample in data] == ["a.jsonl:1", "b.json:1", "b.json:2", "c.parquet:1"]
    assert data.report.rows_per_file == {"a.jsonl": 1, "b.json": 2, "c.parquet": 1, "d.jsonl": 0}
    for index in (1, 3):
        assert texts(data[index]) == (f"{HI}Hello{EOS}\n", f"Hello{EOS}")
    (folder / "b.json").write_text(json.dumps([GOOD, {"prompt": 1, "response": ""}]))
    with pytest.raises(ValueError, match=r"^b\.json record 2: 'prompt' is 1; expected a string"):
        load_sft(folder, CHAT, cache=tmp_path / "cache")


def folders(cache: Path) -> int:
    return sum((path / "metadata.json").exists() for path in cache.iterdir())


def test_the_cache_is_found_by_content_tokenizer_and_settings(load: Load, tmp_path: Path) -> None:
    load([GOOD])
    load([GOOD], max_length=100, overlong="drop", on_bad_row="skip")
    assert folders(tmp_path / "cache") == 1
    for count, arguments in enumerate(
        (
            {"rows": [GOOD, GOOD]},
            {"rows": [GOOD], "name": "b.jsonl"},
            {"rows": [GOOD], "tokenizer": tiny_tokenizer("chatml_marked")},
            {"rows": [GOOD], "tokenizer": tiny_tokenizer("chatml", kind="bos")},
            {"rows": [GOOD], "loss_on": "all"},
            {"rows": [GOOD], "prompt_format": "plain"},
            {"rows": [GOOD], "prompt_format": "plain", "append_eos": False},
            {"rows": [GOOD], "template_arguments": {"date": "today"}},
            {"rows": [GOOD], "chat_template": TEMPLATES["no_system"]},
            {"rows": [GOOD], "columns": {"prompt": "prompt"}},
        ),
        start=2,
    ):
        load(**arguments)
        assert folders(tmp_path / "cache") == count


def test_a_moved_file_is_still_known(load: Load, tmp_path: Path) -> None:
    load([GOOD])
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "moved" / "a.jsonl")
    load_sft(tmp_path / "moved" / "a.jsonl", CHAT, cache=tmp_path / "cache")
    assert folders(tmp_path / "cache") == 1


def test_progress_is_reported_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_ROWS", 2)
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 5)
    seen: list[tuple[int, int]] = []
    load_sft(path, CHAT, cache=tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert seen == [(size * 2 // 5, size), (size * 4 // 5, size), (size, size)]


def test_a_bar_needs_rich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich.progress", None)
        with pytest.raises(
            ValueError, match="progress: True shows a bar, but the package rich is not installed; pip install rich"
        ):
            load_sft(path, CHAT, cache=tmp_path / "cache", progress=True)
    pytest.importorskip("rich", reason="the bar needs rich")
    assert len(load_sft(path, CHAT, cache=tmp_path / "cache", progress=True)) == 1
    assert "tokenising" in capsys.readouterr().err


def test_several_processes_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_ROWS", 3)
    rows: list[dict[str, Any]] = [{"prompt": f"Hi {index}", "response": "Hello " * (index % 5)} for index in range(20)]
    rows[7] = {"prompt": "Hi"}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skip = SFTDataSettings(on_bad_row="skip")
    here = load_sft(path, CHAT, skip, cache=tmp_path / "here", num_workers=0)
    one = load_sft(path, CHAT, skip, cache=tmp_path / "one", num_workers=1)
    server = rank_server()  # starts processes quickly; they do the same as freshly spawned ones
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: server)
    two = load_sft(path, CHAT, skip, cache=tmp_path / "two", num_workers=2)
    for other in (one, two):
        assert other.report == here.report
        for a, b in zip(here, other, strict=True):
            assert a.uid == b.uid
            assert np.array_equal(a.tokens, b.tokens)
            assert np.array_equal(a.mask, b.mask)
    with pytest.raises(ValueError, match=r"a\.jsonl line 8: 'response' is missing"):
        load_sft(path, CHAT, cache=tmp_path / "three", num_workers=1)
    assert multiprocessing.active_children() == []


def test_a_script_that_processes_cannot_import_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    """A worker process would load the same data and wait for its parent, which waits for the worker."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Hello"}) + "\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from padfree.testing.tokenizers import tiny_tokenizer\n"
        "from padfree.data import load_sft\n"
        "load_sft('a.jsonl', tiny_tokenizer(), cache='cache', num_workers=1)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1
    assert "num_workers: the main script loads its data when it is imported, and every worker process" in result.stderr
    assert result.stderr.rstrip().endswith("or num_workers=0")
    assert "num_workers: a tokenising process died" in result.stderr


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")

    def grow(done: int, total: int) -> None:
        path.write_text((json.dumps(GOOD) + "\n") * 2)

    with refused("data", r"a\.jsonl changed while it was being read"):
        load_sft(path, CHAT, cache=tmp_path / "cache", progress=grow)
    assert folders(tmp_path / "cache") == 0


def test_gsm8k_and_a_second_start_that_tokenises_nothing(
    gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gsm8k / "train.jsonl"
    some = tmp_path / "train.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()[:600]
    some.write_text("\n".join(lines), encoding="utf-8")
    settings = SFTDataSettings(columns={"question": "prompt", "answer": "response"}, max_length=512, overlong="drop")
    data = load_sft(some, CHAT, settings, cache=tmp_path / "cache")
    assert len(data) + len(data.report.dropped) == 600
    assert data.lengths.max() <= 512
    assert data.report.num_tokens == data.lengths.sum() == sum(len(sample) for sample in data)
    for sample in data:
        row = json.loads(lines[int(str(sample.uid).partition(":")[2]) - 1])
        assert texts(sample)[1] == row["answer"] + EOS
        assert len(sample) - sample.num_labels > 3
    batch = collate([data[index] for index in range(8)])
    assert batch.num_tokens == data.lengths[:8].sum()

    def refuse(*arguments: Any, **keywords: Any) -> None:
        pytest.fail("the tokenizer was called")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", refuse)
    monkeypatch.setattr("padfree.data.prepare.RowTokenizer", refuse)
    again = load_sft(some, tiny_tokenizer("chatml"), settings, cache=tmp_path / "cache")
    assert again.report == data.report
    assert np.array_equal(again[17].tokens, data[17].tokens)


def damaged(name: str, content: bytes | int | None) -> Callable[[Path], None]:
    """Remove a file of the cache, truncate it, or change its content."""

    def damage(folder: Path) -> None:
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        damaged("metadata.json", None),
        damaged("metadata.json", b"{"),
        damaged("metadata.json", b"[]"),
        damaged("tokens.npy", 130),
        damaged("mask.npy", None),
        damaged("offsets.npy", b"garbage"),
        damaged("rows.npy", b""),
        damaged("skipped.jsonl", None),
        damaged("skipped.jsonl", b"{"),
    ],
)
def test_a_damaged_cache_is_made_anew(damage: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + "not JSON\n")
    settings = SFTDataSettings(on_bad_row="skip")

    def load() -> TokenizedDataset:
        return load_sft(path, CHAT, settings, cache=tmp_path / "cache", num_workers=0)

    whole = load()
    tokens = whole[0].tokens.tolist()
    damage(whole.folder)
    again = load()
    assert again.folder == whole.folder
    assert again[0].tokens.tolist() == tokens
    assert len(again.report.skipped) == 1
    assert again.digest == whole.digest


@pytest.mark.parametrize("where", ["append", "finish", "close"])
def test_a_full_disk_under_the_cache_is_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    real = getattr(ArrayWriter, where)

    def full(self: ArrayWriter, *arguments: Any) -> None:
        real(self, *arguments)
        if where != "append" or len(arguments[0]) > 1:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ArrayWriter, where, full)
        with refused("cache", r".*building-\S+ cannot be written \(No space left on device\)") as caught:
            load_sft(path, CHAT, cache=tmp_path / "cache", num_workers=0)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []
    assert len(load_sft(path, CHAT, cache=tmp_path / "cache", num_workers=0)) == 1


def test_the_digest_of_a_data_set_is_that_of_its_samples(tmp_path: Path) -> None:
    """The digest does not depend on the location and spelling of the files or on the number of processes."""
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 3)
    other.write_text((json.dumps({"note": 1, **GOOD}) + "\n") * 3)

    def digest(path: Path, **settings: Any) -> str:
        return load_sft(path, CHAT, SFTDataSettings(**settings), cache=tmp_path / "cache", num_workers=0).digest

    assert digest(path) == digest(other) == digest(path, max_length=999) == digest(path, columns={"prompt": "prompt"})
    assert digest(path) != digest(path, loss_on="all")
    longest = len(load_sft(path, CHAT, cache=tmp_path / "cache", num_workers=0)[0])
    assert digest(path) != digest(path, max_length=longest - 1, overlong="truncate")
    other.write_text((json.dumps(GOOD) + "\n") * 2)
    assert digest(path) != digest(other)
