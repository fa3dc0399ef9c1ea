"""Valid and invalid values of MODEL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padfree.tools.talk.find_model import ModelFiles, find_model


def folder_of(path: Path, *names: str, **texts: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("{}")
    for name, text in texts.items():
        (path / f"{name}.json").write_text(text)
    return path


def test_a_model_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", "config.json", "tokenizer.json")
    assert find_model(str(folder)) == ModelFiles(weights=str(folder), tokenizer=str(folder))


def test_a_run_folder_is_its_exported_model_with_its_chat_settings(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "run", "run.json", config=json.dumps({"data": {"chat_template": "moved.jinja"}}))
    folder_of(run / "model", "config.json", "tokenizer.json")
    model = str(run / "model")
    assert find_model(str(run)) == ModelFiles(weights=model, tokenizer=model)
    (run / "config.json").write_text(json.dumps({"data": {"prompt_format": "plain"}}))
    assert find_model(str(run)) == ModelFiles(weights=model, tokenizer=model, plain=True)
    for damaged in ("{", "[]", '{"data": 3}'):
        (run / "config.json").write_text(damaged)
        assert find_model(str(run)) == ModelFiles(weights=model, tokenizer=model)


def test_an_adapter_folder_and_its_base(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", "config.json", "tokenizer.json")
    other = folder_of(tmp_path / "other", "config.json", "tokenizer.json")
    named = json.dumps({"base_model_name_or_path": str(base)})
    adapter = folder_of(tmp_path / "a", "adapter_model.safetensors", adapter_config=named)
    expected = ModelFiles(weights=str(base), tokenizer=str(base), adapter=adapter)
    assert find_model(str(adapter)) == expected
    (adapter / "tokenizer.json").write_text("{}")
    assert find_model(str(adapter)).tokenizer == str(adapter)
    assert find_model(str(adapter), base=str(other)).weights == str(other)


def test_what_is_refused(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", "config.json", "tokenizer.json")
    run = folder_of(tmp_path / "run", "run.json", "config.json")
    adapter = folder_of(tmp_path / "a", "adapter_model.safetensors", adapter_config="{}")
    gone = json.dumps({"base_model_name_or_path": str(tmp_path / "gone")})
    moved = folder_of(tmp_path / "moved", "adapter_model.safetensors", adapter_config=gone)
    broken = folder_of(tmp_path / "broken", "adapter_model.safetensors", adapter_config="{")
    bare = folder_of(tmp_path / "bare", "config.json")
    pickled = folder_of(tmp_path / "pickled", "adapter_config.json", "adapter_model.bin")
    empty = folder_of(tmp_path / "empty")
    file = tmp_path / "file"
    file.touch()
    for name, given, message in (
        (tmp_path / "nothing", None, "does not exist; correct the path"),
        (file, None, "is a file; give a model folder"),
        (empty, None, "has neither config.json nor adapter_config.json nor run.json; give a model folder"),
        (bare, None, "has no tokenizer (tokenizer.json); copy the tokenizer's files into it"),
        (run, None, "has not exported its model to model/ yet; finish the run with checkpoint.export=true"),
        (adapter, None, "does not name a base model; give the base model with --base"),
        (moved, None, "does not exist; correct the path, or give a Hub id (owner/name) (with --base)"),
        (adapter, str(tmp_path / "nothing"), "--base: "),
        (adapter, str(bare), "has a tokenizer; copy"),
        (broken, None, "adapter_config.json cannot be read"),
        (pickled, None, "has no adapter_model.safetensors"),
        (base, str(base), "is not an adapter folder; remove --base"),
        ("x" * 5000, None, "cannot be read"),
    ):
        with pytest.raises(ValueError) as caught:
            find_model(str(name), base=given)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    folder_of(run / "model-best")
    with pytest.raises(ValueError, match=r"or give .*model-best"):
        find_model(str(run))
