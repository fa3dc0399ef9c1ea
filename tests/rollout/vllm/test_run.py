"""Whole runs with fake vLLM servers: the trained samples, and servers that fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.config import Config, config_from_dict
from padfree.distributed import distributed, make_mesh
from padfree.record.run_folder import mark_run_folder
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.sample_exchange import whole
from padfree.rollout.engines import make_sampler
from padfree.rollout.engines.servers import pool, server_processes, start
from padfree.rollout.engines.servers import sampler as sampler_module
from padfree.rollout.engines.servers.server_api import LateError, RestartedError, VersionError
from padfree.rollout.engines.servers.server_processes import LaunchedServer, Launcher
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.token_ids import vocabulary_of
from padfree.sample import Sample
from padfree.testing.models import save_with_tokenizer
from padfree.train import run as run_module
from padfree.train.batcher import make_batcher
from padfree.train.run import train
from padfree.train.setup import build_engine
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rollout.vllm import vllm_cases
from tests.rollout.vllm.test_http import served_of
from tests.rollout.vllm.test_watchdog import alive
from tests.rollout.vllm.vllm_cases import FakeVllm, launch_of, serving
from tests.waiting import wait_until

HERE = "tests.rollout.vllm.test_run"
ROOT = Path(__file__).parents[3]
GROUP, SAMPLES = 3, 12


def digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter.isdigit() for letter in response) / 6


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)


def make_config(
    folder: Path, model: Path, *, steps: int = 3, checkpoint: Mapping[str, Any] | None = None, **rollout: Any
) -> Config:
    rows = [{"prompt": f"{a}+{'1' * b}"} for a in range(4) for b in range(1, 4)]
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_from_dict(
        {
            "model": {"path": str(model)},
            "data": {"path": [str(data)], "epochs": None},
            "batch": {"samples": SAMPLES, "max_tokens": 80},
            "rollout": {
                "reward": f"{HERE}:digits",
                "samples_per_prompt": GROUP,
                "max_new_tokens": 6,
                "engine": "vllm",
                "timeout": 300.0,  # on a busy machine even a small server starts slowly
                **rollout,
            },
            "loss": {"kind": "clip", "temperature": 0.8},
            "optimizer": {"lr": 2e-3, "eps": 1e-3},
            "checkpoint": {"every": 1000, **(checkpoint or {"export": False})},
            "run": {"folder": str(folder), "steps": steps, "device": "cpu"},
        }
    )


def fake_of(model: Path) -> FakeVllm:
    policy: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    return FakeVllm(vocabulary=policy.config.vocab_size, model=policy, tokenizer=AutoTokenizer.from_pretrained(model))


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.mark.parametrize("transfer", ["group", "files"])
def test_a_run_on_a_server(transfer: str, model_folder: Path, tmp_path: Path) -> None:
    fake = fake_of(model_folder)
    before = {name: value.clone() for name, value in fake.model.named_parameters()}
    with serving(fake) as (url,):
        train(make_config(tmp_path / "run", model_folder, servers=[url], transfer=transfer))
    found = lines(tmp_path / "run")
    assert [line["samples"] for line in found] == [SAMPLES] * 3
    for line in found:
        assert line["loss/sampler_difference"] < 1e-5, "the same policy in float32"
        assert line["sampler/canary_difference"] < 1e-5
        assert "version_age" not in line, "without rollout.staleness"
        assert line["sampler/weight_sync_bytes"] > sum(value.nbytes for value in before.values()) / 2
    assert found[1]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)
    assert fake.version == "2", "the weights of the last batch, after two steps"
    assert any(not torch.equal(value, before[name]) for name, value in fake.model.named_parameters())
    sampled = [body for body in fake.completed if "stop_token_ids" in body]
    assert len(sampled) == 3 * SAMPLES
    assert {body["cache_salt"].split()[1] for body in sampled} == {"0", "1", "2"}, (
        "caches of other versions are not used"
    )
    assert list((tmp_path / "run").glob("*weights*")) == [], "no copy of the model is left behind"


def first_samples(config: Config) -> list[Sample]:
    mesh = make_mesh("cpu")
    if mesh.loss.rank == 0:
        mark_run_folder(config)
    tokenizer = load_tokenizer(config)
    batcher = make_batcher(config, load_training_data(config, tokenizer).samples)
    engine = build_engine(config, mesh)
    sampler = make_sampler(config, mesh, engine.model, tokenizer, engine.scorer.logprobs)
    collector = Collector(
        config.rollout, config.loss, config.run, mesh, sampler, tokenizer, vocabulary=vocabulary_of(engine.model)
    )
    groups: Any = next(batcher)
    with closing(collector):
        collector.sync_weights(engine.model, 0)
        collector.put(groups, batch=batcher.step, version=0)
        return whole(collector.take(batcher.step, version=0))


def ranks(rank: int, world: int, config: Config) -> list[Sample]:
    return first_samples(config)


def test_two_ranks_give_the_samples_of_one(model_folder: Path, tmp_path: Path) -> None:
    fakes = [fake_of(model_folder), fake_of(model_folder)]
    with serving(*fakes) as urls:
        with distributed(device="cpu"):
            expected = first_samples(make_config(tmp_path / "one", model_folder, servers=urls[:1]))
        results = run_ranks(2, ranks, make_config(tmp_path / "two", model_folder, servers=urls))
    for found in results:
        for sample, other in zip(found, expected, strict=True):
            assert np.array_equal(sample.tokens, other.tokens)
            assert (sample.uid, sample.group, sample.reward) == (other.uid, other.group, other.reward)
            np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4)


def test_the_canary_stops_a_run_whose_server_keeps_its_weights(model_folder: Path, tmp_path: Path) -> None:
    fake = fake_of(model_folder)
    fake.stale = True
    line = (
        r"was sent policy version 1, but its log-probabilities differ from the trainer's by .*; use padfree's transfer"
    )
    with serving(fake) as (url,), pytest.raises(ValueError, match=line) as caught:
        train(make_config(tmp_path / "run", model_folder, servers=[url]))
    assert "\n" not in str(caught.value)
    assert [line["step"] for line in lines(tmp_path / "run")] == [0], (
        "the first weights equal those that it loaded itself"
    )


class NeverScores(FakeVllm):
    """Accepts weights, and fails all requests afterwards."""

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fault = "500"
        return super()._finish(body)


def test_the_run_ends_if_no_server_accepts_the_weights(model_folder: Path, tmp_path: Path) -> None:
    plain = fake_of(model_folder)
    fake = NeverScores(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    line = r"/v1/completions answered 500 .*, and no server accepted the weights for 2 s; check that a server"
    with serving(fake) as (url,), pytest.raises(ValueError, match=line):
        train(make_config(tmp_path / "run", model_folder, servers=[url], timeout=2.0))


class OtherSizes(FakeVllm):
    """A server of another model with the same vocabulary."""

    def _take(self, transfer_info: dict[str, Any]) -> dict[str, Any]:
        super()._take(transfer_info)
        raise RuntimeError("the sizes of a layer are others")


def test_a_server_of_another_model_ends_the_run_at_once(model_folder: Path, tmp_path: Path) -> None:
    plain = fake_of(model_folder)
    fake = OtherSizes(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    line = r"/update_weights answered 500 \(the sizes of a layer are others\), in 3 weight syncs in a row; start the"
    with serving(fake) as (url,), pytest.raises(ValueError, match=line) as caught:
        train(make_config(tmp_path / "run", model_folder, servers=[url]))
    assert "\n" not in str(caught.value)


def test_an_update_of_a_killed_run_is_ended_first(model_folder: Path, tmp_path: Path) -> None:
    fake = fake_of(model_folder)
    fake.answer("/pause", {})
    fake.answer("/start_weight_update", {})
    with serving(fake) as (url,):
        train(make_config(tmp_path / "run", model_folder, servers=[url], steps=1))
    assert fake.version == "0"
    assert not fake.paused


def test_a_restarted_server_receives_the_weights_again(model_folder: Path, tmp_path: Path) -> None:
    """The only server restarts in the middle of sampling: the rest of the batch waits for the weights."""
    fake = fake_of(model_folder)
    fake.seconds = 0.05

    def restart() -> None:
        wait_until(lambda: len([body for body in fake.completed if "stop_token_ids" in body]) > 3)
        fake.version = "default"

    with serving(fake) as (url,):
        threading.Thread(target=restart, daemon=True).start()
        train(make_config(tmp_path / "run", model_folder, servers=[url], max_concurrent=2, steps=2))
    assert [line["samples"] for line in lines(tmp_path / "run")] == [SAMPLES] * 2
    assert fake.calls.count("/finish_weight_update") == 3
    sampled = Counter(body["seed"] for body in fake.completed if "stop_token_ids" in body)
    assert len(sampled) == 2 * SAMPLES


@pytest.mark.parametrize("kind", [VersionError, RestartedError])
def test_a_request_that_fails_during_a_weight_sync_is_retried(
    kind: type[Exception], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the weights are the same, and the weight sync has ended before the failure is handled."""
    respond, version = VllmServer.respond, VllmServer.version
    asked, probed, exchanged = (threading.Event() for _ in range(3))
    hung_up: list[str] = []

    async def late(server: VllmServer, request: SamplingRequest, *args: Any, **settings: Any) -> Response:
        if not asked.is_set():
            asked.set()
            assert await asyncio.to_thread(exchanged.wait, 60.0)
            what = f"{server.url} has lost the weights of the run"
            raise kind("rollout.servers", what, "start it again") if kind is VersionError else kind(what)
        return await respond(server, request, *args, **settings)

    async def late_probe(server: VllmServer, *, timeout: float | None = None) -> str | None:
        if asked.is_set() and not probed.is_set():  # the first call of a probe, not of a weight sync
            probed.set()
            assert await asyncio.to_thread(exchanged.wait, 60.0)
            raise LateError(f"rollout.servers: {server.url} /weight_info did not answer within 30 s")
        return await version(server, timeout=timeout)

    monkeypatch.setattr(VllmServer, "respond", late)
    monkeypatch.setattr(VllmServer, "version", late_probe)
    monkeypatch.setattr(pool._ServerState, "cancel_requests", lambda state: hung_up.append(state.server.url))
    monkeypatch.setattr(sampler_module, "PROBE_EVERY", 0.1)
    found: dict[int, Response] = {}
    requests = [SamplingRequest(tokens=np.array([3, 4]), max_new_tokens=2, key=1 + number) for number in range(5)]
    with serving(fake_of(model_folder)) as (url,), distributed(device="cpu"):
        config = make_config(tmp_path / "run", model_folder, servers=[url], staleness=1, max_concurrent=2)
        mesh = make_mesh("cpu")
        engine = build_engine(config, mesh)
        sampler: Any = make_sampler(config, mesh, engine.model, load_tokenizer(config), engine.scorer.logprobs)
        try:
            sampler.update_weights(engine.model, 0)
            sampler.begin(requests, found.__setitem__)
            assert asked.wait(60.0)
            assert probed.wait(60.0)
            sampler.renew()
            exchanged.set()
            wait_until(lambda: len(found) == 5 or sampler.failure is not None or sampler.stuck)
            assert sampler.failure is None
            assert not sampler.stuck
            assert sorted(found) == list(range(5))
            assert hung_up == [], "cancelling would also have interrupted the weight sync"
        finally:
            sampler.close()
    assert "servers" not in [thread.name for thread in threading.enumerate()]


class Late(FakeVllm):
    """A request arrives during one weight sync, and is in progress at the next one."""

    asked = 0
    under_way: threading.Event

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "stop_token_ids" in body:
            self.asked += 1
            if self.asked == 1:
                wait_until(lambda: self._pauses == 2)
        return super()._complete(body)

    def _before_token(self, body: dict[str, Any], count: int, pauses: int) -> None:
        if "stop_token_ids" in body and count == 1 and pauses == 2:
            self.under_way.set()
            wait_until(lambda: self._pauses == 3)


def test_tokens_of_a_request_that_came_during_a_weight_sync_have_no_older_version(
    model_folder: Path, tmp_path: Path
) -> None:
    """The server had the older weights when it reported its version, and the newer ones when it sampled."""
    plain = fake_of(model_folder)
    fake = Late(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    fake.under_way = threading.Event()
    found: dict[int, Response] = {}
    with serving(fake) as (url,), distributed(device="cpu"):
        config = make_config(tmp_path / "run", model_folder, servers=[url], staleness=1, max_concurrent=1)
        mesh = make_mesh("cpu")
        engine = build_engine(config, mesh)
        sampler: Any = make_sampler(config, mesh, engine.model, load_tokenizer(config), engine.scorer.logprobs)
        try:
            sampler.update_weights(engine.model, 0)
            sampler.begin([SamplingRequest(tokens=np.array([3, 4]), max_new_tokens=3, key=1)], found.__setitem__)
            wait_until(lambda: fake.asked == 1)
            sampler.update_weights(engine.model, 1)
            assert fake.under_way.wait(60.0)
            sampler.update_weights(engine.model, 2)
            wait_until(lambda: (0 in found and found[0].is_whole(3)) or sampler.failure is not None)
        finally:
            sampler.close()
    assert sampler.failure is None
    assert set(found[0].token_versions.tolist()) == {2}


class RecordedLauncher(Launcher):
    """The launcher of the run under test."""

    present: RecordedLauncher | None = None

    def __init__(self, launched: Sequence[LaunchedServer]) -> None:
        super().__init__(launched)
        RecordedLauncher.present = self


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server_processes, "Launcher", RecordedLauncher)
    monkeypatch.setattr(server_processes, "EVERY", 0.1)
    monkeypatch.setattr(server_processes, "LONGEST_PAUSE", 0.5)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    RecordedLauncher.present = None
    yield
    RecordedLauncher.present = None


def servers_of(watchdog: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(watchdog)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def test_one_of_two_servers_is_killed_again_and_again(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group is trained on exactly once, and no process is left when the run ends."""
    killed: list[int] = []
    asked: list[str] = []
    respond = VllmServer.respond

    async def recorded(server: VllmServer, *args: Any, **settings: Any) -> Any:
        asked.append(server.url)
        return await respond(server, *args, **settings)

    monkeypatch.setattr(VllmServer, "respond", recorded)

    def killer() -> None:
        wait_until(lambda: RecordedLauncher.present is not None)
        launcher = RecordedLauncher.present
        assert launcher is not None
        one, last = launcher.launched[1], 0
        while len(killed) < 2:
            at_work = one.starts > last and one.server.url in asked[-4:]
            if at_work and one._watchdog is not None:
                last = one.starts
                asked.clear()
                killed.extend(servers_of(one._watchdog.pid))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.002)

    threading.Thread(target=killer, daemon=True).start()
    counted: list[tuple[float, float]] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        counted.append((metrics["samples"], metrics["groups"]))
        if metrics["sampler/restarts"] >= 2 and metrics["sampler/servers"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # ends the run after this step

    with serving(fake_of(model_folder), fake_of(model_folder)) as urls:
        train(
            make_config(tmp_path / "run", model_folder, launch=launch_of(urls), steps=4000, max_concurrent=4),
            on_step=on_step,
        )
    assert len(killed) == 2
    assert set(counted) == {(SAMPLES, SAMPLES // GROUP)}
    last = lines(tmp_path / "run")[-1]
    assert last["sampler/restarts"] >= 2
    assert last["sampler/servers"] == 2, "it restarted and received the weights"
    assert RecordedLauncher.present is not None
    assert all(one._watchdog is None for one in RecordedLauncher.present.launched)
    assert "start 3: " in (tmp_path / "run" / "servers" / "1.log").read_text()


def test_a_command_that_never_becomes_a_server(launchers: None, model_folder: Path, tmp_path: Path) -> None:
    never = {
        "command": [sys.executable, "-c", "import sys; sys.exit('SomeError: no such option')"],
        "devices": ["cpu"],
    }
    line = (
        r"rollout.launch: http://127.0.0.1:\d+ ended with status 1 before it answered, 3 times "
        r"\(SomeError: no such option\); correct rollout.launch.command \(the output of the server is in .*0.log\)"
    )
    with pytest.raises(ValueError, match=line):
        train(make_config(tmp_path / "run", model_folder, launch=never))


def test_a_server_that_does_not_come_back_ends_the_run_before_the_timeout(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond = VllmServer.respond

    async def killed_at_work(server: VllmServer, *args: Any, **settings: Any) -> Any:
        launcher = RecordedLauncher.present
        assert launcher is not None
        one = launcher.launched[0]
        if one._command[1] != "-c":
            one._command = [sys.executable, "-c", "import sys; sys.exit('SomeError: the device is gone')"]
            assert one._watchdog is not None
            (process,) = servers_of(one._watchdog.pid)
            os.kill(process, signal.SIGKILL)
        return await respond(server, *args, **settings)

    monkeypatch.setattr(VllmServer, "respond", killed_at_work)
    monkeypatch.setattr(sampler_module, "PROBE_EVERY", 0.1)
    line = r"rollout.launch: .* ended with status 1 before it answered, 3 times \(SomeError: the device is gone\);"
    with serving(fake_of(model_folder)) as urls, pytest.raises(ValueError, match=line):
        train(make_config(tmp_path / "run", model_folder, launch=launch_of(urls)))
    assert no_server_is_left()


def test_a_server_that_cannot_be_started(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: LaunchedServer) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(LaunchedServer, "_start", refuse)
    line = r"rollout.launch: http://127.0.0.1:\d+ cannot be started \(.* temporarily unavailable\); free disk space"
    with serving(fake_of(model_folder)) as urls, pytest.raises(ValueError, match=line) as caught:
        train(make_config(tmp_path / "run", model_folder, launch=launch_of(urls)))
    assert "\n" not in str(caught.value)


def no_server_is_left() -> bool:
    launcher = RecordedLauncher.present
    assert launcher is not None
    assert all(one.starts for one in launcher.launched), "all were started"
    watched = launcher._watching is not None and not launcher._watching.done()
    return not watched and all(one._watchdog is None for one in launcher.launched)


def test_no_server_outlives_a_start_that_fails(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails because a server does not fit the run, by an interrupt, or by a bug after the sampler is made."""
    fake = fake_of(model_folder)
    with serving(fake) as urls:
        config = make_config(tmp_path / "run", model_folder, launch=launch_of(urls))
        fake.missing = {"/weight_info"}
        with pytest.raises(ValueError, match="has no route /weight_info; start the server with VLLM_SERVER_DEV_MODE=1"):
            train(config)
        assert no_server_is_left()
        fake.missing = set()

        def interrupt(*_: Any, **settings: Any) -> None:
            raise KeyboardInterrupt

        for owner, name in ((start, "check_servers"), (Collector, "__init__"), (run_module, "ResponseLog")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    train(config)
            assert no_server_is_left()


def test_missing_servers(model_folder: Path, tmp_path: Path) -> None:
    url = vllm_cases.unused_url()
    with refused("rollout.servers", f"{url} refused the connection"):
        train(make_config(tmp_path / "run", model_folder, servers=[url]))


def test_the_command_line_of_a_server(tmp_path: Path) -> None:
    given = ["vllm", "serve", "--dtype=float16", "--max-model-len", "99"]
    words = VllmServer.command(given, served_of(path=str(tmp_path / "model")), name="policy", port=5)
    assert words[:5] == ["vllm", "serve", "--dtype=float16", "--max-model-len", "99"]
    assert words.count("--dtype") == 0, "options in the command take precedence"
    assert "--enable-lora" not in words
    for flag, value in (
        ("--model", str(tmp_path / "model")),
        ("--port", "5"),
        ("--logprobs-mode", "processed_logprobs"),
    ):
        assert words[words.index(flag) + 1] == value


def test_lora_target_modules_of_a_server() -> None:
    served = served_of(lora_rank=3, adapted=["down_proj", "q_proj"])
    words = VllmServer.command(["vllm", "serve"], served, name="policy", port=5)
    first = words.index("--lora-target-modules")
    assert words[first + 1 : first + 3] == ["down_proj", "q_proj"]
    assert words[words.index("--max-lora-rank") + 1] == "8"


def killed_after_a_step(rank: int, world: int, config: Config, pids: Path) -> None:
    def kill(metrics: Mapping[str, Any]) -> None:
        (watchdog,) = filter(servers_of, servers_of(os.getpid()))  # ps is also a child
        (server,) = servers_of(watchdog)
        pids.write_text(f"{watchdog} {server}")
        os.kill(os.getpid(), signal.SIGKILL)

    train(config, on_step=kill)


def test_a_killed_run_leaves_no_server(model_folder: Path, tmp_path: Path) -> None:
    with serving(fake_of(model_folder)) as urls:
        config = make_config(tmp_path / "run", model_folder, launch=launch_of(urls))
        run_ranks(1, killed_after_a_step, config, tmp_path / "pids", dying=[0])
        watchdog, server = (int(word) for word in (tmp_path / "pids").read_text().split())
        wait_until(lambda: not alive(server) and not alive(watchdog))
