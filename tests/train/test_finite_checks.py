"""Non-finite weights and metrics raise an error that names them, and are never reported as a result."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from padfree.attention import varlen_attention
from padfree.cli.main import main
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.model.nonfinite_tensors import nonfinite_tensor
from padfree.sample import Sample
from padfree.segments import Segments
from padfree.tasks.measures import TokenMeasure
from padfree.testing.models import build, save_with_tokenizer
from padfree.train.finite_checks import check_metrics, check_scores
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model") / "good")


def damaged(good: Path, to: Path, tensor: str, value: float, **more: torch.Tensor) -> str:
    shutil.copytree(good, to)
    tensors = {**load_file(to / "model.safetensors"), **more}
    tensors[tensor] = tensors[tensor].clone()
    tensors[tensor].view(-1)[-1] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return str(to)


def tensor_names(good: Path) -> list[str]:
    return sorted(load_file(good / "model.safetensors"))


# Weights


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_tensor_of_a_model_is_looked_at(value: float, good: Path, tmp_path: Path) -> None:
    for number, name in enumerate(tensor_names(good)):
        folder = damaged(good, tmp_path / str(number), name, value)
        with refused("model", f"{name} of .*model.safetensors has values that are not finite"):
            load_model(folder)


def test_values_that_the_dtype_cannot_hold(good: Path, tmp_path: Path) -> None:
    wide = load_file(good / "model.safetensors")[DOWN].double()
    folder = damaged(good, tmp_path / "wide", DOWN, 1e200, **{DOWN: wide})
    with pytest.raises(ValueError, match=r"has values up to 1e\+200, which exceed the range of float32"):
        load_model(folder)


def test_weights_that_transformers_converts_are_looked_at(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path / "moe")
    tensors = load_file(tmp_path / "moe" / "model.safetensors")
    name = next(name for name in tensors if "experts.1" in name)
    tensors[name].view(-1)[0] = math.nan
    save_file(tensors, tmp_path / "moe" / "model.safetensors", {"format": "pt"})
    with refused("model", ".*experts.* has values that are not finite"):
        load_model(tmp_path / "moe")


def test_a_buffer_may_hold_infinities() -> None:
    tensors = {"mask": torch.tensor([0.0, -math.inf]), "weight": torch.ones(2), "empty": torch.ones(0)}
    assert nonfinite_tensor(tensors, {"weight", "empty"}) is None
    assert nonfinite_tensor(tensors) == "mask"
    assert nonfinite_tensor({"mask": torch.tensor([math.nan])}, set()) == "mask"
    assert nonfinite_tensor({"ids": torch.arange(3)}) is None


def test_an_export_that_its_dtype_cannot_hold_is_refused(good: Path, tmp_path: Path) -> None:
    model = load_model(good)
    with torch.no_grad():
        model.get_parameter(DOWN).view(-1)[0] = 1e5
    with refused("export", f"{DOWN} has values that are not finite in float16"):
        export_model(model, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export_model(model, tmp_path / "out", dtype=torch.bfloat16)


# Attention on the CPU


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_the_cpu_kernel_hides_nothing(where: str, value: float, length: int) -> None:
    """Like the reference, also for a query that sees a single key, for which the fused kernel gives 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(length, 2, 16, generator=generator) for name in "qkv"}
    tensors[where][:, 0] = value
    segments = Segments.from_lengths([length])
    out, expected = (
        varlen_attention(tensors["q"], tensors["k"], tensors["v"], segments, segments, backend=backend)
        for backend in ("cpu", "reference")
    )
    assert isinstance(out, torch.Tensor)
    assert not torch.isfinite(out[:, 0]).all(-1).any()
    torch.testing.assert_close(out, expected, equal_nan=True)


# Runs: every setting that names a model


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


TEXTS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "no"} for n in range(4)]
ROLLOUTS = [{"tokens": [3, 4, 5], "response_length": 2, "reward": n % 2, "group": n // 4} for n in range(8)]
PROMPTS = [{"prompt": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(4)]
SMALL = ["model.dtype=float32", "batch.samples=4", "batch.max_tokens=64", "run.device=cpu", "run.steps=1"]
RUNS: dict[str, tuple[str, str, list[dict[str, Any]], list[str]]] = {
    # setting named by the error: command, recipe, data rows, settings
    "model": ("sft", "sft", TEXTS, ["model.path=BAD"]),
    "reference.path": ("rl", "rl", ROLLOUTS, ["reference.path=BAD", "loss.kl_coefficient=0.1"]),
    "reference.path of dpo": ("dpo", "dpo", PAIRS, ["reference.path=BAD"]),
    "teacher.path": ("distill", "distill", TEXTS, ["teacher.path=BAD"]),
    "teacher.path of rl": ("rl", "rl", ROLLOUTS, ["teacher.path=BAD", "loss.advantage=teacher"]),
    "critic.path": ("rl", "rl", ROLLOUTS, ["critic.path=BAD", "loss.advantage=gae"]),
    "rollout.reward": (
        "rl",
        "rl-local",
        PROMPTS,
        ["rollout.reward=model:BAD", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=2", "data.columns={}"],
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_refuses_weights_that_are_not_finite(
    case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, recipe, rows, changes = RUNS[case]
    score = {"score.weight": torch.ones(1, 32)} if case == "rollout.reward" else {}
    bad = damaged(good, tmp_path / "bad", NORM, math.nan, **score)
    overrides = [f"model.path={good}", f"data.path={written(tmp_path / 'd.jsonl', rows)}", *SMALL]
    overrides += [f"run.folder={tmp_path / 'run'}", *(change.replace("BAD", bad) for change in changes)]
    assert main([command, str(RECIPES / f"{recipe}.toml"), *overrides]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"padfree {command}: {case.partition(' ')[0]}: {NORM} of {bad}/model.safetensors has values")
    assert said.count("\n") == 1


def test_an_evaluation_refuses_weights_that_are_not_finite(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged(good, tmp_path / "bad", "model.layers.0.self_attn.q_proj.weight", math.nan)
    overrides = [f"model.path={bad}", f"eval.path={written(tmp_path / 'e.jsonl', TEXTS)}", *SMALL]
    assert main(["eval", str(RECIPES / "sft.toml"), *overrides]) == 1
    assert "q_proj.weight of" in capsys.readouterr().err


def test_finite_weights_that_overflow_give_an_evaluation_no_numbers(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged(good, tmp_path / "bad", NORM, 3e38, **{NORM: torch.full((32,), 3e38)})
    target = tmp_path / "found.json"
    overrides = [f"model.path={bad}", f"eval.path={written(tmp_path / 'e.jsonl', TEXTS)}", *SMALL]
    assert main(["eval", str(RECIPES / "sft.toml"), *overrides, "--json", str(target)]) == 1
    captured = capsys.readouterr()
    *progress, said = captured.err.splitlines()
    assert said.startswith(
        "padfree eval: eval: the metric eval/loss must be finite, but is nan (2 metrics are not finite); check the"
    )
    assert all(line.startswith("tokenising ") for line in progress)
    assert not captured.out
    assert not target.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metrics_are_looked_at_one_by_one(value: float) -> None:
    check_metrics({"eval/loss": 1.0, "eval/accuracy": 0.0}, 3)
    with refused("eval"):
        check_metrics({"eval/loss": 1.0, "eval/reward": value}, 3)


def test_a_perplexity_that_no_float_can_hold_is_not_another_number() -> None:
    found = TokenMeasure().metrics({"loss": 800.0, "accuracy": 0.0})
    assert found["perplexity"] == math.inf
    assert TokenMeasure().metrics({"loss": 2.0, "accuracy": 0.0})["perplexity"] == math.exp(2.0)


# What the error says about the cause


RUINOUS = "optimizer.lr=3e38"  # finite in float32, but its first step is not: AdamW divides it by 1 - beta1


def run_sft(good: Path, tmp_path: Path, *changes: str) -> int:
    overrides = [f"model.path={good}", f"data.path={written(tmp_path / 'd.jsonl', TEXTS)}", *SMALL]
    return main(["sft", str(RECIPES / "sft.toml"), *overrides, f"run.folder={tmp_path / 'run'}", *changes])


def test_an_update_that_ruins_the_weights_saves_and_exports_nothing(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sft(good, tmp_path, RUINOUS, "schedule.warmup=0") == 1
    said = capsys.readouterr().err
    assert said.startswith("padfree sft: step 1: the updates have made ")
    assert said.endswith("nothing is saved; resume the previous checkpoint with a lower optimizer.lr\n")
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run").glob("checkpoints/step*"))


def test_a_loss_that_is_not_finite_in_the_first_step_is_not_blamed_on_the_learning_rate(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged(good, tmp_path / "bad", NORM, 3e38, **{NORM: torch.full((32,), 3e38)})
    assert run_sft(Path(bad), tmp_path) == 1
    said = capsys.readouterr().err
    assert said.startswith("padfree sft: step 0: the loss is nan on rank 0 before the update; inspect sample ")
    assert "so optimizer.lr is not the cause; the samples are in" in said


def test_a_later_loss_names_the_weights_that_are_not_finite(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sft(good, tmp_path, RUINOUS, "run.steps=3", "data.epochs=2", "schedule.warmup=0") == 1
    said = capsys.readouterr().err
    assert "padfree sft: step 1: the loss is nan" in said
    assert "; the cause is in the weights: " in said
    assert "is not finite; resume a checkpoint with a lower optimizer.lr; the samples are in" in said


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 1])
def test_a_score_that_is_not_finite_is_named_by_its_place(bad: float, index: int) -> None:
    samples = [Sample(tokens=np.arange(3)), Sample(tokens=np.arange(4), uid="b")]
    name = ("at index 0", "b")[index]
    by_token = [np.zeros(3), np.zeros(4)]
    by_token[index][2] = bad
    with refused("critic.path", rf"the value of token 2 of sample {name} is {bad}"):
        check_scores(by_token, samples, setting="critic.path", what="value")
    by_sample = np.zeros(2)
    by_sample[index] = bad
    with refused("rollout.reward", rf"the reward of sample {name} is {bad}"):
        check_scores([np.asarray(each) for each in by_sample], samples, setting="rollout.reward", what="reward")
