"""Progress of a run: one line per step in a log, bars on a terminal, and a status line after a silence.

    0:31  step 1/40: sampling 112/256, 12 s
    step 1/40  loss 0.0312  norm 0.412  lr 1.00e-06  reward 0.125  211 tokens/s  0:58 elapsed, 37:05 left

A run that prints nothing for minutes looks as if it hangs. A thread therefore writes a status line (the first line
above) after `SILENCE` seconds without output. The wait for the next status line doubles each time. If steps are slow,
the first wait is twice the time of a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from padfree.errors import UserError

SILENCE, LONGEST_SILENCE = 10.0, 600.0
"""`SILENCE`: seconds without output until the first status line. `LONGEST_SILENCE`: maximum seconds between two status
lines."""


class Heartbeat:
    """Thread that writes a status line if nothing else has been written for some time."""

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self.begin = clock()
        # `_last`: time of the last step line. `_interval`: seconds between the last two step lines.
        self._last, self._interval = self.begin, 0.0
        self._spoke, self._wait = self.begin, SILENCE
        self._step = ""
        self._doing, self._count, self._since = "starting", "", self.begin
        self._changed = threading.Condition()
        self._left = False
        self._thread: threading.Thread | None = None

    @property
    def elapsed(self) -> float:
        return self._clock() - self.begin

    def doing(self, name: str, done: int = 0, total: int = 0) -> None:
        """Set the current activity and its progress, `done` of `total`. A `total` of 0 means an unknown total."""
        with self._changed:
            if name != self._doing:
                self._doing, self._since = name, self._clock()
            self._count = f" {done}/{total}" if total else ""

    def in_step(self, count: str) -> None:
        """Set the text of the current step, such as `step 3/40`; an empty text means that there are no more steps."""
        with self._changed:
            self._step = count

    def spoke(self, *, step: bool = False) -> None:
        """Record that a line was just written, which delays the next status line.

        `step`: whether the line reported a finished step.
        """
        with self._changed:
            now = self._clock()
            if step:
                self._interval, self._last = now - self._last, now
            self._spoke, self._wait = now, max(SILENCE, 2 * self._interval)

    def due(self) -> str | None:
        """Return the status line if it is time to write one, otherwise None."""
        with self._changed:
            now = self._clock()
            if now - self._spoke < self._wait:
                return None
            self._spoke, self._wait = now, min(2 * self._wait, LONGEST_SILENCE)
            parts = [part for part in (self._step, f"{self._doing}{self._count}") if part]
            seconds = now - self._since
            spent = f", {seconds:.0f} s" if seconds >= 1 else ""
            return f"{shown_time(now - self.begin)}  {': '.join(parts)}{spent}"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(max(0.05, self._spoke + self._wait - self._clock()))
                if self._left:
                    return
            if (line := self.due()) is not None:
                self._write(line)

    def __enter__(self) -> Heartbeat:
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()


def shown_time(seconds: float) -> str:
    """Format a time as minutes and seconds, or as hours, minutes and seconds: 0:07, 12:05, 3:07:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Lines:
    """Shows progress in a log file: one line per step, and one line whenever another 10 % of the data is tokenised."""

    def __init__(self, *, shown: bool, write: Callable[[str], None] | None = None) -> None:
        self._shown, self._tenths = shown, 0
        self._write = write or _print
        self.heartbeat = Heartbeat(self._write)
        self._total: int | None = None  # number of steps of the run, if it is known
        self._first: tuple[int, float] | None = None  # the first step since the start, and its time

    def _line(self, text: str, *, step: bool = False) -> None:
        if self._shown:
            self._write(text)
        self.heartbeat.spoke(step=step)

    def tokenising(self, done: int, total: int) -> None:
        self.heartbeat.doing("tokenising", done, total)
        tenths = done * 10 // total if total else 10
        if tenths > self._tenths:
            self._tenths = tenths
            self._line(f"tokenising {tenths * 10} %")

    def sampling(self, done: int, wanted: int) -> None:
        """Show how many responses of the current batch are finished on rank 0, and how many were requested."""
        self.heartbeat.doing("sampling" if done < wanted else "computing rewards", done, wanted if done < wanted else 0)

    def activity(self, name: str, done: int, total: int) -> None:
        """Set the current activity `name` and its progress, `done` of `total`. A `total` of 0 means an unknown total.

        If `name` is "step", `done` is the number of the step that begins (the first is 1), and `total` the number of
        steps of the run.
        """
        if name != "step":
            self.heartbeat.doing(name, done, total)
            return
        self._total = total or None
        if self._first is None:
            self._first = done, self.heartbeat.elapsed
        self.heartbeat.in_step(f"step {self._count(done)}")
        self.heartbeat.doing("computing")

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        done = metrics["step"] + 1
        self._line(f"step {self._count(done)}  {summary(metrics)}  {self._times(done)}", step=True)

    def _count(self, done: int) -> str:
        known = self._total is not None and done <= self._total
        return f"{done}/{self._total}" if known else f"{done}"

    def _times(self, done: int) -> str:
        """Return the elapsed time and the estimated time that is left, as text. `done`: number of finished steps."""
        elapsed = self.heartbeat.elapsed
        text = f"{shown_time(elapsed)} elapsed"
        if self._total is None or self._first is None or done > self._total:
            return text
        first, begin = self._first
        return f"{text}, {shown_time((elapsed - begin) / (done - first + 1) * (self._total - done))} left"


def _print(text: str) -> None:
    print(text, flush=True)


class Bars(Lines):
    """Shows progress as bars on a terminal: tokenisation, steps, and the responses of a batch."""

    def __init__(self, bars: Any, steps: int | None) -> None:
        super().__init__(shown=True, write=self._above)
        self._bars, self._steps = bars, steps
        self._tasks: dict[str, Any] = {}
        self._passing: str | None = None  # an activity other than steps and sampling

    def _above(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, name: str, done: int, total: int | None, count: str, text: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, count=count, text=text)
        self._bars.update(self._tasks[name], completed=done, total=total, count=count, text=text)
        self.heartbeat.spoke()

    def tokenising(self, done: int, total: int) -> None:
        self._show("tokenising", done, total, f"{done / total:.0%}" if total else "")

    def sampling(self, done: int, wanted: int) -> None:
        self._show("responses", done, wanted, f"{done}/{wanted}")

    def activity(self, name: str, done: int, total: int) -> None:
        super().activity(name, done, total)
        if self._passing not in (None, name):
            self._bars.remove_task(self._tasks.pop(self._passing))
            self._passing = None
        if name != "step":
            self._passing = name
            self._show(name, done, total or None, f"{done}/{total}" if total else "")

    def step(self, metrics: Mapping[str, Any]) -> None:
        done = metrics["step"] + 1
        total = self._steps or self._total
        count = f"{done}" if total is None else f"{done}/{total}"
        self._show("step", done, total, count, summary(metrics))


@contextmanager
def progress(steps: int | None, *, shown: bool) -> Iterator[Lines]:
    """Context manager that shows progress: bars on a terminal, lines elsewhere, nothing if `shown` is false.

    `steps`: number of steps of the run, if it is known.
    """
    if not shown:
        yield Lines(shown=False)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise UserError("padfree", "the package rich is missing", "install it with pip install rich") from error
    console = Console()
    if not console.is_terminal:
        lines = Lines(shown=True)
        with lines.heartbeat:
            yield lines
        return
    columns = ("{task.description}", "{task.fields[count]}", BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as bars:
        on_terminal = Bars(bars, steps)
        with on_terminal.heartbeat:
            yield on_terminal


def summary(metrics: Mapping[str, Any]) -> str:
    """Return the main metrics of a step as text for one line."""
    parts = [f"loss {metrics['loss']:.4f}", f"norm {metrics['gradient_norm']:.3f}", f"lr {metrics['lr']:.2e}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3f}")
    if "groups_without_signal" in metrics:
        parts.append(f"no signal {metrics['groups_without_signal']}/{metrics['groups']}")
    if "version_age" in metrics:
        waited = metrics.get("seconds/waiting", 0.0)
        parts.append(f"age {metrics['version_age']:.1f}  ahead {metrics['queue_finished']:.0f}  waited {waited:.1f} s")
    elif "seconds/sampling" in metrics:
        parts.append(f"sampling {metrics['seconds/sampling']:.1f} s")
    if "sampler/canary_difference" in metrics:
        parts.append(f"canary {metrics['sampler/canary_difference']:.1e}")
    if "groups_requested" in metrics:
        parts.append(f"asked {metrics['groups_requested']:.0f} groups")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in metrics:
        parts.append(f"mfu {metrics['mfu']:.1%}")
    return "  ".join(parts)
