"""`checkpoint.asynchronous=auto` writes in the background only if the free memory of every host allows it."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from padfree.checkpoint import checkpointer as checkpoint
from padfree.checkpoint.background import LEAST_BYTES, RankCopy, choose_write
from padfree.checkpoint.checkpoint_files import write_safetensors
from padfree.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.gpu_hosts import as_on_a_gpu
from tests.ranks import run_ranks

GIB = 1 << 30


def copies(*ranks: tuple[str, float, float], on_cpu: bool = False) -> list[RankCopy]:
    return [RankCopy(host=host, size=int(size * GIB), free=free * GIB, on_cpu=on_cpu) for host, size, free in ranks]


@pytest.mark.parametrize(
    ("ranks", "background", "reason"),
    [
        ([("a", 3, 6)], True, "the copy of a checkpoint needs 3.00 GiB of 6.00 GiB of free memory on host a"),
        ([("a", 3, 5.9)], False, "needs 3.00 GiB of 5.90 GiB of free memory on host a, which is more than half"),
        ([("a", 3, 0)], False, "3.00 GiB of 0.00 MiB of free memory"),
        ([("a", 3, 11), ("a", 3, 12)], False, "6.00 GiB of 11.00 GiB"),  # all ranks of a host hold copies
        ([("a", 3, 12), ("a", 3, 13)], True, "6.00 GiB of 12.00 GiB"),
        ([("a", 3, 40), ("b", 3, 20)], True, "3.00 GiB of 20.00 GiB of free memory on host b"),
        ([("a", 3, 40), ("a", 3, 40), ("b", 3, 5)], False, "3.00 GiB of 5.00 GiB of free memory on host b"),
        ([("a", 0.1, 40), ("a", 0.24, 40)], False, "a rank writes at most 245.76 MiB, which takes less than a second"),
        ([("a", 0, 40), ("a", 1, 40)], True, "needs 1.00 GiB of 40.00 GiB"),
    ],
)
def test_copies_take_at_most_half_of_the_free_memory_of_each_host(
    ranks: list[tuple[str, float, float]], background: bool, reason: str
) -> None:
    found = choose_write(copies(*ranks))
    assert found.background is background
    assert reason in found.reason


def test_a_model_on_the_cpu_is_saved_synchronously() -> None:
    found = choose_write(copies(("a", 3, 400), on_cpu=True))
    assert (found.background, "in host memory" in found.reason) == (False, True)
    assert choose_write([RankCopy(host="a", size=LEAST_BYTES, free=400 * GIB, on_cpu=False)]).background


def save(checkpointer: Checkpointer, step: int, **options: Any) -> Path:
    model = torch.nn.Linear(100, 10)
    return checkpointer.save(step, model=model, optimizer=None, extra={}, rank_state={}, **options)


class SlowWrite:
    """Replaces `write_safetensors`: waits for permission, and remembers the tensors without keeping them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        patch.setattr(checkpoint, "write_safetensors", self)

    def __call__(self, path: Path, tensors: Any) -> tuple[int, str]:
        self.tensors += [weakref.ref(tensor) for tensor in tensors.values()]
        assert self.may_write.wait(60)
        return write_safetensors(path, tensors)


def test_every_save_measures_the_memory_and_no_two_copies_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch, free=1e9)
    slow = SlowWrite(monkeypatch)
    copied = []

    def free() -> float:
        copied.append([tensor for tensor in slow.tensors if tensor() is not None])
        return 1e9 if len(copied) < 3 else 1e3

    monkeypatch.setattr(checkpoint, "free_host_memory", free)
    checkpointer = Checkpointer(tmp_path, asynchronous="auto")
    first = save(checkpointer, 1)
    assert checkpointer.choice is not None
    assert checkpointer.choice.background
    assert not first.exists(), "it is being written"
    slow.may_write.set()
    second = save(checkpointer, 2)
    assert first.exists()
    checkpointer.wait()
    assert second.exists()
    third = save(checkpointer, 3)
    assert not checkpointer.choice.background
    assert third.exists()
    assert len(slow.tensors) > 0
    assert copied == [[], [], []], "the copy is freed before memory is measured for the next"


def test_the_last_checkpoint_is_complete_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, free=1e9)
    checkpointer = Checkpointer(tmp_path, asynchronous="auto")
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    assert save(checkpointer, 1, last=True).exists()
    assert checkpointer.choice is None


def test_a_kept_checkpoint_stays_while_another_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends the protection of its best checkpoint while an earlier save is still being written."""
    checkpointer = Checkpointer(tmp_path, keep_last=1, asynchronous=True)
    best = save(checkpointer, 1)
    checkpointer.keep(best)
    save(checkpointer, 2)
    checkpointer.wait()
    slow = SlowWrite(monkeypatch)
    save(checkpointer, 3)
    checkpointer.keep(None)
    slow.may_write.set()
    checkpointer.wait()
    assert best.exists(), "the next best is not complete yet"
    checkpointer.keep(save(checkpointer, 4))
    checkpointer.wait()
    assert [path.name for path in sorted(tmp_path.glob("step*"))] == ["step-00000004"]


def save_on_hosts(rank: int, world: int, folder: str) -> tuple[bool, str]:
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch, free=1e9 if rank == 0 else 1e3, host="ab"[rank])
        checkpointer = Checkpointer(folder, asynchronous="auto")
        # With a plain model only rank 0 writes, so every rank also saves a state of its own.
        model, state = torch.nn.Linear(100, 10), {"noise": torch.zeros(1000)}
        path = checkpointer.save(1, model=model, optimizer=None, extra={}, rank_state=state)
        assert path.exists()
        assert checkpointer.choice is not None
        return checkpointer.choice.background, checkpointer.choice.reason


def test_ranks_agree_if_one_host_has_less_memory(tmp_path: Path) -> None:
    one, other = run_ranks(2, save_on_hosts, str(tmp_path))
    assert one == other
    assert one[0] is False
    assert one[1].endswith("of free memory on host b, which is more than half")
