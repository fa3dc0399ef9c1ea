"""`padfree.sft` and the other calls: one call is one run, and the process is afterwards what it was before."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import padfree
import padfree.train.run  # sets an environment variable for flash-attn-4, once in a process
from padfree.cli.main import main
from padfree.testing.models import build, save_with_tokenizer
from padfree.testing.tokenizers import tiny_tokenizer

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
CPU = {"device": "cpu"}
LOGGERS = (None, "padfree", "torch", "transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for SFT, distillation and RL."""
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(4) for b in range(4)]
    return written(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "9"} for a in range(4) for b in range(4)]
    return written(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def digits(response: str, row: Mapping[str, Any]) -> float:
    """The share of the response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def state_of_the_process() -> dict[str, Any]:
    """What a run changes while it goes on."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": wakeup,
        "threads": {thread.name for thread in threading.enumerate()},
        "random": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "group": dist.is_initialized(),
        "streams": (sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "tracing": (sys.gettrace(), sys.getswitchinterval(), sys.getrecursionlimit()),
        "warnings": list(warnings.filters),
        "loggers": [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in LOGGERS],
        "progress bar": transformers.utils.logging.is_progress_bar_enabled(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "numbers": (random.getstate(), str(np.random.get_state())),
        "torch": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_autocast_enabled(),
            torch.is_inference_mode_enabled(),
        ),
    }


def test_a_call_is_a_run_and_leaves_nothing_behind(
    model: Path, sums: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, steps, notes = state_of_the_process(), [], []
    found = padfree.sft(
        model=model,
        data={"path": sums, "epochs": 2},
        batch={"samples": 8, "max_tokens": 64},
        eval={"path": [sums], "every": 2},
        checkpoint={"best": "eval/loss"},
        optimizer={"lr": 1e-2},
        run={"folder": tmp_path / "run", "deterministic": True, **CPU},
        on_step=steps.append,
        on_note=notes.append,
    )
    assert state_of_the_process() == before
    assert capfd.readouterr().out == ""
    assert (found.steps, found.stopped, found.folder) == (4, False, tmp_path / "run")
    assert [entry["step"] for entry in found.metrics] == [0, 1, 2, 3]
    assert found.metrics == steps
    assert found.metrics[-1]["loss"] < found.metrics[0]["loss"]
    assert [entry["step"] for entry in found.evaluations] == [0, 2, 4]
    assert any("evaluation after 4 steps" in note for note in notes)
    assert found.config.optimizer.lr == 1e-2
    for folder in (found.model, found.best_model):
        assert folder is not None
        AutoModelForCausalLM.from_pretrained(folder)


def test_calls_do_not_disturb_each_other(model: Path, sums: Path, tmp_path: Path) -> None:
    """Twice in a process, in a running event loop, and in a thread: the same numbers."""

    def call(name: str) -> list[float]:
        found = padfree.sft(
            model=model, data=sums, batch={"samples": 8, "max_tokens": 64}, run={"folder": tmp_path / name, **CPU}
        )
        return [entry["loss"] for entry in found.metrics]

    async def inside() -> list[float]:
        return call("loop")

    expected = call("first")
    assert len(expected) == 2
    assert call("second") == expected
    assert asyncio.run(inside()) == expected
    assert asyncio.run(asyncio.to_thread(call, "thread"), debug=False) == expected
    assert call("first") == expected, "a finished run has the same result"
    assert not dist.is_initialized()


def test_the_numbers_are_those_of_the_command(model: Path, sums: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"[model]\npath = {json.dumps(str(model))}\n[data]\npath = [{json.dumps(str(sums))}]\n"
        "[batch]\nsamples = 4\nmax_tokens = 64\n[optimizer]\nlr = 1e-3\nbetas = [0.8, 0.9]\n"
        f'[run]\nfolder = "command"\ndevice = "cpu"\nsteps = 3\n'
    )
    assert main(["sft", str(recipe), "optimizer.lr=2e-3"]) == 0
    found = padfree.sft(recipe=recipe, optimizer={"lr": 2e-3}, run="call")
    assert found.folder == Path("call")
    assert found.config.optimizer.betas == (0.8, 0.9), "the recipe's, beside what was changed"
    lines = [json.loads(line) for line in Path("command/metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in found.metrics] == [entry["loss"] for entry in lines]


def test_two_keywords_are_enough(model: Path, sums: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = padfree.sft(model=str(model), data=str(sums), progress=True)
    assert found.folder == Path("runs/sft")
    assert found.steps == 1
    lines = capfd.readouterr().out.splitlines()
    assert f"step 1  loss {found.metrics[0]['loss']:.4f}" in lines


CALLERS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "default device": partial(torch.device, "meta"),
}


@pytest.mark.parametrize("name", CALLERS)
def test_the_callers_modes_of_torch_change_nothing(name: str, model: Path, sums: Path, tmp_path: Path) -> None:
    """Models are often evaluated, and calls made, inside these context managers."""

    def outcome(folder: str) -> tuple[list[float], dict[str, float], bytes]:
        data, batch = {"path": sums, "epochs": 1}, {"samples": 8, "max_tokens": 64}
        run = padfree.sft(model=model, data=data, batch=batch, run={"folder": tmp_path / folder, "steps": 2, **CPU})
        assert run.model is not None
        evaluated = padfree.evaluate(model=model, eval=sums, batch=batch, run=CPU)
        weights = (run.model / "model.safetensors").read_bytes()
        return [line["loss"] for line in run.metrics], evaluated, weights

    expected = outcome("plain")
    with CALLERS[name]():
        assert outcome("inside") == expected


def test_preferences_rewards_and_distillation(model: Path, sums: Path, pairs: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"batch": {"samples": 8, "max_tokens": 128}, "optimizer": {"lr": 1e-2}}
    preferred = padfree.dpo(model=model, data=pairs, run={"folder": tmp_path / "dpo", **CPU}, **common)
    assert preferred.metrics[-1]["loss"] < preferred.metrics[0]["loss"]
    judge = padfree.reward(model=model, data=pairs, run={"folder": tmp_path / "reward", **CPU}, **common)
    assert judge.model is not None
    AutoModelForSequenceClassification.from_pretrained(judge.model)
    student = padfree.distill(
        model=model,
        teacher=save_with_tokenizer(tmp_path / "teacher", hidden_size=48),
        data=sums,
        run={"folder": tmp_path / "distill", **CPU},
        **common,
    )
    assert student.metrics[-1]["loss"] < student.metrics[0]["loss"]


def test_rl_with_a_function_and_evaluation_of_what_it_made(model: Path, sums: Path, tmp_path: Path) -> None:
    rollout = {"reward": digits, "samples_per_prompt": 4, "max_new_tokens": 3}

    async def inside() -> padfree.TrainedRun:
        return padfree.rl(
            model=model,
            data={"path": sums, "epochs": None},
            rollout=rollout,
            batch={"samples": 32, "max_tokens": 256},
            optimizer={"lr": 2e-2},
            run={"folder": tmp_path / "rl", "steps": 8, **CPU},
        )

    found = asyncio.run(inside())
    assert found.metrics[-1]["reward"] > found.metrics[0]["reward"] + 0.1
    assert found.config.rollout.reward == "tests.test_api:digits"

    def reward_of(folder: Path | None) -> float:
        return padfree.evaluate(model=folder, eval={"path": sums, "pass_threshold": 0.5}, rollout=rollout)[
            "eval/reward"
        ]

    before = state_of_the_process()
    assert reward_of(found.model) > reward_of(model) + 0.1
    assert state_of_the_process() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"rl", "cache"}, "evaluations write no run folder"


def test_held_out_samples(model: Path, sums: Path) -> None:
    found = padfree.evaluate(model=model, eval=sums)
    assert set(found) == {"eval/loss", "eval/accuracy", "eval/perplexity"}


@pytest.mark.parametrize(
    ("sampled", "settings"),
    [
        (False, {"data": {"epochs": None}}),
        (False, {"schedule": {"kind": "cosine"}}),
        (False, {"run": {"steps": 2, **CPU}, "schedule": {"warmup": 3}}),
        (False, {"checkpoint": {"best": "eval/reward"}}),
        (True, {"data": {"epochs": None}, "rollout": {"samples_per_prompt": 6}}),
        (True, {"rollout": {"samples_per_prompt": 1}}),
        (True, {"loss": {"advantage": "given"}}),
        (True, {"loss": {"kl_coefficient": 0.1}}),
    ],
)
def test_an_evaluation_needs_no_settings_of_training(
    sampled: bool, settings: dict[str, Any], model: Path, sums: Path
) -> None:
    rollout = {"reward": digits, "max_new_tokens": 3}
    if sampled:
        settings = {**settings, "rollout": {**rollout, **settings.get("rollout", {})}}
    held_out = {"data": {"path": sums, **settings.get("data", {})}, "eval": sums}
    with pytest.raises(padfree.UserError):
        (padfree.rl if sampled else padfree.sft)(model=model, **settings | held_out)
    found = padfree.evaluate(model=model, eval=sums, **settings)
    assert ("eval/reward" if sampled else "eval/loss") in found


def test_an_interrupt_stops_a_run_that_can_go_on(model: Path, sums: Path, tmp_path: Path) -> None:
    """What a notebook's stop button does."""

    def interrupt(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    settings: dict[str, Any] = {
        "model": model,
        "data": {"path": sums, "epochs": None},
        "batch": {"samples": 8, "max_tokens": 64},
        "run": {"folder": tmp_path / "run", "steps": 4, **CPU},
    }
    found = padfree.sft(**settings, on_step=interrupt)
    assert (found.steps, found.stopped, found.model) == (2, True, None)
    found = padfree.sft(**settings)
    assert (found.steps, found.stopped, len(found.metrics)) == (4, False, 4)


async def awaited(given: Any) -> None:
    """Nothing would run it."""


class Awaited:
    async def __call__(self, given: Any) -> None:
        """Nothing would run it."""


@pytest.mark.parametrize("name", ["on_step", "on_note"])
@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        (awaited, "is async"),
        (Awaited(), "is async"),
        (functools.partial(awaited, 1), "is async"),
        ("print", "is of type"),
    ],
)
def test_callbacks_that_would_do_nothing_are_refused(
    callback: Any, problem: str, name: str, model: Path, sums: Path, tmp_path: Path
) -> None:
    with pytest.raises(padfree.UserError, match=f"^{name}: {problem}"):
        padfree.sft(model=model, data=sums, run={"folder": tmp_path / "run", **CPU}, **{name: callback})
    assert not (tmp_path / "run").exists()
    if name == "on_note":
        with pytest.raises(padfree.UserError, match=f"^{name}: {problem}"):
            padfree.evaluate(model=model, eval=sums, **{name: callback})


class CallableReward:
    def __call__(self, response: str, row: Mapping[str, Any]) -> float:
        return 0.0


def nested() -> Any:
    def inner(response: str, row: Mapping[str, Any]) -> float:
        return 0.0

    return inner


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        ("sft", {"modle": "x"}, r"modle: no such setting; did you mean model\?"),
        ("sft", {"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate: no such setting"),
        ("sft", {"optimizer": {"lr": "fast"}}, "optimizer.lr: 'fast'; give a number"),
        ("sft", {"optimizer": 1e-5}, r"optimizer: 1e-05 is not a dict of settings; give optimizer=\{\.\.\.\}"),
        (
            "sft",
            {"loss": {"kind": "dpo"}},
            "loss.kind: 'dpo' does not belong to padfree.sft; call padfree.dpo for this loss",
        ),
        ("dpo", {"loss": {"kind": "clip"}}, "call padfree.rl for this loss"),
        ("sft", {"data": "missing.jsonl"}, "missing.jsonl does not exist"),
        ("sft", {"model": "no/such/model"}, "model.path: 'no/such/model' does not exist"),
        ("sft", {"recipe": "missing.toml"}, "config: missing.toml cannot be read"),
        ("rl", {"rollout": {"reward": lambda response, row: 0.0}}, "rollout.reward: .*<lambda>.* cannot be imported"),
        ("rl", {"rollout": {"reward": nested()}}, "rollout.reward: nested.<locals>.inner .* define it with `def`"),
        ("rl", {"rollout": {"reward": Path.exists}}, "rollout.reward: Path.exists"),
        ("distill", {}, "teacher.path: None; set teacher.path"),
        ("evaluate", {"data": "x.jsonl"}, "eval.path: missing"),
        ("evaluate", {}, "eval.path: missing"),
        ("evaluate", {"eval": []}, "eval.path: missing"),
        ("evaluate", {"recipe": "sft", "eval": {"samples": 3}}, "eval.path: missing"),
        ("sft", {"model": build("qwen3")}, "model: is an object of the class Qwen3ForCausalLM, .* save_pretrained"),
        ("sft", {"model": {"path": build("qwen3")}}, "model.path: is an object of the class Qwen3ForCausalLM"),
        ("sft", {"model": {"path": "m", "tokenizer": tiny_tokenizer()}}, "model.tokenizer: is an object of the class"),
        ("dpo", {"reference": build("gpt2")}, "reference: is an object of the class GPT2LMHeadModel"),
        ("rl", {"rollout": {"reward": CallableReward()}}, "rollout.reward: CallableReward cannot be imported"),
        ("evaluate", {"eval": "missing.jsonl"}, "missing.jsonl does not exist"),
    ],
)
def test_mistakes_are_value_errors(
    call: str, settings: dict[str, Any], message: str, model: Path, sums: Path, tmp_path: Path
) -> None:
    given = {"model": model, **({} if call == "evaluate" else {"data": sums}), **settings}
    with pytest.raises(ValueError, match=message) as caught:
        getattr(padfree, call)(**given)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    assert not dist.is_initialized()


def test_a_failure_within_a_run_is_a_value_error_and_leaves_nothing_behind(
    model: Path, sums: Path, tmp_path: Path
) -> None:
    before = state_of_the_process()
    with pytest.raises(ValueError, match="finite"):
        padfree.sft(
            model=model,
            data={"path": sums, "epochs": None},
            batch={"samples": 8, "max_tokens": 64},
            optimizer={"lr": 1e30, "max_grad_norm": None},
            run={"folder": tmp_path / "run", "steps": 20, **CPU},
        )
    assert state_of_the_process() == before


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """All its code cells, one after the other, in a fresh process whose main module they are."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell.get("outputs", []) == [] for cell in cells), "a notebook is kept without outputs"
    program = f"for number, source in enumerate({sources!r}):\n    exec(compile(source, f'cell {{number}}', 'exec'))\n"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "reward" in result.stdout
