"""Count and time compilations, so that a run can report that it waits for the compiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch._dynamo.callback import callback_handler


class CompilerWatch:
    """A context manager that counts compilations. `on_start` is called when a compilation begins."""

    def __init__(self, on_start: Callable[[], None] | None = None) -> None:
        self.count, self.seconds = 0, 0.0
        self._on_start, self._begin = on_start, 0.0

    def __enter__(self) -> CompilerWatch:
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def _start(self, *_: Any) -> None:
        self._begin = time.perf_counter()
        if self._on_start is not None:
            self._on_start()

    def _end(self, *_: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._begin

    def take(self) -> dict[str, Any]:
        """Return the number of graphs compiled since the last call of `take`, and the seconds that these compilations
        took.
        """
        found = {"graphs": self.count, "seconds": round(self.seconds, 2)}
        self.count, self.seconds = 0, 0.0
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._start in callback_handler.start_callbacks:  # torch._dynamo.reset() removes them
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)
