"""A program as the environment: the program is started for each episode, and calls the policy at `OPENAI_BASE_URL`.

    rollout.agent = ["python", "my_agent.py", "{question}"]

    arguments          {question} is replaced by the column `question` of the data row
    standard input     the data row as JSON
    standard output    the answer, from which `rollout.reward` computes the reward
    API calls          the token ids of their prompts and responses become the trajectory

An episode fails if the exit code of its program is not 0. A program that exceeds the time limit is killed with all its
children.
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
"""Seconds to wait for a program after SIGKILL."""

POLL = 0.05
"""Seconds between two checks whether a program has ended."""

LARGEST_OUTPUT, LAST_ERRORS = 16 << 20, 64 << 10
"""`LARGEST_OUTPUT`: maximum bytes of a program's standard output. `LAST_ERRORS`: number of bytes that are
kept from the end of its standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The exit code and the output of a program that has ended."""

    code: int
    output: str
    errors: str


async def run_agent(policy: Policy, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Finished:
    """Run a program until it ends, and return its exit code and output.

    The policy calls of the program are recorded in the episode. `command`: the program and its arguments. `variables`:
    additional environment variables.
    """
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
        output, errors = await _communicate(process, json.dumps(dict(row), default=str).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):  # children that are still running
            os.killpg(process.pid, signal.SIGKILL)
        await _close(process)
    assert process.returncode is not None
    return Finished(code=process.returncode, output=_text(output), errors=_text(errors))


async def _communicate(process: asyncio.subprocess.Process, message: bytes) -> tuple[bytes, bytes]:
    """Send `message` to a program's standard input; return its standard output and standard error.

    When the program ends, child processes that still hold its pipes open are killed.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = bytearray(), bytearray()
    communicating = asyncio.gather(
        _feed(process.stdin, message),
        _collect(process.stdout, output, None),
        _collect(process.stderr, errors, LAST_ERRORS),
    )
    try:
        while not communicating.done():
            await asyncio.wait({communicating}, timeout=POLL)
            if process.returncode is not None and not communicating.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait({communicating}, timeout=GRACE)
                break
        if communicating.done():
            communicating.result()
        while process.returncode is None:  # it closed its pipes, but is still running
            await asyncio.sleep(POLL)
    finally:
        communicating.cancel()
    return bytes(output), bytes(errors)


async def _feed(pipe: asyncio.StreamWriter, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program does not read its input
        pipe.write(message)
        await pipe.drain()
    pipe.close()


async def _collect(pipe: asyncio.StreamReader, collected: bytearray, last: int | None) -> None:
    """Read a pipe to its end into `collected`.

    With `last`, only the last `last` bytes are kept. Without it, more than LARGEST_OUTPUT bytes are an error.
    """
    while piece := await pipe.read(1 << 16):
        collected += piece
        if last is not None:
            del collected[:-last]
        elif len(collected) > LARGEST_OUTPUT:
            raise RuntimeError(f"the program printed more than {LARGEST_OUTPUT} bytes; let it print only its answer")


async def _close(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a program now. The event loop would close them later, but may end before."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public method for it


def agent_episode(command: Sequence[str]) -> Episode:
    """Return the coroutine function that plays an episode of `rollout.agent`: it runs the program `command`."""

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        finished = await run_agent(policy, command)
        if finished.code:
            last = (finished.errors.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{command[0]} exited with code {finished.code}: {last}")
        return policy.trajectory(answer=finished.output)

    return episode


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
