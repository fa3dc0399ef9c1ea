"""RL on prompts with images: sampled, rewarded and trained by the command, and resumed to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from padfree.config import Config, load_config
from padfree.data import RolloutDataSettings
from padfree.errors import UserError
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.model.parts import PARTS, parts_of
from padfree.model.vision import families
from padfree.rollout import Prompt, Prompts, read_prompts
from padfree.train.run import evaluate, train
from padfree.train.setup import build_reward_model
from padfree.train.training_data import image_share
from tests.data.vision import (
    asked,
    images_of,
    model_folder,
    picture,
    tokenizer_of,
    write_images,
    write_rows,
)
from tests.refused import refused
from tests.train.cases import alone
from tests.train.test_vision_run import weights

pytest.importorskip("PIL")


def share_of_long_words(response: str, row: Mapping[str, Any]) -> float:
    """A reward that differs between responses."""
    return len(set(response)) / max(len(response), 1)


REWARD = f"{__name__}:share_of_long_words"


def prompt_rows(folder: Path) -> Path:
    """Prompts with one image, with the same image behind another text, with two images, and with text only."""
    write_images(folder)
    rows: list[dict[str, Any]] = [
        {"messages": asked(picture("0.png"), "What is two?")[:1], "answer": "Four"},
        {"messages": asked("So ", picture("0.png"), "which?")[:1], "answer": "May"},
        {"prompt": "<image> or <image>?", "images": ["1.png", "2.png"], "answer": "clips"},
        {"prompt": "Hello there!", "answer": "half"},
    ]
    by_messages = write_rows(folder / "messages.jsonl", rows[:2])
    write_rows(folder / "prompts.jsonl", rows[2:])
    return by_messages


def config_of(folder: Path, name: str, *changes: str, model: str = "qwen3_vl") -> Config:
    """A short run in `folder/name`: two batches of two groups of four responses, two updates for each batch."""
    settings = [
        f"model.path={model_folder(model)}",
        "model.vision=true",
        f'data.path=["{folder / "messages.jsonl"}", "{folder / "prompts.jsonl"}"]',
        f"run.folder={folder / name}",
        "run.steps=4",
        "loss.kind=clip",
        "loss.mini_batches=2",
        "batch.samples=8",
        "batch.max_tokens=200",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=6",
        f"rollout.reward={REWARD}",
        "checkpoint.every=1",
        "optimizer.lr=1e-3",
        *changes,
    ]
    return load_config(None, settings)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read(folder: Path, name: str = "qwen3_vl", **changes: Any) -> Prompts:
    settings = RolloutDataSettings(images=images_of(name), **changes)
    files = [folder / "messages.jsonl", folder / "prompts.jsonl"]
    return read_prompts(files, tokenizer_of(name), settings, max_new_tokens=6)


def test_prompts_show_their_images(tmp_path: Path) -> None:
    prompt_rows(tmp_path)
    one, same, two, none = read(tmp_path).prompts
    assert [len(each.images) for each in (one, same, two, none)] == [1, 1, 2, 0]
    assert one.images[0].digest == same.images[0].digest != two.images[0].digest
    text = tokenizer_of().decode(one.tokens)
    assert text.endswith("<|im_start|>assistant\n")
    assert text.count("<|image_pad|>") == len(one.images[0].positions)
    assert one.rotary_positions is not None
    longer = one.rotary_positions_of(len(one.tokens) + 2)
    assert longer is not None
    assert (np.diff(longer[:, -3:]) == 1).all()
    assert none.rotary_positions is None
    loaded = one.images[0].load()
    assert loaded["pixel_values"].shape[0] == np.prod(one.images[0].grid or 0)
    assert str(one.images[0].load).startswith("20 × 16, ")


def test_the_share_of_image_tokens(tmp_path: Path) -> None:
    """The estimate of memory counts a response of maximum length as a part of its prompt."""
    prompt_rows(tmp_path)
    prompts = read(tmp_path).prompts
    shares = [sum(len(image.positions) for image in each.images) / (len(each.tokens) + 6) for each in prompts]
    model = config_of(tmp_path, "run").model
    assert image_share(model, prompts) == max(shares) > 0
    assert image_share(replace(model, vision=False), prompts) == 0


def test_a_changed_image_ends_the_run(tmp_path: Path) -> None:
    prompt_rows(tmp_path)
    prompt = read(tmp_path).prompts[0]
    (tmp_path / "0.png").write_bytes((tmp_path / "1.png").read_bytes())
    with pytest.raises(UserError, match="has changed since the data was read"):
        prompt.images[0].load()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "user", "content": [picture("9.png")]}]}, "does not exist"),
        ({"prompt": "<image>", "images": ["0.png", "1.png"]}, "2 images"),
        ({"prompt": "What is <|image_pad|>?"}, "remove this text"),
    ],
)
def test_bad_rows(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write_images(tmp_path)
    path = write_rows(tmp_path / "bad.jsonl", [row])
    settings = RolloutDataSettings(images=images_of())
    with pytest.raises(UserError, match=problem.replace("|", r"\|")):
        read_prompts(path, tokenizer_of(), settings, max_new_tokens=6)


def run_twice(folder: Path, *changes: str) -> None:
    """Run without and with interruptions. Each interruption is inside a rollout batch or between two of them."""
    prompt_rows(folder)
    train(config_of(folder, "whole", *changes))
    for steps in (1, 2, 4):
        train(config_of(folder, "parts", f"run.steps={steps}", *changes))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    run_twice(tmp_path)
    whole, parts, before = (
        weights(folder) for folder in (tmp_path / "whole/model", tmp_path / "parts/model", model_folder())
    )
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    changed = {name for name, tensor in whole.items() if not torch.equal(tensor, before[name])}
    assert any("visual.blocks" in name for name in changed)
    lines, resumed = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert [line["reward"] for line in lines] == [line["reward"] for line in resumed]
    assert all(line["loss/sampler_difference"] < 1e-5 for line in lines[::2])


@pytest.mark.slow
def test_a_critic_sees_the_images(tmp_path: Path) -> None:
    """Resumed to the bit. Its tower learns, too, and its export is the next run's critic."""
    gae = ("loss.advantage=gae", "critic.lr=1e-3")
    run_twice(tmp_path, *gae)
    whole, parts = (load_model(tmp_path / name / "critic", head="scalar", vision=True) for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts.state_dict()[key]) for key, tensor in whole.state_dict().items())
    before = load_model(model_folder(), head="scalar", vision=True, spread=0.0).state_dict()
    own = parts_of(whole)
    changed = {own[key] for key, tensor in whole.named_parameters() if not torch.equal(tensor, before[key])}
    assert changed == set(PARTS)
    lines = metrics_of(tmp_path / "whole")
    assert [line["critic/loss"] for line in lines] == [line["critic/loss"] for line in metrics_of(tmp_path / "parts")]
    assert lines[0]["critic/value"] == 0.0
    train(config_of(tmp_path, "again", *gae, "run.steps=1", f"critic.path={tmp_path / 'whole/critic'}"))
    assert metrics_of(tmp_path / "again")[0]["critic/value"] != 0.0


def test_a_reward_model_with_a_tower_judges_text(tmp_path: Path) -> None:
    """It gives the scores of transformers for prompt and response, through its own chat template."""
    tokenizer, judge = tokenizer_of(), tmp_path / "judge"
    export_model(load_model(model_folder(), head="scalar", vision=True), judge, tokenizer)
    rows = [{"prompt": "Hello there!"}, {"prompt": "What is two?"}]
    write_rows(tmp_path / "prompts.jsonl", rows)
    changes = ["model.vision=false", f"data.path={tmp_path / 'prompts.jsonl'}", f"rollout.reward=model:{judge}"]
    config = config_of(tmp_path, "run", *changes, "run.steps=1")
    reward_model = build_reward_model(config, alone())
    assert reward_model is not None
    prompts = [Prompt(tokens=np.array([1]), max_new_tokens=4, row=row, uid="row", source="rows") for row in rows]
    found = reward_model([(prompt, "Four.") for prompt in prompts])
    model: Any = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    expected = []
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "Four."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            expected.append(float(model(input_ids=tokens).logits[0, 0]))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    train(config)
    assert np.isfinite(metrics_of(tmp_path / "run")[0]["reward"])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "llava_onevision", "idefics3"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """The first update of each batch has the weights that sampled: its ratios are 1."""
    write_images(tmp_path)
    rows = [{"messages": asked(picture(f"{number}.png"), "Which?")[:1]} for number in range(4)]
    for file in ("messages", "prompts"):
        write_rows(tmp_path / f"{file}.jsonl", rows)
    train(config_of(tmp_path, "run", "run.steps=2", "checkpoint.every=10", model=name))
    assert metrics_of(tmp_path / "run")[0]["loss/sampler_difference"] < 1e-5


def test_a_group_encodes_its_image_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for sampling, once for the update. The prompt of the group is computed once, too."""
    prompt_rows(tmp_path)
    encoded: list[int] = []
    family = families.FAMILIES["Qwen3VLForConditionalGeneration"]
    own = family.encode

    def counted(base: Any, inputs: Mapping[str, Any]) -> Any:
        encoded.append(len(inputs["image_grid_thw"]))
        return own(base, inputs)

    monkeypatch.setitem(families.FAMILIES, "Qwen3VLForConditionalGeneration", replace(family, encode=counted))
    changes = [f"data.path={tmp_path / 'messages.jsonl'}", "run.steps=1", "loss.mini_batches=1", "batch.samples=4"]
    train(config_of(tmp_path, "run", *changes, "batch.max_tokens=1000", "loss.old_policy=sampler"))
    assert encoded == [1, 1]
    (line,) = metrics_of(tmp_path / "run")
    assert line["computed_tokens"] < line["tokens"]


def test_evaluation_on_prompts_with_images(tmp_path: Path) -> None:
    path = prompt_rows(tmp_path)
    held_out = (f"eval.path={path}", "eval.every=2")
    train(config_of(tmp_path, "run", *held_out))
    written = [json.loads(line) for line in (tmp_path / "run/evaluation.jsonl").read_text().splitlines()]
    found = evaluate(config_of(tmp_path, "unused", *held_out, f"model.path={tmp_path / 'run/model'}"))
    assert found["eval/reward"] == pytest.approx(written[-1]["eval/reward"], abs=1e-6)
    assert 0 < found["eval/reward"] < 1


@pytest.mark.parametrize(
    ("changes", "setting", "problem"),
    [
        (
            ["rollout.engine=tests.rollout.test_engines:make"],
            "rollout.engine",
            "the engines that sample responses to images",
        ),
        (["rollout.agent=['true']"], "model.vision", "agents and packaged environments get text only"),
        (["rollout.reward=model:x"], "rollout.reward", "reward models read text"),
    ],
)
def test_what_cannot_sample_images_is_refused(changes: list[str], setting: str, problem: str, tmp_path: Path) -> None:
    with refused(setting, problem):
        config_of(tmp_path, "run", *changes)


def test_recurrent_models_are_refused_before_the_run(tmp_path: Path) -> None:
    prompt_rows(tmp_path)
    with refused("model.vision", "cannot be sampled"):
        train(config_of(tmp_path, "run", model="qwen3_5"))
    assert not (tmp_path / "run").exists()
