"""When Python's garbage collector may look through objects, and through which.

Importing torch, transformers and the compiler makes about a million objects that stay until the process ends. The
collector goes through them again and again while they are made, for a seventh of the time of the imports.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect nothing meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Leave alone what is there already: looking through all of it may take longer than the step it comes into."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
