"""Servers that a user may use by mistake, each with a correct one, for `test_errors`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from padfree.config.rollout import RolloutConfig
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.servers.canary import Canary, CanaryScores
from padfree.rollout.engines.servers.server_api import SamplingSettings, ServerApi
from padfree.rollout.engines.servers.start import check_colocated, check_servers, check_truncation
from padfree.rollout.engines.servers.weight_stream import Bucket
from padfree.rollout.engines.servers.weight_sync import FilesTransport
from padfree.rollout.engines.vllm import VllmServer
from padfree.testing.line_server import LineServer
from tests.rollout.rollout_cases import letters_tokenizer
from tests.rollout.vllm.test_http import Answers, OtherTokenizer, check, served_of
from tests.rollout.vllm.vllm_cases import FakeVllm, serving, unused_url

Attempt = Callable[[Path], Any]


def server(*, temperature: float = 1.0, **changes: Any) -> Attempt:
    """Check a server before a run."""

    def attempt(folder: Path) -> None:
        fake = FakeVllm(vocabulary=46)
        for name, value in changes.items():
            setattr(fake, name, value)
        check(fake, temperature=temperature)

    return attempt


def address(fake: FakeVllm | None = None, *, silent: bool = False) -> Attempt:
    """Check a URL before a run: of this server, of a silent one, or of none."""

    def look(url: str) -> None:
        asyncio.run(check_servers([VllmServer(url, 0.5 if silent else 20.0)], served_of()))

    def attempt(folder: Path) -> None:
        if fake is not None:
            with serving(fake) as (url,):
                look(url)
        elif silent:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                look(f"http://127.0.0.1:{listening.getsockname()[1]}")
        else:
            look(unused_url())

    return attempt


def response(vocabulary: int = 50, **changes: Any) -> Attempt:
    """Request a response from a server."""

    def attempt(folder: Path) -> None:
        fake = FakeVllm()
        fake.version = "4"
        for name, value in changes.items():
            setattr(fake, name, value)
        request = SamplingRequest(tokens=np.array([3, 4, 5]), max_new_tokens=6, key=5)
        sampling = SamplingSettings(temperature=1.0, stops=(0,), vocabulary=vocabulary)
        with serving(fake) as (url,):
            asyncio.run(VllmServer(url, 20.0).respond(request, sampling, model="policy", version=4, salt="run"))

    return attempt


def canary_check(server: float, trainer: float, *, sampled: float = 0.0, limit: float = 0.002) -> Attempt:
    """Compare a server with the trainer after a weight sync."""

    def attempt(folder: Path) -> None:
        theirs = CanaryScores(fixed=np.full(9, server), sampled=np.full(4, sampled))
        ours = CanaryScores(fixed=np.full(9, trainer), sampled=np.zeros(4))
        Canary(limit, VllmServer).check("http://127.0.0.1:8000", theirs, ours, 1)

    return attempt


def files(name: str) -> Attempt:
    def attempt(folder: Path) -> None:
        (folder / "file").write_text("")
        FilesTransport(folder / name).prepare(Bucket())

    return attempt


def truncated(**changes: Any) -> Attempt:
    """Check a server before a run with rollout.top_k."""

    def attempt(folder: Path) -> None:
        fake = FakeVllm(vocabulary=46)
        fake.returns_kept = True
        for name, value in changes.items():
            setattr(fake, name, value)
        with serving(fake) as (url,):
            asyncio.run(VllmServer(url, 20.0).check(served_of(returns_kept="rollout.top_k")))

    return attempt


def colocated(**changes: Any) -> Attempt:
    """Check a server before a run with rollout.colocated."""

    def attempt(folder: Path) -> None:
        fake = FakeVllm(vocabulary=46)
        for name, value in changes.items():
            setattr(fake, name, value)
        with serving(fake) as (url,):
            asyncio.run(VllmServer(url, 20.0).check(served_of(colocated=True)))

    return attempt


def colocated_engine(api: type[ServerApi]) -> Attempt:
    """Make the servers of an engine for a run with rollout.colocated."""

    def attempt(folder: Path) -> None:
        settings = RolloutConfig(
            engine="module:function", reward="exact_match", servers=("http://a:1",), colocated=True
        )
        check_colocated(api, settings)

    return attempt


def truncation_of_engine(api: type[ServerApi]) -> Attempt:
    """Make the servers of an engine for a run with rollout.min_new_tokens."""

    def attempt(folder: Path) -> None:
        check_truncation(api, RolloutConfig(engine="module:function", reward="exact_match", min_new_tokens=2))

    return attempt


SERVERS = "rollout.servers"
RIGHT = address(FakeVllm(vocabulary=46, tokenizer=letters_tokenizer()))
CASES: list[tuple[str, Attempt, Attempt]] = [
    (SERVERS, address(), RIGHT),
    (SERVERS, address(silent=True), RIGHT),
    (SERVERS, address(Answers(200, b"<html>\nwelcome; to</html>")), RIGHT),
    (SERVERS, address(Answers(200, [])), RIGHT),
    (SERVERS, address(Answers(503, b"no healthy upstream")), RIGHT),
    (SERVERS, server(tokenizer=OtherTokenizer()), RIGHT),
    (SERVERS, server(vocabulary=45), server()),
    (SERVERS, server(vocabulary=47), server()),
    (SERVERS, server(backend="nccl"), server()),
    (SERVERS, server(release="0.23.0"), server(release="0.24.0")),
    (SERVERS, server(release="0.34.0"), server(release="0.33.0")),
    (SERVERS, server(release="dev"), server(release="0.32.1.dev3+g12ab")),
    (SERVERS, server(release="1.24.0"), server()),
    (SERVERS, server(missing={"/version"}), server()),
    (SERVERS, server(missing={"/weight_info"}), server()),
    (SERVERS, server(missing={"/v1/models"}), server()),
    (SERVERS, server(logprobs_mode="raw_logprobs", temperature=0.5), server(temperature=0.5)),
    (SERVERS, response(version="3"), response()),
    (SERVERS, response(vocabulary=1), response()),
    (SERVERS, response(stops=tuple(range(1, 50))), response()),
    (SERVERS, response(max_model_len=8), response()),
    (SERVERS, canary_check(-2.364, -2.737), canary_check(-2.7367, -2.737)),
    (SERVERS, canary_check(-2.364, -2.737), canary_check(-2.364, -2.737, limit=0.5)),
    (SERVERS, canary_check(-2.7, -2.7, sampled=-1.0), canary_check(-2.7, -2.7)),
    ("rollout.top_k", truncated(returns_kept=None), truncated()),
    ("rollout.top_k", truncated(returns_kept=False), truncated()),
    ("rollout.top_k", truncated(logprobs_mode="raw_logprobs"), truncated()),
    ("rollout.top_k", truncated(scales_out=False), truncated()),
    ("rollout.min_new_tokens", truncation_of_engine(LineServer), truncation_of_engine(VllmServer)),
    ("rollout.colocated", colocated(sleep_mode=False), colocated()),
    ("rollout.colocated", colocated_engine(LineServer), colocated_engine(VllmServer)),
    (SERVERS, colocated(missing={"/is_sleeping"}), colocated()),
    ("rollout.transfer_folder", files("file"), files("folder")),
]
