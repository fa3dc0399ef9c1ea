"""Mistakes in the inputs are refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from padfree.config import config_from_dict
from padfree.config.loss import TASKS
from padfree.data.first_look import check_columns
from padfree.data.formats import SCHEMAS
from padfree.testing.models import save_with_tokenizer
from tests.refused import refused

SCRIPT = """
import contextlib, io, json, os, sys
from padfree.cli.main import main
found = {}
for case, (folder, words) in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    slow = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
    found[case] = code, slow, said.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=1)


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            for path in (folder / "model").glob(name):
                path.unlink()

    return change


def nothing(folder: Path) -> None:
    pass


CASES = {
    "unknown setting": (nothing, ["model.pth=x"], "model.pth: no such setting; did you mean model.path?"),
    "no recipe": (nothing, ["none.toml"], "config: none.toml cannot be read"),
    "no data file": (nothing, ["data.path=none.jsonl"], "data: none.jsonl does not exist"),
    "columns": (nothing, ["data.path=bad.jsonl"], "data.columns: bad.jsonl has the columns ['x']; expected 'messages'"),
    "mapped": (
        nothing,
        ["data.columns.y=prompt"],
        "data.columns: 'y' (mapped to 'prompt') is not a column of rows.jsonl",
    ),
    "no folder": (nothing, ["model.path=./none"], "model.path: './none' does not exist"),
    "no config": (without("config.json"), [], "model.path: model has no config.json; give a Hugging Face model folder"),
    "no weights": (without("model.safetensors"), [], "model.path: model has no weights (model.safetensors or "),
    "no tokenizer": (without("tokenizer*"), [], "model.tokenizer: model has no tokenizer; give a folder or Hub id"),
}


def words_of(case: str, folder: Path, model: Path) -> list[str]:
    """Write the inputs of a case to a folder, and return its words."""
    (folder / "model").mkdir(parents=True)
    for path in model.iterdir():
        (folder / "model" / path.name).symlink_to(path)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    (folder / "bad.jsonl").write_text(json.dumps({"x": "a"}) + "\n")
    change, words, _ = CASES[case]
    change(folder)
    good = ["model.path=model", "data.path=rows.jsonl", "run.folder=run", "run.device=cpu"]
    return ["sft", *words[:1], *good, *words[1:]] if case == "no recipe" else ["sft", *good, *words]


def test_refused_without_torch(model: Path, tmp_path: Path) -> None:
    given = {case: (str(tmp_path / case), words_of(case, tmp_path / case, model)) for case in CASES}
    program = [sys.executable, "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    for case, (code, slow, said) in json.loads(done.stdout).items():
        assert said.startswith(f"padfree sft: {CASES[case][2]}"), said
        assert (code, slow, said.count("\n")) == (1, [], 1), case
        assert not (tmp_path / case / "run").exists()


def test_every_command_has_a_format() -> None:
    assert {"prompts", *(task.data_format for task in TASKS.values())} == SCHEMAS.keys()


ROWS = {
    "sft": {"text": "a"},
    "distill": {"text": "a"},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "response": "b", "label": True},
    "reward": {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1},
    "rl": {"tokens": [1, 2], "response_length": 1, "reward": 1, "group": "a"},
}


@pytest.mark.parametrize("command", TASKS)
def test_each_command_reads_its_columns(command: str, tmp_path: Path) -> None:
    for name, row in (("good", ROWS[command]), ("bad", {"else": 1})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        values = {
            "model": {"path": "m"},
            "data": {"path": [str(tmp_path / f"{name}.jsonl")]},
            "batch": {"samples": 2, "max_tokens": 8},
            "loss": {"kind": TASKS[command].kind},
            "run": {"folder": "r"},
            **({"reference": {"path": "m"}} if command in ("dpo", "kto") else {}),
            **({"teacher": {"path": "m"}} if command == "distill" else {}),
        }
        config = config_from_dict(values)
        if name == "good":
            check_columns(config)
        else:
            with refused("data.columns", r"bad\.jsonl has the columns \['else'\]; expected .*"):
                check_columns(config)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_columns_with_images_need_a_vision_model(command: str, tmp_path: Path) -> None:
    row = {"prompt": "<image>a", "images": ["0.png"], **({"response": "b"} if command == "sft" else {})}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    values = {
        "model": {"path": "m", "vision": True},
        "data": {"path": [str(tmp_path / "rows.jsonl")]},
        "batch": {"samples": 2, "max_tokens": 8},
        "loss": {"kind": TASKS[command].kind},
        "run": {"folder": "r"},
        **({"rollout": {"reward": "exact_match", "samples_per_prompt": 2}} if command == "rl" else {}),
    }
    check_columns(config_from_dict(values))
    with refused("data.columns", "set model.vision=true"):
        check_columns(config_from_dict({**values, "model": {"path": "m"}}))
