"""Packs on the device: labels counted on the host, old log-probabilities aligned with labels, fillers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from padfree.batch import IGNORE
from padfree.distributed import Axis, Mesh
from padfree.sample import Sample
from padfree.train.microbatch import MicroBatch, PackSettings, filler, make_micro_batch
from tests.refused import refused
from tests.train.cases import make_samples

SETTINGS = PackSettings(layout="balanced")


class _Group:
    """A fake context group without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def share_of(mesh: Mesh, rank: int, size: int) -> Mesh:
    group: Any = _Group(rank, size)
    return replace(mesh, context=Axis(rank=rank, size=size, group=group))


def with_old(samples: list[Sample], scale: float = 1000.0) -> list[Sample]:
    return [one.with_numbers(old_logprobs=scale * i + np.arange(len(one))) for i, one in enumerate(samples)]


def old_of(batch: MicroBatch) -> torch.Tensor:
    assert batch.local.rollout is not None
    assert batch.local.rollout.old_logprobs is not None
    return batch.local.rollout.old_logprobs


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_of_a_row(size: int, mesh: Mesh) -> None:
    samples = make_samples()
    indices = np.array([1, 3, 5])
    labels = 0
    for rank in range(size):
        batch = make_micro_batch(with_old(samples), indices, share_of(mesh, rank, size), SETTINGS)
        local = batch.local
        assert batch.packed.num_tokens % size == 0
        assert batch.num_labels == int((local.labels != IGNORE).sum())
        labels += batch.num_labels
        old = old_of(batch)
        # entry t belongs to the token that position t predicts: token position + 1 of its sample
        real = (local.sample_index < 3) & (local.labels != IGNORE)
        expected = torch.from_numpy(indices)[local.sample_index[real].long()] * 1000.0 + local.position_ids[real] + 1
        torch.testing.assert_close(old[real], expected.float())
    assert labels == sum(samples[i].num_labels for i in indices)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("least", "multiple"), [(0, 1), (0, 32), (48, 32)])
def test_packs_are_padded(size: int, least: int, multiple: int, mesh: Mesh) -> None:
    settings = replace(SETTINGS, min_tokens=least, multiple=multiple)
    samples = make_samples()
    tokens = sum(len(samples[i]) for i in (1, 3, 5))
    batch = make_micro_batch(with_old(samples), np.array([1, 3, 5]), share_of(mesh, 0, size), settings)
    share = batch.packed.num_tokens // size
    assert batch.packed.num_tokens == share * size
    assert share % multiple == 0
    assert max(-(-tokens // size), least) <= share < max(-(-tokens // size), least) + multiple


def test_a_slot_without_samples_is_a_row_that_weighs_nothing(mesh: Mesh) -> None:
    samples = make_samples()
    for indices in (np.array([], dtype=np.int64), np.array([8])):
        batch = make_micro_batch(
            [*with_old(samples), replace(with_old(samples)[0].truncated(0), uid="empty")],
            indices,
            share_of(mesh, 1, 2),
            SETTINGS,
            weights=[np.ones(len(sample), np.float32) for sample in samples] + [np.zeros(0, np.float32)],
        )
        assert batch.is_filler
        assert (batch.packed.num_tokens, batch.local.num_tokens, batch.num_labels) == (2, 1, 0)
        assert not batch.packed.weights.any()
        assert batch.local.rollout is not None
        assert batch.local.rollout.advantages is not None


def test_a_filler_needs_a_token() -> None:
    assert len(filler([Sample(tokens=[]), Sample(tokens=[7, 8])])) == 1
    with refused("samples"):
        filler([Sample(tokens=[])])


def test_old_logprobs_lie_where_their_tokens_are_predicted(mesh: Mesh) -> None:
    lengths = (0, 3, 1, 4)
    samples = [Sample(tokens=np.arange(n), uid=index) for index, n in enumerate(lengths)]
    batch = make_micro_batch(with_old(samples, 10.0), np.array([0, 1, 2, 3]), mesh, PackSettings())
    assert old_of(batch).tolist() == [11.0, 12.0, 0.0, 0.0, 31.0, 32.0, 33.0, 0.0]
    with pytest.raises(ValueError, match="old_logprobs"):
        samples[1].with_numbers(old_logprobs=np.zeros(4))
