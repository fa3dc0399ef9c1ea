"""The command line: help on one screen, exit codes, and error messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from padfree.cli.main import main, parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *(
            [name, "--help"]
            for name in ("chat", "check", "demo", "generate", "launch", "plan", "report", "sft", "distill", "rl")
        ),
    ],
)
def test_help_fits_on_one_screen_and_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert len(text.splitlines()) <= 28
    assert "example: padfree" in text


def test_no_command_and_an_unknown_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["sing"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "usage: padfree" in capsys.readouterr().err


def test_settings_may_stand_behind_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "recipes/nowhere.toml", "--dry-run", "optimizer.lr=1e-5"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    for arguments in (["sft", "r.toml", "--dry-run", "word"], ["report", "a", "--output", "b", "c.d=1", "--bad"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2


def test_help_says_the_same_of_a_command_whether_it_is_loaded_or_not() -> None:
    assert parser(()).format_help() == parser().format_help()


QUICK = (
    "--help",
    *(f"{name} --help" for name in ("chat", "check", "generate", "launch", "plan", "report", "sft", "rl")),
    "sft sft optimiser.lr=1",
    "rl rl loss.low=5 --dry-run",
    "plan sft batch.max_token=1",
    "sft sft model.path=./no/where",
    f"sft sft model.path={ROOT} data.path=nowhere.jsonl",
    "plan sft model.path=./no/where",
    "check --model ./no/where",
    "check --model m --samples 1",
    "generate ./no/where Hello",
    "chat ./no/where",
    "report nowhere --output report.pdf",
    "sing",
)


def test_help_and_a_mistaken_setting_do_not_wait_for_torch(tmp_path: Path) -> None:
    """What is slow to import is not imported: the answer is there in a fraction of a second."""
    files = {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b"{}",
        "model.safetensors": (2).to_bytes(8, "little") + b"{}",
    }
    for missing in ("tokenizer.json", "model.safetensors"):
        folder = tmp_path / f"without-{missing}"
        folder.mkdir()
        for name in files.keys() - {missing}:
            (folder / name).write_bytes(files[name])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "bad.toml").write_text("[model\n")
    rest = f"data.path={tmp_path}/rows.jsonl run.folder={tmp_path}/run"
    lines = {
        f"sft sft model.path={tmp_path}/without-model.safetensors {rest}": "has no weights",
        f"sft sft model.path={tmp_path}/without-tokenizer.json {rest}": "has no tokenizer",
        f"sft {tmp_path}/bad.toml": "is not TOML",
        "sft no-recipe model.path=m": "cannot be read",
    }
    program = (
        "import sys\nfrom padfree.cli.main import main\n"
        "for line in sys.argv[1:]:\n"
        "    try:\n        main(line.split())\n    except SystemExit:\n        pass\n"
        "    slow = {'torch', 'transformers', 'plotly', 'datasets', 'pandas'} & sys.modules.keys()\n"
        "    assert not slow, (line, slow)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *QUICK, *lines], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for line, message in lines.items():
        assert message in result.stderr, line
