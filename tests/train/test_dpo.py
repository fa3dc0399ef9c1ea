"""Whole runs on preference pairs: against plain transformers code, resume, evaluation. Layouts: `test_ways_gsm8k`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.cli.main import main
from padfree.config import Config, config_from_dict
from padfree.data import PairDataset, load_pairs
from padfree.data.data_settings import SFTDataSettings
from padfree.distributed import Mesh
from padfree.sample import Sample
from padfree.testing.models import save_with_tokenizer
from padfree.train.batcher import make_batcher
from padfree.train.run import train
from padfree.train.setup import build_engine, build_reference
from padfree.train.trainer import Trainer
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.train.cases import weights_of
from tests.train.trainer_cases import begin, lines

VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.5, "label_smoothing": 0.1},
    "simpo": {"beta": 2.0, "gamma": 0.3},
    "orpo": {"beta": 0.2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("dpo")
    save_with_tokenizer(found / "model")
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{b}+{a}={a}" if a % 2 else "9"}
        for a in range(4)
        for b in range(4)
    ]
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))
    (found / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[12:]))
    return found


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def make_config(folder: Path, place: Path, variant: str = "sigmoid", **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / "pairs.jsonl")], "epochs": None},
        "loss": {"kind": "dpo", "dpo": {"variant": variant, **VARIANTS.get(variant, {})}},
        "batch": {"samples": 8, "max_tokens": 32},
        "optimizer": {"lr": 5e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(place), "steps": 4, "device": "cpu"},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return config_from_dict(values)


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    samples = load_training_data(config, load_tokenizer(config)).samples
    engine = build_engine(config, mesh)
    return begin(config, engine, make_batcher(config, samples), reference=build_reference(config, mesh, engine))


def answer(model: PreTrainedModel, sample: Sample) -> tuple[torch.Tensor, int]:
    """Plain transformers code: the sum of the log-probabilities of an answer, and its number of tokens."""
    tokens = torch.from_numpy(np.asarray(sample.tokens, np.int64))
    scores = torch.log_softmax(model(input_ids=tokens[None]).logits[0].float(), -1)
    places = torch.from_numpy(np.flatnonzero(sample.scored))
    return scores[places - 1, tokens[places]].sum(), len(places)


def plain_loss(model: PreTrainedModel, reference: PreTrainedModel, pair: list[Sample], variant: str) -> torch.Tensor:
    beta = VARIANTS[variant]["beta"]
    (x, n), (y, m) = (answer(model, sample) for sample in pair)
    if variant == "sigmoid":
        with torch.no_grad():
            (u, _), (v, _) = (answer(reference, sample) for sample in pair)
        smoothing, d = VARIANTS[variant]["label_smoothing"], beta * ((x - u) - (y - v))
        return -(1 - smoothing) * logsigmoid(d) - smoothing * logsigmoid(-d)
    x, y = x / n, y / m
    if variant == "simpo":
        return -logsigmoid(beta * (x - y) - VARIANTS[variant]["gamma"])
    return -x - beta * logsigmoid((x - y) - (torch.log1p(-x.exp()) - torch.log1p(-y.exp())))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_one_pair_at_a_time(variant: str, mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path / "run", variant)
    trainer = make_trainer(config, mesh)
    with torch.no_grad():  # change the weights: at the reference all differences are 0
        for number, weight in enumerate(trainer.engine.model.parameters()):
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    batch = trainer.batches.next(0)
    assert batch is not None
    engine = trainer.engine
    prepared = engine.prepare(batch.samples)
    assert len(prepared.packs) > 1, "pairs are divided over several packs"
    loss = float(engine.gradients(prepared).loss)
    reference, plain = (AutoModelForCausalLM.from_pretrained(folder / "model").eval() for _ in range(2))
    plain.load_state_dict(engine.model.state_dict())
    total = 0.0
    for first in range(0, len(batch.samples), 2):
        pair = plain_loss(plain, reference, list(batch.samples[first : first + 2]), variant)
        (pair * 2 / len(batch.samples)).backward()
        total += float(pair.detach()) * 2 / len(batch.samples)
    assert loss == pytest.approx(total, rel=1e-5)
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in engine.model.named_parameters():
        assert weight.grad is not None
        assert expected[name] is not None
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-5, atol=max(1e-5 * scale, 1e-7))


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}}], ids=["model", "adapter"])
def test_resume_is_bitwise(sections: dict[str, Any], mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    whole = make_trainer(make_config(folder, tmp_path / "whole", **sections), mesh)
    whole.run()
    for steps in (1, 3, 4):
        part = make_trainer(make_config(folder, tmp_path / "parts", run={"steps": steps}, **sections), mesh)
        part.run()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    found = lines(tmp_path / "whole")
    assert found[0]["loss/margin"] == 0.0, "the policy starts as the reference"
    assert found[3]["loss"] < found[0]["loss"]
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(part.engine.model)[name]), name


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}}], ids=["model", "adapter"])
def test_a_precomputed_reference_gives_the_same_run_and_is_asked_once(
    sections: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_config(folder, tmp_path / "asked", **sections))
    precomputed = {**sections, "reference": {"precompute": True}}
    train(make_config(folder, tmp_path / "first", **precomputed))
    monkeypatch.setattr("padfree.train.scorer.Scorer.logprobs", None)  # scoring would fail
    train(make_config(folder, tmp_path / "second", **precomputed))
    for name in ("first", "second"):
        for line, other in zip(lines(tmp_path / name), lines(tmp_path / "asked"), strict=True):
            assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert models[0] == models[1]


def test_a_run_is_evaluated_on_held_out_pairs(folder: Path, tmp_path: Path) -> None:
    held_out = {"path": [str(folder / name) for name in ("pairs.jsonl", "test.jsonl")], "every": 2}
    config = make_config(folder, tmp_path / "run", eval=held_out, checkpoint={"best": "eval/accuracy"})
    train(config)
    found = [json.loads(line) for line in (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert found[0]["eval/margin"] == 0.0
    assert found[0]["eval/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert found[-1]["eval/pairs.jsonl/loss"] < found[0]["eval/pairs.jsonl/loss"], "pairs.jsonl is also trained on"
    assert found[-1]["eval/loss"] == pytest.approx(
        (12 * found[-1]["eval/pairs.jsonl/loss"] + 4 * found[-1]["eval/test.jsonl/loss"]) / 16
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model-best")


def test_pairs_are_left_out_whole(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_config(folder, tmp_path))
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+2=", "chosen": "3+0=3+0=3", "rejected": "4"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": "2+2=", "chosen": "4"}\n')
    with pytest.raises(ValueError, match="line 3: 'rejected' is missing"):
        load_pairs(file, tokenizer)
    found = load_pairs(file, tokenizer, SFTDataSettings(on_bad_row="skip", max_length=8, overlong="drop"))
    assert isinstance(found, PairDataset)
    assert (len(found), found.report.num_samples, len(found.report.dropped), len(found.report.skipped)) == (2, 1, 1, 1)
    chosen, rejected = found
    assert (chosen.group, chosen.reward, rejected.reward) == (rejected.group, 1.0, 0.0)
    assert chosen.tokens[: -chosen.num_labels].tolist() == rejected.tokens[: -rejected.num_labels].tolist()


def test_dry_run_and_wrong_inputs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "dpo.toml")
    small = [f"model.path={folder / 'model'}", f"data.path={folder / 'pairs.jsonl'}", "model.dtype=float32"]
    small += ["batch.samples=8", "batch.max_tokens=64", "run.device=cpu", f"run.folder={tmp_path / 'run'}"]
    assert main(["dpo", recipe, *small, "--dry-run"]) == 0
    assert "first step: 8 samples" in capsys.readouterr().out
    for changes, message in (
        (["batch.samples=7"], "batch.samples: 7; give an even number"),
        (["loss.dpo.variant=orpo", "reference.path=m"], "reference.path: 'm'; leave it out: loss.dpo.variant 'orpo'"),
        (["loss.dpo.gamma=1"], "loss.dpo.gamma: 1.0; leave it out"),
        (["loss.dpo.variant=sigmoidal"], "loss.dpo.variant: 'sigmoidal'; did you mean 'sigmoid'?"),
        (["batch.max_tokens=8"], "in its two answers"),
        (["loss.kind=sft"], "use padfree sft"),
    ):
        assert main(["dpo", recipe, *small, *changes, "--dry-run"]) == 1
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1
