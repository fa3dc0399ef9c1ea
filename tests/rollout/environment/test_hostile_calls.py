"""The gateway against malicious programs: every request is answered correctly or rejected, and the run continues."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.call_fields import FOLLOWED, MESSAGE_KEYS, METADATA, NEUTRAL, OVERRIDDEN
from padfree.rollout.environment.calls import Calls
from padfree.rollout.environment.listener import ListenerLimits
from padfree.rollout.environment.runner import Played
from tests.refused import refused
from tests.rollout.environment.environment_cases import CHAT, WHOLE, Scripted, play, prompt
from tests.rollout.environment.hostile_cases import UNSHOWN, Q, bodies, heads, outcome, post, statuses

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "environments.md"


def attacked(attack: Callable[[str], Any], *, skip_failures: bool = False, template: str = CHAT) -> tuple[Any, Played]:
    """Run an attack on the URL of an episode; return its result and the episode, which makes one call afterwards."""
    found: list[Any] = []

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        url = await policy.base_url()
        tasks = asyncio.all_tasks()
        found.append(await asyncio.to_thread(attack, url))
        await policy.generate()
        for _ in range(100):  # connections end slightly later
            left = [task for task in asyncio.all_tasks() - tasks if "_connection" in repr(task)]
            if not left:
                break
            await asyncio.sleep(0.05)
        assert not left
        return policy.trajectory(1.0)

    (played,) = play(
        episode,
        None,
        prompt("q", max_new_tokens=2000),
        template=template,
        sampler=Scripted(lambda *_: "x$"),
        skip_failures=skip_failures,
    )
    return found[0], played


def test_every_body_is_answered_or_rejected() -> None:
    """All use one connection: no part of a body is read as the next request."""

    def attack(url: str) -> dict[str, tuple[str, str]]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        found = {}
        for index, (name, route, body, due) in enumerate(bodies()):
            status, answer = post(connection, f"{parts.path}/{route}", body)
            found[f"{index} {route} {name}"] = outcome(status, due), answer.decode("latin-1")
        connection.close()
        return found

    found, played = attacked(attack, template=WHOLE)
    odd = {name: answer for name, answer in found.items() if answer[0] not in ("right", "refused")}
    assert not odd
    counts = Counter(kind for kind, _ in found.values())
    assert counts["refused"] >= 250
    assert counts["right"] >= 80
    assert played.failure is None
    assert played.counts["refused"] == counts["refused"]
    for kind, answer in found.values():
        if kind == "refused":
            assert 0 < len(json.loads(answer)["error"]["message"]) < 400


def test_fields_that_the_template_ignores_are_rejected() -> None:
    def attack(url: str) -> dict[str, tuple[int, str]]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        found = {}
        for name, body in UNSHOWN.items():
            status, answer = post(connection, f"{parts.path}/chat/completions", json.dumps(body).encode())
            found[name] = status, json.loads(answer)["error"]["message"]
        connection.close()
        return found

    found, played = attacked(attack)
    assert played.failure is None
    for name, (status, message) in found.items():
        assert status == 400
        assert message.startswith(f"{name} is missing from the rendered text, because the chat template drops ")


def test_every_head_is_answered_or_closed() -> None:
    def attack(url: str) -> dict[str, Any]:
        path = urlsplit(url).path
        return {name: (statuses(url, raw), due) for name, raw, due in heads(path)}

    found, played = attacked(attack)
    assert {name: one for name, one in found.items() if one[0] != one[1]} == {}
    assert len(found) >= 70
    assert played.failure is None


def test_the_documentation_lists_all_fields() -> None:
    page = DOCS.read_text()
    for name in (*FOLLOWED, *OVERRIDDEN, *NEUTRAL, *METADATA, *MESSAGE_KEYS):
        assert f"`{name}`" in page, name


def test_only_the_loopback_address_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    bind = socket.socket.bind

    def watched(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            bound.append(address[0])
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", watched)
    attacked(lambda url: None)
    assert bound == ["127.0.0.1"]


def test_a_bug_of_the_gateway_gives_a_500_and_fails_only_that_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Calls, "of_messages", broken)

    def attack(url: str) -> tuple[int, bytes]:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        try:
            return post(connection, f"{parts.path}/chat/completions", json.dumps(Q).encode())
        finally:
            connection.close()

    (status, answer), played = attacked(attack, skip_failures=True)
    assert status == 500
    assert b"raised ZeroDivisionError: by zero" in answer
    assert played.failure is not None
    assert "rollout.environment: answering a call of v1/chat/completions raised ZeroDivisionError" in played.failure
    with refused("rollout.environment", "answering a call .*: by zero"):
        attacked(attack)


def test_waiting_calls_are_cancelled_when_their_episode_ends() -> None:
    """Waiting calls end, and no task is left on the loop."""
    closed: list[bytes] = []
    left: list[Any] = []

    async def episode(task: Prompt, policy: Policy) -> Trajectory:
        if task.row["prompt"] == "p":
            parts = urlsplit(await policy.base_url())
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            body = json.dumps(Q).encode()
            head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await asyncio.sleep(0.1)
            waiting.append((reader, writer))
            return policy.trajectory(1.0)
        while not waiting:  # no round starts until this episode requests tokens
            await asyncio.sleep(0.01)
        reader, writer = waiting[0]
        closed.append(await reader.read())
        writer.close()
        await asyncio.sleep(0.05)
        left.extend(one for one in asyncio.all_tasks() if "_connection" in repr(one))
        await policy.generate()
        return policy.trajectory(1.0)

    waiting: list[Any] = []

    async def started(task: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        return await episode(task, policy)

    played = play(started, lambda *_: "x$", prompt("p"), prompt("q"), template=CHAT, skip_failures=True, timeout=20.0)
    assert [one.failure for one in played] == [None, None]
    assert closed == [b""]
    assert left == []


# Limits

TIGHT = ListenerLimits(
    head_seconds=0.5,
    body_seconds=0.5,
    idle_seconds=0.5,
    answer_seconds=0.5,
    unauthenticated=8,
    connections=16,
    bodies=1 << 20,
)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.rollout.environment.listener.ListenerLimits", lambda: TIGHT)


def _opened(url: str, raw: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    made = socket.create_connection((parts.hostname, parts.port), timeout=20.0)  # type: ignore[arg-type]
    made.sendall(raw)
    return made


def _end_of(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    connection.close()
    return found


@pytest.mark.usefixtures("tight")
def test_connections_of_slow_and_silent_clients_are_closed() -> None:
    def attack(url: str) -> dict[str, bytes]:
        path = urlsplit(url).path
        models = f"GET {path}/models HTTP/1.1\r\n\r\n".encode()
        slow = f"POST {path}/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{{".encode()
        opened = {
            "silent": _opened(url),
            "half a head": _opened(url, b"POST /"),
            "a slow body": _opened(url, slow),
            "idle behind a call": _opened(url, models),
        }
        return {name: _end_of(one) for name, one in opened.items()}

    found, _ = attacked(attack)
    assert found["silent"] == found["half a head"] == b""
    assert found["a slow body"].startswith(b"HTTP/1.1 408 ")
    assert found["idle behind a call"].startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("tight")
def test_a_program_is_served_despite_many_silent_connections() -> None:
    def attack(url: str) -> tuple[list[int], int]:
        parts = urlsplit(url)
        served, opened = [], []
        for _ in range(6):
            opened += [_opened(url, b"POST /") for _ in range(20)]
            connection = http.client.HTTPConnection(parts.netloc, timeout=20)
            served.append(post(connection, f"{parts.path}/chat/completions", json.dumps(Q).encode())[0])
            connection.close()
        ended = sum(_end_of(one) == b"" for one in opened)
        return served, ended

    (served, ended), _ = attacked(attack)
    assert served == [200] * 6
    assert ended == 120


@pytest.mark.usefixtures("tight")
def test_bodies_of_all_requests_share_a_budget() -> None:
    """Two slow bodies use the whole budget; a third waits, and is served when they time out."""

    def attack(url: str) -> tuple[list[bytes], int]:
        parts = urlsplit(url)
        head = f"POST {parts.path}/completions HTTP/1.1\r\nContent-Length: {1 << 19}\r\n\r\n".encode()
        slow = [_opened(url, head) for _ in range(2)]
        connection = http.client.HTTPConnection(parts.netloc, timeout=20)
        big = json.dumps({**Q, "metadata": {str(index): "x" * 100 for index in range(4000)}}).encode()
        status, _ = post(connection, f"{parts.path}/chat/completions", big)
        connection.close()
        return [_end_of(one)[:12] for one in slow], status

    (slow, status), _ = attacked(attack)
    assert slow == [b"HTTP/1.1 408"] * 2
    assert status in (200, 503), "the timeout of the slow bodies is also that of the wait"


@pytest.mark.usefixtures("tight")
def test_the_connection_of_a_program_that_does_not_read_is_closed() -> None:
    def attack(url: str) -> bytes:
        parts = urlsplit(url)
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        made.settimeout(20.0)
        made.connect((parts.hostname, parts.port))
        models = f"GET {parts.path}/models HTTP/1.1\r\n\r\n".encode()
        try:
            while True:  # until the buffers are full
                made.sendall(models * 100)
        except (ConnectionError, TimeoutError) as error:
            return type(error).__name__.encode()
        finally:
            made.close()

    found, _ = attacked(attack)
    assert found in (b"ConnectionResetError", b"BrokenPipeError")
