"""PPO with a critic: GAE and value loss against one sample at a time; resume; export. Layouts: `test_ways_gsm8k`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from padfree.cli.main import main
from padfree.config import Config, CriticConfig, config_from_dict
from padfree.distributed import Mesh
from padfree.sample import Sample
from padfree.testing.models import save_with_tokenizer
from padfree.train.batcher import make_batcher
from padfree.train.critic import Critic, explained_variance, with_gae
from padfree.train.run import train
from padfree.train.setup import build_critic, build_engine, export_critic
from padfree.train.trainer import Trainer
from tests.train.cases import small_model, weights_of
from tests.train.trainer_cases import begin, lines, samples

CRITIC = {"lr": 2e-2, "warmup": 1, "gamma": 0.97, "gae_lambda": 0.9, "clip": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("critic")
    small_model().save_pretrained(found / "model")
    return found


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def make_config(folder: Path, place: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": ["in memory"], "epochs": 3},
        "loss": {"kind": "clip", "advantage": "gae", "epochs": 2, "mini_batches": 2},
        "critic": CRITIC,
        "batch": {"samples": 6, "max_tokens": 16},
        "optimizer": {"lr": 5e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(place), "steps": 6, "device": "cpu"},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return config_from_dict(values)


def several_turns() -> list[Sample]:
    """Rollouts, one of which has a tool's answer between two turns of the policy."""
    found = samples()
    mask = found[3].mask.copy()
    mask[5:8] = False
    assert mask[8:].any()
    found[3] = Sample(tokens=found[3].tokens, loss_mask=mask, reward=2.0, group=found[3].group, uid=found[3].uid)
    return [Sample(tokens=s.tokens, loss_mask=s.mask, reward=s.reward, group=s.group, uid=s.uid) for s in found]


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    return begin(
        config,
        build_engine(config, mesh),
        make_batcher(config, several_turns()),
        critic=build_critic(config, mesh),
    )


def moved(critic: Critic) -> None:
    """Change the weights: a new head is 0."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(critic.engine.model.named_parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.add_(noise, alpha=0.3 if name == "score.weight" else 0.02)


def plain_model(critic: Critic) -> Any:
    """A transformers model with the critic's weights."""
    config = copy.deepcopy(critic.engine.model.config)
    kind: Any = AutoModelForSequenceClassification
    plain = kind.from_config(config, attn_implementation="eager").eval()
    plain.load_state_dict(critic.engine.model.state_dict())
    return plain


def plain_values(model: Any, sample: Sample) -> torch.Tensor:
    """[n] Values of one sample: the value of a token is read at the previous token."""
    tokens = torch.from_numpy(np.asarray(sample.tokens, np.int64))
    hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
    values = model.score(hidden)[:, 0]
    return torch.cat([values.new_zeros(1), values[:-1]])


def plain_gae(sample: Sample, values: list[float], settings: CriticConfig) -> tuple[list[float], list[float]]:
    """A loop from the last scored token to the first."""
    places = np.flatnonzero(sample.scored).tolist()
    advantages, returns = [0.0] * len(sample), [0.0] * len(sample)
    following, running = 0.0, 0.0
    for place in reversed(places):
        reward = sample.reward if place == places[-1] else 0.0
        assert reward is not None
        running = reward + settings.gamma * following - values[place] + settings.gamma * settings.gae_lambda * running
        advantages[place], returns[place], following = running, running + values[place], values[place]
    return advantages, returns


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared prefixes"])
def test_values_advantages_and_returns_of_one_sample_at_a_time(
    shared: bool, mesh: Mesh, folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, tmp_path, batch={"share_prefixes": shared}, critic={"whiten": False})
    critic = build_critic(config, mesh)
    assert critic is not None
    moved(critic)
    batch = several_turns()
    batch += [Sample(tokens=s.tokens, loss_mask=s.mask, reward=1.0, group=s.group, uid=f"{s.uid} again") for s in batch]
    found, metrics = critic.add_advantages(batch)
    plain = plain_model(critic)
    for sample in found:
        with torch.no_grad():
            values = plain_values(plain, sample).double().numpy() * sample.scored
        advantages, returns = plain_gae(sample, values.tolist(), config.critic)
        for name, expected in (("values", values), ("advantages", advantages), ("returns", returns)):
            np.testing.assert_allclose(getattr(sample, name), expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert metrics == {"critic/explained_variance": pytest.approx(explained_variance(found))}


def test_the_gradient_of_the_value_loss(mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    """With clipping, against one sample at a time."""
    config = make_config(folder, tmp_path)
    critic = build_critic(config, mesh)
    assert critic is not None
    batch, _ = critic.add_advantages(several_turns())
    moved(critic)
    engine, clip = critic.engine, CRITIC["clip"]
    prepared = engine.prepare(batch)
    assert len(prepared.packs) > 1
    sums = engine.gradients(prepared)
    plain, count, total, clipped = plain_model(critic), sum(s.num_labels for s in batch), 0.0, 0
    for sample in batch:
        if not sample.num_labels:
            continue
        scored = torch.from_numpy(sample.scored)
        values = plain_values(plain, sample)[scored]
        old, returns = (torch.from_numpy(np.asarray(getattr(sample, n)))[scored] for n in ("values", "returns"))
        held = (old + (values - old).clamp(-clip, clip) - returns).square()
        loss = torch.maximum((values - returns).square(), held).sum() / (2 * count)
        torch.autograd.backward(loss)
        total += float(loss.detach())
        clipped += int((held > (values - returns).square()).sum())
    assert 0 < clipped < count, "some values are clipped, and some are not"
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    fraction, number = sums.statistics["value_clip_fraction"]
    assert float(fraction / number) == pytest.approx(clipped / count)
    for name, weight in engine.model.named_parameters():
        expected = dict(plain.named_parameters())[name].grad
        assert weight.grad is not None
        scale = float(expected.abs().max())
        torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=max(1e-5 * scale, 1e-7))


def test_the_policy_waits_for_the_critic(mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_config(folder, tmp_path, critic={"warmup": 2}, run={"steps": 3}), mesh)
    assert trainer.batches.critic is not None
    seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    policy_model, critic_model = trainer.engine.model, trainer.batches.critic.engine.model
    trainer.updates.on_step = lambda _: seen.append((weights_of(policy_model), weights_of(critic_model)))
    before = weights_of(trainer.engine.model)
    trainer.run()
    for policy, _ in seen[:2]:
        assert all(torch.equal(policy[name], weight) for name, weight in before.items())
    assert not all(torch.equal(seen[2][0][name], weight) for name, weight in before.items())
    assert not all(torch.equal(seen[0][1][name], weight) for name, weight in seen[1][1].items())


@pytest.mark.parametrize("steps", [(2, 3, 6), (4, 6)], ids=["inside batches", "between batches"])
def test_resume_is_bitwise(steps: tuple[int, ...], mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    whole = make_trainer(make_config(folder, tmp_path / "whole"), mesh)
    whole.run()
    for count in steps:
        part = make_trainer(make_config(folder, tmp_path / "parts", run={"steps": count}), mesh)
        part.run()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert whole.batches.critic is not None
    assert part.batches.critic is not None
    for one, other in ((whole.engine, part.engine), (whole.batches.critic.engine, part.batches.critic.engine)):
        for name, weight in weights_of(one.model).items():
            assert torch.equal(weight, weights_of(other.model)[name]), name


def test_an_exported_critic_gives_transformers_the_same_values(mesh: Mesh, folder: Path, tmp_path: Path) -> None:
    """The score of a text is the value after its last token; another run trains the exported critic further."""
    trainer = make_trainer(make_config(folder, tmp_path / "run", run={"steps": 2}), mesh)
    trainer.run()
    assert trainer.batches.critic is not None
    exported = export_critic(trainer.batches.critic, tmp_path / "critic")
    found, _ = trainer.batches.critic.add_advantages(several_turns())
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(exported).eval()
    assert model.config.num_labels == 1
    for sample in found:
        tokens = torch.from_numpy(np.asarray(sample.tokens, np.int64))
        for place in np.flatnonzero(sample.scored).tolist():
            with torch.no_grad():
                score = float(model(input_ids=tokens[None, :place]).logits[0, 0])
            assert sample.values is not None
            assert sample.values[place] == pytest.approx(score, rel=1e-5, abs=1e-6)
    assert max(float(np.abs(sample.values).max()) for sample in found if sample.values is not None) > 1e-3
    critic = build_critic(make_config(folder, tmp_path / "later", critic={"path": str(exported)}), mesh)
    assert critic is not None
    for sample, other in zip(critic.add_advantages(several_turns())[0], found, strict=True):
        assert np.array_equal(np.asarray(sample.values), np.asarray(other.values))


def test_a_critic_of_its_own_and_rollouts_of_the_run(folder: Path, tmp_path: Path) -> None:
    """The critic has other sizes than the policy; the run samples its rollouts; a reward model computes the rewards."""
    policy = save_with_tokenizer(tmp_path / "policy")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "9"}\n' * 2)
    common: dict[str, Any] = {"batch": {"samples": 2, "max_tokens": 64}, "optimizer": {"lr": 1e-3}}
    train(
        config_from_dict(
            {
                **common,
                "model": {"path": str(save_with_tokenizer(tmp_path / "base", hidden_size=48))},
                "data": {"path": [str(pairs)]},
                "loss": {"kind": "reward"},
                "run": {"folder": str(tmp_path / "reward"), "steps": 1, "device": "cpu"},
            }
        )
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(3)))
    reward_model = tmp_path / "reward" / "model"
    train(
        config_from_dict(
            {
                **common,
                "model": {"path": str(policy)},
                "critic": {"path": str(reward_model), "lr": 1e-2},
                "data": {"path": [str(prompts)], "epochs": None},
                "loss": {"kind": "clip", "advantage": "gae"},
                "rollout": {"reward": f"model:{reward_model}", "samples_per_prompt": 2, "max_new_tokens": 4},
                "run": {"folder": str(tmp_path / "rl"), "steps": 2, "device": "cpu"},
            }
        )
    )
    found = lines(tmp_path / "rl")
    assert len(found) == 2
    config = AutoConfig.from_pretrained(tmp_path / "rl" / "critic")
    assert (config.hidden_size, config.num_labels) == (48, 1)
    assert config.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / "rl" / "critic").eos_token_id
    assert all(np.isfinite(line["critic/loss"]) and line["reward"] != 0.0 for line in found)


def test_dry_run_plan_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, rollouts = save_with_tokenizer(tmp_path / "model"), tmp_path / "rollouts.jsonl"
    rows = [{"prompt": f"{a}+1=", "response": "2", "reward": a % 2, "group": str(a // 2)} for a in range(4)]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = str(Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "rl.toml")
    small = [f"model.path={policy}", f"data.path={rollouts}", "model.dtype=float32", "loss.advantage=gae"]
    small += ["batch.samples=4", "batch.max_tokens=64", "run.device=cpu", f"run.folder={tmp_path / 'run'}"]
    sizes = []
    for advantage in ("gae", "grpo"):
        assert main(["rl", recipe, *small, f"loss.advantage={advantage}", "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert "first step: 4 samples" in printed
        (memory,) = (line for line in printed.splitlines() if line.startswith("memory: about"))
        sizes.append(float(memory.split()[2]))
    assert sizes[0] > 1.2 * sizes[1], "the critic is a second trained model"
    assert main(["plan", recipe, *small]) == 0
    assert "4 samples" in capsys.readouterr().out
    for changes, message in (
        (["critic.path=nowhere/at/all"], "critic.path: "),
        (["loss.advantage=grpo", "critic.warmup=3"], "critic.warmup: 3; leave it out, or set loss.advantage=gae"),
    ):
        assert main(["rl", recipe, *small, *changes, "--dry-run"]) == 1
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    batch = several_turns()
    values = [np.linspace(-1, 1, len(sample), dtype=np.float32) for sample in batch]
    found = with_gae(batch, values, CriticConfig())
    joined = np.concatenate([np.asarray(s.advantages)[s.scored] for s in found])
    assert joined.mean() == pytest.approx(0.0, abs=1e-6)
    assert joined.std(ddof=1) == pytest.approx(1.0, rel=1e-5)
    returns = with_gae(batch, values, CriticConfig(whiten=False))
    for one, other in zip(found, returns, strict=True):
        assert np.array_equal(np.asarray(one.returns), np.asarray(other.returns))
