"""The reference's log-probabilities of all training samples, computed once and cached on disk.

    reference.precompute = true      first start    reference scores every sample -> <cache>/<key>/logprobs.npy [Σn]
                                     later starts   open the file; no sample is scored

The name of the cached file is a hash of the samples, the reference's weights, and the settings and versions that affect
the result. After scoring, the reference model is freed, so that training can use its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from padfree.data import StoredSamples
from padfree.data.array_files import open_array
from padfree.data.hashing import hash_of
from padfree.data.store import default_cache_folder, find_or_build, writing
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.sample import Sample
from padfree.train.rl.reference_model import ReferenceModel

NAME = "logprobs"
SCORED_AT_A_TIME = 1024
"""Number of samples that the reference scores per call."""


class ReferencedSamples(Sequence[Sample]):
    """Training samples with the reference's log-probabilities, which are read from the cached file on access."""

    def __init__(self, samples: StoredSamples, logprobs: NDArray[np.float32]) -> None:
        self._samples, self._logprobs = samples, logprobs
        self._starts = np.concatenate([[0], np.cumsum(samples.lengths)])
        self.row_starts = samples.row_starts

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        sample, start = self._samples[index], self._starts[index]
        return sample.with_numbers(ref_logprobs=np.array(self._logprobs[start : start + len(sample)]))


def with_reference(
    samples: StoredSamples, reference: ReferenceModel, fingerprint: str, mesh: Mesh, *, dtype: str, temperature: float
) -> ReferencedSamples:
    """Return the samples with the log-probabilities of the reference model. All ranks must call this.

    `fingerprint`: a hash of the reference's weights, which is part of the cache key.
    """
    depends = [samples.digest, fingerprint, dtype, temperature, torch.__version__]
    key, cache = hash_of(["reference", *depends])[:32], default_cache_folder()
    shape = (int(samples.lengths.sum()),)

    def intact(folder: Path) -> bool:
        try:
            return folder.exists() and open_array(folder, NAME, shape).dtype == np.float32
        except UserError:
            return False

    there = torch.tensor(int(intact(cache / key)), device=mesh.device)
    dist.all_reduce(there, op=dist.ReduceOp.MIN, group=mesh.loss.group)
    if not there:
        # Scoring is collective, so it must not run inside `find_or_build`, where only one rank works and holds a lock.
        found = np.concatenate([np.empty(0, np.float32), *_scored(samples, reference)])

        def build(folder: Path) -> None:
            with writing(folder):
                np.save(folder / f"{NAME}.npy", found)

        find_or_build(cache, key, build, intact=intact)
    return ReferencedSamples(samples, open_array(cache / key, NAME, shape))


def _scored(samples: StoredSamples, reference: ReferenceModel) -> Iterator[NDArray[np.float32]]:
    for first in range(0, len(samples), SCORED_AT_A_TIME):
        yield from reference.logprobs([samples[i] for i in range(first, min(first + SCORED_AT_A_TIME, len(samples)))])
