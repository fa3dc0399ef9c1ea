"""The images of a cache folder whose N samples show K images, of which D are distinct.

    image_offsets.npy   int64 [N+1]     sample i shows the images image_index[image_offsets[i] : image_offsets[i+1]]
    image_index.npy     int64 [K]       the index of the distinct image for each shown image
    image_numbers.npy   int64 [D, 11]   size, height and so on (`_NUMBERS` lists the columns)
    image_digests.npy   uint8 [D, 32]   SHA-256 of the image file
    image_contents.bin                  paths of image files, and the bytes of images inside rows

No pixels are stored: an image file is read and decoded when a step needs the image. If an image file changes, the cache
folder is rebuilt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.array_files import ArrayWriter, open_array, unusable_cache
from padfree.data.image_files import content_hash, decode, file_status, read_file
from padfree.data.image_processor import Expansion, ImageSettings
from padfree.data.records import RowError
from padfree.errors import UserError
from padfree.images import Image

_NUMBERS = ("start", "length", "is_path", "size", "time", "width", "height", "count", "grid_t", "grid_h", "grid_w")


class ReadImage(NamedTuple):
    """An image of a sample, as it was read: `path` names its file, or `content` has bytes that the row itself holds."""

    digest: str  # SHA-256 of the bytes, in hexadecimal digits
    path: str | None
    content: bytes | None
    size: int  # bytes of the file; 0 if the image is not in a file of its own
    time: int  # time of the file's last change, in nanoseconds; 0 if the image is not in a file of its own
    width: int
    height: int
    expansion: Expansion


class BadFile(NamedTuple):
    """An image file that made a row unusable, with its size and its time of change (-1 if the file cannot be read)."""

    path: str
    size: int
    time: int


class ImageWriter:
    """Writes the images of one cache folder."""

    def __init__(self, folder: Path) -> None:
        self._offsets = ArrayWriter(folder / "image_offsets.npy", np.dtype(np.int64))
        self._index = ArrayWriter(folder / "image_index.npy", np.dtype(np.int64))
        self._rows = ArrayWriter(folder / "image_numbers.npy", np.dtype(np.int64), (len(_NUMBERS),))
        self._digests = ArrayWriter(folder / "image_digests.npy", np.dtype(np.uint8), (32,))
        self._contents: BinaryIO = open(folder / "image_contents.bin", "wb")  # noqa: SIM115  closed by close()
        self._found: dict[str, int] = {}  # SHA-256 of an image file -> number of this image among the distinct images
        self._offsets.append(np.zeros(1, dtype=np.int64))
        self.bad_files: list[BadFile] = []

    @property
    def arrays(self) -> tuple[ArrayWriter, ...]:
        return self._offsets, self._index, self._rows, self._digests

    def append(self, samples: Sequence[Sequence[ReadImage]]) -> None:
        """Append the images of several samples."""
        numbers = [[self._number(image) for image in images] for images in samples]
        ends = self._index.length + np.cumsum([len(one) for one in numbers], dtype=np.int64)
        self._index.append(np.array([number for one in numbers for number in one], dtype=np.int64))
        self._offsets.append(ends.astype(np.int64))

    def _number(self, image: ReadImage) -> int:
        number = self._found.setdefault(image.digest, len(self._found))
        if number == self._rows.length:
            start = self._contents.tell()
            written = (image.content or b"") if image.path is None else image.path.encode()
            self._contents.write(written)
            is_path = int(image.path is not None)
            grid = image.expansion.grid or (0, 0, 0)
            size = (image.size, image.time, image.width, image.height, image.expansion.num_tokens)
            self._rows.append(np.array([[start, len(written), is_path, *size, *grid]], dtype=np.int64))
            self._digests.append(np.frombuffer(bytes.fromhex(image.digest), dtype=np.uint8)[None])
        return number

    def finish(self) -> dict[str, Any]:
        """Flush the image contents. Return what metadata.json records about images, such as their number."""
        self._contents.flush()
        length = self._contents.tell()
        counts = {"shown": self._index.length, "distinct": self._rows.length, "bytes": length}
        return {**counts, "bad_files": [list(file) for file in self.bad_files]}

    @property
    def digest(self) -> str:
        """A hash of which sample shows which image."""
        parts = (self._offsets.digest, self._index.digest, self._digests.digest)
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def close(self) -> None:
        self._contents.close()


class StoredImages:
    """The images of one cache folder, read on access. Any number of threads may use the same object."""

    def __init__(self, folder: Path, about: Mapping[str, Any], num_samples: int, settings: ImageSettings) -> None:
        self.folder, self._about, self._num_samples, self.settings = folder, about, num_samples, settings
        shown, distinct = int(about["shown"]), int(about["distinct"])
        self._offsets = np.asarray(open_array(folder, "image_offsets", (num_samples + 1,)))
        self._index = np.asarray(open_array(folder, "image_index", (shown,)))
        self._rows = np.asarray(open_array(folder, "image_numbers", (distinct, len(_NUMBERS))))
        self._digests = np.asarray(open_array(folder, "image_digests", (distinct, 32)))
        path = folder / "image_contents.bin"
        if not path.exists() or path.stat().st_size != int(about["bytes"]):
            raise unusable_cache(folder, f"{path} is damaged")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredImages, (self.folder, self._about, self._num_samples, self.settings)

    @cached_property
    def _contents(self) -> NDArray[np.uint8]:
        path = self.folder / "image_contents.bin"
        if not int(self._about["bytes"]):
            return np.zeros(0, dtype=np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))

    def of_sample(self, stored: int, tokens: NDArray[np.int32]) -> tuple[Image, ...]:
        """Return the images that a sample shows, except images that truncation cuts off.

        `stored`: the index of the sample in the folder. `tokens` [n]: all tokens of the sample, or its first tokens if
        it is truncated.
        """
        numbers = self._index[self._offsets[stored] : self._offsets[stored + 1]].tolist()
        if not numbers:
            return ()
        places = np.flatnonzero(tokens == self.settings.placeholder)
        ends = np.cumsum([self._value(number, "count") for number in numbers])
        images = []
        for number, end in zip(numbers, ends.tolist(), strict=True):
            start = end - self._value(number, "count")
            if end > len(places):
                break
            images.append(self._image(number, places[start:end]))
        return tuple(images)

    def counts(self, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of images of each of N samples, [N]. `kept` [N]: the samples' indices in the folder."""
        return np.diff(self._offsets)[kept].astype(np.int64)

    def whole_length(self, stored: int, tokens: NDArray[np.int32], length: int) -> bool:
        """Return False if truncating a sample to `length` tokens cuts off only a part of an image's tokens, else True.

        `stored`: the index of the sample in the folder. `tokens` [n]: all tokens of the sample.
        """
        numbers = self._index[self._offsets[stored] : self._offsets[stored + 1]].tolist()
        kept = int(np.count_nonzero(tokens[:length] == self.settings.placeholder))
        return kept in {0, *np.cumsum([self._value(number, "count") for number in numbers]).tolist()}

    def _image(self, number: int, positions: NDArray[np.int64]) -> Image:
        grid = tuple(self._value(number, name) for name in ("grid_t", "grid_h", "grid_w"))
        return Image(
            digest=image_digest(self._digest(number), self.settings),
            positions=positions,
            load=StoredImage(self, number),
            grid=(grid[0], grid[1], grid[2]) if grid[0] else None,
        )

    def _value(self, number: int, name: str) -> int:
        return int(self._rows[number, _NUMBERS.index(name)])

    def _digest(self, number: int) -> str:
        return bytes(self._digests[number]).hex()

    def _written(self, number: int) -> bytes:
        start, length = self._value(number, "start"), self._value(number, "length")
        return bytes(self._contents[start : start + length])

    def content(self, number: int) -> tuple[bytes, str]:
        """Return the content of image file `number` (its index in the folder), and a name of the image for messages."""
        if not self._value(number, "is_path"):
            return self._written(number), f"image {number} of {self.folder}"
        path = self._written(number).decode()
        return unchanged_file(path, self._digest(number)), path

    def about(self, number: int) -> str:
        """Describe the image with index `number` in the folder: `640 × 480, cats/1.jpg, sha256 1f3a...`."""
        path = self._written(number).decode() if self._value(number, "is_path") else None
        return described(self._value(number, "width"), self._value(number, "height"), path, self._digest(number))

    def summary(self, kept: NDArray[np.int64]) -> str:
        """Describe the images of some samples: `15 images, 4 distinct, 130 tokens`. `kept`: the samples' indices."""
        chosen = np.zeros(self._num_samples, dtype=np.bool_)
        chosen[kept] = True
        numbers = self._index[np.repeat(chosen, np.diff(self._offsets))]
        tokens = int(self._rows[numbers, _NUMBERS.index("count")].sum())
        return f"{len(numbers):,} images, {len(np.unique(numbers)):,} distinct, {tokens:,} tokens"

    def unchanged(self) -> bool:
        """Return whether no image file has changed since the folder was built."""
        return all(file_status(path) == (size, time) for path, size, time in self._files())

    def _files(self) -> Iterator[tuple[str, int, int]]:
        for number in range(len(self._rows)):
            if self._value(number, "is_path"):
                yield self._written(number).decode(), self._value(number, "size"), self._value(number, "time")
        yield from self._about["bad_files"]


class StoredImage:
    """A function that loads one image: reads its file, decodes it, and returns the inputs of the vision tower."""

    def __init__(self, images: StoredImages, number: int) -> None:
        self.images, self.number = images, number

    def __call__(self) -> dict[str, NDArray[Any]]:
        return tower_inputs(*self.images.content(self.number), self.images.settings)

    def __str__(self) -> str:
        return self.images.about(self.number)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """A function that loads one image of a prompt from its file or data row, and returns the vision tower's inputs."""

    read: ReadImage
    settings: ImageSettings

    def __call__(self) -> dict[str, NDArray[Any]]:
        path = self.read.path
        content = self.read.content if path is None else unchanged_file(path, self.read.digest)
        assert content is not None
        return tower_inputs(content, path or "an image of a row", self.settings)

    def __str__(self) -> str:
        return described(self.read.width, self.read.height, self.read.path, self.read.digest)


def images_of(read: Sequence[ReadImage], tokens: NDArray[Any], settings: ImageSettings) -> tuple[Image, ...]:
    """Return the images of a prompt, each with the positions of its placeholders in the prompt's `tokens` [n].

    `read`: the images in the order of the prompt.
    """
    places = np.flatnonzero(tokens == settings.placeholder)
    ends = np.cumsum([one.expansion.num_tokens for one in read])
    return tuple(
        Image(
            digest=image_digest(one.digest, settings),
            positions=places[end - one.expansion.num_tokens : end],
            load=PromptImage(one, settings),
            grid=one.expansion.grid,
        )
        for one, end in zip(read, ends.tolist(), strict=True)
    )


def image_digest(file_digest: str, settings: ImageSettings) -> str:
    """Return a key for the tower inputs of an image: the hash of its file, and a hash of the processor's settings."""
    return f"{file_digest}-{settings.processor.digest[:16]}"


def unchanged_file(path: str, digest: str) -> bytes:
    """Return the content of an image file. Raise a `UserError` if it has changed since the data was read.

    `digest`: the SHA-256 of the content when the data was read.
    """
    try:
        content = read_file(path, "an image of the data")
    except RowError as error:
        fix = "restore the image file, or remove the rows that show the image"
        raise UserError("data", error.problem, fix) from None
    if content_hash(content) != digest:
        raise UserError(
            "data", f"{path} has changed since the data was read", "restore the file, or start the run again"
        )
    return content


def tower_inputs(content: bytes, name: str, settings: ImageSettings) -> dict[str, NDArray[Any]]:
    """Decode an image file, and return the inputs of the vision tower. `name`: the image, for messages."""
    try:
        return settings.processor.tower_inputs(decode(content, name, settings.max_pixels), name)
    except RowError as error:
        raise UserError("data", error.problem, "restore the file, or start the run again") from None


def described(width: int, height: int, path: str | None, digest: str) -> str:
    """Describe an image: `640 × 480, cats/1.jpg, sha256 1f3a...`."""
    return f"{width} × {height}, {path or 'in the row'}, sha256 {digest[:12]}"
