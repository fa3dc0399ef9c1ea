"""A bug in padfree prints its traceback, for every command; a mistake of the user prints one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

import padfree
from padfree.cli.main import COMMANDS, TRAINING, main
from padfree.errors import EXIT_BUG, UserError, bug_note, system_error
from padfree.testing.models import save_with_tokenizer
from tests.refused import refused

RECIPES = Path(padfree.__file__).parent / "recipes"
READS = "padfree.config.reader._converted"

PLANTED: dict[str, tuple[list[str], str]] = {
    "chat": (["m"], "padfree.cli.chat.speaker_of"),
    "check": (["--model", "m"], "padfree.cli.check.context_ranks"),
    "data": (["show", str(RECIPES / "sft.toml")], READS),
    "demo": (["--folder", "FOLDER/demo"], "padfree.tools.demo.run_demo.Demo"),
    "doctor": (["m", "--rollouts", "FOLDER/r.jsonl"], "padfree.cli.doctor.find_model"),
    "env": ([], "padfree.cli.env.environment"),
    "eval": ([str(RECIPES / "sft.toml")], READS),
    "export": (["m", "FOLDER/m.gguf"], "padfree.cli.gguf.find_model"),
    "generate": (["m", "hello"], "padfree.cli.generate.speaker_of"),
    "launch": (["--hosts", "a", "--", "sft", "r.toml"], "padfree.cli.launch._address"),
    "plan": (["--model", "m", "--data", "d.jsonl", "--max-tokens", "8"], READS),
    "recipes": ([], "padfree.cli.recipes.shipped_recipes"),
    "report": (["FOLDER"], "padfree.tools.report.default_output"),
    "settings": ([], "padfree.cli.settings.matching_entries"),
    **{name: ([str(RECIPES / "sft.toml")], READS) for name in TRAINING},
}
"""By command: words, and a function that they come to."""

MISTAKES: dict[str, tuple[list[str], str]] = {
    "chat": (["FOLDER/none"], "MODEL"),
    "check": (["--model", "m", "--samples", "1"], "--samples"),
    "data": (["show", str(RECIPES / "sft.toml"), "data.max_length=1"], "data.max_length"),
    "demo": (["--folder", "FOLDER/none", "--resume"], "--resume"),
    "doctor": (["m", "--rollouts", "FOLDER/r.jsonl", "--samples", "0"], "--samples"),
    "eval": ([str(RECIPES / "sft.toml"), "optimizer.lr=-1"], "optimizer.lr"),
    "export": (["m", "FOLDER/m.txt"], "FILE"),
    "generate": (["m", "--prompts", "FOLDER/none"], "--prompts"),
    "launch": (["--hosts", "a,a", "--", "sft", "r.toml"], "--hosts"),
    "plan": (["--model", "m", "--data", "d.jsonl"], "--max-tokens"),
    "recipes": (["none"], "recipes"),
    "report": (["FOLDER/none"], "RUN"),
    "settings": (["loss.none"], "settings"),
    **{name: (["nowhere.toml"], "config") for name in TRAINING},
}
"""By command: words with a mistake, and the setting it is in. `padfree env` is asked for nothing."""


def broken(*_: Any, **__: Any) -> NoReturn:
    raise planted


planted: Exception = ValueError("planted")


KINDS = (ValueError, TypeError, KeyError, AssertionError, FileNotFoundError)


@pytest.mark.parametrize(
    ("command", "kind"), [*(("recipes", kind) for kind in KINDS[1:]), *((command, ValueError) for command in COMMANDS)]
)
def test_a_bug_shows_its_traceback(
    command: str,
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, function = PLANTED[command]
    monkeypatch.setattr(f"{__name__}.planted", kind("planted; in one line"))
    monkeypatch.setattr(function, broken)
    assert main([command, *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == EXIT_BUG
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "in broken" in said
    assert f"{kind.__name__}: " in said
    assert said.splitlines()[-1] == f"padfree {command}: {bug_note()}"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "env"])
def test_a_mistake_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, setting = MISTAKES[command]
    assert main([command, *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith(f"padfree {command}: {setting}: ")


def test_the_system_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk or a missing permission, wherever it is met; a file that is not there may be a bug."""
    for number in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE):
        monkeypatch.setattr(f"{__name__}.planted", OSError(number, os.strerror(number), "some/file"))
        monkeypatch.setattr(READS, broken)
        assert main(["sft", str(RECIPES / "sft.toml")]) == 1
        assert capsys.readouterr().err.startswith(f"padfree sft: some/file: {os.strerror(number)}; ")
    assert system_error(FileNotFoundError(errno.ENOENT, "no such file", "some/file")) is None


def test_calls_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("optimizer.lr"):
        padfree.sft(model="m", data="d.jsonl", run=tmp_path / "run", optimizer={"lr": -1})
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n', encoding="utf-8")
    save_with_tokenizer(tmp_path / "m", num_hidden_layers=1)
    call = {"model": tmp_path / "m", "data": data, "run": tmp_path / "run"}
    monkeypatch.setattr("padfree.train.run.train", broken)
    with pytest.raises(ValueError, match="planted") as caught:
        padfree.sft(**call)
    assert caught.value.__notes__ == [bug_note()]

    def run_with_note(config: Any, *, on_step: Any, on_note: Any) -> NoReturn:
        on_note("a note")
        raise AssertionError

    monkeypatch.setattr("padfree.train.run.train", run_with_note)
    with pytest.raises(ZeroDivisionError) as of_caller:
        padfree.sft(**call, on_note=lambda line: 1 / 0)  # type: ignore[arg-type, return-value]
    assert not hasattr(of_caller.value, "__notes__")


def test_an_error_can_be_located_elsewhere() -> None:
    error = UserError("model", "is quantized", "give the weights it was made from", "some/model")
    assert str(error) == "model: 'some/model' is quantized; give the weights it was made from"
    assert str(error.at("critic.path")) == "critic.path: 'some/model' is quantized; give the weights it was made from"
    assert error.at("critic.path", "model").setting == "critic.path"
    other = error.at("model.attention", "backend")
    assert str(other) == "model.attention: model: 'some/model' is quantized; give the weights it was made from"


@pytest.mark.parametrize(
    "value", [..., None, 0, "text", object(), [1, 2], "x" * 1000], ids=lambda value: str(value)[:9]
)
def test_an_error_reaches_other_processes_as_the_same_line(value: object) -> None:
    import pickle

    for problem in ("", "is wrong", ", but it is wrong", "a: b; c"):
        error = UserError("a.b", problem, "mend it", value)
        there = pickle.loads(pickle.dumps(error))
        assert (str(there), there.setting, there.fix) == (str(error), "a.b", "mend it")
        assert str(UserError.of(str(error))) == str(error)


def test_lines_without_a_setting_stay_whole() -> None:
    for line in ("stopped", "rank 1 is gone", "step 3: the loss is nan", "no colon; but a fix"):
        assert str(UserError.of(line)) == line
