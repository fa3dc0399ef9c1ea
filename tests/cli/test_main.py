"""The command line: help on one screen, exit codes, and mistakes in one line."""

from __future__ import annotations

import pytest

from padfree.cli.main import main


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ("check", "demo", "plan", "report", "sft", "rl"))]
)
def test_help_fits_on_one_screen_and_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert len(text.splitlines()) <= 24
    assert "example: padfree" in text


def test_no_command_and_an_unknown_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["sing"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "usage: padfree" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--folder", "nowhere", "--resume"], "padfree demo: --resume: nowhere holds no demo"),
        (["sft", "nowhere.toml"], "padfree sft: config: nowhere.toml cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_settings_may_stand_behind_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "recipes/nowhere.toml", "--dry-run", "optimizer.lr=1e-5"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    for arguments in (["sft", "r.toml", "--dry-run", "word"], ["report", "a", "--output", "b", "c.d=1", "--bad"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
