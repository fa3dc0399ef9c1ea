"""What a row says about an image: a path, or the bytes of an image file.

    {"type": "image", "image": "cats/1.jpg"}                         a path
    {"type": "image", "image": "data:image/png;base64,iVBORw0..."}   the bytes of a file
    {"type": "image_url", "image_url": {"url": "cats/1.jpg"}}        a path, in the format of OpenAI
    {"bytes": b"\\x89PNG...", "path": null}                           the bytes of a file, as in Parquet
    {"type": "image"}                                                the next image of the column `images`

An `ImageReference` says where the bytes come from. This module reads and decodes no images;
`image_files` does. URLs are refused, because padfree fetches nothing while it reads data.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from padfree.data.records import RowError, check_encodable, shown

IMAGE_PARTS = ("image", "image_url", "input_image")
"""The types of content parts that hold an image."""
OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")
CONTENT_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
"""The keys under which a content part of a message, such as `{"type": "image", "image": "a.png"}`, can hold its image.

A part has at most one of these keys, or both `bytes` and `path`. In this case, `bytes` is used.
"""
IGNORED_KEYS = ("detail", "text", "id", "index", "format", "mime_type", "media_type")
MOST_PATH = 4096
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):")
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")
"""The first bytes of image files. They show that base64 text without `data:` in front holds an image."""


@dataclass(frozen=True, slots=True)
class ImageReference:
    """Says where an image comes from: the path of a file, or the bytes of a file."""

    path: str | None = None
    content: bytes | None = None

    def __repr__(self) -> str:  # a default repr would show all bytes
        return repr(self.path) if self.content is None else f"{len(self.content)} bytes"


def is_image_part(part: Mapping[str, Any]) -> bool:
    return part.get("type") in IMAGE_PARTS or ("type" not in part and "text" not in part and _has_content(part))


def read_part(part: Mapping[str, Any], name: str) -> ImageReference | None:
    """Read the image of a content part, such as `{"type": "image", "image": "a.png"}`.

    Return None if the part names no image (`{"type": "image"}`): it then stands for the next image of column `images`.
    """
    given = {key: value for key, value in part.items() if value is not None and key not in ("type", *IGNORED_KEYS)}
    unknown = sorted(given.keys() - set(CONTENT_KEYS))
    if unknown:
        raise RowError(
            f"{name} has the key {unknown[0]!r}, which padfree does not read; remove it, because the processor of the "
            "model decides the size of images"
        )
    if len(given.keys() - {"bytes", "path"}) > 1 or (len(given) > 1 and not given.keys() <= {"bytes", "path"}):
        raise RowError(f"{name} has {' and '.join(map(repr, sorted(given)))}; give one of them")
    if not given:
        return None
    if given.keys() <= {"bytes", "path"}:
        return _of_object(given, name)
    (key,) = given
    if key == "base64":
        return ImageReference(content=_decoded(given[key], f"{name}.{key}"))
    return read_reference(given[key], f"{name}.{key}")


def read_reference(value: object, name: str) -> ImageReference:
    """Read an image of a row: a path, a data URI, base64, bytes, an object with bytes or path, or a Pillow image."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _of_bytes(bytes(value), name)
    if isinstance(value, str):
        return _of_text(value, name)
    if isinstance(value, Mapping):
        return _of_object({key: one for key, one in value.items() if one is not None}, name)
    if hasattr(value, "save") and hasattr(value, "convert"):  # a Pillow image, as data sets of the Hub decode images
        return ImageReference(content=_png(value, name))
    raise RowError(f"{name} is {shown(value)}; expected a path, a data URI, bytes, or an object with one of them")


def _has_content(part: Mapping[str, Any]) -> bool:
    return any(part.get(key) is not None for key in CONTENT_KEYS)


def _of_object(given: Mapping[str, Any], name: str) -> ImageReference:
    if given.get("bytes") is not None:
        content = given["bytes"]
        if isinstance(content, str):
            return ImageReference(content=_decoded(content, f"{name}.bytes"))
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise RowError(f"{name}.bytes is {shown(content)}; expected bytes")
        return _of_bytes(bytes(content), f"{name}.bytes")
    for key in ("path", "url", "image", "image_url"):
        if key in given:
            return read_reference(given[key], f"{name}.{key}")
    if "base64" in given:
        return ImageReference(content=_decoded(given["base64"], f"{name}.base64"))
    raise RowError(f"{name} has neither bytes nor a path; give one of them")


def _of_bytes(content: bytes, name: str) -> ImageReference:
    if not content:
        raise RowError(f"{name} is empty; expected the bytes of an image file")
    return ImageReference(content=content)


def _of_text(text: str, name: str) -> ImageReference:
    if not text.strip():
        raise RowError(f"{name} is empty; expected a path or a data URI")
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() == "data":
        return ImageReference(content=_of_uri(text, name))
    if scheme is not None and scheme[1].lower() == "file":
        text = unquote(text[len("file:") :].removeprefix("//").removeprefix("localhost"))
    elif scheme is not None and (text[scheme.end() :].startswith("//") or len(scheme[1]) > 1):
        raise RowError(f"{name} is {shown(text)}, but padfree fetches no images; download the image, and give its path")
    elif (content := _undeclared_base64(text)) is not None:
        return ImageReference(content=content)
    if len(text) > MOST_PATH:
        raise RowError(f"{name} has {len(text):,} characters and is neither a path nor base64 of an image file")
    if "\x00" in text:
        raise RowError(f"{name} has a null character; expected a path or a data URI")
    return ImageReference(path=check_encodable(text, name))


def _of_uri(text: str, name: str) -> bytes:
    header, comma, data = text.partition(",")
    if not comma:
        raise RowError(f"{name} is {shown(text)}, which is not a data URI: it has no comma")
    kind = header[len("data:") :].split(";")[0].strip().lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise RowError(f"{name} is a data URI of {kind[:40]}; expected an image")
    if header.rpartition(";")[2].strip().lower() == "base64":
        return _decoded(data, name)
    content = unquote_to_bytes(data)
    return _of_bytes(content, name).content or b""


def _decoded(text: object, name: str) -> bytes:
    if not isinstance(text, str):
        raise RowError(f"{name} is {shown(text)}; expected base64 text")
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{name} is not base64 ({error}); expected the bytes of an image file as base64") from None
    return _of_bytes(content, name).content or b""


def _undeclared_base64(text: str) -> bytes | None:
    """Return the bytes of an image file that `text` holds in base64, without `data:` in front.

    Return None if the text is something else, such as a path.
    """
    if len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", text):
        return None
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return content if content.startswith(_MAGIC) else None


def _png(image: Any, name: str) -> bytes:
    """Return a decoded image as the content of a PNG file, which is lossless."""
    target = io.BytesIO()
    try:
        (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else image.convert("RGB")).save(target, "PNG")
    except (OSError, ValueError) as error:
        raise RowError(f"{name} cannot be read ({error}); replace the image") from None
    return target.getvalue()
