"""Every shipped recipe accepts every documented format of rows, and prints itself as a recipe that loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from padfree.cli.main import TRAINING, main
from padfree.config import load_config
from padfree.config.loss import TASKS
from padfree.config.reader import read_recipe
from padfree.config.recipe_files import shipped_recipes
from padfree.testing.models import save_with_tokenizer
from padfree.testing.tokenizers import TEMPLATES

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
WRONG = [{"role": "assistant", "content": "3"}]
SAID = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
NUMBERS = {"reward": 1.0, "group": "a"}
REWARDS = (1.0, 0.0) * 4

TEXTS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"conversations": SAID},
    {"prompt": "1+1=", "response": "2"},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"question": "1+1=", "answer": "2"},
    {"instruction": "add", "input": "1+1", "output": "2"},
    {"text": "1+1=2"},
    {"input_ids": [3, 4, 5]},
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    {"question": "1+1=", "chosen": "2", "rejected": "3"},
    {"messages": CHAT[:1], "chosen": CHAT[1:], "rejected": WRONG},
    {"chosen": CHAT, "rejected": [CHAT[0], *WRONG]},
]
LABELLED: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "2", "label": True},
    {"question": "1+1=", "completion": "2", "label": False},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "#### 2"},
    {"prompt": CHAT[:1], "answer": "#### 2"},
    {"messages": CHAT[:1], "answer": "#### 2"},
    {"question": "1+1=", "answer": "#### 2"},
    {"problem": "1+1=", "answer": "#### 2", "level": 3},
    {"instruction": "add", "input": "1+1", "answer": "#### 2"},
]
ROLLOUTS: list[dict[str, Any]] = [
    {"tokens": [3, 4, 5], "response_length": 1, **NUMBERS},
    {"prompt_tokens": [3, 4], "response_tokens": [5], **NUMBERS},
    {"prompt": "1+1=", "response": "2", **NUMBERS},
]
ROWS = {
    "sft": TEXTS,
    "distill": TEXTS,
    "dpo": PAIRS,
    "reward": PAIRS,
    "kto": LABELLED,
    "rl": ROLLOUTS,
    **dict.fromkeys(("rl-local", "rl-ppo", "rl-vllm", "rl-experts", "rl-environment"), PROMPTS),
}
CASES = [(recipe, row) for recipe, rows in ROWS.items() for row in rows]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = {"plain": "qwen3", "experts": "qwen3_moe"}
    found = {name: save_with_tokenizer(folder / name, architecture=kind) for name, kind in names.items()}
    for path in found.values():
        (path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    return found


def words_of(recipe: str, models: dict[str, Path], data: Path) -> list[str]:
    """The documented command, with a tiny model and small batches."""
    command = recipe.partition("-")[0]
    model = models["experts" if recipe == "rl-experts" else "plain"]
    words = [command, recipe, f"model.path={model}", f"data.path={data}", "batch.samples=8", "model.dtype=float32"]
    words += [f"run.folder={data.parent / 'run'}", "run.device=cpu", "--dry-run"]
    return words + [f"teacher.path={model}"] * (recipe == "distill")


def test_every_recipe_has_rows() -> None:
    assert ROWS.keys() == shipped_recipes().keys()


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_recipe_names_its_loss(recipe: str) -> None:
    """Otherwise `padfree rl sft` would train the task of the command on the data of another."""
    assert read_recipe(recipe)["loss"]["kind"] == load_config(recipe).loss.kind


@pytest.mark.parametrize(("recipe", "row"), CASES)
def test_documented_rows_are_accepted(
    recipe: str, row: dict[str, Any], models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{**row, "reward": reward} if "reward" in row else row for reward in REWARDS]
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    code = main(words_of(recipe, models, data))
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", TRAINING)
def test_a_recipe_without_a_loss_trains_the_task_of_the_command(command: str, tmp_path: Path) -> None:
    """As in Python, where `padfree.dpo()` needs no `loss.kind`."""
    recipe = tmp_path / "my.toml"
    recipe.write_text(
        'model.path = "m"\nbatch = { samples = 8, max_tokens = 64 }\nrun.folder = "r"\n'
        'data = { path = "d", epochs = 1 }\n' + 'teacher.path = "t"\n' * (command == "distill")
    )
    config = load_config(recipe, kind=TASKS[command].kind)
    assert config.loss.command == command
    assert load_config(recipe, ["loss.kind=sft", "teacher.path=none"], kind=TASKS[command].kind).loss.command == "sft"


def test_the_command_gives_its_task(
    capsys: pytest.CaptureFixture[str], models: dict[str, Path], tmp_path: Path
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(PAIRS[0]) + "\n" for _ in range(8)))
    (tmp_path / "my.toml").write_text("batch = { samples = 8, max_tokens = 256 }\ndata.epochs = 1\n")
    words = ["dpo", str(tmp_path / "my.toml"), f"model.path={models['plain']}", f"data.path={data}", "--dry-run"]
    assert main([*words, f"run.folder={tmp_path / 'run'}"]) == 0, capsys.readouterr().err


def test_all_needs_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "model.path=m", "--all"]) == 1
    assert capsys.readouterr().err == "padfree sft: --all: needs --dry-run; add --dry-run, or leave --all out\n"


@pytest.mark.parametrize(
    ("warmup", "steps", "noted"),
    [(2, "none", False), (3, "none", True), (1000, "none", True), (3, 3, True), (2, 3, False)],
)
def test_a_warmup_that_is_longer_than_the_data(
    warmup: int, steps: object, noted: bool, capsys: pytest.CaptureFixture[str], models: dict[str, Path], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(TEXTS[2]) + "\n" for _ in range(16)))
    words = [*words_of("sft", models, data), "data.epochs=1", f"schedule.warmup={warmup}", f"run.steps={steps}"]
    assert main(words) == 0
    assert (
        "schedule.warmup is too long, because the data ends after about 2 steps" in capsys.readouterr().out
    ) == noted


@pytest.mark.parametrize(("warmup", "noted"), [(3, False), (4, True)])
def test_a_warmup_of_the_critic_that_is_longer_than_the_data(
    warmup: int, noted: bool, capsys: pytest.CaptureFixture[str], models: dict[str, Path], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(PROMPTS[0]) + "\n" for _ in range(8)))  # one batch, four updates
    assert main([*words_of("rl-ppo", models, data), f"critic.warmup={warmup}"]) == 0
    assert ("after about 4 steps: the policy is never trained" in capsys.readouterr().out) == noted


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ("loss.old_policy=current loss.epochs=2", True),
        ("loss.old_policy=current loss.mini_batches=2 loss.kind=gspo", True),
        ("loss.old_policy=current loss.mini_batches=2 loss.kind=cispo", True),
        ("loss.old_policy=current", False),
        ("loss.old_policy=current loss.epochs=2 loss.kind=reinforce", False),
        ("loss.old_policy=trainer loss.epochs=2", False),
        ("loss.old_policy=auto loss.epochs=2", False),
    ],
)
def test_a_ratio_that_is_always_1_is_noted(
    settings: str, noted: bool, capsys: pytest.CaptureFixture[str], models: dict[str, Path], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(PROMPTS[0]) + "\n" for _ in range(8)))
    assert main([*words_of("rl-local", models, data), *settings.split()]) == 0
    assert ("clips nothing; set loss.old_policy=trainer" in capsys.readouterr().out) == noted
