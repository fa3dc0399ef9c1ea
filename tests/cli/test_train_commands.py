"""`padfree sft` and `padfree rl`: every recipe, at a tiny size, from the command line to an exported model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import save_with_tokenizer
from transformers import AutoModelForCausalLM

from padfree.cli.main import main
from padfree.config import load_config

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What makes each recipe small enough for here."""
    folder = tmp_path_factory.mktemp("data")
    model = save_with_tokenizer(tmp_path_factory.mktemp("model"))
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = [
        {"prompt": row["prompt"], "response": answer, "reward": float(answer == row["response"]), "group": group}
        for group, row in enumerate(rows)
        for answer in (row["response"], "1", "22")
    ]
    (folder / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    small = [f"model.path={model}", "model.dtype=float32", "batch.samples=6", "batch.max_tokens=64", "run.steps=2"]
    return {
        name: [*small, f"data.path={json.dumps([str(folder / f'{name}.jsonl')])}", "run.device=cpu"]
        for name in ("sft", "rl")
    }


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a Hub id that is not there, without asking


def test_there_is_a_recipe_for_each_command() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.toml")) == ["rl", "sft"]
    for path in RECIPES.glob("*.toml"):
        assert (load_config(path).loss.kind == "sft") == (path.stem == "sft")


@pytest.mark.parametrize("name", ["sft", "rl"])
def test_a_recipe_runs_and_exports(
    name: str, overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([name, str(RECIPES / f"{name}.toml"), *overrides[name], f"run.folder={run}"]) == 0
    shown = capsys.readouterr().out
    assert "step 1  loss" in shown
    assert "done after 2 steps" in shown
    assert ("reward" in shown) == (name == "rl")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1]
    AutoModelForCausalLM.from_pretrained(run / "model")
    # Once more: the run is done, and says so without a further step.
    assert main([name, str(RECIPES / f"{name}.toml"), *overrides[name], f"run.folder={run}"]) == 0
    assert "done after 2 steps" in capsys.readouterr().out


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["rl", str(RECIPES / "rl.toml"), *overrides["rl"], f"run.folder={run}", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "  kind = clip" in shown
    assert "layout: 1 processes = 1 replicate x 1 shard x 1 context" in shown
    assert "memory: " in shown
    assert "first step: 6 samples, " in shown
    assert not run.exists()


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("sft", ["loss.kind=clip"], "loss.kind: 'clip' for padfree sft; use padfree rl for it"),
        (
            "rl",
            ["loss.kind=sft", "loss.low=none", "loss.high=none"],
            "loss.kind: 'sft' for padfree rl; use padfree sft",
        ),
        ("sft", ["optimizer.rl=1"], "optimizer.rl"),
        (
            "sft",
            ["parallel.context=2", "--dry-run"],
            "parallel.context: 2 times parallel.replicate 1 does not divide 1",
        ),
        ("sft", ['data.path=["nowhere.jsonl"]'], "nowhere.jsonl"),
        ("sft", ["model.path=no/where"], "model.path: 'no/where' has no tokenizer to load"),
        ("sft", ["model.path=no/where", "--dry-run"], "model.path: 'no/where' has no tokenizer to load"),
    ],
)
def test_mistakes_are_one_line(
    command: str,
    changes: list[str],
    message: str,
    overrides: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*overrides[command], f"run.folder={tmp_path / 'run'}", *changes]
    assert main([command, str(RECIPES / f"{command}.toml"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
