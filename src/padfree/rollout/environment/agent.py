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
from padfree.rollout.environment.episode_policy import Episode, Policy
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.prompts import Prompt

GRACE = 10.0
"""Seconds that a program gets to be gone after SIGKILL."""

POLL = 0.05
"""Seconds."""

LARGEST_OUTPUT, LAST_ERRORS = 16 << 20, 64 << 10
"""Bytes of an answer, and of what is kept of the standard error."""


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
        said, errors = await _talked(process, json.dumps(dict(row), default=str).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):  # whatever it has left behind
            os.killpg(process.pid, signal.SIGKILL)
        await _close(process)
    assert process.returncode is not None
    return Finished(code=process.returncode, output=_text(said), errors=_text(errors))


async def _talked(process: asyncio.subprocess.Process, message: bytes) -> tuple[bytes, bytes]:
    """What a program writes to its end. Programs that it leaves behind, which may hold its pipes, are ended with it."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said, errors = bytearray(), bytearray()
    talking = asyncio.gather(
        _feed(process.stdin, message),
        _collect(process.stdout, said, None),
        _collect(process.stderr, errors, LAST_ERRORS),
    )
    try:
        while not talking.done():
            await asyncio.wait({talking}, timeout=POLL)
            if process.returncode is not None and not talking.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait({talking}, timeout=GRACE)
                break
        if talking.done():
            talking.result()
        while process.returncode is None:  # it has closed its pipes and lives on
            await asyncio.sleep(POLL)
    finally:
        talking.cancel()
    return bytes(said), bytes(errors)


async def _feed(pipe: asyncio.StreamWriter, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not read its input
        pipe.write(message)
        await pipe.drain()
    pipe.close()


async def _collect(pipe: asyncio.StreamReader, found: bytearray, last: int | None) -> None:
    """All of it, which is bounded, or the `last` bytes of it."""
    while piece := await pipe.read(1 << 16):
        found += piece
        if last is not None:
            del found[:-last]
        elif len(found) > LARGEST_OUTPUT:
            raise RuntimeError(f"it printed more than {LARGEST_OUTPUT} bytes; print the answer alone")


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
