"""Every script of examples/ runs, at a tiny size, and what it trains gets better."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.rollout.environment import rehearse
from padfree.testing.arithmetic import problems, train_tokenizer, write_model, write_rows
from padfree.testing.models import save_with_tokenizer

FOLDER = Path(__file__).parents[2] / "examples"
TRAINED = ("--lr", "1e-2", "--epochs", "4", "--samples", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_with_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module of its own name, as `python examples/name.py` would find it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_every_example_has_a_test() -> None:
    named = {path.stem for path in FOLDER.glob("*.py")}
    assert named == {
        "dpo_pairs",
        "distill_jsonl",
        "sft_jsonl",
        "rl_own_reward",
        "rl_images",
        "rl_own_environment",
        "foreign_loop",
        "hf_trainer",
    }


def test_distill_jsonl(model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, run = save_with_tokenizer(tmp_path / "teacher", hidden_size=48), tmp_path / "run"
    arguments = ["--student", model, "--teacher", str(teacher), "--data", data, "--folder", str(run)]
    divergences = example("distill_jsonl", monkeypatch).main(
        [*arguments, "--max-tokens", "64", "--dtype", "float32", *TRAINED]
    )
    assert len(divergences) == 8
    assert divergences[-1] < divergences[0]
    AutoModelForCausalLM.from_pretrained(run / "model")


def test_dpo_pairs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "9"} for a in range(1, 4) for b in range(1, 4)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = tmp_path / "run"
    arguments = ["--model", model, "--data", str(pairs), "--folder", str(run), "--max-tokens", "64"]
    margins = example("dpo_pairs", monkeypatch).main([*arguments, "--dtype", "float32", *TRAINED])
    assert margins[0] == 0.0
    assert margins[-1] > 0.1
    AutoModelForCausalLM.from_pretrained(run / "model")


def test_sft_jsonl(model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    arguments = ["--model", model, "--data", data, "--folder", str(run), "--max-tokens", "64", "--dtype", "float32"]
    losses = example("sft_jsonl", monkeypatch).main([*arguments, *TRAINED])
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")


@pytest.mark.parametrize("name", ["foreign_loop", "hf_trainer"])
def test_loops_of_others(name: str, model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "trained"
    arguments = ["--model", model, "--data", data, "--output", str(output)]
    losses = example(name, monkeypatch).main([*arguments, *TRAINED])
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    trained = AutoModelForCausalLM.from_pretrained(output)
    assert trained.config._attn_implementation == "sdpa"


def test_rl_own_reward(model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model writes mostly letters; numbers pay a little, so it learns to write some."""
    module = example("rl_own_reward", monkeypatch)
    assert [module.reward(text, {"answer": "7"}) for text in ("abc", "3", "is 7", "-7", "")] == [0, 0.1, 1, 0.1, 0]
    run = tmp_path / "run"
    arguments = ["--model", model, "--prompts", data, "--folder", str(run), "--dtype", "float32", "--lr", "2e-2"]
    sizes = ["--samples", "32", "--group", "4", "--max-new-tokens", "3", "--max-tokens", "256", "--steps", "8"]
    rewards = module.main([*arguments, *sizes])
    assert len(rewards) == 8
    assert rewards[-1] > rewards[0]
    assert (run / "rollouts.jsonl").exists()


def test_rl_own_environment(model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers pay a little, so an untrained model learns to write some; its questions are answered meanwhile."""
    module = example("rl_own_environment", monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    (leaf,) = rehearse(module.episode, "12*3?", ["is 12*3=", "36"], tokenizer, row={"answer": "36"})
    assert leaf.tokens.tolist() == [*tokenizer("12*3?is 12*3=<eos>36" + "36<eos>")["input_ids"]]
    assert leaf.sampled.astype(int).tolist() == [0] * 5 + [1] * 9 + [0] * 2 + [1] * 3
    assert leaf.reward == 1.0
    run = tmp_path / "run"
    arguments = ["--model", model, "--prompts", data, "--folder", str(run), "--dtype", "float32", "--lr", "2e-2"]
    sizes = ["--samples", "32", "--group", "4", "--max-new-tokens", "6", "--max-tokens", "256", "--steps", "8"]
    rewards = module.main([*arguments, *sizes])
    assert len(rewards) == 8
    assert rewards[-1] > rewards[0]
    assert "environment/questions" in json.loads((run / "metrics.jsonl").read_text().splitlines()[0])


def test_rl_own_reward_on_the_prompts_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "train.jsonl", problems(50, seed=0))
    asked = ({"prompt": row["prompt"], "answer": row["answer"]} for row in rows[:8])
    write_rows(tmp_path / "prompts.jsonl", asked)
    write_model(tmp_path / "model", train_tokenizer(rows), hidden=32)
    arguments = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.jsonl"), "--steps", "1"]
    sizes = ["--samples", "8", "--group", "4", "--max-new-tokens", "3", "--max-tokens", "512", "--dtype", "float32"]
    module = example("rl_own_reward", monkeypatch)
    assert module.reward("5", {"answer": "#### 5"}) == 1.0
    assert len(module.main([*arguments, *sizes, "--folder", str(tmp_path / "run")])) == 1


@pytest.mark.slow
def test_rl_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward rises above that of guessing one of three colours."""
    pytest.importorskip("PIL")
    module = example("rl_images", monkeypatch)
    assert [module.reward(text, {"answer": "g"}) for text in ("g", " g ", "r", "gg", "")] == [1, 1, 0, 0, 0]
    rewards = module.main(["--folder", str(tmp_path), "--steps", "24"])
    assert len(rewards) == 24
    assert rewards[0] < 0.5
    assert sum(rewards[-4:]) / 4 > 0.6
