"""Rows with images that cannot be used: each is a bad row, with one line that says what is wrong."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.data import load_sft
from padfree.testing.vision_folders import drawn, encoded
from tests.data.vision import asked, picture, settings_of, tokenizer_of, write_images, write_rows
from tests.refused import refused

pytest.importorskip("PIL")

GOOD = {"messages": asked(picture("0.png"), "What is two?")}


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file that claims a size, with almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def animation() -> bytes:
    target = io.BytesIO()
    frames = [drawn(number, 8, 8) for number in range(3)]
    frames[0].save(target, "GIF", save_all=True, append_images=frames[1:])
    return target.getvalue()


def file(name: str, content: bytes) -> Callable[[Path], dict[str, Any]]:
    def row(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(content)
        return {"messages": asked(picture(name), "Hello")}

    return row


def shows(*parts: Any, **columns: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"messages": asked(*parts, "Hello"), **columns}


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def folder_as_image(folder: Path) -> dict[str, Any]:
    (folder / "sub").mkdir()
    return {"messages": asked(picture("sub"), "Hello")}


def fifo(folder: Path) -> dict[str, Any]:
    os.mkfifo(folder / "pipe.png")
    return {"messages": asked(picture("pipe.png"), "Hello")}


PNG = encoded(drawn(5, 32, 32))
BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "missing file": (shows(picture("nowhere.png")), "does not exist"),
    "missing folder": (shows(picture("no/where.png")), "does not exist"),
    "a folder": (folder_as_image, "is a folder"),
    "a pipe": (fifo, "not a regular file"),
    "empty file": (file("empty.png", b""), "is empty"),
    "text file": (file("text.png", b"not an image at all"), "not an image file"),
    "truncated PNG": (file("half.png", PNG[: len(PNG) // 2]), "is damaged"),
    "truncated JPEG": (file("half.jpg", encoded(drawn(5, 64, 64), "JPEG")[:900]), "is damaged"),
    "wrong checksum": (file("crc.png", PNG[:50] + b"\xff\xff" + PNG[52:]), "is damaged"),
    "header only": (file("head.png", PNG[:8]), "not an image file"),
    "too many pixels": (file("big.png", encoded(drawn(0, 200, 200))), "200 × 200 pixels"),
    "bomb": (file("bomb.png", png_of_size(60_000, 60_000)), "too many pixels|60000 × 60000"),
    "no rows of pixels": (file("short.png", png_of_size(40, 40)), "is damaged"),
    "animation": (file("moves.gif", animation()), "animation of 3 frames"),
    "too long and thin": (file("thin.png", encoded(drawn(0, 2, 900))), "the model's processor raised"),
    "URL": (shows(picture("https://example.org/a.png")), "fetches no images"),
    "URL of OpenAI": (shows({"type": "image_url", "image_url": {"url": "http://x/a.png"}}), "fetches no images"),
    "data URI that is no base64": (shows(picture("data:image/png;base64,###")), "is not base64"),
    "data URI of text": (shows(picture("data:text/html,hi")), "data URI of text/html"),
    "data URI of a damaged image": (shows(picture(uri(PNG[:200]))), "is damaged"),
    "number": (shows({"type": "image", "image": 5}), "expected a path"),
    "part without an image": (shows({"type": "image"}), "has no image"),
    "two images in a part": (shows({"type": "image", "image": "0.png", "url": "1.png"}), "give one of them"),
    "size in a part": (shows({"type": "image", "image": "0.png", "resized_width": 4}), "resized_width"),
    "fewer images than places": (
        lambda folder: {"messages": asked("<image> and <image>"), "images": ["0.png"]},
        "1 images.*2 times",
    ),
    "more images than places": (
        lambda folder: {"messages": asked("<image>"), "images": ["0.png", "1.png"]},
        "2 images.*1 times",
    ),
    "more images than parts": (shows({"type": "image"}, images=["0.png", "1.png"]), "2 images.*1 image parts"),
    "a place and no column": (shows("<image>x"), "'images' is missing, but the messages have the text '<image>'"),
    "a place and null": (shows("<image>x", images=None), "'images' is missing, but the messages"),
    "a place and another image": (shows(picture("0.png"), "<image>x"), "'images' is missing, but the messages"),
    "null in the column": (shows("x", images=["0.png", None]), "images\\[1\\] is null"),
    "broken column": (shows("x", images={"bytes": None, "path": None}), "neither bytes nor a path"),
    "marker in the text": (shows(picture("0.png"), "see <|image_pad|>"), "2 times.*1 images"),
    "marker without an image": (shows("see <|image_pad|>"), "1 times.*0 images"),
    "video": (shows({"type": "video", "video": "a.mp4"}), "text and images only"),
    "lone surrogate": (shows(picture("\ud800.png")), "surrogate"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_a_bad_row(kind: str, tmp_path: Path) -> None:
    make, problem = BAD[kind]
    write_images(tmp_path)
    path = write_rows(tmp_path / "train.jsonl", [GOOD, make(tmp_path), GOOD])
    options: dict[str, Any] = {"cache": tmp_path / "cache", "num_workers": 0}
    changes = "data.max_image_pixels=20000"
    with refused("train.jsonl line 2", problem):
        load_sft(path, tokenizer_of(), settings_of("qwen3_vl", changes), **options)
    data = load_sft(path, tokenizer_of(), settings_of("qwen3_vl", changes, on_bad_row="skip"), **options)
    assert len(data) == 2
    (skipped,) = data.report.skipped
    assert skipped.line == 2
    assert "\n" not in skipped.reason
    assert skipped.reason.count("; ") <= 1  # one cure


def test_text_models_refuse_images(tmp_path: Path) -> None:
    from padfree.data import SFTDataSettings

    write_images(tmp_path)
    path = write_rows(tmp_path / "train.jsonl", [{"messages": asked("Hello")}, GOOD])
    with refused("train.jsonl line 2", r"or set model\.vision=true"):
        load_sft(path, tokenizer_of(), SFTDataSettings(), cache=tmp_path / "cache", num_workers=0)
    column = write_rows(tmp_path / "column.jsonl", [{"messages": asked("Hello"), "images": ["0.png"]}])
    with refused("data.columns", r"set model\.vision=true"):
        load_sft(column, tokenizer_of(), SFTDataSettings(), cache=tmp_path / "cache", num_workers=0)


def test_a_repaired_image_is_read_again(tmp_path: Path) -> None:
    """With `on_bad_row="skip"` the cache does not remember a missing image forever."""
    write_images(tmp_path)
    path = write_rows(tmp_path / "train.jsonl", [GOOD, {"messages": asked(picture("late.png"), "Hello")}])
    settings = settings_of(on_bad_row="skip")
    options: dict[str, Any] = {"cache": tmp_path / "cache", "num_workers": 0}
    assert len(load_sft(path, tokenizer_of(), settings, **options)) == 1
    drawn(0, 16, 16).save(tmp_path / "late.png")
    assert len(load_sft(path, tokenizer_of(), settings, **options)) == 2


def test_one_image_per_sample_where_the_model_needs_it(tmp_path: Path) -> None:
    write_images(tmp_path)
    path = write_rows(tmp_path / "train.jsonl", [{"messages": asked(picture("0.png"), picture("1.png"), "Hello")}])
    with refused("train.jsonl line 1", "shows 2 images"):
        load_sft(
            path,
            tokenizer_of("llava_onevision"),
            settings_of("llava_onevision"),
            cache=tmp_path / "cache",
            num_workers=0,
        )
