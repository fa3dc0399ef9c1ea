"""Training on rows with images by the commands: exact, resumed to the bit, exported for transformers' own class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, PreTrainedModel

import padfree
from padfree.cli.main import main
from padfree.config import Config, load_config
from padfree.data import load_pairs, load_sft
from padfree.model import attach, lm_head_of
from padfree.model.load import load_model
from padfree.model.parts import PARTS, parts_of
from padfree.model.vision.families import FAMILIES
from padfree.sample import Sample
from padfree.testing.vision_folders import KINDS
from padfree.train.run import evaluate, train
from tests.data.test_image_data import by_processor, rows_for
from tests.data.vision import asked, model_folder, picture, settings_of, tokenizer_of, write_images, write_rows
from tests.model.vision.one_at_a_time import stock_score, without_rounding
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, in_float64, largest_difference

pytest.importorskip("PIL")


def results(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter; of a parameter without a gradient: zeros."""
    found = {"loss": loss}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def packed(model: PreTrainedModel, samples: list[Sample]) -> dict[str, Tensor]:
    """All samples in one pack. The loss is minus the sum of the log-probabilities of trained tokens."""
    local = padfree.shard(padfree.collate(samples, share_prefixes=False))
    scores = padfree.score(padfree.hidden_states(model, local), lm_head_of(model), local.labels)
    loss = -scores.logprobs.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return results(model, loss.detach())


def one_at_a_time(
    name: str, folder: Path, model: PreTrainedModel, rows: list[Any], samples: list[Sample]
) -> dict[str, Tensor]:
    """The same loss from transformers, on what the model's own processor makes of each row."""
    total = torch.zeros((), dtype=model.dtype)
    for row, sample in zip(rows, samples, strict=True):
        inputs: dict[str, Tensor] = {}
        for key, value in by_processor(name, folder, row["messages"]).items():
            tensor = torch.as_tensor(np.asarray(value))
            inputs[key] = tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        logprobs = torch.log_softmax(model(**inputs).logits[0, :-1], -1)
        scored = torch.as_tensor(sample.mask[1:].copy())
        chosen = logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        loss = -chosen[scored].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return results(model, total)


@pytest.mark.parametrize("name", KINDS)
def test_rows_train_as_in_transformers(name: str, tmp_path: Path) -> None:
    """The rows give the loss and every gradient (tower, projector, language model) of transformers.

    Float64 must agree to 1e-12, and float32 up to rounding.
    """
    rows = rows_for(name)
    write_images(tmp_path)
    path = write_rows(tmp_path / "train.jsonl", rows)
    data = load_sft(path, tokenizer_of(name), settings_of(name), cache=tmp_path / "cache", num_workers=0)
    samples = list(data)
    folder = str(model_folder(name))
    model = attach(load_model(folder, vision=True))
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    with without_rounding():
        wide = one_at_a_time(name, tmp_path, in_float64(plain), rows, samples)
        difference, where = largest_difference(packed(in_float64(model), samples), wide)
    assert difference < 1e-12, where
    narrow = one_at_a_time(name, tmp_path, plain, rows, samples)
    assert_same_but_for_rounding(packed(model, samples), narrow, wide)


def mixed_rows(folder: Path) -> Path:
    """Rows with one image, with several, and without: the same image in several rows."""
    write_images(folder)
    rows: list[dict[str, Any]] = [
        {"messages": asked(picture("0.png"), "What is two?")},
        {"messages": asked("Hello there!", answer="half as many")},
        {"messages": [*asked(picture("1.png"), picture("2.png")), *asked("then", picture("0.png"), answer="May.")]},
        {"messages": asked("<image>Which?", answer="clips"), "images": ["3.png"]},
    ]
    return write_rows(folder / "train.jsonl", rows * 3)


def config_of(folder: Path, name: str, *changes: str, model: str = "qwen3_vl", kind: str = "sft") -> Config:
    """A short run in `folder/name` on the rows of `folder`."""
    settings = [
        f"model.path={model_folder(model)}",
        "model.vision=true",
        f"data.path={folder / 'train.jsonl'}",
        f"run.folder={folder / name}",
        "run.steps=4",
        "batch.samples=4",
        "batch.max_tokens=100",
        "checkpoint.every=2",
        "data.epochs=4",
        "optimizer.lr=1e-3",
        f"loss.kind={kind}",
        *changes,
    ]
    return load_config(None, settings)


def weights(folder: Path) -> dict[str, Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cached")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Tower, projector and language model change, and the export is a folder that transformers' class loads."""
    mixed_rows(tmp_path)
    train(config_of(tmp_path, "whole"))
    train(config_of(tmp_path, "parts", "run.steps=2"))
    train(config_of(tmp_path, "parts"))
    whole, parts, before = (
        weights(folder) for folder in (tmp_path / "whole/model", tmp_path / "parts/model", model_folder())
    )
    assert whole.keys() == parts.keys() == before.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    changed = {name for name, tensor in whole.items() if not torch.equal(tensor, before[name])}
    assert any("visual.blocks" in name for name in changed)
    assert any("visual.merger" in name for name in changed)
    assert any("language_model.layers" in name for name in changed)
    files = {path.name for path in (tmp_path / "whole/model").iterdir()}
    assert {"preprocessor_config.json", "processor_config.json", "chat_template.jinja"} <= files


@pytest.mark.usefixtures("cached")
def test_an_export_trains_and_evaluates_again(tmp_path: Path) -> None:
    mixed_rows(tmp_path)
    held_out = f"eval.path={tmp_path / 'train.jsonl'}"
    train(config_of(tmp_path, "run", held_out))
    written = [json.loads(line) for line in (tmp_path / "run/evaluation.jsonl").read_text().splitlines()]
    exported = config_of(tmp_path, "unused", held_out, f"model.path={tmp_path / 'run/model'}")
    found = evaluate(exported)
    assert found["eval/loss"] == pytest.approx(written[-1]["eval/loss"], rel=1e-6)
    assert found["eval/loss"] < written[0]["eval/loss"]


@pytest.mark.usefixtures("cached")
def test_packs_and_shared_images_do_not_change_the_updates(tmp_path: Path) -> None:
    """One pack per step, or one per sample: the same gradient norms, up to rounding in float32."""
    mixed_rows(tmp_path)
    norms = []
    for name, size in (("large", 1000), ("small", 80)):
        train(config_of(tmp_path, name, "optimizer.lr=0", f"batch.max_tokens={size}"))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        norms.append([json.loads(line)["gradient_norm"] for line in lines])
    assert len(norms[0]) == 4
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.usefixtures("cached")
def test_another_image_is_other_data(tmp_path: Path) -> None:
    from padfree.testing.vision_folders import drawn

    mixed_rows(tmp_path)
    train(config_of(tmp_path, "run", "run.steps=2"))
    drawn(77, 20, 16).save(tmp_path / "0.png")  # the same size, so that the tokens stay the same
    with pytest.raises(padfree.UserError, match="data"):
        train(config_of(tmp_path, "run"))


def pair_rows(folder: Path) -> Path:
    """Pairs of answers to prompts with and without an image."""
    write_images(folder)
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>What is two?", "chosen": "Four.", "rejected": "May.", "images": ["0.png"]},
        {"prompt": "<image>Which?", "chosen": "clips", "rejected": "half", "images": ["1.png"]},
        {"prompt": "Hello", "chosen": "there", "rejected": "April"},
    ]
    return write_rows(folder / "train.jsonl", rows * 2)


@pytest.mark.usefixtures("cached")
def test_dpo_shows_an_image_to_both_answers(tmp_path: Path) -> None:
    """A reference model sees the images as well: without updates, policy and reference agree."""
    pair_rows(tmp_path)
    for sharing in ("true", "false"):
        changes = ("optimizer.lr=0", "run.steps=2", f"batch.share_prefixes={sharing}", "data.shuffle=false")
        train(config_of(tmp_path, sharing, *changes, kind="dpo"))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("true", "false")]
    shared, apart = ([json.loads(line) for line in each] for each in lines)
    for one, other in zip(shared, apart, strict=True):
        assert one["loss"] == pytest.approx(np.log(2.0), abs=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
        assert one["gradient_norm"] > 0
        assert one["computed_tokens"] < other["computed_tokens"]


@pytest.mark.usefixtures("cached")
def test_an_exported_reward_model_scores_images(tmp_path: Path) -> None:
    """As in transformers. The export is a folder that evaluates and trains again."""
    path, name = pair_rows(tmp_path), "qwen2_5_vl"

    def config(folder: str, *changes: str) -> Config:
        return config_of(tmp_path, folder, f"eval.path={path}", *changes, model=name, kind="reward")

    train(config("run"))
    exported = tmp_path / "run/model"
    assert {"preprocessor_config.json", "chat_template.jinja"} <= {file.name for file in exported.iterdir()}
    written = [json.loads(line) for line in (tmp_path / "run/evaluation.jsonl").read_text().splitlines()]
    assert written[-1]["eval/loss"] < written[0]["eval/loss"]
    found = evaluate(config("unused", f"model.path={exported}"))
    assert found["eval/loss"] == pytest.approx(written[-1]["eval/loss"], rel=1e-5)
    model: Any = AutoModelForSequenceClassification.from_pretrained(exported)
    samples = load_pairs(path, tokenizer_of(name), settings_of(name), cache=tmp_path / "cache", num_workers=0)
    with torch.no_grad():
        scores = torch.stack([stock_score(model, sample) for sample in samples])
    expected = -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()
    assert found["eval/loss"] == pytest.approx(float(expected), rel=1e-4)
    train(config("again", f"model.path={exported}", "run.steps=1"))


@pytest.mark.usefixtures("cached")
def test_a_pair_encodes_its_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a shared prompt, which changes neither losses nor gradients."""
    path = pair_rows(tmp_path)
    write_rows(path, [json.loads(line) for line in path.read_text().splitlines()][:2])
    encoded: list[int] = []
    family = FAMILIES["Qwen3VLForConditionalGeneration"]

    def counted(base: Any, inputs: Any) -> Any:
        encoded.append(len(inputs["image_grid_thw"]))
        return family.encode(base, inputs)

    monkeypatch.setitem(FAMILIES, "Qwen3VLForConditionalGeneration", replace(family, encode=counted))
    found = []
    for sharing in ("true", "false"):
        changes = ("optimizer.lr=0", "run.steps=1", f"batch.share_prefixes={sharing}", "batch.max_tokens=1000")
        train(config_of(tmp_path, sharing, *changes, kind="reward"))
        found += [json.loads(line) for line in (tmp_path / sharing / "metrics.jsonl").read_text().splitlines()]
    assert encoded == [2, 2], "two pairs with one image each"
    shared, apart = found
    assert shared["loss"] == pytest.approx(apart["loss"], rel=1e-5)
    assert shared["gradient_norm"] == pytest.approx(apart["gradient_norm"], rel=1e-4)
    assert shared["computed_tokens"] < apart["computed_tokens"]


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ([], set(PARTS)),
        (["model.freeze=['language_model']"], {"tower", "projector"}),
        (["lora.rank=2"], {"language_model"}),
    ],
)
@pytest.mark.usefixtures("cached")
def test_parts_of_a_reward_model_are_trained(changes: list[str], trained: set[str], tmp_path: Path) -> None:
    """Resumed to the bit. Adapters are merged into the weights, and the new head is trained with them."""
    pair_rows(tmp_path)
    train(config_of(tmp_path, "whole", *changes, kind="reward"))
    for steps in (1, 4):
        train(config_of(tmp_path, "parts", *changes, f"run.steps={steps}", kind="reward"))
    whole, parts = (load_model(tmp_path / name / "model", head="scalar", vision=True) for name in ("whole", "parts"))
    before = load_model(model_folder(), head="scalar", vision=True, seed=0).state_dict()
    assert all(torch.equal(tensor, parts.state_dict()[key]) for key, tensor in whole.state_dict().items())
    own = parts_of(whole)
    changed = {key for key, tensor in whole.named_parameters() if not torch.equal(tensor, before[key])}
    assert {own[key] for key in changed} == trained
    assert ("score.weight" in changed) == ("language_model" in trained)


@pytest.mark.usefixtures("cached")
def test_a_wrong_image_of_a_pair_is_a_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pair_rows(tmp_path)
    row = {"prompt": "<image>Which?", "chosen": "clips", "rejected": "half", "images": ["9.png"]}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    settings = [f"model.path={model_folder()}", "model.vision=true", f"data.path={path}", "data.epochs=4"]
    limits = ["batch.samples=4", "batch.max_tokens=100", f"run.folder={tmp_path / 'dry'}", "run.steps=2"]
    assert main(["reward", *settings, *limits, "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert "line 7" in error
    assert "9.png" in error
    assert error.count("\n") == 1
    assert main(["reward", *settings, *limits, "data.on_bad_row=skip", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "first step: 4 samples" in text
    assert "model.vision" in text
    assert main(["plan", "reward", *settings, *limits, "data.on_bad_row=skip"]) == 0
    assert "12 samples" in capsys.readouterr().out


@pytest.mark.usefixtures("cached")
def test_kto_shows_images_to_policy_and_reference(tmp_path: Path) -> None:
    """Without updates, policy and reference agree: the KL term is 0, and each loss is 1/2."""
    write_images(tmp_path)
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>What is two?", "completion": "Four.", "label": True, "images": ["0.png"]},
        {"prompt": "Hello", "completion": "there, May", "label": False},
        {"prompt": "<image>Which?", "completion": "clips", "label": False, "images": ["1.png"]},
    ]
    write_rows(tmp_path / "train.jsonl", rows * 2)
    changes = ("optimizer.lr=0", "run.steps=1", "batch.samples=6", "data.shuffle=false")
    train(config_of(tmp_path, "run", *changes, kind="kto"))
    (line,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert line["loss"] == pytest.approx(0.5, abs=1e-5)
    assert line["loss/kl"] == pytest.approx(0.0, abs=1e-4)
    assert line["gradient_norm"] > 0


@pytest.mark.usefixtures("cached")
def test_distillation_from_an_equal_teacher_changes_nothing(tmp_path: Path) -> None:
    """The teacher sees the images: its distributions are those of the student, so that the divergence is 0."""
    mixed_rows(tmp_path)
    train(config_of(tmp_path, "run", f"teacher.path={model_folder()}", "run.steps=1", kind="distill"))
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert abs(line["loss"]) < 1e-5


@pytest.mark.usefixtures("cached")
def test_commands_count_and_show_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixed_rows(tmp_path)
    settings = [f"model.path={model_folder()}", "model.vision=true", f"data.path={path}"]
    main(["data", "show", "sft", *settings, "--rows", "3"])
    text = capsys.readouterr().out
    assert "[image 1: 20 × 16, " in text
    assert "4 tokens]" in text
    assert "sha256" in text
    assert "<|image_pad|>" not in text
    limits = ["batch.samples=4", "batch.max_tokens=100", f"run.folder={tmp_path / 'dry'}"]
    main(["sft", *settings, *limits, "--dry-run"])
    text = capsys.readouterr().out
    assert "model.vision" in text
    assert "15 images, 4 distinct, 141 tokens" in text
    assert not (tmp_path / "dry").exists()
    main(["plan", "sft", *settings, *limits])
    tokens = sum(len(sample) for sample in load_sft(path, tokenizer_of(), settings_of(), num_workers=0))
    assert f"{tokens:,} tokens" in capsys.readouterr().out


def test_a_folder_of_images_needs_a_model_that_reads_them(tmp_path: Path) -> None:
    with refused("data.image_folder", "model.vision"):
        config_of(tmp_path, "run", "data.image_folder=x", "model.vision=false")


def test_a_language_model_has_no_images(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    mixed_rows(tmp_path)
    Qwen3Config(num_hidden_layers=1, hidden_size=16, vocab_size=64).save_pretrained(tmp_path / "text")
    with refused("model.path", "is not a supported vision-language model"):
        train(config_of(tmp_path, "run", f"model.path={tmp_path / 'text'}"))
