"""Model files with unexpected contents: a one-line error with the path, whichever command reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from padfree.cli.main import main
from padfree.testing.models import save_with_tokenizer

RECIPE = Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "sft.toml"
CONTENTS = {
    "nothing": "",
    "half": "{",
    "object": "{}",
    "list": "[]",
    "null": "null",
    "number": "3",
    "nested": "[" * 100_000 + "]" * 100_000,
    "page": "<html></html>",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
VALUES = {
    "hidden_size": ["x", -1, None, [1]],
    "vocab_size": ["x", -1, None],
    "num_hidden_layers": ["x", -1, None],
    "num_attention_heads": ["a", 0],
    "model_type": [3, None, "zzz", [1]],
    "rope_parameters": ["x", 3],
    "layer_types": ["x", ["zz"]],
    "hidden_act": ["zz", 3],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"))


def dry_run(folder: Path, tmp_path: Path) -> list[str]:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "response": "2"}\n')
    overrides = [f"model.path={folder}", "model.dtype=float32", f"data.path={data}", f"run.folder={tmp_path / 'run'}"]
    return ["sft", str(RECIPE), *overrides, "run.device=cpu", "--dry-run"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.filterwarnings("ignore")  # warnings of transformers about these files
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_something_else(
    name: str, content: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / name).write_text(CONTENTS[content])
    assert main(dry_run(folder, tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    if (name, content) == ("tokenizer_config.json", "object"):  # a tokenizer with other special tokens
        assert error.startswith("padfree sft: data.path: d.jsonl:1 has token id ")
        return
    assert error.startswith("padfree sft: model.path: ")
    assert str(folder) in error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES.items() for value in values])
def test_a_config_with_values_of_another_kind(
    name: str, value: object, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    for arguments in (dry_run(folder, tmp_path), ["check", "--model", str(folder), "--device", "cpu"]):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert error.startswith((f"padfree {arguments[0]}: model.path: ", f"padfree {arguments[0]}: --model: ")), error


def test_a_broken_generation_config_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "generation_config.json").write_text("[]")
    assert main(["check", "--model", str(folder), "--device", "cpu", "--samples", "2"]) == 1
    error = capsys.readouterr().err
    assert f"{folder / 'generation_config.json'} cannot be read" in error
    assert error.count("\n") == 1
