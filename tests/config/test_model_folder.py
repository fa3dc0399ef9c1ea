"""A model folder that cannot work is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from padfree.config.model_folder import CONFIG, INDEX, WEIGHTS, check_config, check_headers
from tests.refused import refused


def weights(path: Path, *, tensors: int = 2) -> None:
    """A safetensors file of float32 tensors of 3 numbers."""
    header = {
        f"t{i}": {"dtype": "F32", "shape": [3], "data_offsets": [12 * i, 12 * (i + 1)]} for i in range(tensors)
    } | {"__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12 * tensors))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (found / CONFIG).write_text('{"model_type": "qwen3"}')
    weights(found / WEIGHTS)
    return found


def sharded(folder: Path) -> None:
    for number in (1, 2):
        weights(folder / f"model-0000{number}-of-00002.safetensors")
    (folder / WEIGHTS).unlink()
    mapping = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")


def one_is_missing(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def one_is_cut(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")


def other_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


WEIGHT_FILES: list[tuple[Callable[[Path], None], str]] = [
    (cut, r"cannot be read \(it has [\d,]+ bytes and should have [\d,]+\)"),
    (lfs_pointer, "without a safetensors header"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b""), "without a safetensors header"),
    (lambda folder: (folder / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"[[]]"), "its header is not valid"),
    (lambda folder: (folder / WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"\xff{"), "its header is not valid"),
    (one_is_missing, "00002-of-00002.safetensors is missing"),
    (one_is_cut, "00002-of-00002.safetensors cannot be read"),
    (other_folder, "is missing, although"),
    (lambda folder: (folder / INDEX).write_text("{"), "has no valid weight_map"),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": 3}}'), "has no valid weight_map"),
]


@pytest.mark.parametrize(("damage", "about"), WEIGHT_FILES)
def test_damaged_weights(folder: Path, damage: Callable[[Path], None], about: str) -> None:
    check_headers(folder)
    damage(folder)
    with refused("model", about):
        check_headers(folder)


def test_whole_files_pass(folder: Path) -> None:
    weights(folder / WEIGHTS, tensors=0)
    check_headers(folder)
    sharded(folder)
    check_headers(folder)
    check_config(folder)


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{", "is not a JSON object"),
        ('{"quantization_config": {"quant_method": "awq"}}', "is quantized"),
    ],
)
def test_configs_that_cannot_be_used(folder: Path, text: str, about: str) -> None:
    (folder / CONFIG).write_text(text)
    with refused("model", about):
        check_config(folder)


REFUSED = """
import sys
from padfree.cli.main import main
assert main(sys.argv[1:]) == 1
heavy = {"torch", "transformers", "triton", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("setting", ["model.path", "reference.path", "teacher.path"])
@pytest.mark.parametrize("damage", [cut, lambda folder: (folder / CONFIG).write_text("[")])
def test_a_command_refuses_without_importing_torch(
    folder: Path, tmp_path: Path, setting: str, damage: Callable[[Path], None]
) -> None:
    """For every model that the settings name, by the name of its setting."""
    (folder / "tokenizer.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    damage(other)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"}\n')
    command = {"model.path": "sft", "reference.path": "dpo", "teacher.path": "distill"}[setting]
    models = [f"model.path={folder}", f"{setting}={other}"]
    arguments = [command, command, *models, f"data.path={tmp_path / 'train.jsonl'}", f"run.folder={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", REFUSED, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"padfree {command}: {setting}: " in done.stderr
