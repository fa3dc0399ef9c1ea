"""A second server engine with a different protocol than vLLM: the generic code works for it unchanged."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from padfree.choices import SAMPLING_ENGINES
from padfree.config import Config, LoraConfig
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers import server_processes
from padfree.rollout.engines.servers.server_api import (
    LateError,
    RestartedError,
    SamplingSettings,
    ServerLostError,
    VersionError,
)
from padfree.rollout.loop_thread import LoopThread
from padfree.testing.line_server import LineServer, LineService
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.refused import refused
from tests.rollout.vllm.test_http import served_of
from tests.rollout.vllm.test_run import SAMPLES, RecordedLauncher, launchers, lines, make_config, servers_of
from tests.rollout.vllm.vllm_cases import unused_url

__all__ = ["launchers"]  # a fixture
ENGINE = "padfree.testing.line_server:make_line_sampler"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)


def service_of(folder: Path, kind: type[LineService] = LineService) -> LineService:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    return kind(model, "policy")


@contextmanager
def serving(*services: LineService) -> Iterator[list[str]]:
    loop = LoopThread("line servers")
    servers = [loop.run(service.listen()) for service in services]
    try:
        yield [f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            loop.call(server.close)
        loop.close()


@pytest.mark.parametrize(("transfer", "staleness"), [("group", 0), ("files", 1)])
def test_a_run_on_a_server(transfer: str, staleness: int, model_folder: Path, tmp_path: Path) -> None:
    service = service_of(model_folder)
    before = service.model.get_input_embeddings().weight.clone()
    with serving(service) as (url,):
        settings: dict[str, Any] = {"engine": ENGINE, "transfer": transfer, "staleness": staleness}
        train(make_config(tmp_path / "run", model_folder, servers=[url], **settings))
    found = lines(tmp_path / "run")
    assert [line["samples"] for line in found] == [SAMPLES] * 3
    for line in found:
        assert line["loss/sampler_difference"] < 1e-5 or staleness
        assert line["sampler/canary_difference"] < 1e-5
    assert found[1]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)
    assert service.version == "2"
    assert not np.array_equal(before.detach().numpy(), service.model.get_input_embeddings().weight.detach().numpy())


def test_adapters_are_merged_for_an_engine_without_adapters(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    service = service_of(model_folder)
    with serving(service) as (url,):
        config = make_config(tmp_path / "run", model_folder, servers=[url], engine=ENGINE, steps=2)
        train(replace(config, lora=LoraConfig(rank=2), optimizer=replace(config.optimizer, lr=0.05)))
    found = lines(tmp_path / "run")
    assert all(line["loss/sampler_difference"] < 1e-5 for line in found)
    assert found[1]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)


def test_a_run_starts_its_server_and_starts_it_again_when_it_is_killed(
    launchers: None, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_processes, "EVERY", 0.1)
    killed: list[int] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        launcher = RecordedLauncher.present
        assert launcher is not None
        watchdog = launcher.launched[0]._watchdog
        if not killed:
            assert watchdog is not None
            killed.extend(servers_of(watchdog.pid))
            os.kill(killed[0], signal.SIGKILL)

    command = {"command": [sys.executable, "-m", "padfree.testing.line_server"], "devices": ["cpu"]}
    train(make_config(tmp_path / "run", model_folder, engine=ENGINE, launch=command, steps=2), on_step=on_step)
    assert len(killed) == 1
    found = lines(tmp_path / "run")
    assert [line["samples"] for line in found] == [SAMPLES] * 2
    assert found[1]["sampler/restarts"] == 1
    assert "start 2: " in (tmp_path / "run" / "servers" / "0.log").read_text()


class Stale(LineService):
    """Reports success without loading the weights."""

    def load(self, form: Any) -> None:
        list(self._receiver.tensors(form))


class Refusing(LineService):
    def load(self, form: Any) -> None:
        list(self._receiver.tensors(form))
        raise RuntimeError("another model")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (
            Stale,
            r"was sent policy version 1, but its log-probabilities differ from the trainer's by .*; check that the",
        ),
        (Refusing, r"failed in bucket \(RuntimeError: another model\), in 3 weight syncs in a row; start the"),
    ],
)
def test_weights_that_do_not_arrive_end_the_run(
    kind: type[LineService], line: str, model_folder: Path, tmp_path: Path
) -> None:
    with serving(service_of(model_folder, kind)) as (url,), pytest.raises(ValueError, match=line) as caught:
        train(make_config(tmp_path / "run", model_folder, servers=[url], engine=ENGINE))
    assert "\n" not in str(caught.value)


def test_errors_of_a_server_are_one_line(model_folder: Path) -> None:
    request = SamplingRequest(tokens=np.array([3, 4]), max_new_tokens=4, key=5)

    def respond(url: str, *, vocabulary: int = 46, timeout: float = 5.0) -> Any:
        sampling = SamplingSettings(temperature=1.0, stops=(), vocabulary=vocabulary)
        server = LineServer(url, timeout)
        return asyncio.run(server.respond(request, sampling, model="policy", version=4, salt="run"))

    service = service_of(model_folder)
    with serving(service) as (url,):
        with pytest.raises(RestartedError, match="has restarted and lost the weights of the run"):
            respond(url)
        service.version = "3"
        with pytest.raises(VersionError, match="serves policy version '3', not 4"):
            respond(url)
        service.version = "4"
        with pytest.raises(ValueError, match=r"sampled token \d+, but the vocabulary size is 1; start the server with"):
            respond(url, vocabulary=1)
        with pytest.raises(ValueError, match=r"has a vocabulary of .*, but the model of this run has 7; start the"):
            asyncio.run(LineServer(url, 5.0).check(served_of(vocabulary=7)))
        asyncio.run(LineServer(url, 5.0).pause())
        with pytest.raises(LateError, match=r"did not answer the call 'complete' within 0.3 s"):
            respond(url, timeout=0.3)
    with pytest.raises(ServerLostError, match="refused the connection"):
        respond(unused_url())


def test_a_registered_engine_is_a_name(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in the registry is enough: the settings accept the name, and know that it needs servers."""
    monkeypatch.setitem(SAMPLING_ENGINES, "lines", ENGINE)

    def config(**rollout: Any) -> Config:
        return make_config(tmp_path / "run", model_folder, engine="lines", steps=1, **rollout)

    with refused("rollout.servers", r"\[\]"):
        config()
    service = service_of(model_folder)
    with serving(service) as (url,):
        train(config(servers=[url.replace("tcp:", "http:")]))
    assert service.version == "0"
