"""`padfree distill`: gradients against plain code, resume, errors. Layouts: `test_ways_gsm8k`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from padfree.config import Config, config_from_dict
from padfree.config.loss_settings import DistillSettings
from padfree.distributed import distributed, make_mesh
from padfree.head.divergence import Divergence
from padfree.head.full import full_divergence
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks.batch_advantages import reverse_kl, teacher_advantages
from padfree.tasks.distill import DistillationMicroBatchLoss
from padfree.testing.models import build, save_with_tokenizer
from padfree.train.check_models import check_models
from padfree.train.engine import Engine, LossSettings
from padfree.train.run import train
from padfree.train.scorer import Scorer
from tests.refused import refused
from tests.train.cases import MAX_TOKENS, VOCABULARY, make_samples, small_model
from tests.train.trainer_cases import TIMES

TEACHER = {"hidden_size": 48, "vocab_size": VOCABULARY}
SETTINGS = {
    "forward-kl": DistillSettings(),
    "top-k": DistillSettings(divergence="reverse-kl", top_k=5),
    "jsd": DistillSettings(divergence="jsd", beta=0.3),
}


def gradients(settings: DistillSettings) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one global batch."""
    with distributed(device="cpu") as device:
        mesh = make_mesh(device)
        student, teacher = small_model(), build("qwen3", **TEACHER)
        parallelize(student, transformations(mesh))
        parallelize(teacher, transformations(mesh, frozen=True))
        micro_batch_loss = DistillationMicroBatchLoss(settings, teacher, temperature=1.5)
        optimizer = make_optimizer(student, OptimizerConfig(lr=0.0))
        scorer = Scorer(student, mesh, max_tokens=MAX_TOKENS)
        engine = Engine(scorer, optimizer, LossSettings(loss=settings, aggregation="sample-mean"), micro_batch_loss)
        prepared = engine.prepare(make_samples())
        sums = engine.gradients(prepared)
        loss = float(engine._sum_over_ranks(prepared, sums, False)[0])
        found = {}
        for name, parameter in student.named_parameters():
            assert parameter.grad is not None, name
            found[name] = parameter.grad.clone()
        return loss, found


def plain_gradients(settings: DistillSettings) -> tuple[float, dict[str, Tensor]]:
    """One sample at a time, with plain transformers code, in float64."""
    student, teacher = small_model().double(), build("qwen3", **TEACHER).double()
    divergence = Divergence(kind=settings.divergence, beta=settings.beta, top_k=settings.top_k)
    samples = [sample for sample in make_samples() if sample.num_labels]
    total = 0.0
    for sample in samples:
        tokens = torch.from_numpy(np.asarray(sample.tokens))[None]
        rows = torch.from_numpy(sample.mask[1:].copy())
        own = (student(input_ids=tokens).logits[0, :-1] / 1.5).log_softmax(-1)[rows]
        with torch.no_grad():
            taught = (teacher(input_ids=tokens).logits[0, :-1] / 1.5).log_softmax(-1)[rows]
        loss = full_divergence(own, taught, divergence).mean() / len(samples)
        loss.backward()
        total += float(loss)
    return total, {name: parameter.grad for name, parameter in student.named_parameters()}


def assert_same(actual: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        difference = float((actual[1][name].double() - gradient.double()).norm())
        assert difference <= 1e-5 * max(float(gradient.norm()), 1e-3), name


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_those_of_one_sample_at_a_time(settings: DistillSettings) -> None:
    assert_same(gradients(settings), plain_gradients(settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Student and teacher with the same tokenizer."""
    student = save_with_tokenizer(tmp_path_factory.mktemp("student"))
    teacher = save_with_tokenizer(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=3)
    return student, teacher


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def make_config(folder: Path, folders: tuple[Path, Path], *, steps: int, **sections: Any) -> Config:
    data = folder.parent / "data.jsonl"
    rows = [{"prompt": f"{a}+{b}", "response": f"the sum is {a + b}"} for a in range(4) for b in (7, 30)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_from_dict(
        {
            "model": {"path": str(folders[0])},
            "teacher": {"path": str(folders[1])},
            "data": {"path": [str(data)], "epochs": None},
            "batch": {"samples": 4, "max_tokens": 64},
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "loss": {"kind": "distill", "distill": {"divergence": "jsd"}},
            "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
            "run": {"folder": str(folder), "steps": steps, "device": "cpu"},
            **sections,
        }
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def test_a_run_resumes_to_the_bit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    train(make_config(tmp_path / "whole", folders, steps=6))
    for steps in (3, 6):
        train(make_config(tmp_path / "parts", folders, steps=steps))
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert whole == parts
    assert whole[-1]["loss/divergence"] < whole[0]["loss/divergence"]
    assert {"loss/cross_entropy", "loss/teacher_cross_entropy"} <= whole[0].keys()
    name = "model.safetensors"
    assert (tmp_path / "whole/model" / name).read_bytes() == (tmp_path / "parts/model" / name).read_bytes()


def test_a_teacher_with_other_weights_is_refused_on_a_resume(folders: tuple[Path, Path], tmp_path: Path) -> None:
    teacher = save_with_tokenizer(tmp_path / "teacher", hidden_size=48)
    train(make_config(tmp_path / "run", (folders[0], teacher), steps=1))
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with refused("teacher.path"):
        train(make_config(tmp_path / "run", (folders[0], teacher), steps=2))


def test_the_students_own_responses(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """On-policy: the student answers the prompts, and the loss is the reverse KL."""
    sections: dict[str, Any] = {
        "loss": {"kind": "distill", "distill": {"divergence": "reverse-kl"}},
        "rollout": {"reward": "exact_match", "samples_per_prompt": 2, "max_new_tokens": 6},
        "data": {"path": [], "epochs": None},
    }
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1", "answer": str(a + 1)}) + "\n" for a in range(4)))
    sections["data"]["path"] = [str(data)]
    for folder, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            train(make_config(tmp_path / folder, folders, steps=count, **sections))
    whole = metrics(tmp_path / "whole")
    assert whole == metrics(tmp_path / "parts")
    assert len(whole) == 4
    assert all("reward" in line and line["loss/divergence"] > 0 for line in whole)


def test_the_reverse_kl_as_the_advantage(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`padfree rl` with loss.advantage=teacher: log t - log p of every token; bit-identical resume."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1", "answer": str(a + 1)}) + "\n" for a in range(4)))
    sections: dict[str, Any] = {
        "loss": {"kind": "clip", "advantage": "teacher", "epochs": 2},
        "rollout": {"reward": "exact_match", "samples_per_prompt": 2, "max_new_tokens": 6},
        "data": {"path": [str(data)], "epochs": None},
    }
    for folder, steps in (("whole", (4,)), ("parts", (3, 4))):
        for count in steps:
            train(make_config(tmp_path / folder, folders, steps=count, **sections))
    whole = metrics(tmp_path / "whole")
    assert whole == metrics(tmp_path / "parts")
    assert all(np.isfinite(line["reverse_kl"]) and line["reverse_kl"] != 0 for line in whole)


def test_teacher_advantages_are_differences_of_scored_tokens() -> None:
    sample = Sample(tokens=np.array([3, 1, 2, 5]), loss_mask=np.array([True, False, True, True]))
    (found,) = teacher_advantages([sample], [np.array([9.0, 9.0, -1.0, -2.0])], [np.array([0.0, 0.0, -1.5, -1.0])])
    assert found.advantages is not None
    assert found.advantages.tolist() == [0.0, 0.0, 0.5, -1.0]
    assert reverse_kl([found]) == 0.25


def test_another_vocabulary_is_refused_before_weights_are_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    small_model(vocab_size=VOCABULARY).save_pretrained(tmp_path / "other")
    config = make_config(tmp_path / "run", (folders[0], tmp_path / "other"), steps=1)
    with refused("teacher.path"):
        check_models(config)
