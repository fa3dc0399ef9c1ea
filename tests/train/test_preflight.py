"""Runs that cannot work are refused before the first step, with the same error by run, dry run and plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.cli.main import main
from padfree.config import config_from_dict, load_config
from padfree.data import TokenizedDataset
from padfree.testing.models import build, save_with_tokenizer
from padfree.train import run as whole_run
from padfree.train.batcher import count_steps
from padfree.train.preflight import check_context, check_experts, check_settings, preflight
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"
Write = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models with the same tokenizer of 45 letters: rotary, with a position table, and with a small vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    found = {"qwen3": save_with_tokenizer(folder / "qwen3")}
    for name, model in (
        ("gpt2", build("gpt2", vocab_size=64, n_positions=16, max_position_embeddings=16)),
        ("small", build("qwen3", vocab_size=10, hidden_size=32)),
    ):
        shutil.copytree(found["qwen3"], folder / name)
        (folder / name / "model.safetensors").unlink()
        model.save_pretrained(folder / name)
        found[name] = folder / name
    return {name: str(path) for name, path in found.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, *rows: dict[str, Any]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return json.dumps([str(path)])

    return written


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


PAIRS = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(6)]
LONG = {"prompt": "1+1=", "response": "2" * 30}
ROLLOUTS = [
    {"tokens": [1, 2, 3, 4, 5], "response_length": 2, "reward": float(index % 2), "group": index // 4}
    for index in range(8)
]
PROMPTS = [{"prompt": f"{number}+1=", "answer": f"#### {number + 1}"} for number in range(8)]
LOGPROBS = [{**row, "logprobs": [-0.1, -0.2]} for row in ROLLOUTS]
SMALL = {
    "sft": ["batch.samples=2"],
    "rl": ["batch.samples=4"],
    "rl-local": ["batch.samples=4", "rollout.samples_per_prompt=4"],
}
REFUSED: list[tuple[str, str, list[dict[str, Any]], list[str], str]] = [
    # recipe, model, data rows, changes, error
    (
        "sft",
        "qwen3",
        [*PAIRS, LONG],
        ["batch.max_tokens=16"],
        "batch.max_tokens: 16 tokens, but d.jsonl:7 has 35 tokens; set",
    ),
    (
        "sft",
        "qwen3",
        [*PAIRS, LONG],
        ["batch.samples=none", "batch.tokens=20"],
        "batch.tokens: 20 tokens, but d.jsonl:7 has 35 tokens; set batch.tokens=35",
    ),
    (
        "rl",
        "qwen3",
        [*ROLLOUTS, {**ROLLOUTS[0], "tokens": [1] * 40, "uid": "mine"}],
        ["batch.max_tokens=16", "batch.samples=8"],
        "batch.max_tokens: 16 tokens, but d.jsonl:9 has 40 tokens; set batch.max_tokens=40",
    ),
    (
        "rl-local",
        "qwen3",
        PROMPTS,
        ["batch.max_tokens=16", "rollout.max_new_tokens=20", "data.columns={}"],
        "batch.max_tokens: 16 tokens, but d.jsonl:1 has 24 tokens with its response, and 7 more are too long; set",
    ),
    (
        "sft",
        "gpt2",
        [*PAIRS, LONG],
        [],
        "data.path: d.jsonl:7 has 35 tokens, but the model has 16 positions; set",
    ),
    (
        "rl-local",
        "gpt2",
        PROMPTS,
        ["rollout.max_new_tokens=20", "data.columns={}"],
        "data.path: d.jsonl:1 has 24 tokens, but the model has 16 positions; set a lower rollout.max_new_tokens, or",
    ),
    ("sft", "small", PAIRS, [], "data.path: d.jsonl:1 has token id 12, but the model's vocabulary has 10 entries; set"),
    (
        "rl",
        "small",
        [*ROLLOUTS, {**ROLLOUTS[0], "tokens": [1, 2, 3, 4, 99]}],
        ["batch.samples=8"],
        "data.path: d.jsonl:9 has token id 99, but the model's vocabulary has 10 entries; set model.tokenizer",
    ),
    (
        "rl-local",
        "small",
        PROMPTS,
        ["data.columns={}", "rollout.max_new_tokens=4"],
        "data.path: d.jsonl:1 has token id 16, but the model's vocabulary has 10 entries",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ["loss.kl_coefficient=0.1"],
        "loss.kl_coefficient: 0.1, but d.jsonl:1 has no 'ref_logprobs'; set reference.path=",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ["loss.old_policy=sampler"],
        "loss.old_policy: 'sampler', but d.jsonl:1 has no 'logprobs'; set loss.old_policy=trainer, or give that column",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ['loss.corrections=["token_tis"]'],
        "loss.corrections: ['token_tis'], but d.jsonl:1 has no 'logprobs'; set loss.corrections=[]",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ["loss.advantage=given"],
        "loss.advantage: 'given', but d.jsonl:1 has no 'advantages'; set loss.advantage=grpo",
    ),
    (
        "rl",
        "qwen3",
        [*LOGPROBS, *ROLLOUTS[:1]],
        ["batch.samples=8"],
        "data.path: d.jsonl:9 has no 'logprobs', but other rows have it; give that column in every row, or in none",
    ),
    (
        "rl",
        "qwen3",
        [{**row, "loss_mask": [0, 0]} for row in ROLLOUTS],
        [],
        "data.path: none of 8 samples has a token to train (the first is d.jsonl:1); give a response_length of 1 or",
    ),
    (
        "rl",
        "qwen3",
        [{**row, "tokens": [1], "response_length": 1} for row in ROLLOUTS],  # nothing predicts a first token
        [],
        "data.path: none of 8 samples has a token to train",
    ),
    (
        "rl-local",
        "qwen3",
        PROMPTS,
        ["data.columns={}", 'rollout.agent=["python3", "agent.py", "{promt}"]'],
        "rollout.agent: the placeholder {promt} has no value, because d.jsonl:1 has only the columns prompt, answer; "
        "did you mean {prompt}?",
    ),
    (
        "rl-local",
        "qwen3",
        [*PROMPTS, {**PROMPTS[0], "level": 3}],
        ["data.columns={}", 'rollout.agent=["python3", "agent.py", "{level}"]'],
        "rollout.agent: the placeholder {level} has no value, because d.jsonl:1 has only the columns prompt, answer",
    ),
    (
        "rl-local",
        "qwen3",
        PROMPTS,
        ["data.columns={}", 'rollout.agent=["sh", "-c", "agent {prompt}"]'],
        "rollout.agent: ['sh', '-c', 'agent {prompt}']: sh runs 'agent {prompt}', so text of the data row would be run",
    ),
    (
        "sft",
        "qwen3",
        PAIRS,
        ["model.attention=fast"],
        "model.attention: 'fast' is not an attention backend; set it to auto, or to one of fa4",
    ),
    (
        "sft",
        "qwen3",
        PAIRS,
        ["model.attention=fa4"],
        "model.attention: 'fa4' does not support this call: the backend runs on cuda, not on cpu; "
        "use 'auto' or 'cpu' or 'reference'",
    ),
    ("sft", "qwen3", PAIRS, ["run.folder=FOLDER/d.jsonl/run"], "run.folder: "),
    ("sft", "qwen3", PAIRS, ["parallel.offload=true"], "parallel.offload: true, but the device is already the CPU"),
    (
        "sft",
        "qwen3",
        PAIRS,
        ["model.tokenizer=no/where"],
        "model.tokenizer: 'no/where' was not found on disk or on the Hub: the Hub",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ["loss.kl_coefficient=0.1", "reference.path=no/where"],
        "reference.path: 'no/where' was not found",
    ),
    (
        "rl",
        "qwen3",
        [*ROLLOUTS, {**ROLLOUTS[0], "tokens": [1, 2, 3, 4, 20]}],
        ["batch.samples=8", "loss.kl_coefficient=0.1", "reference.path=SMALL"],
        "data.path: d.jsonl:9 has token id 20, but the model's vocabulary has 10 entries",
    ),
    (
        "rl",
        "qwen3",
        ROLLOUTS,
        ["loss.kl_coefficient=0.1", "reference.path=SMALL", "reference.refresh=2"],
        "reference.refresh: 2, but ",
    ),
    (
        "rl-local",
        "qwen3",
        [*PROMPTS, {"prompt": "1+1=", "answer": "two"}],
        ["data.columns={}", "rollout.max_new_tokens=4"],
        "reward: number_after_hashes raised UserError: answer: 'two' has no number; ",
    ),
    (
        "rl-local",
        "qwen3",
        PROMPTS,
        ["data.columns={}", "rollout.reward=best"],
        "reward: 'best' is not the name of a reward; use one of exact_match",
    ),
]


@pytest.mark.parametrize(
    ("recipe", "model", "rows", "changes", "message"), REFUSED, ids=[f"{case[0]}-{case[4][:40]}" for case in REFUSED]
)
def test_run_and_dry_run_refuse_the_same_before_anything_is_loaded(
    recipe: str,
    model: str,
    rows: list[dict[str, Any]],
    changes: list[str],
    message: str,
    models: dict[str, str],
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights are being loaded")

    monkeypatch.setattr(whole_run, "build_engine", loaded)
    path, folder = write("d.jsonl", *rows), tmp_path / "run"
    overrides = [f"model.path={models[model]}", "model.dtype=float32", f"data.path={path}", "run.device=cpu"]
    overrides += [f"run.folder={folder}", "run.steps=1", *SMALL[recipe]]
    overrides += [change.replace("FOLDER", str(tmp_path)).replace("SMALL", models["small"]) for change in changes]
    arguments = [recipe.partition("-")[0], str(RECIPES / f"{recipe}.toml"), *overrides]
    said = []
    for flags in (["--dry-run"], []):
        assert main([*arguments, *flags]) == 1
        said.append(capsys.readouterr().err)
        assert not folder.exists()
    assert said[0] == said[1]
    assert said[0].startswith(f"padfree {arguments[0]}: {message}")
    assert said[0].count("\n") == 1


@pytest.mark.parametrize(
    ("model", "rows", "changes", "message"),
    [
        ("gpt2", [*PAIRS, LONG], [], "data.path: d.jsonl:7 has 35 tokens, but the model has 16 positions"),
        ("small", PAIRS, [], "data.path: d.jsonl:1 has token id 12, but the model's vocabulary has 10 entries"),
        ("qwen3", PAIRS, ["model.attention=fast"], "model.attention: 'fast'"),
    ],
)
def test_the_plan_refuses_it_too(
    model: str,
    rows: list[dict[str, Any]],
    changes: list[str],
    message: str,
    models: dict[str, str],
    write: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [f"model.path={models[model]}", f"data.path={write('d.jsonl', *rows)}", *changes]
    assert main(["plan", str(RECIPES / "sft.toml"), *overrides]) == 1
    assert capsys.readouterr().err.startswith(f"padfree plan: {message}")


def test_what_is_no_mistake_is_let_through_and_noted(models: dict[str, str], write: Write, tmp_path: Path) -> None:
    """Samples beyond the trained length of a rotary model, too little data, and unused tokens of a larger tokenizer."""
    config = load_config(
        RECIPES / "sft.toml",
        [
            f"model.path={models['qwen3']}",
            "model.dtype=float32",
            f"data.path={write('d.jsonl', *PAIRS, {**LONG, 'response': '2' * 300})}",
            "batch.samples=2",
            "data.epochs=2",
            "run.steps=100",
            "schedule.kind=cosine",
            f"run.folder={tmp_path / 'run'}",
        ],
    )
    notes = preflight(config, processes=1, device_type="cpu").notes
    read = "is read as prompt and response (prompt, response); as plain text"
    assert notes == (
        f"data: d.jsonl {read}",
        "samples have up to 305 tokens, but the model supports 256 (max_position_embeddings)",
        "run.steps is 100, but the data ends after about 8 steps, before the cosine schedule ends; set run.steps=8, or "
        "data.epochs=none",
    )
    for change in ({"run": replace(config.run, steps=8)}, {"data": replace(config.data, epochs=None)}):
        cured = replace(config, **change)  # type: ignore[arg-type]
        assert preflight(cured, processes=1, device_type="cpu").notes == notes[:2]
    small = ["model.path=" + models["small"], "model.dtype=float32", "batch.samples=2", "data.append_eos=false"]
    path = write("e.jsonl", *[{"prompt": "0", "response": "123"}] * 3)  # only ids below 10 occur
    fits = load_config(RECIPES / "sft.toml", [*small, f"data.path={path}", f"run.folder={tmp_path / 'run'}"])
    assert preflight(fits, processes=1, device_type="cpu").notes == (f"data: e.jsonl {read}",)


def test_what_has_no_effect_and_what_trains_nothing_is_noted(
    models: dict[str, str], write: Write, tmp_path: Path
) -> None:
    rows = [{**row, "loss_mask": [1, 1]} for row in ROLLOUTS] + [{**ROLLOUTS[0], "loss_mask": [0, 0]}]
    shared = [f"model.path={models['qwen3']}", "model.dtype=float32", f"run.folder={tmp_path / 'run'}"]
    shared += ["optimizer.lr=0", "batch.samples=8"]
    config = load_config(RECIPES / "rl.toml", [*shared, f"data.path={write('d.jsonl', *rows)}", "loss.gspo.low=0.1"])
    assert {note for note in preflight(config, processes=1, device_type="cpu").notes if "is read as" not in note} == {
        "loss.gspo.low has no effect with loss.kind=clip",
        "optimizer.lr is 0: no weight changes",
        "data.path: 1 of 9 samples have no token to train (the first is d.jsonl:9)",
    }
    config = load_config(RECIPES / "sft.toml", [*shared, f"data.path={write('e.jsonl', *PAIRS)}", "loss.clip.low=0.1"])
    assert {note for note in preflight(config, processes=1, device_type="cpu").notes if "is read as" not in note} == {
        "loss.clip.low has no effect with loss.kind=sft",
        "optimizer.lr is 0: no weight changes",
    }


def test_a_run_prints_its_notes_first(
    models: dict[str, str], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"model.path={models['qwen3']}", "model.dtype=float32", f"data.path={write('d.jsonl', *PAIRS)}"]
    overrides += ["batch.samples=6", "data.epochs=1", "run.steps=5", f"run.folder={tmp_path / 'run'}", "run.device=cpu"]
    assert main(["sft", str(RECIPES / "sft.toml"), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    notes = [
        index for index, line in enumerate(lines) if line.startswith("note: run.steps is 5, but the data ends after")
    ]
    steps = [index for index, line in enumerate(lines) if line.startswith("step 1/1 ")]  # as the data allows
    assert len(notes) == len(steps) == 1
    assert notes < steps


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("sft", ["batch.samples=4", "data.epochs=3"]),
        ("sft", ["batch.samples=none", "batch.tokens=20", "data.epochs=2", "data.shuffle=false"]),
        ("rl", ["batch.samples=4", "loss.epochs=2", "loss.mini_batches=3", "data.epochs=2"]),
    ],
)
def test_steps_are_counted_as_a_run_makes_them(
    recipe: str, changes: list[str], models: dict[str, str], write: Write, tmp_path: Path
) -> None:
    path = write("d.jsonl", *(PAIRS if recipe == "sft" else ROLLOUTS))
    overrides = [f"model.path={models['qwen3']}", "model.dtype=float32", f"data.path={path}", "run.device=cpu"]
    folder = f"run.folder={tmp_path / 'run'}"
    config = load_config(RECIPES / f"{recipe}.toml", [*overrides, folder, "checkpoint.export=false", *changes])
    source = load_training_data(config, load_tokenizer(config))
    assert count_steps(config, source, enough=1000) == whole_run.train(config).step


def test_a_token_is_found_where_it_counts(models: dict[str, str], write: Write) -> None:
    """Token ids after the truncated end of a sample, or in a dropped sample, are not checked."""
    values = {
        "model": {"path": models["qwen3"]},
        "data": {"path": json.loads(write("d.jsonl", LONG, {"prompt": "1", "response": "11z"}, PAIRS[0]))},
        "batch": {"samples": 1, "max_tokens": 64},
        "run": {"folder": "unused"},
    }
    config = config_from_dict(values)
    data = load_training_data(config, load_tokenizer(config)).samples
    assert isinstance(data, TokenizedDataset)
    largest = int(max(np.max(sample.tokens) for sample in data))
    assert data.first_token_from(largest) == (1, largest)
    assert data.first_token_from(largest + 1) is None
    for overlong, length, expected in (("truncate", 3, None), ("drop", 5, (0, largest)), ("truncate", 5, (1, largest))):
        cut = TokenizedDataset(data.folder, max_length=length, overlong=overlong)  # type: ignore[arg-type]
        assert cut.first_token_from(largest) == expected


def test_a_dry_run_imports_no_reward_and_says_so(
    models: dict[str, str],
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "noisy_reward.py").write_text("open('imported', 'w').close()\ndef judge(response, row): return 0.0\n")
    monkeypatch.chdir(tmp_path)
    overrides = [f"model.path={models['qwen3']}", f"data.path={write('d.jsonl', *PROMPTS)}", "data.columns={}"]
    overrides += ["rollout.reward=noisy_reward:judge", "rollout.max_new_tokens=4", "batch.samples=8", "run.folder=run"]
    assert main(["rl", str(RECIPES / "rl-local.toml"), *overrides, "--dry-run"]) == 0
    assert "note: rollout.reward noisy_reward:judge is not imported by a dry run" in capsys.readouterr().out
    assert not (tmp_path / "imported").exists()


def test_experts_are_divided_where_they_can_be(tmp_path: Path, write: Write, models: Any) -> None:
    def config(*changes: str) -> Any:
        settings = [f"model.path={models['qwen3']}", f"run.folder={tmp_path / 'run'}", "parallel.expert=2"]
        data = write("d.jsonl", *PAIRS)
        return load_config(RECIPES / "sft.toml", [*settings, f"data.path={data}", "run.device=cpu", *changes])

    experts = build("qwen3_moe")  # 4 experts
    check_experts(config(), experts, 8)
    check_experts(config("parallel.expert=1"), build("qwen3"), 8)
    for refusal in (
        (config(), experts, 3),
        (config("parallel.replicate=2"), experts, 2),
        (config("parallel.expert=8"), experts, 8),
        (config("lora.rank=4", "lora.targets=['all-linear', 'experts']"), experts, 8),
        (config("parallel.checkpointing=host", "parallel.compile=inductor"), experts, 8),
        (config(), build("llama4"), 8),
    ):
        with refused("parallel.expert"):
            check_experts(*refusal)
    with refused("parallel.expert", "has no experts"):
        preflight(config(), processes=2, device_type="cpu", dry=True)
    with refused("parallel.expert", "does not divide the 3 processes"):
        check_settings(config(), processes=3, device_type="cpu")


def test_rows_of_any_width_need_layers_and_heads_that_can_have_them(tmp_path: Path, write: Write, models: Any) -> None:
    def config(*changes: str) -> Any:
        settings = [f"model.path={models['qwen3']}", f"run.folder={tmp_path / 'run'}", "parallel.context=auto"]
        data = write("d.jsonl", *PAIRS, LONG)
        return load_config(RECIPES / "sft.toml", [*settings, f"data.path={data}", "run.device=cpu", *changes])

    with refused("parallel.context"):
        check_context(config(), build("lfm2"), 4)
    model = build("qwen3")  # 4 heads, 2 key heads
    check_context(config("parallel.method=ulysses"), model, 4)
    check_context(config("parallel.method=ring"), model, 8)
    with refused("parallel.method"):
        check_context(config("parallel.method=ulysses"), model, 8)
    with refused("parallel.context"):
        check_settings(config("parallel.replicate=3"), processes=8, device_type="cpu")
    short = config("batch.max_tokens=16", "model.dtype=float32", "batch.samples=2")
    preflight(short, processes=4, device_type="cpu", dry=True)  # 35 tokens on 4 ranks of 16
    with refused("batch.max_tokens"):
        preflight(short, processes=2, device_type="cpu", dry=True)
