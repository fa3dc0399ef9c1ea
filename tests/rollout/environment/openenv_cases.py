"""Environments made of OpenEnv's own classes, and their server. Nothing here knows padfree."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):  # type: ignore[misc, type-arg]
    """Guess a number: a step costs 0.1, and the right one ends the episode with 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self._state = 5, State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: Any = None, episode_id: Any = None, number: int = 5, **kwargs: Any) -> Hint:
        self.number, self._state = number, State(episode_id=str(uuid4()), step_count=0)
        return Hint(hint="0 to 9", done=False, reward=None)

    def step(self, action: Guess, timeout_s: Any = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        if action.text == str(self.number):
            return Hint(hint="right", done=True, reward=1.0)
        return Hint(hint="more" if action.text < str(self.number) else "less", done=False, reward=-0.125)

    @property
    def state(self) -> State:
        return self._state


class Move(Action):
    dx: int
    dy: int = 0


class Place(Observation):
    x: int = 0
    y: int = 0


class Walking(Environment):  # type: ignore[misc, type-arg]
    """Walk to x = 2. Actions and observations have several fields."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.x = self.y = 0
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Place:
        self.x = self.y = 0
        return Place(x=0, y=0, done=False, reward=0.0)

    def step(self, action: Move, timeout_s: Any = None, **kwargs: Any) -> Place:
        self.x, self.y = self.x + action.dx, self.y + action.dy
        return Place(x=self.x, y=self.y, done=self.x == 2, reward=float(self.x == 2))

    @property
    def state(self) -> State:
        return self._state


@contextmanager
def served(environment: Any, action: Any, observation: Any, sessions: int = 8) -> Iterator[str]:
    """Serve an environment on a free port of the loopback address, and yield its address."""
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
