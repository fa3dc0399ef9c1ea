"""The files of an export besides the weights: generation config, chat template, permissions; checks before training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from padfree.cli.main import main
from padfree.config import Config
from padfree.data.chat_renderer import ChatRenderer
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.rollout.engines.servers.weight_stream import Bucket
from padfree.rollout.engines.servers.weight_sync import FilesTransport
from padfree.testing.models import save_with_tokenizer
from padfree.testing.vision_folders import vision_folder
from padfree.train import run as whole_run
from padfree.train.run import evaluate, train
from padfree.train.training_data import load_tokenizer
from tests.train.test_train import make_config, write_lines
from tests.train.test_wrapped_models import save

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
OTHER = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o022)
    yield
    os.umask(mask)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_with_tokenizer(tmp_path / "model")


def config_of(model: Path, **sections: Any) -> Config:
    """One step in the current folder, with the run in `run` and the rows in `rows.jsonl`."""
    rows = write_lines(Path("rows.jsonl"), [{"prompt": f"{a}+{a}", "response": f"{2 * a}"} for a in range(4)])
    run = {"folder": "run", "steps": 1, "device": "cpu"}
    return make_config(Path("run"), model, rows, **{"run": run, "checkpoint": {"every": None}, **sections})


# The generation config


GENERATION = {
    "sampling parameters without do_sample": {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 1]},
    "greedy with a temperature": {"do_sample": False, "temperature": 0.3, "top_k": 3},
    "beam parameters without beams": {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
    "negative pad token": {"pad_token_id": -1, "max_length": 20},
    "unknown names": {"thinking": True, "temperature": 0.6},
    "valid": {"do_sample": True, "temperature": 0.6, "eos_token_id": 0},
}


@pytest.mark.parametrize("name", GENERATION)
def test_a_generation_config_is_exported_as_it_was_loaded(name: str, model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps(GENERATION[name]))
    export_model(load_model(model), tmp_path / "out")
    before, after = (GenerationConfig.from_pretrained(folder).to_dict() for folder in (model, tmp_path / "out"))
    assert {**after, "transformers_version": None} == {**before, "transformers_version": None}


def test_a_run_exports_a_generation_config_that_transformers_does_not_save(model: Path) -> None:
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}')
    train(config_of(model))
    assert GenerationConfig.from_pretrained("run/model").temperature == 0.6


ENDED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("before", "template", "added"),
    [
        (5, ENDED, ["eos", "<|im_end|>"]),
        ([5, 1], ENDED, ["eos", "<|im_end|>"]),
        ("eos", ENDED, ["<|im_end|>"]),
        (["eos", "<|im_end|>"], ENDED, []),
        ("eos", None, []),
        (None, None, ["eos"]),
        ("eos", TEMPLATE, []),  # ends turns with no special token
    ],
)
def test_an_exported_model_stops_where_it_has_learned_to_stop(
    before: Any, template: str | None, added: list[str], tmp_path: Path
) -> None:
    """Base models name another end than the chat template with which they are trained."""
    model = save_with_tokenizer(tmp_path / "model", vocab_size=64)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)

    def numbers(names: Any) -> list[int]:
        listed = names if isinstance(names, list) else [] if names is None else [names]
        ids = {"eos": tokenizer.eos_token_id, "<|im_end|>": tokenizer.convert_tokens_to_ids("<|im_end|>")}
        return [ids.get(name, name) for name in listed]

    known = numbers(before)
    written = known[0] if len(known) == 1 else known or None
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    train(config_of(model, data={"path": ["rows.jsonl"], "epochs": None, "prompt_format": "auto"}))
    after = GenerationConfig.from_pretrained("run/model").eos_token_id
    assert after == ([*known, *numbers(added)] if added else written)


def test_a_multimodal_model_keeps_its_generation_config(tmp_path: Path) -> None:
    save(tmp_path / "whole", "Gemma3")
    (tmp_path / "whole" / "generation_config.json").write_text('{"temperature": 0.6}')
    export_model(load_model(tmp_path / "whole"), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6


def several_templates(model: Path) -> str:
    """transformers reads the name of this template, but does not write a file for it."""
    path = model / "tokenizer_config.json"
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "../tool_use", "template": TEMPLATE}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    return "model.path: the tokenizer can be loaded but not saved"


def broken_generation_config(model: Path) -> str:
    (model / "generation_config.json").write_text("{bad")
    return f"model.path: {model / 'generation_config.json'} cannot be read"


@pytest.mark.parametrize("spoil", [several_templates, broken_generation_config])
def test_what_cannot_be_exported_is_refused_before_the_training(
    spoil: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights are being loaded")

    config_of(model)
    message = spoil(model)
    monkeypatch.setattr(whole_run, "build_engine", loaded)
    words = ["sft", f"model.path={model}", "data.path=rows.jsonl", "run.folder=run", "run.steps=1", "run.device=cpu"]
    for flags in (["--dry-run"], []):
        assert main([*words, *flags]) == 1
        assert message in capsys.readouterr().err


def test_what_cannot_be_exported_can_be_trained_without_an_export_and_evaluated(model: Path) -> None:
    several_templates(model)
    train(config_of(model, checkpoint={"every": None, "export": False}))
    assert not Path("run/model").exists()
    evaluate(config_of(model, eval={"path": ["rows.jsonl"]}))


# The chat template


@pytest.mark.parametrize("adapters", [False, True])
def test_an_export_has_the_template_of_the_run(adapters: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes after the run, and the model is read from another folder."""
    Path("t.jinja").write_text(TEMPLATE)
    lora = {"rank": 2, "export": "adapter"} if adapters else {}
    train(config_of(model, data={"chat_template": "t.jinja"}, lora=lora))
    Path("t.jinja").write_text(OTHER)
    assert AutoTokenizer.from_pretrained("run/model").chat_template == TEMPLATE
    asked = [{"role": "user", "content": "1+1"}]
    assert ChatRenderer(AutoTokenizer.from_pretrained("run/model")).render(asked, generation_prompt=True) == (
        "u: 1+1 a: "
    )


def test_another_template_replaces_the_tokenizers_own(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": OTHER, "tool_use": OTHER}
    tokenizer.save_pretrained(model)
    Path("t.jinja").write_text(TEMPLATE)
    train(config_of(model, data={"chat_template": "t.jinja"}))
    assert AutoTokenizer.from_pretrained("run/model").chat_template == TEMPLATE


def test_plain_prompts_leave_the_template_as_it_is(model: Path) -> None:
    Path("t.jinja").write_text(TEMPLATE)
    config = config_of(model, data={"chat_template": "t.jinja", "prompt_format": "plain"})
    assert load_tokenizer(config).chat_template is None


def test_a_run_generates_and_exports_without_its_template_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.jinja").write_text(TEMPLATE)
    train(config_of(model, data={"chat_template": "t.jinja"}))
    capsys.readouterr()
    words = ["--device", "cpu", "--max-new-tokens", "3"]
    assert main(["generate", "run", "1+1", "--chat-template", "t.jinja", *words]) == 0
    expected = capsys.readouterr().out
    Path("t.jinja").write_text(OTHER)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("run", "run/model"):
        assert main(["generate", str(tmp_path / name), "1+1", *words]) == 0
        assert capsys.readouterr().out == expected


def test_an_older_template_of_a_processor_is_not_exported(tmp_path: Path) -> None:
    """transformers' processors prefer chat_template.json to chat_template.jinja."""
    folder = vision_folder(tmp_path / "vision", "qwen2_5_vl")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OTHER}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    export_model(load_model(folder, vision=True), tmp_path / "out", tokenizer)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert not (tmp_path / "out" / "chat_template.json").exists()
    export_model(load_model(folder, vision=True), tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.json").exists()


# Permissions


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_every_file_has_the_permissions_of_the_umask(mask: int, mode: int, model: Path, tmp_path: Path) -> None:
    """Whole model, adapters, a checkpoint, a multimodal model with read-only source files, and a bucket of weights."""
    for path in model.iterdir():
        path.chmod(0o400)
    os.umask(mask)
    train(config_of(model, checkpoint={"every": 1}))
    train(config_of(model, lora={"rank": 2, "export": "adapter"}, run={"folder": "a", "steps": 1, "device": "cpu"}))
    vision = vision_folder(tmp_path / "vision", "qwen2_5_vl")
    (vision / "processor_config.json").chmod(0o400)
    export_model(load_model(vision, vision=True), tmp_path / "out")
    FilesTransport(tmp_path / "sent").prepare(Bucket([("a", torch.ones(3))]))
    found = 0
    for folder in ("run/model", "run/checkpoints", "a/model", "out", "sent"):
        for path in Path(folder).rglob("*"):
            if path.is_file():
                found += 1
                assert path.stat().st_mode & 0o777 == mode, path
    assert found > 20
