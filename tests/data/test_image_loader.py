"""Images are loaded in threads, a few packs ahead, once per image, and dropped when the packs are built."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from padfree.data.image_loader import PACKS_AHEAD, ImageLoader, PacksAhead
from padfree.images import Image
from padfree.sample import Sample

STAR = 9


class Loads:
    """Images whose loads are counted. `release` lets loads proceed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.threads: set[str] = set()
        self.release = threading.Event()
        self.release.set()

    def sample(self, *digests: str) -> Sample:
        tokens = [token for _ in digests for token in (1, STAR)]
        images = [Image(digest=one, positions=[2 * n + 1], load=self._load(one)) for n, one in enumerate(digests)]  # type: ignore[arg-type]
        return Sample(tokens=tokens, images=tuple(images))  # type: ignore[arg-type]

    def _load(self, digest: str) -> Any:
        def load() -> dict[str, Any]:
            self.release.wait(10)
            self.counts[digest] += 1
            self.threads.add(threading.current_thread().name)
            if digest == "bad":
                raise ValueError("damaged")
            return {"pixel_values": np.full((1, 2), ord(digest[0]))}

        return load


def test_an_image_of_several_samples_is_loaded_once() -> None:
    loads = Loads()
    text = Sample(tokens=[1])  # type: ignore[arg-type]
    packs = [[loads.sample("a", "b"), loads.sample("a")], [loads.sample("a")], [text]]
    ahead = PacksAhead(ImageLoader(), packs)
    first = ahead.take()
    assert [[image.load()["pixel_values"][0, 0] for image in sample.images] for sample in first] == [[97, 98], [97]]
    assert ahead.take()[0].images[0].load()["pixel_values"][0, 0] == 97
    assert ahead.take()[0].images == ()
    assert loads.counts == {"a": 1, "b": 1}
    assert all(name.startswith("padfree-images") for name in loads.threads)


def test_only_a_few_packs_are_loaded_ahead() -> None:
    loads = Loads()
    packs = [[loads.sample(chr(97 + number))] for number in range(10)]
    loader = ImageLoader()
    ahead = PacksAhead(loader, packs)
    assert len(loader._waiting) == PACKS_AHEAD
    for number in range(10):
        (sample,) = ahead.take()
        assert sample.images[0].load()["pixel_values"][0, 0] == 97 + number
        assert len(loader._waiting) <= PACKS_AHEAD
    assert not loader._waiting
    assert set(loads.counts.values()) == {1}


def test_loading_does_not_wait_for_the_main_thread() -> None:
    loads = Loads()
    loads.release.clear()
    ahead = PacksAhead(ImageLoader(), [[loads.sample("a")], [loads.sample("b")]])
    assert not loads.counts
    loads.release.set()
    ahead.take()
    ahead.take()
    assert loads.counts == {"a": 1, "b": 1}


def test_an_error_is_raised_where_the_pack_is_built() -> None:
    loads = Loads()
    ahead = PacksAhead(ImageLoader(), [[loads.sample("a")], [loads.sample("bad")]])
    ahead.take()
    with pytest.raises(ValueError, match="damaged"):
        ahead.take()
