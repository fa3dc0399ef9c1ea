"""A status line appears after a silence, at intervals that grow."""

from __future__ import annotations

import pytest

from padfree.cli.progress import LONGEST_SILENCE, SILENCE, Heartbeat, Lines, shown_time

METRICS = {"loss": 1.5, "gradient_norm": 0.5, "lr": 1e-5, "tokens_per_second": 1234.5}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines_of(heartbeat: Heartbeat, clock: Clock, seconds: int) -> list[str]:
    """What it writes while nothing else is written, looked at every second."""
    found = []
    for _ in range(seconds):
        clock.now += 1
        if (line := heartbeat.due()) is not None:
            found.append(line)
    return found


def test_lines_become_rarer() -> None:
    clock = Clock()
    heartbeat = Heartbeat(lambda line: None, clock=clock)
    heartbeat.doing("loading the model")
    found = lines_of(heartbeat, clock, 160)
    assert found == [
        f"{at}  loading the model, {seconds} s"
        for at, seconds in (("0:10", 10), ("0:30", 30), ("1:10", 70), ("2:30", 150))
    ]
    assert len(lines_of(heartbeat, clock, 36_000)) <= 36_000 / LONGEST_SILENCE + 5


def test_what_is_counted_and_in_which_step() -> None:
    clock = Clock()
    heartbeat = Heartbeat(lambda line: None, clock=clock)
    heartbeat.in_step("step 3/10")
    heartbeat.doing("sampling", 0, 256)
    clock.now += 5
    heartbeat.doing("sampling", 120, 256)
    assert lines_of(heartbeat, clock, 6) == ["0:10  step 3/10: sampling 120/256, 10 s"]


def test_steps_that_take_long_are_not_silence() -> None:
    clock = Clock()
    heartbeat = Heartbeat(lambda line: None, clock=clock)
    said = []
    for _ in range(10):
        said.append(len(lines_of(heartbeat, clock, 30)))
        heartbeat.spoke(step=True)
    assert said[1:] == [0] * 9, "each step has its own line after 30 s"
    assert len(lines_of(heartbeat, clock, 70)) == 1, "this one is late"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3600, "1:00:00"), (90_000, "25:00:00")])
def test_times(seconds: float, text: str) -> None:
    assert shown_time(seconds) == text


def test_a_step_line_has_its_number_and_the_time_that_is_left() -> None:
    said: list[str] = []
    lines, clock = Lines(shown=True, write=said.append), Clock()
    lines.heartbeat = Heartbeat(said.append, clock=clock)
    clock.now += 30  # loading
    for step in (4, 5):  # of a run that was resumed
        lines.activity("step", step + 1, 10)
        clock.now += 20
        lines.step({**METRICS, "step": step})
    assert [line.partition("tokens/s")[2] for line in said] == [
        "  0:50 elapsed, 1:40 left",
        "  1:10 elapsed, 1:20 left",
    ]
    assert said[0].startswith("step 5/10  loss")
    lines.activity("step", 11, 10)
    lines.step({**METRICS, "step": 10})
    assert said[-1].startswith("step 11  loss"), "the number was an estimate"


def test_the_thread_writes() -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("padfree.cli.progress.SILENCE", 0.05)
        heartbeat = Heartbeat(said.append)
        with heartbeat:
            heartbeat.doing("evaluating", 3, 40)
            while not said:
                pass
    assert said[0] == "0:00  evaluating 3/40"
    assert SILENCE == 10.0
