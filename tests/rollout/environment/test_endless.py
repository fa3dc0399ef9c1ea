"""Episodes, rewards and programs that exit, never return, or ignore cancellation: `rollout.on_failure` handles them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padfree.data import Reward
from padfree.errors import UserError
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.agent import agent_episode
from padfree.rollout.reward_workers import DaemonPool, RewardWorkers, _in_thread, call_within
from tests.rollout.environment.environment_cases import CHAT, play, prompt

LIMIT = 0.7
HERE = "tests.rollout.environment.rewards"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class OwnExit(BaseException):
    pass


async def exits(which: str, policy: Policy) -> Any:
    async def leave() -> None:
        sys.exit(3)

    match which:
        case "a":
            sys.exit(0)
        case "b":
            raise KeyboardInterrupt
        case "c":
            raise asyncio.CancelledError
        case "d":
            raise GeneratorExit
        case "e":
            raise OwnExit("own")
        case "f":
            raise UnspeakableError
        case "g":
            await asyncio.gather(leave(), asyncio.sleep(0.01))
        case "h":
            await asyncio.to_thread(sys.exit, 4)
        case "i":
            async with asyncio.TaskGroup() as group:
                group.create_task(leave())
        case "j":
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(10)
        case "k":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(100)
        case "l":
            asyncio.get_running_loop().stop()
        case "m":
            asyncio.get_running_loop().call_soon(sys.exit, 5)
            await asyncio.sleep(0.01)
        case "n":
            return policy.trajectory(1.0, metrics={"a": "x"})  # type: ignore[dict-item]
        case "o":
            return policy.trajectory(answer=7)  # type: ignore[arg-type]
        case "p":
            await policy.generate(max_tokens=1.5)  # type: ignore[arg-type]
        case "r":
            while True:
                await policy.branch().generate()
        case "s":
            raise StopAsyncIteration
        case "t":
            policy.add("\ud800")
        case "u":
            raise ValueError("two\nlines")
        case "v":
            return policy.trajectory(1.0, metrics={"a": None})  # type: ignore[dict-item]
    return None


FAILURES = {
    "a": "raised SystemExit: 0",
    "b": "raised KeyboardInterrupt: no message",
    "c": "raised CancelledError",
    "d": "raised GeneratorExit",
    "e": "raised OwnExit: own",
    "f": "raised UnspeakableError",
    "g": "raised SystemExit: 3",
    "h": "raised SystemExit: 4",
    "i": "raised SystemExit: 3",
    "j": "raised CancelledError",
    "k": r"took more than 0.7 s \(rollout.episode_timeout\)",
    "n": "raised ValueError: could not convert string to float: 'x'",
    "o": "returned the answer 7 for",
    "p": "calls generate with max_tokens=1.5; give an integer",
    "r": "has requested tokens 50 times",
    "s": "raised StopAsyncIteration",
    "t": "raised ",
    "u": "raised ValueError: two",
    "v": "raised TypeError",
}
UNHARMED = "lm"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.rollout.environment.runner.GRACE", 0.2)
    monkeypatch.setattr("padfree.rollout.environment.runner.MAX_TURNS", 50)
    monkeypatch.setattr("padfree.rollout.loop_thread.CLOSING", 2.0)


async def episode(task: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    return await exits(task.row["prompt"], policy) or policy.trajectory(1.0)


@pytest.mark.parametrize("which", [*FAILURES, *UNHARMED])
def test_whatever_an_episode_raises_is_its_failure(which: str) -> None:
    """The other episodes and the next batch are played to their end."""
    names = ["x", which, "y", "z"]
    played = play(episode, lambda *_: "x$", *map(prompt, names), timeout=LIMIT, skip_failures=True, max_concurrent=2)
    failed = [one.failure for one in played]
    if which in UNHARMED:
        assert failed == [None] * 4
        return
    assert [one is None for one in failed] == [True, False, True, True]
    assert re.search(FAILURES[which], str(failed[1]))
    assert "\n" not in str(failed[1])


@pytest.mark.parametrize("which", ["a", "c", "i", "k"])
def test_without_skipping_a_failure_ends_the_run(which: str) -> None:
    with pytest.raises(ValueError, match=FAILURES[which]) as caught:
        play(episode, lambda *_: "x$", *map(prompt, ("x", which)), timeout=LIMIT)
    assert re.match(
        r"rollout.environment: tests:episode .*; correct the environment, or set rollout.on_failure=skip$",
        str(caught.value),
    )


def test_a_loop_that_an_episode_could_not_end_leaves_no_messages(capfd: pytest.CaptureFixture[str]) -> None:
    test_whatever_an_episode_raises_is_its_failure("k")
    assert "destroyed" not in capfd.readouterr().err


# Rewards without processes


def sleeps(response: str, row: Any) -> float:
    time.sleep(600)
    return 1.0


def computes(response: str, row: Any) -> float:
    while True:
        pass


def backtracks(response: str, row: Any) -> float:
    return float(re.match(r"(a+)+$", "a" * 40 + "b") is None)


def catches_errors(response: str, row: Any) -> float:
    try:
        time.sleep(600)
    except Exception:
        return 0.0
    return 1.0


def catches_all(response: str, row: Any) -> float:
    try:
        time.sleep(600)
    except:  # noqa: E722
        return 0.0
    return 1.0


def makes_it_another(response: str, row: Any) -> float:
    try:
        time.sleep(600)
    except BaseException as error:
        raise ValueError("reward: it went wrong") from error
    return 1.0


def waits(response: str, row: Any) -> float:
    threading.Event().wait()
    return 1.0


def reads(response: str, row: Any) -> float:
    inside, _ = os.pipe()
    return float(len(os.read(inside, 1)))


LATE = {
    one.__name__: one
    for one in (sleeps, computes, backtracks, catches_errors, catches_all, makes_it_another, waits, reads)
}
LINE = r"^reward: mine:late took more than 0.3 s \(rollout.episode_timeout\) for sample 'rows.jsonl:p'; make"


@pytest.mark.parametrize("which", LATE)
def test_a_reward_that_does_not_return_raises_a_user_error(which: str) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError, match=LINE):
        RewardWorkers(Reward("mine:late", LATE[which])).within(0.3, "", {}, "rows.jsonl:p")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("which", ["sleeps", "waits"])
def test_a_late_reward_in_another_thread(which: str) -> None:
    found: list[str] = []

    def run() -> None:
        try:
            RewardWorkers(Reward("mine:late", LATE[which])).within(0.3, "", {}, "rows.jsonl:p")
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert re.match(LINE, found[0])


def test_a_reward_may_set_its_own_alarms() -> None:
    """Libraries that grade mathematics do so, which needs the main thread."""

    def grades(response: str, row: Any) -> float:
        def ring(*_: Any) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(600)
        except TimeoutError:
            return 0.25
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return 1.0

    assert RewardWorkers(Reward("mine:grades", grades)).within(0.3, "", {}, "p") == 0.25


def test_an_alarm_that_was_set_before_still_rings() -> None:
    rung: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1.0))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        assert call_within(5.0, "late", lambda value: value + 1, 1) == 2
        for _ in range(100):
            if rung:
                break
            time.sleep(0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung


def test_what_a_function_raises_is_raised_either_way() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        call_within(5.0, "late", fails)
    found: list[type] = []

    def run() -> None:
        try:
            call_within(5.0, "late", fails)
        except KeyError as error:
            found.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found == [KeyError]


def test_a_process_does_not_wait_for_the_threads_of_rewards() -> None:
    """A process whose pool is full of rewards that never return still exits: all threads are daemons."""
    ends = threading.Event()
    before = set(threading.enumerate())
    pool = DaemonPool(2, "test")
    for _ in range(5):
        pool.submit(ends.wait)
    with pytest.raises(UserError, match="too slow"):
        _in_thread(0.05, "late: too slow; be faster", ends.wait)
    new = set(threading.enumerate()) - before
    assert len(new) == 3
    assert all(thread.daemon for thread in new)
    pool.close()  # returns at once
    ends.set()


def test_a_pool_runs_all_calls() -> None:
    found: list[int] = []
    done = threading.Semaphore(0)

    def note(value: int) -> None:
        found.append(value)
        done.release()

    pool = DaemonPool(3, "test")
    for value in range(20):
        pool.submit(note, value)
    for _ in range(20):
        assert done.acquire(timeout=20)
    pool.close()
    assert sorted(found) == list(range(20))


# Rewards in processes


def rewarded(name: str, *texts: str, seconds: float = 30.0) -> list[Any]:
    async def run() -> list[Any]:
        reward_workers = RewardWorkers(SimpleNamespace(name=name), processes=1)  # type: ignore[arg-type]
        found: list[Any] = []
        try:
            for text in texts:
                try:
                    async with asyncio.timeout(seconds):
                        found.append(await reward_workers(text, {"answer": "1"}, "a"))
                except (ValueError, TimeoutError) as error:
                    found.append(f"{type(error).__name__} {error}")
        finally:
            await reward_workers.close()
        return found

    return asyncio.run(run())


def test_a_reward_that_reads_stdin_does_not_read_the_requests() -> None:
    assert rewarded(f"{HERE}:reads_input", "12", "1") == [0.25, 0.125]


def test_a_module_that_cannot_be_imported_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_rewards.py").write_text("raise OSError('no licence')\n")
    first, second = rewarded("late_rewards:reward", "1", "2")
    assert first == second
    assert re.match(r"UserError reward: .*importing late_rewards raised OSError: no licence; correct the module", first)


def test_a_module_that_hangs_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hanging_rewards.py").write_text("import time\ntime.sleep(600)\n")
    assert rewarded("hanging_rewards:reward", "1", seconds=1.0) == ["TimeoutError "]


# Programs

PROGRAMS = {
    "ignores SIGTERM": ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", "took more than"),
    "closes its output and lives": ("import os, time; os.close(1); os.close(2); time.sleep(600)", "took more than"),
    "prints without end": ("while True: print('x' * 65536)", r"printed more than 16777216 bytes; let it print only"),
    "fills its standard error": ("import sys; sys.stderr.write('e' * 10**7); print('done')", None),
    "reads nothing": ("print('done')", None),
    "leaves a program with its pipes": (
        "import subprocess; subprocess.Popen(['sleep', '600']); print('done')",
        None,
    ),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "exited with code -9"),
    "exits by a code": ("import sys; sys.exit('why')", "exited with code 1: why"),
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs_that_end_abnormally(which: str) -> None:
    code, failure = PROGRAMS[which]
    call = (
        "import json, os, urllib.request as u\n"
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions',"
        "json.dumps({'messages': [{'role': 'user', 'content': 'q'}]}).encode())).read()\n"
    )
    (played,) = play(
        agent_episode([sys.executable, "-c", call + code]),
        lambda *_: "x$",
        prompt("q", max_new_tokens=200, long="r" * 300_000),
        template=CHAT,
        reward=lambda answer, row: float(answer == "done\n"),
        timeout=1.5 if failure == "took more than" else 30.0,
        skip_failures=True,
    )
    if failure is None:
        assert (played.failure, played.reward) == (None, 1.0)
    else:
        assert re.search(failure, str(played.failure))
