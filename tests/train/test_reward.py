"""`padfree reward`: against TRL and plain transformers code, resume, export. Layouts: `test_ways_gsm8k`."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from padfree.cli.main import main
from padfree.config import Config, config_from_dict
from padfree.data import load_pairs
from padfree.distributed import Mesh, make_mesh
from padfree.losses import RewardModelSettings, reward_model_loss
from padfree.model.load import load_model
from padfree.model.lora import add_adapters, is_adapter
from padfree.packing import collate
from padfree.packing.context_sizes import context_sizes
from padfree.rollout import Prompt
from padfree.sample import Sample
from padfree.testing.models import save_with_tokenizer
from padfree.tools.check.padded import padded_rows
from padfree.train.batcher import make_batcher
from padfree.train.microbatch import at_ends
from padfree.train.run import evaluate, train
from padfree.train.scorer import ScalarScorer
from padfree.train.setup import build_engine, build_reward_model
from padfree.train.trainer import Trainer
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import alone
from tests.train.trainer_cases import begin, lines

MARGIN = 0.25
ADAPTERS = {"lora": {"rank": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reward")
    save_with_tokenizer(found / "model")
    rows: list[dict[str, Any]] = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{b}+{a}={a}" if a % 2 else "9", "margin": b / 4}
        for a in range(4)
        for b in range(4)
    ]
    del rows[0]["margin"]
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))
    (found / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[12:]))
    return found


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def make_config(folder: Path, place: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / "pairs.jsonl")], "epochs": None},
        "loss": {"kind": "reward", "reward": {"margin": MARGIN}},
        "batch": {"samples": 8, "max_tokens": 32, "share_prefixes": True},
        "optimizer": {"lr": 5e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(place), "steps": 4, "device": "cpu"},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return config_from_dict(values)


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    tokenizer = load_tokenizer(config)
    samples = load_training_data(config, tokenizer).samples
    return begin(config, build_engine(config, mesh, tokenizer), make_batcher(config, samples))


def score(model: Any, sample: Sample) -> torch.Tensor:
    """Plain transformers code."""
    tokens = torch.from_numpy(np.asarray(sample.tokens, np.int64))
    found: torch.Tensor = model(input_ids=tokens[None]).logits[0, 0]
    return found


@pytest.mark.parametrize(
    ("shared", "sections"),
    [(True, {}), (False, {}), (True, ADAPTERS)],
    ids=["shared prompts", "each prompt twice", "adapters"],
)
def test_gradients_are_those_of_one_pair_at_a_time(
    shared: bool, sections: dict[str, Any], mesh: Mesh, folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, tmp_path / "run", batch={"share_prefixes": shared}, **sections)
    trainer = make_trainer(config, mesh)
    move_adapters(trainer.engine.model)
    batch = trainer.batches.next(0)
    assert batch is not None
    engine = trainer.engine
    prepared = engine.prepare(batch.samples)
    assert len(prepared.packs) > 1, "pairs are divided over several packs"
    assert (prepared.plan.prefixes is not None) == shared
    loss = float(engine.gradients(prepared).loss)
    plain = AutoModelForSequenceClassification.from_config(
        copy.deepcopy(engine.model.config), attn_implementation="eager"
    )
    if sections:
        add_adapters(plain, config.lora)
    plain.load_state_dict(engine.model.state_dict())
    total = 0.0
    for first in range(0, len(batch.samples), 2):
        chosen, rejected = batch.samples[first : first + 2]
        margin = MARGIN + margin_of(chosen)
        pair = -logsigmoid(score(plain, chosen) - score(plain, rejected) - margin) * 2 / len(batch.samples)
        torch.autograd.backward(pair)
        total += float(pair.detach())
    assert max(margin_of(sample) for sample in batch.samples[::2]) > 0, "rows have margins"
    assert loss == pytest.approx(total, rel=1e-5)
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    trained = {name for name, weight in engine.model.named_parameters() if weight.requires_grad}
    assert "score.weight" in trained
    assert (trained == expected.keys()) == (not sections)
    for name, weight in engine.model.named_parameters():
        if name not in trained:
            assert weight.grad is None
            continue
        assert weight.grad is not None
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-5, atol=max(1e-5 * scale, 1e-7))


def margin_of(chosen: Sample) -> float:
    assert chosen.terms is not None
    return chosen.terms["margin"]


@torch.no_grad()
def move_adapters(model: Any) -> None:
    """Change the adapters: initially half of them are 0, so the gradients of the other half are 0."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        if is_adapter(name):
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("sections", [{}, ADAPTERS], ids=["whole", "adapters"])
def test_an_exported_model_gives_transformers_the_same_scores(
    sections: dict[str, Any], mesh: Mesh, folder: Path, tmp_path: Path
) -> None:
    """Also if texts end with the padding token, and in padded batches; evaluation, best model, further training."""
    held_out = {"path": [str(folder / "test.jsonl")], "every": 2}
    train(make_config(folder, tmp_path / "run", eval=held_out, checkpoint={"best": "eval/accuracy"}, **sections))
    found = [json.loads(line) for line in (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert set(found[-1]) >= {"eval/loss", "eval/accuracy", "eval/margin"}
    exported = tmp_path / "run" / "model"
    model: Any = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert model.config.num_labels == 1
    base = load_file(folder / "model" / "model.safetensors")
    changed = {name for name, weight in model.state_dict().items() if name in base and not weight.equal(base[name])}
    assert {"model.embed_tokens.weight" in changed, "model.norm.weight" in changed} == {not sections}
    assert any("q_proj" in name for name in changed), "adapters are merged into the weights"
    assert model.config.pad_token_id == tokenizer.eos_token_id, "the tokenizer has no other padding token"
    samples = list(load_pairs(folder / "test.jsonl", tokenizer, margins=True))
    assert all(sample.tokens[-1] == tokenizer.eos_token_id for sample in samples)
    packed = ScalarScorer(load_model(exported, head="scalar", shard=attached), mesh, max_tokens=1024).rewards(samples)
    with torch.no_grad():
        single = torch.stack([score(model, sample) for sample in samples])
        rows = padded_rows(samples)
        ids = torch.where(rows.attention_mask.bool(), rows.input_ids, tokenizer.eos_token_id)
        together = model(input_ids=ids, attention_mask=rows.attention_mask).logits[:, 0]
    torch.testing.assert_close(torch.from_numpy(packed), single, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together, single, rtol=1e-4, atol=1e-5)
    pairs = [margin_of(chosen) + MARGIN for chosen in samples[::2]]
    expected = -logsigmoid(single[::2] - single[1::2] - torch.tensor(pairs)).mean()
    assert found[-1]["eval/loss"] == pytest.approx(float(expected), rel=1e-5)
    again = evaluate(make_config(folder, tmp_path / "no run", model={"path": str(exported)}, eval=held_out))
    assert again["eval/loss"] == pytest.approx(found[-1]["eval/loss"], rel=1e-6)


def attached(model: Any) -> None:
    from padfree.model import attach

    attach(model)


def test_the_loss_is_that_of_trl(tmp_path: Path) -> None:
    """TRL's own method on the same scores and margins."""
    trainer = pytest.importorskip("trl.trainer.reward_trainer", reason="TRL is not installed", exc_type=ImportError)
    rng = np.random.default_rng(0)
    theirs = torch.from_numpy(rng.normal(size=6)).requires_grad_()  # three chosen, then three rejected answers
    margins = torch.tensor([0.0, 0.5, 1.25], dtype=torch.float64)
    own: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=None),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(6, 4), "margin": margins}
    expected = trainer.RewardTrainer.compute_loss(own, lambda **_: SimpleNamespace(logits=theirs[:, None]), inputs)
    expected.backward()
    order = [0, 3, 1, 4, 2, 5]  # in a pack the answers of a pair are adjacent; each sample has two tokens
    ends = torch.tensor([False, True] * 6)
    ours = torch.zeros(12, dtype=torch.float64)
    ours[1::2] = theirs.detach()[order]
    ours.requires_grad_()
    output = reward_model_loss(
        ours,
        ends,
        torch.arange(6).repeat_interleave(2),
        6,
        RewardModelSettings(),
        torch.arange(6).view(3, 2),
        torch.full((3,), 1 / 3, dtype=torch.float64),
        margins=margins,
    )
    torch.autograd.backward(output.loss)
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad[1::2], theirs.grad[order], rtol=1e-12, atol=0.0)
    metrics = own._metrics["train"]
    statistics = {name: float(total / count) for name, (total, count) in output.statistics.items()}
    assert statistics["accuracy"] == pytest.approx(metrics["accuracy"][0])
    assert statistics["margin"] == pytest.approx(metrics["margin"][0])


def test_ends_are_the_last_tokens_that_are_no_padding() -> None:
    samples = [Sample(tokens=np.array(tokens)) for tokens in ([3, 4, 5], [0, 6, 0, 0], [0, 0], [7])]
    packed = collate(samples)
    found = at_ends(packed, 0).labels
    assert found.tolist() == [-100, -100, 5, -100, 6, -100, -100, 0, -100, 7]
    assert at_ends(packed, None).labels.tolist() == [-100, -100, 5, -100, -100, -100, 0, -100, 0, 7]


@pytest.mark.parametrize("sections", [{}, ADAPTERS], ids=["whole", "adapters"])
def test_resume_is_bitwise(sections: dict[str, Any], mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    whole = make_trainer(make_config(folder, tmp_path / "whole", **sections), mesh)
    whole.run()
    for steps in (1, 3, 4):
        part = make_trainer(make_config(folder, tmp_path / "parts", run={"steps": steps}, **sections), mesh)
        part.run()
    found = lines(tmp_path / "whole")
    assert found[3]["loss"] < found[0]["loss"]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    for name, weight in whole.engine.model.state_dict().items():
        assert torch.equal(weight, part.engine.model.state_dict()[name]), name


def rewarded(rank: int, world: int, config: Config) -> list[list[float | str]]:
    """Rewards of this rank's responses (rank 0 has all of them) on every layout; the last has packs of any width."""
    meshes = [make_mesh("cpu", context=context) for context in range(1, world + 1)]
    if world > 1:
        meshes.append(make_mesh("cpu", contexts=context_sizes(world)))
    found: list[list[float | str]] = []
    for mesh in meshes:
        reward_model = build_reward_model(config, mesh)
        assert reward_model is not None
        if len(found) == world:
            reward_model.scorer.packer.max_tokens = 4
        found.append(reward_model(ANSWERS if rank == 0 else []))
    return found


ANSWERS = [
    (Prompt(tokens=np.array([1]), max_new_tokens=4, row=row, uid=f"row {number}", source="rows"), text)
    for number, (row, text) in enumerate(
        (({"prompt": "1+2="}, "3"), ({"prompt": "1+2="}, "12+0=9"), ({"question": "x", "prompt": "4+4="}, ""))
    )
]


@pytest.fixture(scope="module")
def judge_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained reward model."""
    place = tmp_path_factory.mktemp("judge")
    train(make_config(folder, place / "run", run={"steps": 2}))
    return place / "run" / "model"


def rl_config(folder: Path, reward_model: Path, place: Path) -> Config:
    prompts = place / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(3)))
    return config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": [str(prompts)], "epochs": None},
            "loss": {"kind": "clip"},
            "batch": {"samples": 4, "max_tokens": 64},
            "rollout": {"reward": f"model:{reward_model}", "samples_per_prompt": 2, "max_new_tokens": 5},
            "eval": {"path": [str(prompts)], "pass_threshold": -100.0},
            "run": {"folder": str(place / "rl"), "steps": 2, "device": "cpu"},
        }
    )


def test_a_reward_model_judges_responses(mesh: Mesh, folder: Path, judge_folder: Path, tmp_path: Path) -> None:
    """On any rank and layout: the scores that transformers gives to prompt, response and end token."""
    config = rl_config(folder, judge_folder, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(judge_folder).eval()

    def by_transformers(prompt: str, text: str) -> float:
        ids = [*tokenizer(prompt)["input_ids"], *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    expected = [by_transformers(prompt.row["prompt"], text) for prompt, text in ANSWERS]
    first, second = run_ranks(2, rewarded, config)
    assert len(first) == 3
    for found in (*rewarded(0, 1, config), *first):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert second == [[], [], []]
    train(config)
    shown = [json.loads(line) for line in (tmp_path / "rl" / "rollouts.jsonl").read_text().splitlines()]
    assert shown
    for line in shown:
        prompt = line["prompt"].replace(" ", "")  # the tokenizer puts spaces between its letters
        assert line["reward"] == pytest.approx(by_transformers(prompt, line["response"]), rel=1e-5, abs=1e-6)
    measured = [json.loads(line) for line in (tmp_path / "rl" / "evaluation.jsonl").read_text().splitlines()]
    assert measured[0]["eval/reward"] != 0.0


def test_what_cannot_judge_is_refused(folder: Path, judge_folder: Path, tmp_path: Path) -> None:
    config = rl_config(folder, folder / "model", tmp_path)
    with refused("rollout.reward", ".*model has no score.weight"):
        train(config)
    reward_model = build_reward_model(rl_config(folder, judge_folder, tmp_path), alone())
    assert reward_model is not None
    prompt = Prompt(tokens=np.array([1]), max_new_tokens=4, row={"prompt": ["1"]}, uid="row 7", source="rows")
    (wrong,) = reward_model([(prompt, "2")])
    assert re.match(r"rollout.reward: the reward model cannot read row 7 .*; change the row", str(wrong))


def test_dry_run_plan_and_wrong_inputs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "reward.toml")
    small = [f"model.path={folder / 'model'}", f"data.path={folder / 'pairs.jsonl'}", "model.dtype=float32"]
    small += ["batch.samples=8", "batch.max_tokens=64", "run.device=cpu", f"run.folder={tmp_path / 'run'}"]
    assert main(["reward", recipe, *small, "--dry-run"]) == 0
    assert "first step: 8 samples" in capsys.readouterr().out
    assert main(["plan", recipe, *small]) == 0
    assert "24 samples" in capsys.readouterr().out
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1", "chosen": "2", "rejected": "3", "margin": "much"}\n')
    for changes, message in (
        (["batch.samples=7"], "batch.samples: 7; give an even number"),
        (["reference.path=m"], "reference.path: 'm'; leave it out"),
        (["lora.rank=4", "lora.export=adapter"], "lora.export: 'adapter'; set lora.export=merged"),
        (["loss.temperature=2"], "loss.temperature: 2.0; leave it out"),
        (["loss.reward.margin=-1"], "loss.reward.margin: -1.0; give 0 or more"),
        ([f"data.path={bad}"], "bad.jsonl line 1: 'margin' is 'much'; expected a finite number"),
        (["batch.max_tokens=8"], "in its two answers"),
        (["loss.kind=dpo", "loss.reward.margin=0"], "use padfree dpo"),
    ):
        assert main(["reward", recipe, *small, *changes, "--dry-run"]) == 1
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1


def test_an_evaluation_refuses_a_model_without_a_trained_head(folder: Path, tmp_path: Path) -> None:
    """A head that is missing from the files would be random. Random weights that were asked for are evaluated."""
    held_out: dict[str, Any] = {"eval": {"path": [str(folder / "test.jsonl")]}}
    with refused("model.path", "has no score.weight"):
        evaluate(make_config(folder, tmp_path / "run", **held_out))
    config = folder / "model" / "config.json"
    for model in ({"path": str(folder / "model"), "init": "random"}, {"path": str(config)}):
        tokenizer = {"tokenizer": str(folder / "model")}
        found = evaluate(make_config(folder, tmp_path / "run", model={**model, **tokenizer}, **held_out))
        assert "eval/loss" in found
