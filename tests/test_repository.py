"""Files outside the package agree with it: the version, the CI workflow, the recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import padfree
from padfree.cli.main import COMMANDS, main
from padfree.config import load_config
from padfree.config.recipe_files import default_recipe, recipe_path, shipped_recipes, summary

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == padfree.__version__
    assert f"\n## {padfree.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_what_ci_runs() -> None:
    steps = [
        step["run"]
        for job in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    ran = {target for step in steps for target in re.findall(r"make ([\w-]+)", step)}
    asked = set(re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    assert asked <= ran
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in ran)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_loads_by_name_and_has_a_summary(name: str) -> None:
    config = load_config(name)
    assert config == load_config(shipped_recipes()[name])
    assert config.loss.command == name.partition("-")[0]
    assert summary(shipped_recipes()[name]).endswith((".", ":"))


def test_a_file_takes_precedence_over_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_path("sft") == shipped_recipes()["sft"]
    (tmp_path / "sft").mkdir()  # a folder is not a recipe
    assert recipe_path("sft") == shipped_recipes()["sft"]
    (tmp_path / "dpo").write_text("")
    assert recipe_path("dpo") == Path("dpo")


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(shipped_recipes())
    assert main(["recipes", "rl-local"]) == 0
    assert capsys.readouterr().out == shipped_recipes()["rl-local"].read_text()
    assert main(["recipes", "rl_local"]) == 1
    assert capsys.readouterr().err.endswith("use rl-local\n")


def test_a_command_without_a_recipe_uses_the_one_of_the_same_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert default_recipe("sft") == "sft"
    assert default_recipe("rl") is None  # several recipes
    for words in (["sft"], ["sft", "model.path=./no/where"], ["sft", "--model", "./no/where", "--dry-run"]):
        assert main([*words, "model.path=./no/where"]) == 1
        assert capsys.readouterr().err.startswith("padfree sft: model.path: './no/where' does not exist")
    with pytest.raises(SystemExit):
        main(["rl", "model.path=./no/where"])
    assert "`padfree recipes` lists" in capsys.readouterr().err


def test_env_names_every_optional_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert "env" in COMMANDS
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    for name in ("torch", "transformers", "triton", "flash-attn-4", "peft"):
        assert re.search(rf"\b{name}\b", shown), name
    assert re.search(r"^attention +cpu, float32", shown, re.MULTILINE) or "cuda, bfloat16" in shown
