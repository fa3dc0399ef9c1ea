"""Servers that share the device of the run: they sleep while the run trains (`rollout.colocated`)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from padfree.cli.train import shared_memory_line
from padfree.config import Config, LoraConfig, config_from_dict
from padfree.distributed import distributed, make_mesh
from padfree.model.lora import add_adapters
from padfree.rollout.base import SamplingRequest
from padfree.rollout.collect.collector import Collector
from padfree.rollout.engines import CheckedSampler, make_sampler
from padfree.rollout.engines.servers import start
from padfree.rollout.engines.servers.weight_stream import WeightStream
from padfree.rollout.engines.servers.weight_sync import FilesTransport, WeightSync
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.loop_thread import LoopThread
from padfree.testing.models import build, save_with_tokenizer
from padfree.train import resolve_auto
from padfree.train.engine import Engine
from padfree.train.run import train
from padfree.warning import PadfreeWarning
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rollout.vllm import test_run
from tests.rollout.vllm.test_http import served_of
from tests.rollout.vllm.test_run import SAMPLES, RecordedLauncher, fake_of, lines, make_config, servers_of
from tests.rollout.vllm.vllm_cases import FakeVllm, launch_of, serving

HERE = "tests.rollout.vllm.test_colocated"
BOTH = {"weights", "kv_cache"}
BATCH = {"samples": 16, "max_tokens": 80}
launchers = test_run.launchers


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)


def observe_training(monkeypatch: pytest.MonkeyPatch, seen: Callable[[], None]) -> None:
    """Call `seen` before the first gradient of each update."""
    gradients = Engine.gradients

    def observed(engine: Engine, prepared: Any) -> Any:
        seen()
        return gradients(engine, prepared)

    monkeypatch.setattr(Engine, "gradients", observed)


def order_of(calls: list[str]) -> list[str]:
    """The calls of a rollout batch that order matters for, each once. Completions of the canary are included."""
    kept: list[str] = []
    for call in calls:
        known = call.startswith(("/sleep", "/wake_up", "train", "/start", "/update_weights", "/finish", "/v1/compl"))
        if known and kept[-1:] != [call]:
            kept.append(call)
    return kept


@pytest.mark.parametrize(("weight_sync", "level"), [("auto", 2), ("difference", 1)])
def test_the_servers_sleep_while_the_run_trains(
    weight_sync: str, level: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2 replaces the weights by NaN in the fake server, so the canary would fail if one were not sent again."""
    fakes = fake_of(model_folder), fake_of(model_folder)
    slept: list[set[str]] = []

    def seen() -> None:
        for fake in fakes:
            slept.append(set(fake.asleep))
            fake.calls.append("train")

    observe_training(monkeypatch, seen)
    with serving(*fakes) as urls:
        config = make_config(tmp_path / "run", model_folder, servers=urls, colocated=True, weight_sync=weight_sync)
        train(config)
    assert slept == [BOTH] * 6
    found = lines(tmp_path / "run")
    assert [line["samples"] for line in found] == [SAMPLES] * 3
    for line in found:
        assert line["loss/sampler_difference"] < 1e-5
        assert line["sampler/servers"] == 2
        assert line["sampler/sleep_seconds"] > 0
    sends = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    step = ["/wake_up?tags=weights", *sends, "/wake_up?tags=kv_cache", "/v1/completions", f"/sleep?level={level}"]
    for fake in fakes:
        assert fake.broken == []
        assert fake.levels == [level] * 3
        assert fake.asleep == BOTH, "the servers sleep after the run"
        first = fake.calls.index(step[0])
        assert order_of(fake.calls[first:]) == [*step, "train"] * 3
    assert start.transfer_folder(config).parent == Path("/dev/shm"), "no copy goes through a disk"
    assert not start.transfer_folder(config).exists()


def evaluated(config: Config, folder: Path) -> Config:
    path = folder / "held_out.jsonl"
    path.write_text('{"prompt": "3+1"}\n{"prompt": "2+11"}\n')
    return replace(config, eval=replace(config.eval, path=(str(path),), every=1))


def test_an_evaluation_during_training(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_of(model_folder)
    slept: list[set[str]] = []
    observe_training(monkeypatch, lambda: slept.append(set(fake.asleep)))
    with serving(fake) as (url,):
        config = make_config(tmp_path / "run", model_folder, servers=[url], colocated=True)
        train(evaluated(config, tmp_path))
    assert slept == [BOTH] * 3
    assert fake.broken == []
    assert len(fake.levels) > 3, "it also slept after each evaluation"
    assert len(lines(tmp_path / "run", "evaluation.jsonl")) >= 3


def colocated_ranks(rank: int, world: int, config: Config) -> None:
    train(config)


def test_two_ranks_share_a_server(model_folder: Path, tmp_path: Path) -> None:
    fake = fake_of(model_folder)
    with serving(fake) as (url,):
        run_ranks(2, colocated_ranks, make_config(tmp_path / "run", model_folder, servers=[url], colocated=True))
    assert [line["samples"] for line in lines(tmp_path / "run")] == [SAMPLES] * 3
    assert fake.broken == []
    assert fake.levels == [2] * 3, "only the first rank sends the request"


# Killed runs


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("awake", [[], ["weights"]])
@pytest.mark.parametrize("updating", [True, False])
def test_a_server_that_a_killed_run_left_asleep(
    colocated: bool, awake: list[str], updating: bool, model_folder: Path, tmp_path: Path
) -> None:
    """The next run wakes the server before it uses it, also if this run does not share the device."""
    fake = fake_of(model_folder)
    fake.version = "7"
    fake.answer("/sleep", {}, "level=2")
    for part in awake:
        fake.answer("/wake_up", {}, f"tags={part}")
    if updating and awake:
        fake.answer("/start_weight_update", {})
    with serving(fake) as (url,):
        train(make_config(tmp_path / "run", model_folder, servers=[url], colocated=colocated, steps=1))
    assert fake.broken == []
    assert lines(tmp_path / "run")[0]["loss/sampler_difference"] < 1e-5
    assert fake.asleep == (BOTH if colocated else set())


def killed_while_servers_sleep(rank: int, world: int, config: Config) -> None:
    def kill(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, on_step=kill)


def test_a_trainer_is_killed_and_resumed(model_folder: Path, tmp_path: Path) -> None:
    fake = fake_of(model_folder)
    with serving(fake) as (url,):
        checkpoint = {"every": 1, "export": False}
        config = make_config(tmp_path / "run", model_folder, servers=[url], colocated=True, checkpoint=checkpoint)
        run_ranks(1, killed_while_servers_sleep, config, dying=[0])
        assert fake.asleep == BOTH
        train(config)
    assert lines(tmp_path / "run")[-1]["step"] == 2
    assert fake.broken == []
    assert fake.version == "2"


def test_a_server_dies_asleep(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted only when the run no longer trains, because a starting server allocates memory."""
    starts: list[int] = []
    fake = fake_of(model_folder)

    def seen() -> None:
        launcher = RecordedLauncher.present
        assert launcher is not None
        one = launcher.launched[0]
        if not starts:
            assert one._watchdog is not None
            (process,) = servers_of(one._watchdog.pid)
            os.kill(process, signal.SIGKILL)
            time.sleep(1.5)  # the launcher checks its servers every 0.1 s
            starts.append(one.starts)

    observe_training(monkeypatch, seen)
    with serving(fake) as urls:
        train(make_config(tmp_path / "run", model_folder, launch=launch_of(urls), colocated=True))
    assert starts == [1]
    assert [line["samples"] for line in lines(tmp_path / "run")] == [SAMPLES] * 3
    assert lines(tmp_path / "run")[-1]["sampler/restarts"] == 1


def test_a_server_dies_before_it_sleeps(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted and sleeps before the run trains."""
    fake = fake_of(model_folder)
    put_to_sleep, killed, slept = VllmServer.sleep, [False], []

    async def dies_first(server: VllmServer, level: int) -> None:
        launcher = RecordedLauncher.present
        assert launcher is not None
        watchdog = launcher.launched[0]._watchdog
        if not killed[0] and watchdog is not None:
            killed[0] = True
            (process,) = servers_of(watchdog.pid)
            os.kill(process, signal.SIGKILL)
        await put_to_sleep(server, level)

    monkeypatch.setattr(VllmServer, "sleep", dies_first)
    observe_training(monkeypatch, lambda: slept.append(set(fake.asleep)))
    with serving(fake) as urls:
        train(make_config(tmp_path / "run", model_folder, launch=launch_of(urls), colocated=True, steps=2))
    assert killed == [True]
    assert slept == [BOTH] * 2
    assert lines(tmp_path / "run")[-1]["sampler/restarts"] == 1


def test_a_server_that_does_not_sleep(model_folder: Path, tmp_path: Path) -> None:
    """The run did not start it, so it goes on and says what may happen."""
    fake = fake_of(model_folder)
    fake.failing = {"/sleep"}
    line = r"/sleep\?level=2 answered 500 \(the engine failed\); if this server is running, it keeps its GPU memory"
    with serving(fake) as (url,), pytest.warns(PadfreeWarning, match=line):
        train(make_config(tmp_path / "run", model_folder, servers=[url], colocated=True, steps=1))
    assert len(lines(tmp_path / "run")) == 1


def test_a_request_to_a_sleeping_server_fails() -> None:
    """The fake server notices a wake that a run has forgotten."""
    fake = FakeVllm()
    fake.version = "4"
    with serving(fake) as (url,):
        server = VllmServer(url, 20.0)
        asyncio.run(server.sleep(1))
        with pytest.raises(RuntimeError, match=r"needs .*kv_cache.*, which sleeps"):
            asyncio.run(server.score([[1, 2]], num_sampled=1, temperature=1.0, model="policy", salt=""))
        asyncio.run(server.wake("weights"))
        asyncio.run(server.begin())
        with pytest.raises(RuntimeError, match="which sleeps"):
            asyncio.run(server.resume())
        asyncio.run(server.wake("kv_cache"))
        asyncio.run(server.resume())
        asyncio.run(server.score([[1, 2]], num_sampled=1, temperature=1.0, model="policy", salt=""))
    assert fake.broken == ["/v1/completions", "/resume"]


# Adapters and engines of users


class Calls:
    """A server that records its calls."""

    url = "http://a:1"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **settings: Any) -> None:
            self.calls.append(" ".join([name, *(one for one in arguments if isinstance(one, str))]))

        return call


@pytest.mark.parametrize("colocated", [True, False])
def test_adapters_are_loaded_by_a_server_that_is_awake(colocated: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, server, loop = build("qwen3"), Calls(), LoopThread("servers")
    add_adapters(model, LoraConfig(rank=2))
    with distributed(device="cpu"):
        sync = WeightSync(
            servers=[cast(Any, server)],
            loop=loop,
            mesh=make_mesh("cpu"),
            stream=WeightStream(model, torch.float32),
            sent=None,
            transport=FilesTransport(tmp_path),
            folder=tmp_path,
            base="base",
            model="policy",
            adapters=True,
            launcher=None,
            colocated=colocated,
        )
        sync.send(model, 3)
    loop.close()
    wakes = ["wake weights", "wake kv_cache"] if colocated else []
    assert server.calls == [*wakes, "pause", "resume", "load_adapters"]
    assert not sync.sends_all, "the server keeps the base weights, so it must not discard them"


class OwnSampler:
    """An engine of a user."""

    asleep = False

    def update_weights(self, trained: Any, version: int) -> None: ...

    def sample(self, requests: list[SamplingRequest]) -> list[Any]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class OwnSleepingSampler(OwnSampler):
    def sleep(self) -> None:
        self.asleep = True


def own_engine(config: Any, mesh: Any, trained: Any, tokenizer: Any, score: Any) -> OwnSampler:
    return OwnSampler()


def own_sleeping_engine(config: Any, mesh: Any, trained: Any, tokenizer: Any, score: Any) -> OwnSampler:
    return OwnSleepingSampler()


def test_an_engine_of_a_user_must_be_able_to_sleep(model_folder: Path, tmp_path: Path) -> None:
    def made(function: str) -> Any:
        config = make_config(
            tmp_path / "run", model_folder, engine=f"{HERE}:{function}", servers=["http://a:1"], colocated=True
        )
        return make_sampler(config, *cast(Any, (None,) * 4))

    with refused("rollout.engine", "returned an object of type OwnSampler, which has no sleep"):
        made("own_engine")
    sampler = made("own_sleeping_engine")
    assert isinstance(sampler, CheckedSampler)
    sampler.sleep()
    assert sampler.sampler.asleep


def test_the_run_puts_an_engine_to_sleep_only_if_it_is_colocated() -> None:
    for colocated in (True, False):
        sampler = OwnSleepingSampler()
        collector: Any = SimpleNamespace(settings=SimpleNamespace(colocated=colocated), sampler=sampler)
        Collector._let_servers_sleep(collector)
        assert sampler.asleep == colocated


# Memory


def test_options_of_a_server_that_the_run_starts() -> None:
    words = VllmServer.command(["vllm", "serve"], served_of(colocated=True, memory=0.45), name="policy", port=5)
    assert "--enable-sleep-mode" in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.45"
    words = VllmServer.command(["vllm", "serve"], served_of(), name="policy", port=5)
    assert not {"--enable-sleep-mode", "--gpu-memory-utilization"} & set(words)


def settings(**rollout: Any) -> Config:
    given = {"reward": "exact_match", "engine": "vllm", "servers": ["http://a:1"], **rollout}
    return config_from_dict(
        {
            "model": {"path": "m"},
            "data": {"path": ["p"]},
            "loss": {"kind": "clip"},
            "batch": BATCH,
            "run": {"folder": "f"},
            "rollout": given,
        }
    )


def test_memory_that_automatic_choices_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared GPU: all memory but that of a sleeping server, however much is free at the moment."""
    gib, device = 2**30, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    assert resolve_auto.training_memory(settings(), device) == 8 * gib
    assert resolve_auto.training_memory(settings(colocated=True), device) == 98 * gib
    assert resolve_auto.training_memory(settings(colocated=True, sleeping_memory=3.5), device) == 96.5 * gib
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_auto.training_memory(settings(colocated=True), device) == 78 * gib
    cpu = torch.device("cpu")
    assert resolve_auto.training_memory(settings(colocated=True), cpu) == resolve_auto.device_memory(cpu)


def test_the_line_of_a_dry_run() -> None:
    gib = 2**30
    memory: Any = SimpleNamespace(device=60 * gib, between_steps=20 * gib)

    def line(whole: int, **rollout: Any) -> str:
        return shared_memory_line(memory, settings(colocated=True, **rollout), whole * gib)

    assert line(80, server_memory=0.5) == (
        "shared GPU of 80.00 GiB: training 60.00 GiB + 2.00 GiB of the sleeping server; sampling 20.00 GiB + 40.00 GiB "
        "of the server"
    )
    assert "training 60.00 GiB + 2.00 GiB of the sleeping server, which does not fit;" in line(61, server_memory=0.5)
    assert line(80, server_memory=0.9).endswith("sampling 20.00 GiB + 72.00 GiB of the server, which does not fit")
    assert line(80).endswith("sampling 20.00 GiB + the server (set rollout.server_memory to count it)")


def test_what_a_colocated_run_sends() -> None:
    shared = settings(colocated=True).rollout
    assert shared.resolved_transfer == "files"
    assert not shared.keeps_sent_weights("bfloat16"), "servers that discard their weights need all of them"
    assert settings(colocated=True, weight_sync="difference").rollout.keeps_sent_weights("bfloat16")
    alone = settings().rollout
    assert alone.resolved_transfer == "group"
    assert alone.keeps_sent_weights("bfloat16")
    assert settings(transfer="files").rollout.resolved_transfer == "files"
