"""`padfree generate` from the command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from padfree.cli.main import main
from padfree.cli.talk_options import CONTROLS
from tests.tools.talk.talk_cases import save_adapters, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("talk") / "model"))


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", *words, "--device", "cpu", "--max-new-tokens", "12"]) == 0
    return capsys.readouterr().out


def test_one_prompt_is_the_text_of_the_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(capsys, model, "Hello", "--temperature", "0.7", "--seed", "4")
    line = json.loads(generated(capsys, model, "Hello", "--temperature", "0.7", "--seed", "4", "--json"))
    assert text == f"{line['text']}\n"
    assert line.keys() == {"prompt", "text", "end", "tokens", "logprobs"}
    assert line["prompt"] == "Hello"
    assert line["end"] in ("length", "stop")
    assert len(line["tokens"]) == len(line["logprobs"]) <= 12


def test_several_prompts_in_their_order(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One?\r\n\nTwo and a half?\nThree\n", encoding="utf-8-sig")
    lines = generated(capsys, model, "Zero?", "--prompts", str(file), "--json", "--temperature", "1").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["prompt"] for row in rows] == ["Zero?", "One?", "Two and a half?", "Three"]
    text = generated(capsys, model, "Zero?", "--prompts", str(file), "--temperature", "1")
    assert text == "\n".join(f"> {row['prompt']}\n{row['text']}\n" for row in rows)


def test_standard_input(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Two\nlines\n"))
    assert json.loads(generated(capsys, model, "-", "--json"))["prompt"] == "Two\nlines"
    monkeypatch.setattr("sys.stdin", io.StringIO("Two\nlines\n"))
    rows = generated(capsys, model, "--prompts", "-", "--json").splitlines()
    assert [json.loads(row)["prompt"] for row in rows] == ["Two", "lines"]


def test_more_prompts_than_a_batch(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"number {number}\n" for number in range(20)))
    sampling = ("--temperature", "1", "--json")
    rows = [json.loads(row) for row in generated(capsys, model, "--prompts", str(file), *sampling).splitlines()]
    assert [row["prompt"] for row in rows] == [f"number {number}" for number in range(20)]
    file.write_text("number 0\nnumber 0\n")
    same = [json.loads(row) for row in generated(capsys, model, "--prompts", str(file), *sampling).splitlines()]
    assert same[0]["tokens"] == rows[0]["tokens"] != same[1]["tokens"]


def test_system_plain_and_arguments(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = generated(capsys, model, "Hello")
    assert generated(capsys, model, "Hello", "--system", "Be kind.") != plain
    assert generated(capsys, model, "Hello", "--plain") != plain


def test_flags_may_stand_before_the_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = generated(capsys, model, "Hello", "a=b", "--json")
    assert main(["generate", model, "--json", "--device", "cpu", "--max-new-tokens", "12", "Hello", "a=b"]) == 0
    assert capsys.readouterr().out == expected
    for wrong in (["--temprature", "1", "Hello"], ["Hello", "--jsonn"]):
        with pytest.raises(SystemExit, match="2"):
            main(["generate", model, *wrong])


def test_a_run_folder_and_an_adapter_folder(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    save_adapters(tmp_path / "run" / "model", Path(model))
    (tmp_path / "run" / "run.json").write_text("{}")
    found = {generated(capsys, str(place), "Hello") for place in (tmp_path / "run", tmp_path / "run" / "model")}
    assert len(found) == 1
    assert found != {generated(capsys, model, "Hello")}


def test_mistakes_are_one_line_and_exit_code_1(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "plain").mkdir()
    plain = str(save_model(tmp_path / "plain", None))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for words, message in (
        ((model,), "PROMPT: missing; give a text"),
        ((model, " "), "PROMPT: a prompt is empty"),
        ((model, "-"), "PROMPT: a prompt is empty"),
        ((model, "-", "-"), "PROMPT: standard input (-) can be read only once"),
        ((model, "--prompts", str(tmp_path / "latin.txt")), "latin.txt: is not UTF-8 text; convert it"),
        ((model, "--prompts", str(tmp_path / "blank.txt")), "blank.txt has no prompt"),
        ((model, "--prompts", str(tmp_path)), "is not a file; give a file"),
        ((model, "--prompts", str(tmp_path / "gone")), "cannot be read (No such file or directory)"),
        ((model, "x", "--temperature", "nan"), "--temperature: nan; give 0, or 0.01 to 100"),
        ((model, "x", "--seed", "-3"), "--seed: -3; give 0 to"),
        ((model, "x", "--max-new-tokens", "0"), "--max-new-tokens: 0; give 1 to"),
        ((model, "x", "--template-arguments", "yes"), "--template-arguments: 'yes'; give a JSON object"),
        ((model, "x", "--plain", "--template-arguments", "{}"), "--plain: uses no chat template"),
        ((model, "x", "--plain", "--system", "y"), "--system: 'y'"),
        ((model, "y" * 3000), "fill the model's context of 256"),
        ((plain, "x"), "the tokenizer has no chat template"),
        ((str(tmp_path / "gone"), "x"), "does not exist"),
        ((str(tmp_path), "x"), "config.json"),
        ((model, "x", "--base", model), "is not an adapter folder"),
    ):
        assert main(["generate", "--device", "cpu", *words]) == 1, words
        output = capsys.readouterr()
        assert message in output.err, words
        assert output.err.startswith("padfree generate: ")
        assert output.err.count("\n") == 1
        assert output.out == ""


def test_a_reader_that_leaves_ends_it_without_a_traceback(model: str) -> None:
    program = [
        sys.executable,
        "-m",
        "padfree",
        "generate",
        model,
        "Hello",
        "--max-new-tokens",
        "200",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read().decode()
    assert "Traceback" not in error


def test_control_characters_are_shown_on_a_terminal() -> None:
    assert "a\x1b]0;title\x07\tb\n\x9b".translate(CONTROLS) == "a\\x1b]0;title\\x07\tb\n\\x9b"
