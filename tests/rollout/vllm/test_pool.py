"""The pool: the least loaded server gets a request, a failed request is retried, and each gets one response."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from padfree.rollout.base import OnResponse, Response, SamplingRequest
from padfree.rollout.engines.servers.pool import Gate, Pool, Probe, Respond
from padfree.rollout.engines.servers.server_api import RestartedError, SamplingSettings, ServerApi, ServerLostError
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.loop_thread import LoopThread
from tests.rollout.vllm.vllm_cases import FakeVllm, serving, unused_url
from tests.waiting import wait_until

SAMPLING = SamplingSettings(temperature=1.0, stops=(0,), vocabulary=50)
REQUESTS = [SamplingRequest(tokens=np.array([number % 50]), max_new_tokens=3, key=1 + number) for number in range(40)]


async def probe(server: ServerApi) -> None:
    server.need_version(await server.version(timeout=5.0), 4)


async def respond(server: ServerApi, request: SamplingRequest) -> Response:
    return await server.respond(request, SAMPLING, model="policy", version=4, salt="run")


@dataclass
class Round:
    found: dict[int, Response]
    retried: int

    @property
    def missing(self) -> list[int]:
        return [number for number in range(len(REQUESTS)) if number not in self.found]


def run(
    urls: list[str],
    *,
    timeout: float = 20.0,
    probe_every: float = 0.1,
    meanwhile: Callable[[], None] | None = None,
    requests: list[SamplingRequest] = REQUESTS,
    respond: Respond = respond,
    probe: Probe = probe,
    on_response: OnResponse | None = None,
    servers: list[ServerApi] | None = None,
) -> Round:
    servers = servers or [VllmServer(url, timeout) for url in urls]
    pool = Pool(servers, concurrency=4, timeout=timeout, probe_every=probe_every, probe=probe)
    pool.reset(servers)
    if meanwhile is not None:
        threading.Thread(target=meanwhile, daemon=True).start()
    received: dict[int, Response] = {}
    loop = LoopThread("requests")
    try:
        retried = loop.run(pool.run_all(requests, respond, on_response or received.__setitem__))
    finally:
        loop.close()
    return Round(received, retried)


def with_weights(number: int, *, seconds: float = 0.0) -> list[FakeVllm]:
    fakes = [FakeVllm() for _ in range(number)]
    for fake in fakes:
        fake.version, fake.seconds = "4", seconds
    return fakes


def times_completed(fakes: list[FakeVllm]) -> Counter[int]:
    return Counter(body["seed"] for fake in fakes for body in fake.completed)


def test_every_request_is_answered_once_and_servers_share_the_work() -> None:
    fakes = with_weights(2, seconds=0.02)
    with serving(*fakes) as urls:
        found = run(urls)
    assert sorted(found.found) == list(range(40))
    assert found.missing == []
    assert times_completed(fakes) == Counter(range(1, 41))
    assert all(len(fake.completed) >= 12 for fake in fakes)
    assert all(fake.most_at_once <= 5 for fake in fakes), "four per server, and the least loaded server is used"


def test_the_slower_server_gets_fewer_requests() -> None:
    fast, slow = with_weights(2)
    fast.seconds, slow.seconds = 0.01, 0.4
    with serving(fast, slow) as urls:
        run(urls)
    assert len(slow.completed) < len(fast.completed)


@pytest.mark.parametrize("fault", ["500", "half", "malformed", "cut", "abort"])
def test_a_failed_request_goes_to_another_server(fault: str) -> None:
    good, bad = with_weights(2)
    bad.fault = fault
    with serving(good, bad) as urls:
        found = run(urls)
    assert sorted(found.found) == list(range(40))
    assert found.retried > 0
    assert len(good.completed) == 40


def test_the_requests_of_a_hanging_server_go_to_another() -> None:
    good, bad = with_weights(2)
    begin = time.monotonic()

    async def hanging_probe(server: ServerApi) -> None:
        if server.url == urls[1]:
            raise ServerLostError(f"rollout.servers: {server.url} /weight_info did not answer")
        await probe(server)

    bad.fault = "hang"
    with serving(good, bad) as urls:
        found = run(urls, timeout=60.0, probe=hanging_probe)
    assert sorted(found.found) == list(range(40))
    assert time.monotonic() - begin < 20.0, "long before the hanging server answers or times out"


def test_a_server_that_recovers_is_used_again() -> None:
    (fake,) = with_weights(1)
    fake.fault = "500"

    def recover() -> None:
        time.sleep(0.7)
        fake.fault = None

    with serving(fake) as urls:
        found = run(urls, meanwhile=recover)
    assert sorted(found.found) == list(range(40))
    assert found.retried > 0


def test_after_the_timeout_one_line_names_the_server() -> None:
    url = unused_url()
    with pytest.raises(
        ValueError, match=r"refused the connection, and no server gave a response for 1.5 s; check that"
    ):
        run([url], timeout=1.5)
    (fake,) = with_weights(1)
    fake.fault = "500"  # it answers probes, so it looks healthy between two requests
    with serving(fake) as urls, pytest.raises(ValueError, match=rf"{urls[0]} /v1/completions answered 500 .*1.5 s"):
        run(urls, timeout=1.5)


def test_without_a_server_that_has_the_weights_the_round_ends() -> None:
    fakes = with_weights(2, seconds=0.05)

    def restart() -> None:
        time.sleep(0.2)
        for fake in fakes:
            fake.version = "default"

    with serving(*fakes) as urls:
        found = run(urls, meanwhile=restart)
    assert found.missing
    assert sorted([*found.found, *found.missing]) == list(range(40))


def test_weights_of_another_version_end_the_run() -> None:
    good, bad = with_weights(2, seconds=0.02)
    bad.fault = "version"
    with serving(good, bad) as urls, pytest.raises(ValueError, match=rf"{urls[1]} serves policy version '77', not 4"):
        run(urls)


def test_an_exception_on_the_loop_is_raised_in_the_waiting_thread() -> None:
    (fake,) = with_weights(1)

    async def fail(*_: object) -> Response:
        raise KeyError("a bug")

    def fail_at_once(*_: object) -> None:
        raise KeyError("a bug")

    with serving(fake) as urls:
        with pytest.raises(KeyError, match="a bug"):
            run(urls, respond=fail)
        with pytest.raises(KeyError, match="a bug"):
            run(urls, on_response=fail_at_once)


def test_an_error_does_not_wait_for_a_server_that_hangs() -> None:
    hanging, wrong = with_weights(2)
    hanging.fault, wrong.fault = "hang", "version"
    begin = time.monotonic()
    with serving(hanging, wrong) as urls, pytest.raises(ValueError, match="serves policy version '77', not 4"):
        run(urls, timeout=60.0)
    assert time.monotonic() - begin < 25.0, "its answers take 30 seconds"


def test_a_server_that_hangs_when_the_round_has_ended_is_still_watched() -> None:
    """One server has restarted. The other fails once, which ends the round, and then does not answer a request."""
    restarted, hanging = VllmServer("http://127.0.0.1:1", 60.0), VllmServer("http://127.0.0.1:2", 60.0)
    failed = threading.Event()

    async def lost(server: ServerApi, request: SamplingRequest) -> Response:
        if server is restarted:
            raise RestartedError("rollout.servers: a has restarted")
        await asyncio.sleep(0.3 if request.key == 1 else 50.0)  # the other requests are in flight
        failed.set()
        raise ServerLostError("rollout.servers: b broke the connection")

    async def hangs(server: ServerApi) -> None:
        if failed.is_set():
            raise ServerLostError("rollout.servers: b did not answer")

    begin = time.monotonic()
    found = run(
        [],
        timeout=60.0,
        probe_every=0.2,
        requests=REQUESTS[:4],
        respond=lost,
        probe=hangs,
        servers=[restarted, hanging],
    )
    assert found.found == {}
    assert time.monotonic() - begin < 40.0


def test_an_interrupted_round_leaves_no_requests() -> None:
    (fake,) = with_weights(1, seconds=0.1)

    def interrupt() -> None:
        wait_until(lambda: len(fake.completed) > 3)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    with serving(fake) as urls:
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                run(urls, meanwhile=interrupt)
        finally:
            signal.signal(signal.SIGINT, ignored)
        wait_until(lambda: fake.at_once == 0)
        assert "requests" not in [thread.name for thread in threading.enumerate()]
    assert len(fake.completed) < 40


def test_a_gate_knows_whether_it_was_closed_since() -> None:
    async def play() -> None:
        gate = Gate()
        ticket = await gate.wait_open()
        assert not gate.closed_since(ticket)
        gate.close()
        assert gate.is_closed
        assert gate.closed_since(ticket)
        waiting = asyncio.create_task(gate.wait_open())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        gate.open()
        later = await waiting
        assert gate.closed_since(ticket), "although it is open again"
        assert not gate.is_closed
        assert not gate.closed_since(later)

    asyncio.run(play())


def test_the_timeout_of_an_endless_queue_stops_during_a_weight_sync() -> None:
    """A weight sync has its own timeout, and a server does not answer while it loads weights."""
    servers = [VllmServer(unused_url(), 20.0)]
    pool = Pool(servers, concurrency=2, timeout=0.5, probe_every=0.1, probe=probe)
    received: list[int] = []
    failing = True

    async def lost(server: ServerApi, request: SamplingRequest) -> Response:
        if failing:
            raise ServerLostError(f"rollout.servers: {server.url} broke the connection")
        return Response(tokens=np.array([0]), logprobs=np.zeros(1, np.float32), ended=True, version=4)

    async def play() -> None:
        nonlocal failing
        pool.gate.close()
        queue = pool.start_queue(lost)
        queue.add(REQUESTS[:3], lambda index, response: received.append(index))
        await asyncio.sleep(1.8)
        assert queue.error is None
        failing = False
        pool.reset(servers)
        pool.gate.open()
        deadline = time.monotonic() + 60.0
        while len(received) < 3 and queue.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert queue.error is None
        assert queue.task is not None
        queue.task.cancel()

    asyncio.run(play())
    assert sorted(received) == [0, 1, 2]


def test_run_all_does_not_affect_an_endless_queue() -> None:
    """An evaluation may request responses while a queue is processed."""
    (fake,) = with_weights(1, seconds=0.02)
    received: list[int] = []

    async def play(url: str) -> None:
        servers = [VllmServer(url, 20.0)]
        pool = Pool(servers, concurrency=4, timeout=20.0, probe_every=0.1, probe=probe)
        queue = pool.start_queue(respond)
        queue.add(REQUESTS[:20], lambda index, response: received.append(index))
        await pool.run_all(REQUESTS[20:24], respond, lambda index, response: None)
        while len(received) < 20 and queue.error is None:
            await asyncio.sleep(0.02)
        assert queue.error is None
        assert queue.retried == 0
        assert queue.task is not None
        queue.task.cancel()

    with serving(fake) as (url,):
        asyncio.run(play(url))
    assert times_completed([fake]) == Counter(range(1, 25))


def test_a_pool_drains_before_a_weight_sync() -> None:
    """Requests in flight finish, queued ones wait for the end of the sync, and a server that hangs delays nothing."""
    fakes = with_weights(2, seconds=0.1)
    fakes[1].fault = "hang"
    received: list[int] = []

    async def hung(server: ServerApi) -> None:
        if server.url == hanging:
            raise ServerLostError(f"rollout.servers: {server.url} did not answer")
        await probe(server)

    async def play(urls: list[str]) -> None:
        pool = Pool([VllmServer(url, 20.0) for url in urls], concurrency=4, timeout=20.0, probe_every=0.1, probe=hung)
        queue = pool.start_queue(respond)
        queue.add(REQUESTS[:20], lambda index, response: received.append(index))
        while not any(state.in_flight for state in pool.states):
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        await pool.drain()
        assert time.monotonic() - begin < 20.0, "the requests of the hanging server do not run into their timeout"
        finished = len(received)
        assert 0 < finished < 20
        assert fakes[0].at_once == 0
        await asyncio.sleep(0.3)
        assert len(received) == finished
        pool.resume()
        while len(received) < 20 and queue.error is None:
            await asyncio.sleep(0.02)
        assert queue.error is None
        assert queue.task is not None
        queue.task.cancel()

    with serving(*fakes) as urls:
        hanging = urls[1]
        asyncio.run(play(urls))
    assert sorted(received) == list(range(20))


@pytest.mark.parametrize("continues", [True, False])
def test_interrupted_responses_continue_or_restart(continues: bool) -> None:
    """The first response to each request is cut after one token."""
    asked: list[SamplingRequest] = []
    received: list[Response] = []

    async def cut(server: ServerApi, request: SamplingRequest) -> Response:
        first = request.key not in {one.key for one in asked}
        asked.append(request)
        number = 1 if first else request.max_new_tokens
        return Response(
            tokens=np.full(number, 7), logprobs=np.zeros(number, np.float32), ended=False, version=1 if first else 2
        )

    async def play() -> None:
        servers = [VllmServer(unused_url(), 20.0)]
        pool = Pool(servers, concurrency=4, timeout=20.0, probe_every=5.0, probe=probe, continues=continues)
        queue = pool.start_queue(cut)
        queue.add(REQUESTS[:3], lambda index, response: received.append(response))
        while sum(one.is_whole(3) for one in received) < 3 and queue.error is None:
            await asyncio.sleep(0.01)
        assert queue.retried == (0 if continues else 3)
        assert queue.task is not None
        queue.task.cancel()

    asyncio.run(play())
    assert Counter(one.key for one in asked) == {1: 2, 2: 2, 3: 2}, "with the same seed"
    assert sum(one.partial is not None for one in asked) == (3 if continues else 0)
    assert {one.version for one in received} == ({1, 2} if continues else {2})


def test_no_requests() -> None:
    assert run([unused_url()], requests=[]).found == {}
