"""A program as the environment: started for each episode, with the policy at its `OPENAI_BASE_URL`.

    rollout.agent = ["python", "my_agent.py", "{question}"]

    words        {question}: that column of the row (`command.py` says what is refused)
    input        the row as JSON
    output       the answer that `rollout.reward` judges
    calls        become the trajectory, token for token

A program that ends with another code than 0 has failed. One that is too slow is ended, with all that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from padfree.rollout.environment.command import check_command, filled
from padfree.rollout.environment.policy import Episode, Policy
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.prompts import Prompt

GRACE = 10.0
"""Seconds that a program gets to be gone after SIGKILL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A program that has ended."""

    code: int
    output: str
    errors: str


async def run_agent(policy: Policy, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Finished:
    """Run a program to its end. What it asks of the policy is part of the episode."""
    check_command(command)
    row = policy.prompt.row
    url = await policy.base_url()
    process = await asyncio.create_subprocess_exec(
        *filled(command, row),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "padfree", **(variables or {})},
        start_new_session=True,
    )
    try:
        said, errors = await process.communicate(json.dumps(dict(row), default=str).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):  # whatever it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        await _close(process)
    assert process.returncode is not None
    return Finished(code=process.returncode, output=_text(said), errors=_text(errors))


async def _close(process: asyncio.subprocess.Process) -> None:
    """Close its pipes while there is a loop: after a time-out the loop may end before it has seen that they are."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    process._transport.close()  # type: ignore[attr-defined]  # asyncio has no other way


def agent_episode(command: Sequence[str]) -> Episode:
    """The environment of `rollout.agent`."""

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        finished = await run_agent(policy, command)
        if finished.code:
            last = (finished.errors.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{command[0]} ended with code {finished.code}: {last}")
        return policy.trajectory(answer=finished.output)

    return episode


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
