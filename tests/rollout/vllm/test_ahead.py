"""Sampling during training: the trained samples, their policy versions, and resuming."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from padfree.config import Config
from padfree.rollout.base import Response
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.queue_state import Stored
from padfree.rollout.collect.queued_batch import QueuedBatch
from padfree.rollout.engines.servers import weight_sync
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.group import Played
from padfree.rollout.response_log import _records
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample
from padfree.train.engine import Engine
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.rollout.vllm.test_run import SAMPLES, digits, fake_of, lines, make_config, model_folder
from tests.rollout.vllm.vllm_cases import FakeVllm, Remembering, serving
from tests.waiting import wait_until

__all__ = ["model_folder"]  # a fixture
HERE = "tests.rollout.vllm.test_ahead"
CONNECTIONS = 4


class Holding(Remembering):
    """Holds one response after its first token until a weight sync. Its batch is trained after the sync."""

    held: int | None = None  # its seed

    def _before_token(self, body: dict[str, Any], count: int, pauses: int) -> None:
        if count == 1 and self.held is None and self._pauses == pauses and self.version.isdigit():
            later = range(int(self.version) + 2, 5)
            if body["seed"] in {seed_of(batch, number) for batch in later for number in range(SAMPLES)}:
                self.held = body["seed"]
                wait_until(lambda: self._pauses != pauses)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[list[Sample], list[Played]]]:
    """Record the samples and this rank's episodes of every batch."""
    found: dict[int, tuple[list[Sample], list[Played]]] = {}
    take = Collector.take

    def record(collector: Collector, batch: int, *, version: int) -> list[Sample]:
        queued: QueuedBatch = collector._batches[batch]
        samples = take(collector, batch, version=version)
        found[batch] = samples, [queued.played[number] for number in sorted(queued.played)]
        return samples

    monkeypatch.setattr(Collector, "take", record)
    return found


def test_every_token_is_of_the_version_it_says(model_folder: Path, tmp_path: Path, taken: Any) -> None:
    """New weights continue interrupted responses; log-probabilities are those of the version of each token."""
    plain = fake_of(model_folder)
    fake = Holding(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    with serving(fake) as (url,):
        train(make_config(tmp_path / "run", model_folder, servers=[url], staleness=2, max_concurrent=5, steps=4))
    found = lines(tmp_path / "run")
    assert sorted(taken) == [1, 2, 3, 4]
    assert [line["samples"] for line in found] == [SAMPLES] * 4
    assert max(line["version_age_max"] for line in found) in (1.0, 2.0)
    assert all(0 <= line["version_age"] <= line["version_age_max"] <= 2 for line in found)
    assert check_versions(taken, fake.weights, model_folder, temperature=0.8) > 0, (
        "a weight sync interrupted a response"
    )


def check_versions(taken: Mapping[int, Any], weights: Mapping[int, Any], model_folder: Path, temperature: float) -> int:
    """Check the log-probabilities of each token by its version; return the number of mixed responses."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    mixed = 0
    for batch, (samples, written) in taken.items():
        assert [one.number for one in written] == list(range(len(samples)))
        for sample, one in zip(samples, written, strict=True):
            (leaf,) = one.leaves
            versions = one.versions
            assert (np.diff(versions) >= 0).all()
            assert batch - 3 <= versions.min()
            assert versions.max() < batch
            mixed += len(set(versions.tolist())) > 1
            for version in set(versions.tolist()):
                model.load_state_dict(weights[version], strict=False)
                with torch.no_grad():
                    logits = model(input_ids=torch.from_numpy(sample.tokens)[None].long()).logits[0].double()
                scores = torch.log_softmax(logits / temperature, -1)
                before = len(sample.tokens) - len(versions)
                for place in np.flatnonzero(versions == version):
                    at = before + int(place)
                    expected = scores[at - 1, int(sample.tokens[at])].item()
                    assert leaf.logprobs[at] == pytest.approx(expected, abs=1e-4)
    return mixed


class Busy(Remembering):
    """Records how many responses are in progress at each pause."""

    def _pause(self, paused: bool) -> dict[str, Any]:
        if paused:
            self.__dict__.setdefault("in_progress", []).append(self.at_once)
        return super()._pause(paused)


def trained(rank: int, world: int, config: Config) -> None:
    train(config)


@pytest.mark.parametrize("on_update", ["continue", "finish", "restart"])
def test_responses_in_progress_at_a_weight_sync(on_update: str, model_folder: Path, tmp_path: Path, taken: Any) -> None:
    plain = fake_of(model_folder)
    fake = Busy(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    fake.token_seconds = 0.05
    with serving(fake) as (url,):
        settings: dict[str, Any] = {"servers": [url], "staleness": 2, "max_concurrent": 5, "on_update": on_update}
        train(make_config(tmp_path / "run", model_folder, steps=4, **settings))
    mixed = check_versions(taken, fake.weights, model_folder, temperature=0.8)
    busy = any(fake.in_progress)
    assert busy == (on_update != "finish"), "the sync waits until no response is in progress"
    assert (mixed > 0) == (on_update == "continue")
    seeds = {seed_of(batch, number) for batch in range(1, 5) for number in range(SAMPLES)}
    assert (asked_of(fake).keys() == seeds) == (on_update != "continue"), "a continued response has another seed"
    assert (max(asked_of(fake).values()) > 1) == (on_update == "restart")


def test_all_ranks_finish_before_a_weight_sync(model_folder: Path, tmp_path: Path) -> None:
    plain = fake_of(model_folder)
    fake = Busy(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    fake.token_seconds = 0.05
    with serving(fake) as (url,):
        settings: dict[str, Any] = {"servers": [url], "staleness": 1, "max_concurrent": 3, "on_update": "finish"}
        run_ranks(2, trained, make_config(tmp_path / "run", model_folder, steps=3, **settings))
    assert len(fake.in_progress) >= 3
    assert not any(fake.in_progress)


begun: list[str] = []
"""The thread of each reward."""


def together(response: str, row: Mapping[str, Any]) -> float:
    """A reward that returns only after another one has started."""
    begun.append(threading.current_thread().name)
    wait_until(lambda: len(begun) > 1)
    return digits(response, row)


def test_rewards_run_beside_each_other_and_beside_training(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training starts after a reward of the second batch has started, and no reward returns before another starts."""
    begun.clear()
    begin = Engine.begin

    def late(engine: Engine, *arguments: Any, **settings: Any) -> Any:
        wait_until(lambda: len(begun) > SAMPLES)
        return begin(engine, *arguments, **settings)

    monkeypatch.setattr(Engine, "begin", late)
    with serving(fake_of(model_folder)) as (url,):
        train(
            make_config(tmp_path / "run", model_folder, servers=[url], staleness=2, steps=3, reward=f"{HERE}:together")
        )
    assert len(begun) == 3 * SAMPLES, "batches that would not be trained are not sampled"
    assert {name.split("_")[0] for name in begun} == {"reward"}


def test_without_staleness_a_run_is_synchronous(tmp_path: Path) -> None:
    """The run of `test_run.py`, whose metrics have no ages."""
    plain, zero = (
        make_config(tmp_path / "run", tmp_path, servers=["http://a:1"], **more) for more in ({}, {"staleness": 0})
    )
    assert plain == zero


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[Stored]:
    """The queue in the last checkpoint."""
    found: list[Stored] = []
    restore = Collector.restore

    def record(collector: Collector, extra: Mapping[str, Any]) -> None:
        restore(collector, extra)
        found.extend((batch, number, one) for (batch, number), one in collector._known.restored.items())

    monkeypatch.setattr(Collector, "restore", record)
    return found


class StopError(Exception):
    pass


def stop_after(step: int, *, rewards: int = 0) -> Any:
    """Interrupt the run in this step. Before the previous checkpoint, this many calls of `noted` have started."""
    begun.clear()

    def on_step(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == step - 1:
            wait_until(lambda: len(begun) >= rewards)
        if metrics["step"] == step:
            raise StopError

    return on_step


def noted(response: str, row: Mapping[str, Any]) -> float:
    begun.append(threading.current_thread().name)
    return digits(response, row)


def asked_of(fake: FakeVllm) -> Counter[int]:
    """How many times each response was requested; a continued response has another seed."""
    return Counter(body["seed"] for body in fake.completed if "stop_token_ids" in body)


def seed_of(batch: int, number: int) -> int:
    return int(response_keys(0, batch, np.array([number]))[0]) & ((1 << 63) - 1)


def check_not_asked_again(fake: FakeVllm, restored: list[Stored]) -> None:
    """No response in the checkpoint is requested again; a continued one has another seed."""
    again = asked_of(fake)
    for batch, number, _ in restored:
        assert seed_of(batch, number) not in again


def logged_responses(folder: Path) -> set[tuple[int, int]]:
    """Batch and number of all responses in the response log of a run."""
    return {
        (record["batch"], row["number"])
        for path in (folder / "response_log").glob("*.jsonl")
        for _, record in _records(path)
        for row in record["responses"]
    }


@pytest.mark.parametrize("filtered", ["none", "equal"])
def test_a_resumed_run_goes_on_with_its_queue(
    filtered: str, model_folder: Path, tmp_path: Path, taken: Any, restored: list[Stored]
) -> None:
    """Interrupted after three steps, with a checkpoint after each: no response in the checkpoint is sampled again."""
    fake = fake_of(model_folder)
    settings: dict[str, Any] = {"staleness": 2, "filter": filtered, "steps": 5, "reward": f"{HERE}:noted"}
    with serving(fake) as (url,):
        config = make_config(
            tmp_path / "run", model_folder, servers=[url], checkpoint={"every": 1, "export": False}, **settings
        )
        with pytest.raises(StopError):
            train(config, on_step=stop_after(3, rewards=5 * SAMPLES if filtered == "none" else 0))
        assert restored == []
        fake.completed.clear()
        train(config)
    assert {batch for batch, _, _ in restored} <= {4, 5}
    finished = {(batch, number): one for batch, number, one in restored if isinstance(one, Played)}
    assert finished or filtered != "none"
    check_not_asked_again(fake, restored)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    for batch in (4, 5):
        for one in taken[batch][1]:
            kept = finished.get((batch, one.number))
            if kept is not None:
                assert np.array_equal(kept.leaves[0].tokens, one.leaves[0].tokens)
                assert np.array_equal(kept.versions, one.versions)
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(5))
    assert all(line["groups_dropped"] == 0 for line in found)


def killed_run(rank: int, world: int, config: Config, moment: str, number: int) -> None:
    """A run that is killed with SIGKILL: at this response, at this bucket of weights, or in the update of this step."""
    here = threading.Lock()
    respond, begin, broadcast = VllmServer.respond, Engine.begin, weight_sync.broadcast
    count = 0

    def kill_at_last() -> None:
        nonlocal count
        with here:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    async def answered(server: VllmServer, *arguments: Any, **settings: Any) -> Response:
        response = await respond(server, *arguments, **settings)
        kill_at_last()  # before it is stored
        return response

    def sent(*arguments: Any) -> None:
        time.sleep(0.1)  # the server is now waiting for the bucket
        kill_at_last()
        broadcast(*arguments)

    def begun(engine: Engine, prepared: Any, *, step: int, **settings: Any) -> Any:
        pending = begin(engine, prepared, step=step, **settings)
        if step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending

    patches: dict[str, tuple[Any, str, Any]] = {
        "sampling": (VllmServer, "respond", answered),
        "exchange": (weight_sync, "broadcast", sent),
        "update": (Engine, "begin", begun),
    }
    with mock.patch.object(*patches[moment]):
        train(config)


@pytest.mark.parametrize(
    ("staleness", "kills"),
    [(0, {"sampling": SAMPLES + 5, "exchange": 2, "update": 3}), (2, {"sampling": 2 * SAMPLES + 5, "update": 2})],
)
def test_a_run_that_is_killed_again_and_again_goes_on(
    staleness: int, kills: dict[str, int], model_folder: Path, tmp_path: Path, taken: Any, restored: list[Stored]
) -> None:
    """With SIGKILL and a checkpoint after every other step: nothing is sampled again, and everything is trained.

    Responses that the run had received but not stored are requested again: at most one per connection.
    """
    fake = fake_of(model_folder)
    answered: set[int] = set()

    def check_asked(kept: set[tuple[int, int]]) -> None:
        """None of the requests since the last call was in `kept`."""
        wait_until(lambda: fake.at_once == 0)  # one of its threads may not have noticed yet
        asked = asked_of(fake)
        assert not {seed_of(batch, number) for batch, number in kept} & asked.keys()
        assert len(answered & asked.keys()) <= CONNECTIONS
        answered.update(asked)

    with serving(fake) as (url,):
        config = make_config(
            tmp_path / "run",
            model_folder,
            servers=[url],
            checkpoint={"every": 2, "export": False},
            staleness=staleness,
            max_concurrent=CONNECTIONS,
            steps=5,
        )
        kept: set[tuple[int, int]] = set()
        for moment, number in kills.items():
            run_ranks(1, killed_run, config, moment, number, dying=[0])
            check_asked(kept)
            kept = logged_responses(tmp_path / "run")
            assert kept or moment != "sampling", "responses arrived after the checkpoint"
            fake.completed.clear()
        train(config)
        check_asked(kept)
    check_not_asked_again(fake, restored)
    wanted = {seed_of(batch, number) for batch in range(1, 6) for number in range(SAMPLES)}
    assert answered >= wanted, "every response of every batch was requested"
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(5))
    assert [line["samples"] for line in found] == [SAMPLES] * 5
    assert all([one.number for one in written] == list(range(SAMPLES)) for _, written in taken.values())


def test_a_lower_staleness_drops_what_is_older(model_folder: Path, tmp_path: Path, taken: Any) -> None:
    fake = fake_of(model_folder)
    checkpoint = {"every": 1, "export": False}
    with serving(fake) as (url,):
        settings: dict[str, Any] = {
            "servers": [url],
            "checkpoint": checkpoint,
            "steps": 4,
            "reward": f"{HERE}:noted",
        }
        with pytest.raises(StopError):
            train(
                make_config(tmp_path / "run", model_folder, staleness=3, **settings),
                on_step=stop_after(2, rewards=4 * SAMPLES),
            )
        taken.clear()
        notes: list[str] = []
        train(make_config(tmp_path / "run", model_folder, staleness=1, **settings), on_note=notes.append)
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(4))
    assert sum(line["groups_dropped"] for line in found[2:]) > 0
    assert all(line["version_age_max"] <= 1 for line in found[3:])
    assert all(len(written) == SAMPLES for _, written in taken.values())
    assert any("rollout.staleness" in note for note in notes)
