"""Replace the images of a rendered text by their placeholder tokens, while rows are tokenised.

    rendered    <|vision_start|><|image_pad|><|vision_end|>What is this?           one marker per image
    expanded    <|vision_start|><|image_pad|> * 6<|vision_end|>What is this?       as the model's processor writes it

The text consists of pieces, each of which is trained or untrained. A marker and its expansion are in the same piece.
Loss masks therefore stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.data.encode import Passage, Piece
from padfree.data.image_files import ImageFileError, content_hash, decode, file_status, path_of, read_file
from padfree.data.image_processor import Expansion, ImageSettings
from padfree.data.image_references import ImageReference
from padfree.data.image_store import BadFile, ReadImage
from padfree.data.records import RowError

MOST_REMEMBERED = 4096
"""The maximum number of images whose placeholder text is cached, for rows that show the same image again."""


class ImageReader:
    """Reads the images of rows, and replaces each image marker in the rendered text by an image's placeholder tokens.

    Each process that tokenises rows has one reader.
    """

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings.for_rows()
        self._found: dict[str, tuple[Expansion, int, int]] = {}
        self.bad_files: list[BadFile] = []  # the files of images that could not be used

    def expanded(self, passage: Passage, folder: str | None) -> tuple[Passage, tuple[ReadImage, ...]]:
        """Read the images of a passage, and replace each image marker by the placeholder tokens of its image.

        Return the changed passage and its images. `folder`: the folder to which relative paths of images refer.
        """
        processor = self.settings.processor
        marker = processor.marker
        markers = sum(piece.text.count(marker) for piece in passage.pieces)
        if markers != len(passage.images):
            raise RowError(
                f"the rendered text has {marker!r} {markers} times, but the row shows {len(passage.images)} images; "
                "remove this text from the row, or set data.chat_template to a template that shows each image once"
            )
        read = self.read(passage.images, folder)
        if not read:
            return passage, read
        texts = iter([image.expansion.text for image in read])
        return replace(passage, pieces=tuple(_expanded(piece, marker, texts) for piece in passage.pieces)), read

    def read(self, references: Sequence[ImageReference], folder: str | None) -> tuple[ReadImage, ...]:
        """Read the images of a sample. `folder`: the folder to which relative paths of images refer."""
        if self.settings.one_image is not None and len(references) > 1:
            raise RowError(f"the sample shows {len(references)} images; give one, because {self.settings.one_image}")
        return tuple(self._read(reference, folder, f"image {number}") for number, reference in enumerate(references, 1))

    def problem(self, tokens: NDArray[np.integer[Any]], images: Sequence[ReadImage]) -> str | None:
        """Return why the number of placeholders among `tokens` [n] does not match its images, or None if it does."""
        found = int(np.count_nonzero(tokens == self.settings.placeholder))
        expected = sum(image.expansion.num_tokens for image in images)
        if found == expected:
            return None
        text = self.settings.processor.placeholder_text
        return f"has {found} placeholder tokens {text!r}, but its images need {expected}; remove this text from the row"

    def _read(self, reference: ImageReference, folder: str | None, name: str) -> ReadImage:
        path = path_of(reference, self.settings.folder or folder, name)
        status = None if path is None else file_status(path)
        try:
            content = reference.content if path is None else read_file(path, name)
            assert content is not None
            digest = content_hash(content)
            found = self._found.get(digest)
            if found is None:
                image = decode(content, name, self.settings.max_pixels, path)
                found = self.settings.processor.expansion(image, name), image.width, image.height
                if not found[0].num_tokens:
                    raise RowError(f"{name} is too small to become a placeholder token; give a larger image")
                if len(self._found) >= MOST_REMEMBERED:
                    self._found.clear()
                self._found[digest] = found
        except RowError as error:
            if path is not None and status is not None:
                self.bad_files.append(BadFile(path, *status))
                if not isinstance(error, ImageFileError):
                    raise RowError(f"{error.problem} ({path})") from None
            raise
        size, time = (0, 0) if status is None else status
        expansion, width, height = found
        return ReadImage(digest, path, None if path else content, size, time, width, height, expansion)


def _expanded(piece: Piece, marker: str, texts: Iterator[str]) -> Piece:
    first, *rest = piece.text.split(marker)
    return Piece("".join([first, *(f"{next(texts)}{part}" for part in rest)]), piece.trained)
