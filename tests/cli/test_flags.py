"""All spellings of a setting are equivalent, for every command."""

from __future__ import annotations

import json

import pytest

from padfree.cli.flags import normalised_words
from padfree.cli.main import COMMANDS, TRAINING, main, parsed


@pytest.mark.parametrize("command", [*TRAINING, "eval"])
@pytest.mark.parametrize(
    ("words", "override"),
    [
        ("--model X", 'model.path="X"'),
        ("--model=X", 'model.path="X"'),
        ("--model.path X", "model.path=X"),
        ("--model.path=X", "model.path=X"),
        ("model.path=X", "model.path=X"),
        ("--folder 1", 'run.folder="1"'),
        ("--run.folder X", "run.folder=X"),
        ("--steps 5", "run.steps=5"),
        ("--lr 1e-5", "optimizer.lr=1e-5"),
        ("--loss.clip.low 0.1", "loss.clip.low=0.1"),
        ("--eval.pass_threshold -1", "eval.pass_threshold=-1"),
    ],
)
def test_a_setting_may_be_a_flag(command: str, words: str, override: str) -> None:
    for line in ([command, "r.toml", *words.split()], [command, *words.split(), "r.toml"]):
        settings = parsed(line)
        assert settings.recipe == "r.toml"
        assert settings.overrides == [override]


def test_data_may_be_repeated_and_is_held_out_data_of_eval() -> None:
    words = ["r.toml", "--data", "a.jsonl", "--data=b.jsonl", "run.steps=1"]
    assert parsed(["sft", *words]).overrides == ["run.steps=1", 'data.path=["a.jsonl", "b.jsonl"]']
    assert parsed(["eval", *words]).overrides == ["run.steps=1", 'eval.path=["a.jsonl", "b.jsonl"]']


@pytest.mark.parametrize("words", ["--model m", "--model=m", "model.path=m", "--model.path m", "--model.path=m"])
def test_check_plan_and_others_understand_settings(words: str) -> None:
    assert parsed(["check", *words.split()]).model == "m"
    plan = parsed(["plan", *words.split()])
    assert plan.model == "m" or plan.settings == ["model.path=m"]
    assert parsed(["demo", "--run.folder", "f"]).folder == parsed(["demo", "run.folder=f"]).folder == "f"
    for spelling in (["f"], ["--run.folder", "f"], ["--folder", "f"], ["run.folder=f"]):
        assert parsed(["report", *spelling]).runs == ["f"]


def test_check_takes_the_settings_that_it_has_flags_for() -> None:
    line = 'check model.path=m run.device=cpu model.dtype=float32 --model.attention reference data.path=["a","b"]'
    settings = parsed(line.split())
    assert (settings.device, settings.dtype, settings.backend, settings.data) == (
        "cpu",
        "float32",
        "reference",
        ["a", "b"],
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sft r.toml --max-tokens 5", "did you mean batch.max_tokens=...?"),
        ("sft r.toml --modle x", "did you mean model.path=...?"),
        ("eval r.toml --learning-rate 5", "did you mean optimizer.lr=...?"),
        ("eval r.toml --zzzzzzzz 5", "write settings as section.name=value"),
        ("plan r.toml --epoch 1", "did you mean data.epochs=...?"),
        ("sft r.toml --run.steps", "--run.steps"),
        ("sft r.toml --model --dry-run", "--model"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_other_words_stay_as_they_are() -> None:
    for words in (["launch", "--hosts", "a", "--", "sft", "r.toml", "--model", "x"], [], ["--help"], ["sing", "--a.b"]):
        assert normalised_words(words) == words
    assert set(COMMANDS) >= {"check", "demo", "plan", "report"}


WORDS_AFTER = ["-5+3", "--all", "--model", "-", "--", "-h", "model.path=x", "--loss.kind=dpo"]


@pytest.mark.parametrize("word", WORDS_AFTER)
@pytest.mark.parametrize("options", [[], ["--max-new-tokens", "4"], ["--json", "--seed", "1"]])
def test_a_prompt_may_begin_with_a_dash_after_the_separator(options: list[str], word: str) -> None:
    for line, prompts in (
        (["m", *options, "--", word], [word]),
        (["m", *options, "first", "--", word, "x"], ["first", word, "x"]),
        ([*options, "--", "m", word], [word]),
    ):
        settings = parsed(["generate", *line])
        assert (settings.model, settings.prompt) == ("m", prompts)


POSITIONAL = {
    "chat": "model",
    "check": None,
    "data": "recipe",
    "demo": None,
    "doctor": None,
    "env": None,
    "eval": "recipe",
    "export": "model",
    "generate": "model",
    "launch": None,
    "plan": "settings",
    "recipes": "name",
    "report": "runs",
    "settings": "name",
    **dict.fromkeys(TRAINING, "recipe"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_separator_works_in_every_command(command: str) -> None:
    argument = POSITIONAL[command]
    if argument is None:
        return
    before, after = {"data": (["show"], []), "export": ([], ["out.gguf"])}.get(command, ([], []))
    found = getattr(parsed([command, *before, "--", "-odd.toml", *after]), argument)
    assert found in ("-odd.toml", ["-odd.toml"])


def test_a_flag_like_prompt_is_refused_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["generate", "m", "-5+3"])
    assert capsys.readouterr().err.endswith(
        "unrecognized arguments: -5+3; write -- before a prompt that begins with -\n"
    )


@pytest.mark.parametrize("command", [*TRAINING, "eval", "plan", "check"])
@pytest.mark.parametrize("files", ["a.jsonl", "a.jsonl b.jsonl", "a.parquet b.json c.jsonl"])
def test_several_files_may_follow_the_flag(command: str, files: str) -> None:
    words, several = ["--model", "m", "--data", *files.split()], files.split()
    if command in ("plan", "check"):
        assert parsed([command, *words]).data == several
        return
    settings = parsed([command, "r.toml", *words, "--steps", "3"])
    assert settings.recipe == "r.toml"
    section = "eval" if command == "eval" else "data"
    assert f"{section}.path={json.dumps(several)}" in settings.overrides
    assert "run.steps=3" in settings.overrides


def test_short_flags_in_data_show() -> None:
    settings = parsed(["data", "show", "sft", "--model", "m", "--data", "a.jsonl", "--rows", "2"])
    assert (settings.recipe, settings.rows) == ("sft", 2)
    assert settings.overrides == ['model.path="m"', 'data.path=["a.jsonl"]']
