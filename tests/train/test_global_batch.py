"""A batch between its updates: the samples of each update, and a bit-identical restore from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.sample import TOKEN_ARRAYS, Sample, with_arrays
from padfree.train.global_batch import KEY, GlobalBatch, update_parts
from tests.refused import refused

COURSE: dict[str, int] = {"epochs": 2, "mini_batches": 2, "seed": 3, "number": 5}


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)

    def floats(length: int) -> Any:
        return rng.normal(size=length).astype(np.float32) / 3

    return [
        Sample(tokens=rng.integers(0, 9, 4), loss_mask=[0, 1, 1, 0], advantages=floats(4), uid="a", reward=0.1),
        Sample(tokens=np.arange(2, dtype=np.uint16), advantages=floats(2), uid=np.int64(7), group="g", source="file:3"),  # type: ignore[arg-type]
        Sample(tokens=[], advantages=floats(0), group=2, reward=float("nan")),
        Sample(tokens=[5, 6, 7], advantages=floats(3), ref_logprobs=floats(3), logprobs=floats(3), raw_reward={"x": 1}),
        Sample(tokens=[1], advantages=floats(1), reward=np.float32(0.3)),  # type: ignore[arg-type]
    ]


def make_batch(found: list[Sample], *, old: bool = True) -> GlobalBatch:
    rng = np.random.default_rng(1)
    if old:
        found = with_arrays(found, old_logprobs=[rng.normal(size=len(sample)).astype(np.float32) for sample in found])
    return GlobalBatch(
        samples=found,
        parts=update_parts(len(found), **COURSE),
        epochs=2,
        metrics={"reward": np.float64(1 / 3), "count": 3},
    )


def test_every_epoch_has_every_sample_once() -> None:
    batch = make_batch(samples())
    seen: list[list[int]] = [[], []]
    epochs = []
    while not batch.finished:
        epochs.append(batch.epoch)
        seen[batch.epoch] += [int(i) for i in batch.parts[batch.done]]
        assert batch.samples_of(batch.done) == [batch.samples[i] for i in batch.parts[batch.done]]
        batch.done += 1
    assert epochs == [0, 0, 1, 1]
    assert [sorted(order) for order in seen] == [list(range(5))] * 2
    assert seen[0] != seen[1]


def test_fewer_samples_than_mini_batches_and_one_mini_batch() -> None:
    assert [len(part) for part in update_parts(2, epochs=1, mini_batches=3, seed=0, number=1)] == [1, 1]
    (whole,) = update_parts(4, epochs=1, mini_batches=1, seed=0, number=1)
    assert whole.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("old", [True, False])
def test_a_checkpoint_brings_it_back(old: bool, tmp_path: Path) -> None:
    batch = make_batch(samples(), old=old)
    batch.done = 3
    checkpointer, model = Checkpointer(tmp_path), nn.Linear(1, 1)
    path = checkpointer.save(1, model=model, optimizer=None, extra={"step": 1, **batch.state()}, rank_state={})
    extra, _ = checkpointer.load(path, model=model, optimizer=None)
    assert all(isinstance(value, Tensor) == key.startswith(f"{KEY}/") for key, value in extra.items())
    found = GlobalBatch.restored(extra, **COURSE)
    assert (found.done, found.epoch, found.epochs) == (3, 1, 2)
    assert found.metrics == {"reward": 1 / 3, "count": 3}
    assert [part.tolist() for part in found.parts] == [part.tolist() for part in batch.parts]
    for sample, other in zip(found.samples, batch.samples, strict=True):
        assert sample.tokens.tolist() == other.tokens.tolist()
        for name in ("loss_mask", *TOKEN_ARRAYS):
            one, two = getattr(sample, name), getattr(other, name)
            assert (one is None) == (two is None)
            if one is not None:
                assert one.dtype == two.dtype
                assert one.tobytes() == two.tobytes()
        assert (sample.uid, sample.group, sample.source) == (other.uid, other.group, other.source)
        assert sample.reward == other.reward or sample.reward != sample.reward
    assert all((sample.old_logprobs is not None) == old for sample in found.samples)


def test_a_checkpoint_with_old_logprobs_beside_the_samples_is_read() -> None:
    """The format of earlier versions."""
    batch = make_batch(samples())
    state = batch.state()
    state[f"{KEY}/old"] = state.pop(f"{KEY}/old_logprobs")
    for row in state[KEY]["samples"]:
        row["arrays"].remove("old_logprobs")
    for sample, other in zip(GlobalBatch.restored(state, **COURSE).samples, batch.samples, strict=True):
        assert sample.old_logprobs is not None
        assert other.old_logprobs is not None
        assert sample.old_logprobs.tobytes() == other.old_logprobs.tobytes()


@pytest.mark.parametrize("changes", [{"epochs": 3}, {"mini_batches": 4}, {"epochs": 4, "mini_batches": 1}])
def test_another_course_inside_a_batch_is_refused(changes: dict[str, int]) -> None:
    state = make_batch(samples()).state()
    with refused("loss.epochs"):
        GlobalBatch.restored(state, **{**COURSE, **changes})
