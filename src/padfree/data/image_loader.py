"""Load the images of micro-batches in threads, before the main thread needs the images.

While the main thread concatenates the samples of one micro-batch (a pack), threads load the images of the next three
packs. Decoding and resizing release Python's global lock, so that threads use several cores.

An image that occurs several times in these packs is loaded once. Its pixels are dropped when the packs are built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from padfree.images import Image
from padfree.sample import Sample

MOST_THREADS = 16
PACKS_AHEAD = 3
"""How many packs ahead images are loaded: while a pack is built, threads load the images of the next packs."""

Inputs = Mapping[str, NDArray[Any]]


class ImageLoader:
    """Loads images in threads. `begin` announces a pack of samples, and `loaded` later returns it with its images."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None  # started for the first image
        self._waiting: dict[str, tuple[Future[Inputs], int]] = {}  # by digest: inputs, number of packs that need them

    def begin(self, samples: Sequence[Sample]) -> None:
        """Start to load the images of a pack of samples in threads, without waiting for them."""
        for digest, image in _distinct(samples).items():
            future, count = self._waiting.get(digest, (None, 0))
            self._waiting[digest] = (future or self._submit(image), count + 1)

    def loaded(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of a pack with their images, after waiting until the images are loaded."""
        found: dict[str, Inputs] = {}
        for digest in _distinct(samples):
            future, count = self._waiting.pop(digest)
            if count > 1:
                self._waiting[digest] = (future, count - 1)
            found[digest] = future.result()
        return [_with_inputs(sample, found) if sample.images else sample for sample in samples]

    def _submit(self, image: Image) -> Future[Inputs]:
        if self._threads is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self._threads = ThreadPoolExecutor(min(cores, MOST_THREADS), thread_name_prefix="padfree-images")
        return self._threads.submit(image.load)


class PacksAhead:
    """Loads the images of several packs in order, a few packs ahead. `packs[k]`: the samples of pack k."""

    def __init__(self, loader: ImageLoader, packs: Sequence[Sequence[Sample]]) -> None:
        self._loader, self._packs = loader, packs
        self._begun = self._taken = 0
        self._begin()

    def take(self) -> list[Sample]:
        """Return the samples of the next pack, with loaded images, and start to load the images of a later pack."""
        samples = self._packs[self._taken]
        self._taken += 1
        self._begin()
        return self._loader.loaded(samples)

    def _begin(self) -> None:
        while self._begun < min(len(self._packs), self._taken + PACKS_AHEAD):
            self._loader.begin(self._packs[self._begun])
            self._begun += 1


def _distinct(samples: Sequence[Sample]) -> dict[str, Image]:
    return {image.digest: image for sample in samples for image in sample.images}


def _with_inputs(sample: Sample, found: Mapping[str, Inputs]) -> Sample:
    def loaded(image: Image) -> Image:
        inputs = found[image.digest]
        return replace(image, load=lambda: inputs)

    return replace(sample, images=tuple(map(loaded, sample.images)))
