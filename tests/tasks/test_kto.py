"""`padfree kto`: equal to TRL on the same batch, on every layout; whole runs, resume, evaluation, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import padfree
from padfree.cli.main import main
from padfree.config import Config, config_from_dict
from padfree.config.loss_settings import KTOSettings
from padfree.data.formats import LABEL_SCHEMA
from padfree.data.prepare import load_rows
from padfree.distributed import Mesh, distributed
from padfree.model.vision import prepare_sample
from padfree.sample import Sample
from padfree.tasks.kto import LabelledDataset, LabelTokenizer, kto_loss, mismatched
from padfree.testing.models import save_with_tokenizer
from padfree.testing.tokenizers import tiny_tokenizer
from padfree.testing.vision_models import build_vision, picture, shown
from padfree.train.batcher import make_batcher
from padfree.train.run import mesh_of, train
from padfree.train.setup import build_engine, build_reference
from padfree.train.trainer import Trainer
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.train.cases import weights_of
from tests.train.trainer_cases import begin, lines

KTO = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.75}
RECIPE = "kto"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("kto")
    save_with_tokenizer(found / "model")
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b) if a % 2 else f"{b}+{a}={a}", "label": bool(a % 2)}
        for a in range(4)
        for b in range(4)
    ]
    (found / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:14]))
    (found / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows[:2], *rows[14:])))
    return found


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def make_config(folder: Path, place: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / "train.jsonl")], "epochs": None, "shuffle": False},
        "loss": {"kind": "kto", "kto": KTO},
        "batch": {"samples": 6, "max_tokens": 24},
        "optimizer": {"lr": 5e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(place), "steps": 4, "device": "cpu"},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return config_from_dict(values)


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    source = load_training_data(config, load_tokenizer(config))
    engine = build_engine(config, mesh)
    return begin(config, engine, make_batcher(config, source.samples), reference=build_reference(config, mesh, engine))


@torch.no_grad()
def move_weights(model: PreTrainedModel) -> None:
    """Change the weights, because at the reference every x is 0, and so that z₀ is above 0."""
    for number, weight in enumerate(model.parameters()):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        whole = 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number + 300))
        if isinstance(weight, DTensor):
            whole = torch.distributed.tensor.distribute_tensor(
                whole, weight.device_mesh, weight.placements, src_data_rank=None
            ).to_local()
        local += whole


def first_step(config: Config, mesh: Mesh) -> tuple[float, float, dict[str, torch.Tensor], list[Sample]]:
    """Loss, z₀ and gradients of the first batch, with weights that differ from the reference."""
    trainer = make_trainer(config, mesh)
    move_weights(trainer.engine.model)
    batch = trainer.batches.next(0)
    assert batch is not None
    loss = trainer.engine.gradients(trainer.engine.prepare(batch.samples)).loss
    torch.distributed.all_reduce(loss, group=mesh.loss.group)
    gradients = {}
    for name, weight in trainer.engine.model.named_parameters():
        assert weight.grad is not None
        gradients[name] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    terms = batch.samples[0].terms
    assert terms is not None
    return float(loss), terms["kl"], gradients, list(batch.samples)


def test_the_loss_and_its_gradient_are_those_of_trl(mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    """TRL's trainer with its data preparation, collator and loss, on one batch of all samples."""
    reason = "TRL is not installed"
    trl = pytest.importorskip("trl.trainer.kto_trainer", reason=reason, exc_type=ImportError)
    datasets = pytest.importorskip("datasets", reason=reason)
    loss, point, gradients, samples = first_step(make_config(folder, tmp_path / "run"), mesh)
    assert point > 0.01

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()][: len(samples)]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2))
    move_weights(model)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), use_cpu=True, bf16=False,
        report_to="none", gradient_checkpointing=False, **KTO,
    )  # fmt: skip
    trainer = trl.KTOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    for row, sample in enumerate(samples):
        assert inputs["input_ids"][row, : len(sample)].tolist() == sample.tokens.tolist()
        assert inputs["completion_mask"][row, : len(sample)].bool().tolist() == sample.mask.tolist()
    for row, sample in enumerate(mismatched(samples)):
        assert inputs["KL_input_ids"][row, : len(sample)].tolist() == sample.tokens.tolist()
    expected = trainer.compute_loss(trainer.model.train(), inputs)
    expected.backward()
    assert point == pytest.approx(trainer._metrics["train"]["kl"][-1], rel=1e-5)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for name, weight in trainer.model.named_parameters():
        assert weight.grad is not None
        scale = float(weight.grad.abs().max())
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=max(1e-5 * scale, 1e-8))


def test_the_formula_and_its_slope() -> None:
    """In float64, against autograd."""
    x = torch.linspace(-3, 3, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 0] * 4, dtype=torch.float64)
    settings, point = KTOSettings(**KTO), torch.full((8,), 0.7, dtype=torch.float64)
    losses, slopes, rewards, right = kto_loss(x, labels, point, settings)
    good = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (x - 0.7)))
    bad = settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (0.7 - x)))
    torch.testing.assert_close(losses, torch.where(labels > 0, good, bad), rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(slopes, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(rewards, settings.beta * x)
    assert right.tolist() == [(value > 0.7) == bool(label) for value, label in zip(x.tolist(), labels, strict=True)]


def ranks(rank: int, world: int, folder: Path, place: Path, context: int, cache: str) -> Any:
    import os

    os.environ["PADFREE_CACHE"] = cache
    with distributed(device="cpu") as device:
        config = make_config(folder, place, parallel={"context": context})
        loss, point, gradients, _ = first_step(config, mesh_of(config, device))
        return loss, point, {name: gradient.numpy() for name, gradient in gradients.items()}


def test_the_loss_does_not_depend_on_the_layout(mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    """Micro-batches of several sizes, two data ranks, two context ranks."""
    loss, point, gradients, samples = first_step(
        make_config(folder, tmp_path / "whole", batch={"max_tokens": 512}), mesh
    )
    found = []
    for max_tokens in (max(len(sample) for sample in samples), 24, 40):
        config = make_config(folder, tmp_path / str(max_tokens), batch={"max_tokens": max_tokens})
        found.append(first_step(config, mesh)[:3])
    for context in (1, 2):
        place = tmp_path / f"context {context}"
        each = run_ranks(2, ranks, folder, place, context, str(tmp_path / "cache"))
        for other, own_point, own in each:
            found.append((other, own_point, {name: torch.from_numpy(gradient) for name, gradient in own.items()}))
    for other, other_point, others in found:
        assert other == pytest.approx(loss, rel=1e-5)
        assert other_point == pytest.approx(point, rel=1e-5)
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=max(1e-5 * scale, 1e-8))


def test_mismatched_pairs() -> None:
    def sample(tokens: list[int], prompt: int, **terms: float) -> Sample:
        return Sample(tokens=tokens, loss_mask=np.arange(len(tokens)) >= prompt, terms=terms or None)

    found = mismatched([sample([1, 2, 3], 2), sample([4, 5, 6], 1), sample([7, 8], 1)])
    assert [one.tokens.tolist() for one in found] == [[1, 2, 8], [4, 3], [7, 5, 6]]
    assert [one.mask.tolist() for one in found] == [[False, False, True], [False, True], [False, True, True]]
    cut = mismatched([sample([1, 2, 3, 4], 3, longest=4.0), sample([5, 6, 7, 8], 1, longest=4.0)])
    assert [one.tokens.tolist() for one in cut] == [[1, 2, 3, 6], [5, 4]]


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}}], ids=["model", "adapter"])
def test_resume_is_bitwise(sections: dict[str, Any], mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    whole = make_trainer(make_config(folder, tmp_path / "whole", **sections), mesh)
    whole.run()
    for steps in (1, 3, 4):
        part = make_trainer(make_config(folder, tmp_path / "parts", run={"steps": steps}, **sections), mesh)
        part.run()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    found = lines(tmp_path / "whole")
    assert found[0]["loss/kl"] == 0.0, "the policy starts as the reference"
    assert found[3]["loss"] < found[0]["loss"]
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(part.engine.model)[name]), name


def test_a_run_is_evaluated_and_exported(folder: Path, tmp_path: Path) -> None:
    held_out = {"path": [str(folder / name) for name in ("train.jsonl", "test.jsonl")], "every": 2}
    train(make_config(folder, tmp_path / "run", eval=held_out, checkpoint={"best": "eval/margin"}))
    found = [json.loads(line) for line in (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert found[0]["eval/margin"] == found[0]["eval/kl"] == 0.0
    assert found[-1]["eval/margin"] > 0
    assert found[-1]["eval/loss"] < found[0]["eval/loss"]
    for name in ("loss", "accuracy", "kl", "margin"):
        assert f"eval/test.jsonl/{name}" in found[-1]
    for name in ("model", "model-best"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name)


def test_the_python_call(folder: Path, tmp_path: Path) -> None:
    run = padfree.kto(
        model=folder / "model",
        data=folder / "train.jsonl",
        batch={"samples": 6, "max_tokens": 64},
        run={"folder": tmp_path / "run", "steps": 1, "device": "cpu"},
    )
    assert run.steps == 1
    assert {"loss/kl", "loss/accuracy", "loss/desirable", "loss/undesirable"} <= run.metrics[0].keys()
    assert padfree.kto.__doc__ is not None
    assert "KTO" in padfree.kto.__doc__


def test_rows_of_messages(tmp_path: Path) -> None:
    """TRL's conversational format, and numbers as labels."""
    tokenizer = tiny_tokenizer("chatml")
    asked = [{"role": "user", "content": "1+1="}]
    said = [[{"role": "assistant", "content": text}] for text in ("2", "3")]
    rows = [{"prompt": asked, "completion": answer, "label": 1 - index} for index, answer in enumerate(said)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad = load_rows(file, tokenizer, None, LabelledDataset, LabelTokenizer, LABEL_SCHEMA)
    assert (good.reward, bad.reward, good.group) == (1.0, 0.0, None)
    assert tokenizer.decode(good.tokens[good.mask]) == "2<|im_end|>"
    assert "1+1=" in tokenizer.decode(good.tokens[~good.mask])


def test_dry_run_plan_and_wrong_inputs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"model.path={folder / 'model'}", f"data.path={folder / 'train.jsonl'}", "model.dtype=float32"]
    small += ["batch.samples=6", "batch.max_tokens=64", "run.device=cpu", f"run.folder={tmp_path / 'run'}"]
    assert main(["kto", RECIPE, *small, "--dry-run"]) == 0
    assert "first step: 6 samples" in capsys.readouterr().out
    assert main(["plan", RECIPE, *small]) == 0
    capsys.readouterr()
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"prompt": "1+1=", "completion": "2", "label": "good"}) + "\n")
    for command, recipe, changes, message in (
        ("kto", "kto", ["batch.samples=1"], "batch.samples: 1; give 2 or more"),
        (
            "kto",
            "kto",
            ["reference.precompute=true"],
            "reference.precompute: True; leave it out: only padfree dpo",
        ),
        (
            "kto",
            "kto",
            ["reference.refresh=2", "reference.path=m"],
            "reference.refresh: 2; leave it out: the reference of KTO never changes",
        ),
        ("kto", "kto", ["loss.kto.beta=0"], "loss.kto.beta: 0"),
        ("kto", "kto", ["loss.aggregation=sample-mean"], "loss.aggregation: 'sample-mean'; leave it out"),
        (
            "kto",
            "kto",
            ["loss.kind=sft", "loss.kto.beta=0.2"],
            "loss.kto.beta: 0.2; leave it out, or set loss.kind",
        ),
        ("kto", "kto", [f"data.path={odd}"], "'label' is 'good'; expected true or false"),
        ("sft", "sft", [], "padfree kto"),
        ("dpo", "dpo", [], "padfree kto"),
    ):
        assert main([command, recipe, *small, *changes, "--dry-run"]) == 1
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1


def test_mismatched_pairs_show_the_images_of_their_prompt() -> None:
    """The rotary positions are those that the model's own function gives to the pair."""
    model = build_vision("qwen3_vl")
    one, other = picture(model, 0, rows=2, columns=3), picture(model, 1, rows=3, columns=1)
    parts = [([4, one, 3], 5), ([6], 3), ([2, other, 1, one, 4], 4)]
    samples = []
    for seed, (prompt, answer) in enumerate(parts):
        sample = shown(model, [*prompt, answer], seed=seed)
        samples.append(replace(sample, loss_mask=np.arange(len(sample)) >= len(sample) - answer))
    pairs = mismatched(samples)
    for sample, pair, (_, answer), (_, other_answer) in zip(samples, pairs, parts, [parts[-1], *parts], strict=False):
        assert len(pair) == len(sample) - answer + other_answer
        assert [image.digest for image in pair.images] == [image.digest for image in sample.images]
        own = prepare_sample(model, replace(pair, rotary_positions=None)).rotary_positions
        if own is None:
            own = np.broadcast_to(np.arange(len(pair)), (3, len(pair)))
        assert pair.rotary_positions is not None
        np.testing.assert_array_equal(pair.rotary_positions, own)
