"""`padfree check`: its table, its verdict, its exit code, and its error messages."""

from __future__ import annotations

import io
import json
import os
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from padfree.batch import PackedBatch
from padfree.cli.check import context_ranks
from padfree.cli.main import main
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.testing.models import save_with_tokenizer
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a Hub id that is not there, without asking


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_with_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b) * a} for a in range(1, 5) for b in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_right_model_passes_with_a_table_and_a_report(
    model: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    arguments = ["--model", model, "--data", data, "--samples", "4", "--device", "cpu", "--json", str(target)]
    assert main(["check", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model       Qwen3ForCausalLM, all of its 2 layers"
    assert lines[1].startswith(f"samples     4 of {data}, ")
    assert lines[-1] == "passed: packed training gives the same results as one sample at a time"
    titles = [line.split("  ")[0] for line in lines]
    parts = {"gradients", "gradients of layer 0", "gradients of layer 1", "gradients of embeddings and head"}
    assert {"log-probabilities", "loss", "normaliser", *parts} <= set(titles)
    told = json.loads(target.read_text())
    assert (told["passed"], told["dtype"], len(told["lengths"])) == (True, "float32", 4)


def test_float8_is_measured_by_layer(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget between the two distances keeps one layer in bfloat16; the other comparisons are without float8."""
    target = tmp_path / "report.json"
    arguments = ["check", "--model", model, "--samples", "4", "--device", "cpu", "--float8"]
    assert main([*arguments, "--json", str(target)]) == 0
    assert "give --float8 a number" in capsys.readouterr().out
    distances = json.loads(target.read_text())["float8"]
    assert [each["layer"] for each in distances] == [0, 1]
    assert all(0.005 < each[name] < 0.6 for each in distances for name in ("together", "alone"))
    low, high = sorted(each["alone"] for each in distances)
    assert main([*arguments, str((low + high) / 2)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (kept,) = (each["layer"] for each in distances if each["alone"] == high)
    assert lines[-3].endswith(f": layers {kept} stay in bfloat16")
    assert [line.split("  ")[0] for line in lines if "stays in bfloat16" in line] == [f"layer {kept}"]


def test_a_broken_one_exits_with_1_and_says_what_failed(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def halved(samples: list[Sample], **options: object) -> PackedBatch:
        batch = collate(samples, **options)  # type: ignore[arg-type]
        return batch.with_weights(batch.weights / 2)

    monkeypatch.setattr("padfree.train.microbatch.collate", halved)
    with pytest.raises(SystemExit) as end:
        main(["check", "--model", model, "--samples", "3", "--device", "cpu", "--layers", "1"])
    assert end.value.code == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].endswith("the first 1 of its 2 layers")
    assert lines[1].startswith("samples     3 samples of random tokens")
    assert lines[-1].startswith("FAILED: loss, normaliser, gradients; pad after every pack (loss, ")
    failed = [line.split("  ")[0] for line in lines if " FAILED" in line]
    assert {"loss", "normaliser", "gradients of layer 0"} <= set(failed)
    assert "log-probabilities" not in failed
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--float8", "0"], "--float8: 0.0; give a budget above 0, or --float8 without a budget"),
        (["--float8", "nan"], "--float8: nan; give a budget above 0, or --float8 without a budget"),
        (["--backend", "magic"], "backend: 'magic' is not an attention backend"),
        (["--device", "tpu"], "device: 'tpu' is not a device type"),
        (["--layout", "cp"], "--layout: 'cp'; give numbers of data and context ranks, such as dp=2,cp=2"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--model", model, "--device", "cpu", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"padfree check: {message}")
    assert error.count("\n") == 1


def test_settings_of_data_may_stand_anywhere(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what a message advises: it is pasted behind the command."""
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{number}+1=", "its reply": str(number + 1)} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    arguments = ["check", "--model", model, "--samples", "2", "--device", "cpu", "--layers", "1", "--data", str(path)]
    assert main(arguments) == 1
    advice = capsys.readouterr().err.rpartition("as in ")[2]
    (columns,) = shlex.split(advice)
    assert columns == 'data.columns={"its reply"="response"}'
    assert main([*arguments, columns]) == 1
    assert "questions.jsonl line 5: is not valid JSON" in capsys.readouterr().err
    assert main([*arguments, columns, "data.on_bad_row=skip"]) == 0
    assert main(["check", columns, *arguments[1:], "data.on_bad_row=skip"]) == 0
    assert f"2 of {path}, " in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_said_before_the_check(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(*arguments: object, **options: object) -> None:
        raise AssertionError("the check has begun")

    monkeypatch.setattr("padfree.tools.check.model_check", checked)
    (tmp_path / "file").write_text("")
    assert main(["check", "--model", model, "--json", str(tmp_path / "file" / "report.json")]) == 1
    assert capsys.readouterr().err.startswith(
        f"padfree check: --json: {tmp_path / 'file'} is not a folder; give a file in"
    )


def test_layouts_are_read() -> None:
    assert context_ranks(None, 8) == 1
    assert context_ranks("dp=2,cp=4", 8) == 4
    assert context_ranks("cp=2", 2) == 2
    assert context_ranks("dp=3", 3) == 1


def test_help_fits_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert len(text.splitlines()) <= 24
    assert "example: padfree check" in text


def command(rank: int, world: int, arguments: list[str]) -> str:
    """What a process of torchrun shows."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    with redirect_stdout(io.StringIO()) as shown:
        assert main(arguments) == 0
    return shown.getvalue()


def test_two_processes_check_the_sharded_path_and_one_tells(model: str, data: str) -> None:
    arguments = ["--model", model, "--data", data, "--samples", "3", "--layout", "cp=2", "--device", "cpu"]
    first, second = run_ranks(2, command, ["check", *arguments, "--layers", "1"])
    assert second == ""
    lines = first.splitlines()
    assert lines[-1] == "passed: packed training gives the same results as one sample at a time"
    assert any("1 data x 2 context ranks, FSDP2" in line for line in lines)
    assert any(line.startswith("balanced ring: ") for line in lines)
