"""All combinations of collecting rollouts: engine, kind of episode, staleness, kind of reward, penalties.

All of them filter and oversample groups, leave out failed groups, write the response log, and are interrupted after a
checkpoint and resumed. With staleness 0, a resumed run is bit-identical to an undisturbed one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from padfree.config import Config, config_from_dict
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.refused import refused
from tests.rollout.environment.rewards import digits
from tests.rollout.vllm.test_run import fake_of
from tests.rollout.vllm.vllm_cases import serving
from tests.train.trainer_cases import TIMES

HERE = "tests.rollout.collect.test_combinations"
FUNCTION = "tests.rollout.environment.rewards:sometimes_raises"
STEPS, GROUP, GROUPS, PROMPTS, MAX_NEW_TOKENS = 3, 3, 4, 12, 8
REWARDS = ("function", "processes", "model")
COMBINATIONS = list(
    itertools.product(("in_process", "server"), ("response", "episode"), (0, 1), REWARDS, (False, True))
)
BY_RESUMING = ("responses_from_log",)


async def two_turns(prompt: Prompt, policy: Policy) -> Trajectory:
    """A turn, a reply of the tool, and another turn; the reward is `rollout.reward`."""
    await policy.generate(max_tokens=3)
    policy.add("=")
    if prompt.row["answer"] == "2":
        raise RuntimeError("the tool is broken")
    await policy.generate()
    return policy.trajectory()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model and prompts."""
    place = tmp_path_factory.mktemp("combinations")
    policy = save_with_tokenizer(place / "policy", writes_back=True, num_hidden_layers=1)
    reward_model: Any = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    reward_model.save_pretrained(place / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(place / "judge")
    rows = [{"prompt": f"{a}+{'1' * b}", "answer": str(a + 1)} for a in range(4) for b in range(1, 4)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server with the policy."""
    with serving(fake_of(folder / "policy")) as (found,):
        yield found


def make_config(
    run: Path, folder: Path, url: str, *, engine: str, episode: str, staleness: int, reward: str, overlong: bool
) -> Config:
    rollout: dict[str, Any] = {
        "reward": f"model:{folder / 'judge'}" if reward == "model" else FUNCTION,
        "reward_processes": 1 if reward == "processes" else 0,
        "on_failure": "skip",
        "filter": "equal",
        "oversample": 1.5,
        "overlong_buffer": 5 if overlong else 0,
        "staleness": staleness,
        "samples_per_prompt": GROUP,
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_concurrent": 6,
    }
    if episode == "episode":
        rollout["environment"] = f"{HERE}:two_turns"
    if engine == "server":
        rollout |= {"engine": "vllm", "servers": [url], "transfer": "files", "timeout": 300.0}
    return config_from_dict(
        {
            "model": {"path": str(folder / "policy")},
            "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": GROUP * GROUPS, "max_tokens": 80},
            "rollout": rollout,
            "loss": {"kind": "clip", "temperature": 0.8},
            "optimizer": {"lr": 2e-3, "eps": 1e-3},
            "checkpoint": {"every": 1, "export": False},
            "run": {"folder": str(run), "steps": STEPS, "device": "cpu"},
        }
    )


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in (*TIMES, *BY_RESUMING) and not name.startswith("sampler/")  # sampled since this start
        }
        for line in found
    ]


class StopError(Exception):
    pass


def stop(metrics: Mapping[str, Any]) -> None:
    """Interrupt the run in its second step, as a kill would: before the checkpoint of that step."""
    if metrics["step"] == 1:
        raise StopError


@pytest.mark.parametrize(("engine", "episode", "staleness", "reward", "overlong"), COMBINATIONS)
def test_every_combination(
    engine: str, episode: str, staleness: int, reward: str, overlong: bool, folder: Path, url: str, tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {"engine": engine, "episode": episode, "reward": reward, "overlong": overlong}
    if engine == "in_process" and staleness:
        with refused("rollout.staleness"):
            make_config(tmp_path / "run", folder, url, staleness=staleness, **chosen)
        return
    parts = make_config(tmp_path / "parts", folder, url, staleness=staleness, **chosen)
    with pytest.raises(StopError):
        train(parts, on_step=stop)
    notes: list[str] = []
    train(parts, on_note=notes.append)
    written = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    check_run(tmp_path / "parts", written, staleness=staleness, **chosen)
    assert not any("dropped" in note for note in notes)
    if episode == "response":  # episodes of an environment are played again
        assert any("responses from the response log" in note for note in notes)
    if not staleness:
        train(make_config(tmp_path / "whole", folder, url, staleness=staleness, **chosen))
        for file in ("metrics.jsonl", "rollouts.jsonl"):
            assert lines(tmp_path / "parts", file) == lines(tmp_path / "whole", file)


def check_run(
    folder: Path, found: list[dict[str, Any]], *, engine: str, episode: str, staleness: int, reward: str, overlong: bool
) -> None:
    """Checks that hold for every combination."""
    assert [line["step"] for line in found] == list(range(STEPS))
    fails = reward != "model" or episode == "episode"
    for line in found:
        assert line["samples"] == GROUP * GROUPS or line["groups_failed"] > 0
        assert line["samples"] % GROUP == 0
        assert line["groups_requested"] >= GROUPS * 1.5
        enough = line["groups_requested"] - line["groups_equal"] >= GROUPS
        assert enough or line["groups_requested"] == PROMPTS, "there are no more prompts"
        assert ("overlong_penalty" in line) == overlong
        if overlong:
            assert line["raw_reward"] - line["reward"] == pytest.approx(line["overlong_penalty"], abs=1e-6)
        assert ("version_age_max" in line) == bool(staleness)
        assert line.get("version_age_max", 0) <= staleness
        assert ("turns" in line) == (episode == "episode")
        assert ("sampler/canary_difference" in line) == (engine == "server")
    assert sum(line["groups_failed"] for line in found) > 0 if fails else True
    assert not overlong or max(line["overlong_share"] for line in found) > 0
    shown = lines(folder, "rollouts.jsonl")
    assert [line["batch"] for line in shown] == [
        number for number, line in enumerate(found, start=1) for _ in range(min(4, line["samples"] // GROUP))
    ]
    for line in shown:
        assert reward == "model" or line["reward"] == digits(line["response"])
        assert ("leaves" in line) == (episode == "episode")
    failures = lines(folder, "failures.jsonl") if fails else []
    assert (len(failures) > 0) == fails
    assert all("raised RuntimeError" in line["failure"] for line in failures)
