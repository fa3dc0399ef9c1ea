"""Rows for the device: labels counted on the host, old log-probabilities beside the labels, rows without samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from padfree.batch import IGNORE, Sample
from padfree.distributed import Axis, Mesh
from padfree.train.microbatch import RowSettings, filler, make_micro_batch
from tests.refused import refused
from tests.train.cases import make_samples

SETTINGS = RowSettings(layout="balanced")


class _Group:
    """A context group to look at, not to talk in."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def share_of(mesh: Mesh, rank: int, size: int) -> Mesh:
    group: Any = _Group(rank, size)
    return replace(mesh, context=Axis(rank=rank, size=size, group=group))


def old_logprobs(samples: list[Sample]) -> list[np.ndarray[Any, Any]]:
    return [1000.0 * i + np.arange(len(sample)) for i, sample in enumerate(samples)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_of_a_row(size: int, mesh: Mesh) -> None:
    samples = make_samples()
    indices = np.array([1, 3, 5])
    labels = 0
    for rank in range(size):
        batch = make_micro_batch(
            samples, indices, share_of(mesh, rank, size), SETTINGS, old_logprobs=old_logprobs(samples)
        )
        local = batch.local
        assert batch.packed.num_tokens % size == 0
        assert batch.num_labels == int((local.labels != IGNORE).sum())
        labels += batch.num_labels
        assert batch.old_logprobs is not None
        # entry t is of the token that position t predicts: token position + 1 of its sample
        real = (local.sample_index < 3) & (local.labels != IGNORE)
        expected = torch.from_numpy(indices)[local.sample_index[real].long()] * 1000.0 + local.position_ids[real] + 1
        torch.testing.assert_close(batch.old_logprobs[real], expected.float())
    assert labels == sum(samples[i].num_labels for i in indices)


def test_a_slot_without_samples_is_a_row_that_weighs_nothing(mesh: Mesh) -> None:
    samples = make_samples()
    for indices in (np.array([], dtype=np.int64), np.array([8])):
        batch = make_micro_batch(
            [*samples, replace(samples[0].truncated(0), uid="empty")],
            indices,
            share_of(mesh, 1, 2),
            SETTINGS,
            weights=[np.ones(len(sample), np.float32) for sample in samples] + [np.zeros(0, np.float32)],
            old_logprobs=[*old_logprobs(samples), np.zeros(0)],
        )
        assert batch.is_filler
        assert (batch.packed.num_tokens, batch.local.num_tokens, batch.num_labels) == (2, 1, 0)
        assert not batch.packed.weights.any()
        assert batch.local.rollout is not None
        assert batch.local.rollout.advantages is not None


def test_a_filler_needs_a_token() -> None:
    assert len(filler([Sample(tokens=[]), Sample(tokens=[7, 8])])) == 1
    with pytest.raises(ValueError, match="none of the 1 of this step has a token"):
        filler([Sample(tokens=[])])


def test_old_logprobs_lie_where_their_tokens_are_predicted(mesh: Mesh) -> None:
    lengths = (0, 3, 1, 4)
    samples = [Sample(tokens=np.arange(n), uid=index) for index, n in enumerate(lengths)]
    old = [10.0 * index + np.arange(n) for index, n in enumerate(lengths)]
    batch = make_micro_batch(samples, np.array([0, 1, 2, 3]), mesh, RowSettings(), old_logprobs=old)
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [11.0, 12.0, 0.0, 0.0, 31.0, 32.0, 33.0, 0.0]
    old[1], old[3] = old[3], old[1]
    with refused("old_logprobs"):
        make_micro_batch(samples, np.array([0, 1, 2, 3]), mesh, RowSettings(), old_logprobs=old)
