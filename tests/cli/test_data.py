"""`padfree data show` prints the text that the run trains on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from padfree.cli.main import main
from padfree.data.tokenize import RowTokenizer
from padfree.testing.tokenizers import tiny_tokenizer
from padfree.train import data_view

CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "<think>a</think>Hi"},
    {"role": "user", "content": "And\nnow, 東京?"},
    {"role": "assistant", "content": "Four"},
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def tokenizer_folder(tmp_path: Path, template: str | None, kind: str = "bytes") -> str:
    folder = tmp_path / f"{template}-{kind}"
    tiny_tokenizer(template, kind=kind).save_pretrained(folder)
    return str(folder)


def rows_file(tmp_path: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def show(capsys: pytest.CaptureFixture[str], recipe: str, tokenizer: str, data: str, *words: str, code: int = 0) -> str:
    path = Path(__file__).parents[2] / "src" / "padfree" / "recipes" / f"{recipe}.toml"
    assert main(["data", "show", str(path), f"model.tokenizer={tokenizer}", f"data.path={data}", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def trained(output: str) -> list[str]:
    return re.findall(r"\[\[(.*?)\]\]", output, re.DOTALL)


def test_the_trained_part_is_marked_and_messages_are_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows_file(tmp_path, [{"messages": CHAT, "id": 7}])
    output = show(capsys, "sft", tokenizer_folder(tmp_path, "chatml"), data)
    assert trained(output) == ["<think>a</think>Hi<|im_end|>", "Four<|im_end|>"]
    assert "not used: id" in output
    found = re.findall(r"message (\d) +(\w+) +tokens (\d+) to (\d+)", output)
    assert [(number, role) for number, role, *_ in found] == [
        ("1", "user"),
        ("2", "assistant"),
        ("3", "user"),
        ("4", "assistant"),
    ]
    ends = [int(place) for *_, first, last in found for place in (first, last)]
    assert ends == sorted(ends)


def test_text_reads_as_the_template_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for a tokenizer that decodes a part of a text without the space that it begins with."""
    rows = [{"messages": [{"role": "user", "content": " a  b"}, {"role": "assistant", "content": " c d"}]}]
    for kind in ("bytes", "metaspace"):
        folder = tokenizer_folder(tmp_path, "chatml", kind)
        assert trained(show(capsys, "sft", folder, rows_file(tmp_path, rows))) == [" c d<|im_end|>"]


def test_a_conversation_that_is_split_shows_every_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows_file(tmp_path, [{"messages": CHAT}])
    output = show(capsys, "sft", tokenizer_folder(tmp_path, "forgetful"), data)
    assert trained(output) == ["<think>a</think>Hi<|im_end|>", "Four<|im_end|>"]
    assert "rows.jsonl:1 turn 1: " in output
    assert "rows.jsonl:1 turn 2: " in output
    assert "1 rows: 2 samples" in output


def test_a_row_of_many_turns_is_rendered_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows_file(tmp_path, [{"messages": CHAT * 4}, {"messages": CHAT}, {"messages": CHAT * 3}])
    words = ("sft", tokenizer_folder(tmp_path, "forgetful"), data, "--rows", "3")
    output = show(capsys, *words)
    assert len(re.findall(r"^rows\.jsonl:\d turn", output, re.MULTILINE)) == 16
    assert len(re.findall(r"  message ", output)) == 2 * (sum(range(1, 9)) + sum(range(1, 3)) + sum(range(1, 7)))
    calls: list[str] = []
    rendered, opened = RowTokenizer.rendered, data_view.open_sources
    monkeypatch.setattr(RowTokenizer, "rendered", lambda *given: (calls.append("rendered"), rendered(*given))[1])
    monkeypatch.setattr(
        data_view, "open_sources", lambda *given, **named: (calls.append("opened"), opened(*given, **named))[1]
    )
    assert show(capsys, *words) == output
    assert sorted(calls) == ["opened", "rendered", "rendered", "rendered"]


def test_pairs_prompts_and_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokenizer_folder(tmp_path, "chatml")
    pairs = rows_file(tmp_path, [{"prompt": "Hello", "chosen": "yes", "rejected": "no"}], "pairs.jsonl")
    assert trained(show(capsys, "dpo", folder, pairs)) == ["yes<|im_end|>", "no<|im_end|>"]
    prompts = rows_file(tmp_path, [{"question": "Hello", "answer": "4"}], "prompts.jsonl")
    output = show(capsys, "rl-local", folder, prompts)
    assert trained(output) == []
    assert "at most 512 tokens, written by the model" in output
    rollouts = rows_file(
        tmp_path, [{"tokens": [5, 6, 7], "response_length": 1, "reward": 0.5, "group": "a"}], "rollouts.jsonl"
    )
    output = show(capsys, "rl", folder, rollouts)
    assert "3 tokens, 1 trained, reward: 0.5, group: a" in output


def test_a_row_is_found_by_number_or_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows_file(tmp_path, [{"text": text} for text in ("one", "two", "three")])
    folder = tokenizer_folder(tmp_path, None)
    assert trained(show(capsys, "sft", folder, data, "--row", "2", "--rows", "5")) == [
        "two<|im_end|>",
        "three<|im_end|>",
    ]
    assert trained(show(capsys, "sft", folder, data, "--row", "rows.jsonl:3")) == ["three<|im_end|>"]
    for wrong in ("0", "4", "-1", "rows.jsonl:9", "x", "²"):
        message = show(capsys, "sft", folder, data, f"--row={wrong}", code=1)
        assert message.startswith("padfree data: --row: ")
        assert message.count("\n") == 1
    assert "--rows: 0" in show(capsys, "sft", folder, data, "--rows", "0", code=1)
    assert "eval.path: missing" in show(capsys, "sft", folder, data, "--eval", code=1)


def test_sources_of_a_mixture_are_shown_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = rows_file(tmp_path, [{"messages": CHAT[:2]}], "a.jsonl")
    second = rows_file(tmp_path, [{"question": "Hello", "answer": "Four"}], "b.jsonl")
    folder = tokenizer_folder(tmp_path, "chatml")
    recipe = Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "sft.toml"
    sources = f'[{{path="{first}"}},{{path="{second}",name="sums"}}]'
    words = ["data", "show", str(recipe), f"model.tokenizer={folder}", "data.path=[]", f"data.sources={sources}"]
    assert main([*words, "--row", "sums/b.jsonl:1"]) == 0
    output = capsys.readouterr().out
    assert trained(output) == ["Four<|im_end|>"]
    assert "message 2   assistant" in output


def test_the_page_has_the_same_and_escapes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>"
    chat = [{"role": "user", "content": evil}, {"role": "assistant", "content": f"{evil} done"}]
    data = rows_file(tmp_path, [{"messages": chat}])
    show(capsys, "sft", tokenizer_folder(tmp_path, "chatml"), data, "--page", "data.html")
    page = Path("data.html").read_text(encoding="utf-8")
    assert "<mark>&lt;script&gt;alert(1)&lt;/script&gt; done&lt;|im_end|&gt;</mark>" in page
    assert evil not in page
