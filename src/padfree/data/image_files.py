"""Read and check image files: size on disk, format, width × height, and whether the file is complete.

    reference   -> bytes      from the row, or from the file that the row names
    bytes       -> image      decoded with Pillow, turned as its EXIF data says, in RGB, as transformers decodes images

Every error is a `RowError` that names the image. The limit on width × height is checked before an image is decoded,
because a small file can hold an image of many gigabytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from padfree.data.image_references import ImageReference
from padfree.data.records import RowError
from padfree.errors import UserError

MOST_BYTES = 1 << 28
"""The maximum size of an image file in bytes."""


class ImageFileError(RowError):
    """Raised if an image cannot be used. `path`: the file of the image, or None if the row itself holds the image."""

    def __init__(self, reason: str, path: str | None = None) -> None:
        super().__init__(reason)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.path)


class FileStatus(NamedTuple):
    """Size and modification time of a file, to notice changes. Both numbers are -1 if the file cannot be read."""

    size: int
    time: int  # time of the last change, in nanoseconds


def file_status(path: str) -> FileStatus:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return FileStatus(-1, -1)
    return FileStatus(found.st_size, found.st_mtime_ns)


def path_of(reference: ImageReference, folder: str | None, name: str) -> str | None:
    """Return the absolute path of an image, or None if the row holds the bytes of the image.

    Relative paths are resolved against `folder`, which is None if the rows come from the Hub.
    """
    if reference.path is None:
        return None
    path = os.path.expanduser(reference.path)
    if os.path.isabs(path):
        return path
    if folder is None:
        raise RowError(f"{name} is {reference.path!r}, a relative path in data without a folder; set data.image_folder")
    return os.path.join(folder, path)


def read_file(path: str, name: str) -> bytes:
    """Return the content of an image file."""
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise ImageFileError(f"{name}: {path} is a folder; give an image file", path)
        if not stat.S_ISREG(found.st_mode):
            raise ImageFileError(f"{name}: {path} is not a regular file; give an image file", path)
        if found.st_size > MOST_BYTES:
            raise ImageFileError(f"{name}: {path} has {found.st_size:,} bytes; expected at most {MOST_BYTES:,}", path)
        if not found.st_size:
            raise ImageFileError(f"{name}: {path} is empty; replace the file", path)
        return Path(path).read_bytes()
    except ImageFileError:
        raise
    except FileNotFoundError:
        raise ImageFileError(
            f"{name}: {path} does not exist; correct the path, or set data.image_folder to the folder of images",
            path,
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageFileError(f"{name}: {path} cannot be read ({reason}); correct the path", path) from None


def decode(content: bytes, name: str, max_pixels: int, path: str | None = None) -> Any:
    """Decode the `content` of an image file as a Pillow image in RGB.

    Raise an `ImageFileError` if the image cannot be used, for example because it has more than `max_pixels` pixels.
    `name` and `path` are for error messages.
    """
    pillow, operations = pillow_modules()
    if len(content) > MOST_BYTES:
        raise ImageFileError(f"{name} has {len(content):,} bytes; expected at most {MOST_BYTES:,}", path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about files that have an error but can be read
            image = pillow.open(io.BytesIO(content))
            width, height = image.size
            if width * height > max_pixels:
                raise ImageFileError(
                    f"{name} has {width} × {height} pixels, over data.max_image_pixels {max_pixels}; shrink the image",
                    path,
                )
            if getattr(image, "n_frames", 1) > 1:
                raise ImageFileError(
                    f"{name} is an animation of {image.n_frames} frames ({image.format}); give a single image", path
                )
            image.load()
            return operations.exif_transpose(image).convert("RGB")
    except ImageFileError:
        raise
    except pillow.DecompressionBombError:
        raise ImageFileError(
            f"{name} has too many pixels, over data.max_image_pixels {max_pixels}; shrink the image", path
        ) from None
    except pillow.UnidentifiedImageError:
        where = f" ({path})" if path else ""
        raise ImageFileError(f"{name} is not an image file{where}; give a file that Pillow reads", path) from None
    except Exception as error:  # the decoders raise all kinds of errors for damaged files
        where = f" ({path})" if path else ""
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise ImageFileError(f"{name} is damaged{where}: {reason}; replace the image", path) from None


def content_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pillow_modules() -> tuple[Any, Any]:
    """Return Pillow's modules `Image` and `ImageOps`. Raise a `UserError` if Pillow is missing."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise UserError("model.vision", "true, which needs Pillow", "pip install 'padfree[vision]'") from None
    return Image, ImageOps
