"""Runs with an environment: bit-identical after a kill, failed episodes are dropped, trees train like samples.

`test_ways_gsm8k` tests all layouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.cli.main import main
from padfree.config import Config, config_from_dict
from padfree.distributed import distributed, make_mesh
from padfree.record.run_folder import mark_run_folder
from padfree.rollout import Prompt
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.sample_exchange import whole
from padfree.rollout.engines import make_sampler
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.token_ids import vocabulary_of
from padfree.sample import Sample
from padfree.tasks.batch_advantages import with_advantages
from padfree.testing.models import save_with_tokenizer
from padfree.train.batcher import make_batcher
from padfree.train.microbatch import PackSettings
from padfree.train.run import train
from padfree.train.setup import build_engine
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rollout.environment.rewards import digits
from tests.rollout.vllm.vllm_cases import FakeVllm, serving
from tests.train.test_shared_prefixes import assert_close, gradients
from tests.train.trainer_cases import TIMES

HERE = "tests.train.test_environment_run"
REWARDS = "tests.rollout.environment.rewards"
KILL = "PADFREE_TEST_KILL"


async def branching(prompt: Prompt, policy: Policy) -> Trajectory:
    """A turn, a tool's answer, and two branches with one turn each; every leaf has its own reward."""
    await policy.generate(max_tokens=4)
    _kill_here()
    await asyncio.sleep(0.002 * (len(prompt.tokens) % 3))  # a slow tool
    policy.add("=7 ")
    branches = [policy.branch(), policy.branch()]
    branches[1].add("b")
    await asyncio.gather(*(branch.generate(max_tokens=3) for branch in branches))
    for branch in branches:
        branch.reward = digits(branch.text)
    return policy.trajectory(metrics={"tool_calls": 1})


def _kill_here() -> None:
    """Kill the process in its twentieth episode, once."""
    mark = os.environ.get(KILL)
    if mark and not Path(f"{mark}.done").exists():
        with Path(mark).open("a") as file:
            file.write("x")
        if Path(mark).stat().st_size == 20:
            Path(f"{mark}.done").touch()
            os.kill(os.getpid(), signal.SIGKILL)


async def one_turn(prompt: Prompt, policy: Policy) -> Trajectory:
    turn = await policy.generate()
    return policy.trajectory(digits(turn.text))


async def sometimes(prompt: Prompt, policy: Policy) -> Trajectory:
    turn = await policy.generate()
    if prompt.row["answer"] == "2":
        raise RuntimeError("the tool is broken")
    return policy.trajectory(digits(turn.text))


async def never(prompt: Prompt, policy: Policy) -> Trajectory:
    raise RuntimeError("the tool is broken")


async def words_alone(prompt: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    return policy.trajectory()


def plain(prompt: Prompt, policy: Policy) -> Trajectory:
    return policy.trajectory()


async def one_argument(prompt: Prompt) -> None:
    pass


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)


def make_config(folder: Path, model_path: Path, **sections: Any) -> Config:
    rows = [{"question": f"{a}+{'1' * b}", "answer": str(a + 1)} for a in range(4) for b in range(1, 4)]
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"path": [str(data)], "columns": {"question": "prompt"}, "epochs": None},
        "batch": {"samples": 12, "max_tokens": 60},
        "rollout": {
            "environment": f"{HERE}:branching",
            "samples_per_prompt": 3,
            "max_new_tokens": 12,
            "max_concurrent": 5,
        },
        "loss": {"kind": "clip", "temperature": 0.8},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000, "export": False},
        "run": {"folder": str(folder), "steps": 3, "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def first_samples(config: Config) -> list[Sample]:
    """The rollouts of the first batch, on this process of the group."""
    mesh = make_mesh("cpu", context=config.parallel.context)
    mark_run_folder(config)
    tokenizer = load_tokenizer(config)
    batcher = make_batcher(config, load_training_data(config, tokenizer).samples)
    engine = build_engine(config, mesh)
    sampler = make_sampler(config, mesh, engine.model, tokenizer, engine.scorer.logprobs)
    collector = Collector(
        config.rollout, config.loss, config.run, mesh, sampler, tokenizer, vocabulary=vocabulary_of(engine.model)
    )
    try:
        groups: Any = next(batcher)
        collector.sync_weights(engine.model, 0)
        collector.put(groups, batch=batcher.step, version=0)
        return whole(collector.take(batcher.step, version=0))
    finally:
        collector.close()


def same(samples: list[Sample], others: list[Sample]) -> None:
    assert len(samples) == len(others)
    for sample, other in zip(samples, others, strict=True):
        assert np.array_equal(sample.tokens, other.tokens)
        assert np.array_equal(sample.mask, other.mask)
        assert sample.logprobs is not None
        assert other.logprobs is not None
        assert np.array_equal(sample.logprobs, other.logprobs)
        assert (sample.uid, sample.group, sample.reward) == (other.uid, other.group, other.reward)


def test_one_turn_is_a_rollout_without_an_environment(model_folder: Path, tmp_path: Path) -> None:
    """Bit-identical, also with reward processes."""
    reward: dict[str, Any] = {"reward": f"{REWARDS}:share_of_digits", "environment": None, "max_concurrent": 12}
    with distributed(device="cpu"):
        expected = first_samples(make_config(tmp_path / "plain", model_folder, rollout=reward))
        settings: dict[str, dict[str, Any]] = {
            "own": {"environment": f"{HERE}:one_turn"},
            "judged": {"environment": f"{HERE}:words_alone", "reward": f"{REWARDS}:share_of_digits"},
            "processes": {**reward, "reward_processes": 2},
        }
        for name, rollout in settings.items():
            # all at a time, so that the sampler batches the same responses together
            config = make_config(tmp_path / name, model_folder, rollout={**rollout, "max_concurrent": 12})
            same(first_samples(config), expected)


def plain_gradients(config: Config, samples: list[Sample], old: list[Any]) -> dict[str, Tensor]:
    """Gradients of the clipped ratio with plain transformers code in float64, one leaf at a time."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager").double()
    clip = config.loss.settings().objective  # type: ignore[union-attr]
    count, clipped = sum(sample.num_labels for sample in samples), 0
    for sample, before in zip(samples, old, strict=True):
        tokens, scored = torch.from_numpy(sample.tokens), torch.from_numpy(sample.scored)[1:]
        logits = model(input_ids=tokens[None]).logits[0, :-1] / config.loss.temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        ratio = (logprobs - torch.from_numpy(before)[1:]).exp()
        advantages = torch.from_numpy(np.asarray(sample.advantages))[1:]
        plain, held = -ratio * advantages, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
        clipped += int((held > plain)[scored].sum())
        (torch.maximum(plain, held)[scored].sum() / count).backward()
    assert 0 < clipped < count
    return {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}


def test_samples_of_a_tree_and_their_gradients(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "run",
        model_folder,
        batch={"samples": 12, "max_tokens": 60, "overlong": "alone"},
        loss={"old_policy": "trainer"},
    )
    with distributed(device="cpu"):
        samples = first_samples(config)
        assert len(samples) == 24, "12 episodes of 2 leaves"
        assert samples[0].uid == f"{samples[0].group} response 1 leaf 1"
        tool = load_tokenizer(config)("=7 ")["input_ids"]
        for first, second in zip(samples[::2], samples[1::2], strict=True):
            turns = np.flatnonzero(np.diff(first.mask.astype(int)) == 1)
            assert len(turns) == 2
            begin = turns[1] + 1
            assert first.tokens[begin - 3 : begin].tolist() == tool
            assert np.array_equal(first.tokens[:begin], second.tokens[:begin])
            assert np.array_equal(first.mask[:begin], second.mask[:begin])
            assert first.logprobs is not None
            assert ((first.logprobs < 0) == first.mask).all()
        samples = with_advantages(samples, "grpo")
        engine = build_engine(config, make_mesh("cpu"))
        rng = np.random.default_rng(0)  # differ from the policy, so that some ratios are clipped
        old = [(sample.logprobs + rng.normal(0, 0.2, len(sample))).astype(np.float32) for sample in samples]
        expected = plain_gradients(config, samples, old)
        alone = gradients(engine, samples, old, PackSettings(), 1)  # every leaf in its own pack
        assert_close(alone, expected, 1e-5)
        shared = gradients(engine, samples, old, PackSettings(share_prefixes=True), 1000)
        plan = engine.scorer.packer.plan(samples)
        assert plan.sharing > 1.5
        assert plan.num_micro_batches == 1
        assert_close(shared, expected, 1e-5)


def failed(rank: int, world: int, failing: Config) -> str:
    with pytest.raises(ValueError) as caught:
        train(failing)
    return str(caught.value)


def test_an_error_of_one_rank_ends_all(model_folder: Path, tmp_path: Path) -> None:
    failing = make_config(tmp_path / "failing", model_folder, rollout={"environment": f"{HERE}:sometimes"})
    errors = run_ranks(2, failed, failing)
    assert errors[0] == errors[1], "both ranks raise the error of the one that failed"
    assert "sometimes raised RuntimeError: the tool is broken for 'prompts.jsonl:" in errors[0]
    assert lines(tmp_path / "failing", "failures.jsonl") == [{"batch": 1, "failure": errors[0]}]


def killed(rank: int, world: int, config: Config, mark: str) -> None:
    os.environ[KILL] = mark
    train(config)


def test_killed_in_an_episode_and_resumed_to_the_bit(model_folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint": {"every": 1, "export": True}, "run": {"steps": 3}}
    changes["loss"] = {"old_policy": "sampler"}  # uses the sampler's log-probabilities
    train(make_config(tmp_path / "whole", model_folder, **_merged(changes, tmp_path / "whole")))
    config = make_config(tmp_path / "parts", model_folder, **_merged(changes, tmp_path / "parts"))
    run_ranks(1, killed, config, str(tmp_path / "mark"), dying=[0])
    assert len(lines(tmp_path / "parts")) == 1, "it was killed in the episodes of the second batch"
    train(config)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert lines(tmp_path / "parts", "rollouts.jsonl") == lines(tmp_path / "whole", "rollouts.jsonl")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1]


def _merged(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**changes, "run": {"folder": str(folder), "device": "cpu", **changes["run"]}}


def test_failed_groups_are_left_out_and_listed(model_folder: Path, tmp_path: Path) -> None:
    rollout: dict[str, Any] = {"environment": f"{HERE}:sometimes", "on_failure": "skip"}
    train(make_config(tmp_path / "run", model_folder, rollout=rollout, run={"steps": 3}))
    listed = lines(tmp_path / "run", "failures.jsonl")
    assert {line["failure"] for line in listed} == {"raised RuntimeError: the tool is broken"}
    failed = {1: 0, 2: 0, 3: 0}
    for line in listed:
        failed[line["batch"]] += 1
    assert sum(failed.values()) == 9, "3 prompts of 12 fail, in 3 batches of 4"
    for line in lines(tmp_path / "run"):
        batch = line["step"] + 1
        assert line["episodes_failed"] == failed[batch]
        assert line["groups_failed"] == failed[batch] / 3
        assert line["samples"] == line["episodes"] == 12 - failed[batch]
    # failures of batches that a resumed run repeats are listed once
    train(make_config(tmp_path / "run", model_folder, rollout=rollout, run={"steps": 4}))
    assert [line for line in lines(tmp_path / "run", "failures.jsonl") if line["batch"] < 4] == listed
    with refused("rollout.on_failure"):
        train(make_config(tmp_path / "all", model_folder, rollout={**rollout, "environment": f"{HERE}:never"}))
    assert len(lines(tmp_path / "all", "failures.jsonl")) == 12


def test_a_filter_does_not_take_failed_groups(model_folder: Path, tmp_path: Path) -> None:
    rollout = {"environment": f"{HERE}:sometimes", "on_failure": "skip", "filter": "equal"}
    train(make_config(tmp_path / "run", model_folder, rollout=rollout, run={"steps": 2}))
    for line in lines(tmp_path / "run"):
        assert line["samples"] == 12, "other prompts replace them"
        assert line["groups_requested"] > 4


def test_evaluation_plays_episodes(model_folder: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "1+1", "answer": "2"}\n{"question": "2+1", "answer": "3"}\n')
    changes: dict[str, Any] = {"loss": {"kind": "gspo"}, "run": {"steps": 2}}
    for name, evaluation in (("with", {"path": [str(held_out)], "every": 1}), ("without", {})):
        train(make_config(tmp_path / name, model_folder, eval=evaluation, **_merged(changes, tmp_path / name)))
    found = lines(tmp_path / "with", "evaluation.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2]
    assert all(0 <= line["eval/reward"] <= 1 and line["eval/response_length"] > 2 for line in found)
    assert lines(tmp_path / "with") == lines(tmp_path / "without")


# Programs, servers, dry runs

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }} {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


def test_an_agent_is_trained_and_repeats_itself(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    agent = Path(__file__).parents[1] / "rollout" / "environment" / "agent.py"
    rollout: dict[str, Any] = {
        "environment": None,
        "agent": [sys.executable, str(agent), "{prompt}"],
        "reward": f"{REWARDS}:share_of_digits",
        "samples_per_prompt": 2,
    }
    for name in ("one", "two"):
        train(
            make_config(
                tmp_path / name,
                model_folder,
                data={"chat_template": str(tmp_path / "template"), "prompt_format": "chat"},
                batch={"samples": 6, "max_tokens": 60},
                rollout=rollout,
                run={"steps": 2},
            )
        )
    found = lines(tmp_path / "one")
    assert found == lines(tmp_path / "two")
    assert [line["agent/calls"] >= 6 and line["episodes"] == 6 for line in found] == [True, True]
    assert found[0]["agent/sampling_overridden"] == found[0]["agent/calls"]
    assert found[0]["reward_max"] > 0
    for line in lines(tmp_path / "one", "rollouts.jsonl"):
        assert line["prompt"].startswith("u ")
        assert line["prompt"].endswith(" a ")


def test_servers_get_the_requests_of_episodes(model_folder: Path, tmp_path: Path) -> None:
    """The log-probabilities of all leaves equal the trainer's, up to the rounding of the server."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with serving(FakeVllm(model=model, tokenizer=tokenizer, vocabulary=len(tokenizer))) as urls:
        rollout = {"engine": "vllm", "servers": urls, "transfer": "files", "timeout": 300.0}
        train(make_config(tmp_path / "run", model_folder, rollout=rollout, run={"steps": 2}))
    for line in lines(tmp_path / "run"):
        assert (line["samples"], line["turns"]) == (24, 2)
        assert 0 < line["loss/sampler_difference"] < 1e-5


def test_dry_run_and_plan(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config(tmp_path / "run", model_folder)  # writes the prompts
    words = [f"model.path={model_folder}", f"data.path={tmp_path / 'prompts.jsonl'}", f"run.folder={tmp_path / 'run'}"]
    recipe = str(Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "rl-environment.toml")
    assert main(["rl", recipe, *words, "rollout.max_new_tokens=20", "run.device=cpu", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "rollout.environment padfree.rollout.environment.calculator:episode is not imported by a dry run" in printed
    assert "12 prompts" in printed
    assert (
        main(["plan", recipe, *words, "rollout.max_new_tokens=20", "rollout.samples_per_prompt=4", "batch.samples=8"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "48 samples" in printed, "12 prompts, 4 episodes each"
    assert "each counts as rollout.max_new_tokens tokens" in printed
    assert "steps       6 in an epoch, 8.0 samples" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "is not async; define it with `async def`, and return policy.trajectory"),
        ("one_argument", r"cannot be called with \(prompt, policy\): .* let the function accept these 2 arguments"),
        ("nothing", "the module has no 'nothing'; correct the name"),
    ],
)
def test_environments_that_cannot_be(name: str, message: str, model_folder: Path, tmp_path: Path) -> None:
    with refused("rollout.environment", f"'{HERE}:{name}'.*{message}") as caught:
        train(make_config(tmp_path / "run", model_folder, rollout={"environment": f"{HERE}:{name}"}))
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()
