"""Episodes played while earlier batches are trained: the trained samples, their policy versions, and resuming."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.config import Config, config_from_dict
from padfree.rollout import Prompt
from padfree.rollout.base import OnResponse, Response, SamplingRequest
from padfree.rollout.collect.collector import Collector
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.group import Leaf
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.rollout.environment.rewards import digits
from tests.rollout.vllm.vllm_cases import Remembering, serving
from tests.train.trainer_cases import TIMES

HERE = "tests.rollout.environment.test_ahead"
BY_CHANCE = ("version_age", "version_age_max", "queue_finished", "queue_unfinished", "groups_dropped")
played: Counter[str] = Counter()  # episodes played in this process, by prompt


class KeySampler:
    """An async sampler whose tokens depend only on the key of the request, not on the weights."""

    failure: ValueError | None = None
    stuck = False

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._version, self._threads = vocabulary, 0, ThreadPoolExecutor(2)

    def update_weights(self, trained: Any, version: int) -> None:
        self._version = version

    def renew(self) -> None:
        pass

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        for number, request in enumerate(requests):
            self._threads.submit(self._answer, number, request, on_response)

    def _answer(self, number: int, request: SamplingRequest, on_response: OnResponse) -> None:
        version = self._version
        time.sleep(0.002)
        tokens = np.random.default_rng(request.key & 0xFFFFFFFF).integers(1, self._vocabulary, request.max_new_tokens)
        logprobs = np.full(request.max_new_tokens, -np.log(self._vocabulary), np.float32)
        on_response(number, Response(tokens=tokens, logprobs=logprobs, ended=False, version=version))

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        raise AssertionError("a queued batch must use `begin`")

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def key_sampler(config: Any, mesh: Any, trained: Any, tokenizer: Any, score: Any) -> KeySampler:
    return KeySampler(int(trained.config.vocab_size))


async def two_turns(prompt: Prompt, policy: Policy) -> Trajectory:
    """A turn, a reply of the tool, and two branches."""
    played[prompt.uid] += 1
    await policy.generate(max_tokens=3)
    policy.add("=7 ")
    branches = [policy.branch(), policy.branch()]
    for branch in branches:
        await branch.generate(max_tokens=4)
        branch.reward = digits(branch.text)
    return policy.trajectory()


async def sometimes(prompt: Prompt, policy: Policy) -> Trajectory:
    turn = await policy.generate()
    if prompt.row["answer"] == "2":
        raise RuntimeError("the tool is broken")
    return policy.trajectory(digits(turn.text))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def make_config(folder: Path, model_path: Path, *, steps: int = 4, **rollout: Any) -> Config:
    rows = [{"prompt": f"{a}+{'1' * b}", "answer": str(a + 1)} for a in range(4) for b in range(1, 3)]
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_from_dict(
        {
            "model": {"path": str(model_path)},
            "data": {"path": [str(data)], "epochs": None},
            "batch": {"samples": 6, "max_tokens": 60},
            "rollout": {
                "environment": f"{HERE}:two_turns",
                "engine": f"{HERE}:key_sampler",
                "samples_per_prompt": 3,
                "max_new_tokens": 12,
                "max_concurrent": 4,
                "staleness": 2,
                **rollout,
            },
            "loss": {"kind": "clip", "temperature": 0.8},
            "optimizer": {"lr": 2e-3, "eps": 1e-3},
            "checkpoint": {"every": 1, "export": False},
            "run": {"folder": str(folder), "steps": steps, "device": "cpu"},
        }
    )


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in (*TIMES, *BY_CHANCE)} for line in found]


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run with one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(make_config(folder, model_folder))
    return folder


class StopError(Exception):
    pass


def test_a_resumed_run_goes_on_with_the_episodes_that_have_ended(
    whole: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled tokens do not depend on the weights, so the resumed run is bit-identical to an undisturbed one."""
    restored: list[dict[tuple[int, int], Any]] = []
    restore = Collector.restore

    def record(collector: Collector, extra: Mapping[str, Any]) -> None:
        restore(collector, extra)
        restored.append(dict(collector._known.restored))

    def stop(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 0:
            time.sleep(0.3)  # wait until the episodes of the next batches end, before the checkpoint
        if metrics["step"] == 1:
            raise StopError

    monkeypatch.setattr(Collector, "restore", record)
    config = make_config(tmp_path / "parts", model_folder)
    with pytest.raises(StopError):
        train(config, on_step=stop)
    played.clear()
    train(config)
    assert lines(tmp_path / "parts") == lines(whole)
    assert lines(tmp_path / "parts", "rollouts.jsonl") == lines(whole, "rollouts.jsonl")
    (kept,) = restored
    assert kept, "the checkpoint of the first step has episodes of the second and third batch"
    assert {batch for batch, _ in kept} <= {2, 3}
    assert sum(played.values()) == 3 * 6 - len(kept), "they are not played again"
    first = json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["samples"], first["turns"], first["version_age"]) == (12, 2, 0)


def ranks(rank: int, world: int, config: Config, failing: Config) -> str:
    train(config)
    with pytest.raises(ValueError) as caught:
        train(failing)
    return str(caught.value)


def test_two_ranks_and_failures(whole: Path, model_folder: Path, tmp_path: Path) -> None:
    environment = f"{HERE}:sometimes"
    failing = make_config(tmp_path / "failing", model_folder, environment=environment)
    errors = run_ranks(2, ranks, make_config(tmp_path / "two", model_folder), failing)
    for line, other in zip(lines(tmp_path / "two"), lines(whole), strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert errors[0] == errors[1], "both ranks raise the error of one rank"
    assert "sometimes raised RuntimeError: the tool is broken for 'prompts.jsonl:" in errors[0]
    assert lines(tmp_path / "failing", "failures.jsonl")[-1]["failure"] == errors[0]
    train(make_config(tmp_path / "skipped", model_folder, environment=environment, on_failure="skip"))
    found = lines(tmp_path / "skipped")
    assert sum(line["groups_failed"] for line in found) == 2, "of 8 prompts 2 fail"
    assert all(line["samples"] == 6 - 3 * line["groups_failed"] for line in found)


def test_every_token_is_of_the_version_it_says(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes continue during weight syncs; log-probabilities are those of the policy version of each token."""
    leaves: list[Leaf] = []
    take = Collector.take

    def record(collector: Collector, batch: int, *, version: int) -> Any:
        queued = collector._batches[batch]
        samples = take(collector, batch, version=version)
        leaves.extend(leaf for one in queued.played.values() for leaf in one.leaves)
        return samples

    monkeypatch.setattr(Collector, "take", record)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    fake = Remembering(model=model, tokenizer=tokenizer, vocabulary=len(tokenizer))
    fake.token_seconds = 0.005
    with serving(fake) as urls:
        rollout: dict[str, Any] = {"engine": "vllm", "servers": urls, "transfer": "files", "timeout": 300.0}
        train(make_config(tmp_path / "run", model_folder, **rollout))
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["version_age"] <= line["version_age_max"] <= 2 for line in written)
    assert max(line["version_age_max"] for line in written) >= 1
    plain: Any = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    assert len({int(version) for leaf in leaves for version in leaf.versions[leaf.sampled]}) > 1
    for leaf in leaves:
        tokens = torch.from_numpy(leaf.tokens)
        for version in set(leaf.versions[leaf.sampled].tolist()):
            plain.load_state_dict(fake.__dict__["weights"][version], strict=False)
            with torch.no_grad():
                scores = torch.log_softmax(plain(input_ids=tokens[None]).logits[0].double() / 0.8, -1)
            for position in np.flatnonzero(leaf.sampled & (leaf.versions == version)):
                expected = float(scores[position - 1, tokens[position]])
                assert leaf.logprobs[position] == pytest.approx(expected, abs=1e-4)
