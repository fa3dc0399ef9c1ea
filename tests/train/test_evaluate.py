"""Evaluations are exact (layouts: `test_ways_gsm8k`) and do not change the weights; the best one is kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from padfree.batch import LmHead
from padfree.cli.main import main
from padfree.config import Config, config_from_dict
from padfree.data import DataReport
from padfree.distributed import Mesh
from padfree.head import matches
from padfree.sample import Sample
from padfree.tasks.measures import TokenMeasure
from padfree.tasks.reading import TrainingData
from padfree.testing.models import save_with_tokenizer
from padfree.train.evaluate import HeldOut, check_best
from padfree.train.run import train
from padfree.train.setup import build_engine
from padfree.train.trainer import Trainer, is_better
from tests.refused import refused
from tests.train.cases import make_samples, weights_of
from tests.train.trainer_cases import SFT, lines, make_config, make_trainer, save_config

EVAL = {"path": ["in memory"], "every": 2}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def held_out() -> list[Sample]:
    found = make_samples((7, 4, 11, 6, 3), seed=9)
    return [replace(sample, source=("a.jsonl", "b.jsonl")[index % 2]) for index, sample in enumerate(found)]


def evaluated_loop(config: Config, mesh: Mesh) -> Trainer:
    trainer = make_trainer(config, mesh)
    trainer.evaluate = HeldOut(trainer.engine.scorer, TokenMeasure(), held_out())
    return trainer


def evaluations(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds/evaluation"} for line in found]


def by_hand(model: torch.nn.Module, samples: list[Sample]) -> dict[str, float]:
    """Plain transformers code, one sample at a time."""
    total, right, count = 0.0, 0, 0
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]).logits[0].double()
        scores = torch.log_softmax(logits, -1)
        for place in np.flatnonzero(sample.scored):
            token = int(sample.tokens[place])
            total -= float(scores[place - 1, token])
            right += int(scores[place - 1].argmax()) == token
            count += 1
    return {"loss": total / count, "accuracy": right / count, "perplexity": math.exp(total / count)}


def test_numbers_are_those_of_one_sample_at_a_time(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **SFT)
    engine = build_engine(config, mesh)
    found = HeldOut(engine.scorer, TokenMeasure(), held_out())(0)
    plain = AutoModelForCausalLM.from_config(engine.model.config).eval()
    plain.load_state_dict(engine.model.state_dict())
    plain.set_attn_implementation("eager")
    for prefix, samples in (
        ("eval/", held_out()),
        ("eval/a.jsonl/", held_out()[::2]),
        ("eval/b.jsonl/", held_out()[1::2]),
    ):
        for name, value in by_hand(plain, samples).items():
            assert found[prefix + name] == pytest.approx(value, rel=1e-5), prefix + name
    assert len(found) == 9


def test_weights_are_the_same_with_and_without_evaluation(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {**SFT, "lora": {"rank": 2, "dropout": 0.3}}  # dropout uses the random state
    without = make_trainer(make_config(tmp_path / "without", model_folder, **sections), mesh)
    without.run()
    with_them = evaluated_loop(make_config(tmp_path / "with", model_folder, **sections, eval=EVAL), mesh)
    with_them.run()
    assert [line["step"] for line in evaluations(tmp_path / "with")] == [0, 2, 4, 6]
    assert lines(tmp_path / "with") == lines(tmp_path / "without")
    for name, weight in weights_of(without.engine.model).items():
        assert torch.equal(weight, weights_of(with_them.engine.model)[name]), name


def test_the_best_is_kept_and_a_resumed_run_goes_on_as_if_nothing_had_happened(
    mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {**SFT, "eval": {**EVAL, "every": 1}}
    sections["checkpoint"] = {"best": "eval/loss", "better": "highest", "keep": 1, "every": 1}
    whole = evaluated_loop(make_config(tmp_path / "whole", model_folder, **sections), mesh)
    whole.run()
    for steps in (2, 6):
        part = evaluated_loop(make_config(tmp_path / "parts", model_folder, **sections, run={"steps": steps}), mesh)
        part.run()
    expected = evaluations(tmp_path / "whole")
    assert [line["step"] for line in expected] == list(range(7))
    assert evaluations(tmp_path / "parts") == expected
    best = max(expected[1:], key=lambda line: line["eval/loss"])
    for trainer, folder in ((whole, "whole"), (part, "parts")):
        assert trainer.best is not None
        assert (trainer.best.step, trainer.best.value) == (best["step"], best["eval/loss"])
        names = {path.name for path in (tmp_path / folder / "checkpoints").glob("step-*")}
        assert names == {f"step-{best['step']:08d}", "step-00000006"}
    part.load_best()
    assert part.evaluate is not None
    assert part.evaluate(0)["eval/loss"] == best["eval/loss"]


def test_which_value_is_better() -> None:
    assert is_better(1.0, 2.0, "eval/loss", "auto")
    assert is_better(1.0, 2.0, "eval/a.jsonl/perplexity", "auto")
    assert is_better(2.0, 1.0, "eval/reward", "auto")
    assert is_better(2.0, 1.0, "eval/loss", "highest")
    assert not is_better(math.nan, 1.0, "eval/reward", "auto")


def test_matches_are_found_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias = torch.randn(23, 5), torch.randn(11, 5), torch.randn(11)
    labels = torch.randint(11, (23,))
    labels[::3] = -100
    head = LmHead(weight=weight, bias=bias, softcap=2.0, logit_scale=0.5)
    expected = ((head.logits(hidden).argmax(1) == labels) & (labels != -100)).float()
    monkeypatch.setattr("padfree.head.top1_accuracy.CHUNK_BYTES", 4 * 11 * 4)
    assert torch.equal(matches(hidden, head, labels), expected)


# Whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("whole")
    save_with_tokenizer(found / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in range(4) for b in range(4)]
    (found / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))
    (found / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[12:]))
    return found


def whole_config(folder: Path, run: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / "train.jsonl")], "columns": {"prompt": "prompt", "response": "response"}},
        "batch": {"samples": 6, "max_tokens": 64},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(run), "steps": 2, "device": "cpu"},
        "eval": {"path": [str(folder / "test.jsonl")], "every": 1},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return config_from_dict(values)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def test_a_run_exports_its_best_and_padfree_eval_finds_the_same_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = whole_config(folder, tmp_path / "run", optimizer={"lr": 1e-3}, checkpoint={"best": "eval/loss"})
    notes: list[str] = []
    train(config, on_note=notes.append)
    found = evaluations(tmp_path / "run")
    assert [line["step"] for line in found] == [0, 1, 2]
    assert any(note.startswith("evaluation after 2 steps: loss") for note in notes)
    best = min(found[1:], key=lambda line: line["eval/loss"])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[model]\npath = 'none'\n[data]\npath = ['not here.jsonl']\n[batch]\nsamples = 6\nmax_tokens = 64\n"
        "[run]\nfolder = 'none'\nsteps = 1\ndevice = 'cpu'\n"
    )
    for model, expected in (("model", found[-1]), ("model-best", best)):
        arguments = [f"model.path={tmp_path / 'run' / model}", f"eval.path={folder / 'test.jsonl'}"]
        columns = 'data.columns={prompt="prompt",response="response"}'
        assert main(["eval", str(recipe), *arguments, columns, "--json", str(tmp_path / f"{model}.json")]) == 0
        told = json.loads((tmp_path / f"{model}.json").read_text())
        for name in ("loss", "perplexity", "accuracy"):
            assert told[f"eval/{name}"] == pytest.approx(expected[f"eval/{name}"], rel=1e-6)
    assert "eval/perplexity" in capsys.readouterr().out
    assert main(["eval", str(recipe)]) == 1
    assert "eval.path: missing; give held-out data" in capsys.readouterr().err


@pytest.mark.parametrize("draws", [1, 3])
def test_responses_to_held_out_prompts(draws: int, folder: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"columns": {"prompt": "prompt"}},
        "rollout": {"reward": "exact_match", "samples_per_prompt": 3, "max_new_tokens": 4},
        "loss": {"kind": "clip"},
        "eval": {"samples_per_prompt": draws, "greedy": draws == 1, "pass_threshold": 0.0},
    }
    train(whole_config(folder, tmp_path / "with", **sections))
    found = evaluations(tmp_path / "with")
    names = {"reward", "pass@1", "response_length", "response_cut"} | ({"pass@k"} if draws > 1 else set())
    assert [line["step"] for line in found] == [0, 1, 2]
    assert found[0].keys() == {"step", *(f"eval/{name}" for name in names)}
    assert found[0]["eval/pass@1"] == 1.0, "a reward of 0 passes here"
    assert 1.0 <= found[0]["eval/response_length"] <= 4.0
    sections["eval"] = {"path": [], "every": None}
    config = whole_config(folder, tmp_path / "without", **sections)
    train(config)
    assert lines(tmp_path / "with") == lines(tmp_path / "without")
    with_them, without = (tmp_path / name for name in ("with", "without"))
    assert (with_them / "rollouts.jsonl").read_text() == (without / "rollouts.jsonl").read_text()
    files = [folder / "model" / "model.safetensors" for folder in (with_them, without)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_best_checkpoint_may_be_chosen_by_one_of_several_sources() -> None:
    samples = [Sample(tokens=np.arange(2), source=name) for name in ("a.jsonl", "b.jsonl", "a.jsonl")]
    report = DataReport(num_rows=3, num_samples=3, num_tokens=6, rows_per_file={"a.jsonl": 2, "b.jsonl": 1})
    several = TrainingData(samples=samples, report=report, place=str)
    for name in (None, "eval/loss", "eval/a.jsonl/loss", "eval/b.jsonl/accuracy"):
        check_best(name, several)
    with refused("checkpoint.best", "give one of eval/loss, eval/a.jsonl/loss, eval/b.jsonl/loss"):
        check_best("eval/c.jsonl/loss", several)
