"""What the garbage collector looks through while a run starts, and while it trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from padfree.garbage_collection import paused_collector, quiet_collector


class Node:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()
    if enabled:
        gc.enable()
    else:
        gc.disable()


def test_nothing_is_collected_in_a_pause() -> None:
    gc.enable()
    with paused_collector():
        made = weakref.ref(Node())
        for _ in range(2 * gc.get_threshold()[0]):
            Node()
        assert made() is not None
    assert gc.isenabled()
    gc.collect()
    assert made() is None, "and nothing is left behind"


def _fails_in_a_pause() -> None:
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled(), "the outer one goes on"
        raise RuntimeError("inside")


def test_pauses_may_be_inside_each_other_and_end_with_an_error() -> None:
    gc.enable()
    with pytest.raises(RuntimeError, match="inside"):
        _fails_in_a_pause()
    assert gc.isenabled()
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled(), "it was off before"


def test_in_a_run_old_garbage_is_gone_and_new_garbage_is_collected() -> None:
    gc.collect()
    before = weakref.ref(Node())
    with quiet_collector():
        assert before() is None
        frozen = gc.get_freeze_count()
        assert frozen > 0
        inside = weakref.ref(Node())
        assert inside() is not None
        gc.collect()
        assert inside() is None
    assert gc.get_freeze_count() < frozen
