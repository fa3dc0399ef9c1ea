"""What a row may say about an image, and where the images of a row belong."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from padfree.data.conversation import Conversation, read_conversation
from padfree.data.image_references import ImageReference, read_part, read_reference
from padfree.data.records import RowError
from padfree.data.row_images import read_column, with_images
from padfree.testing.vision_folders import drawn, encoded

pytest.importorskip("PIL")

PNG = encoded(drawn(0, 12, 8))
TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cats/1.jpg", ImageReference(path="cats/1.jpg")),
        ("/data/a b.png", ImageReference(path="/data/a b.png")),
        ("file:///data/a%20b.png", ImageReference(path="/data/a b.png")),
        ("file://localhost/data/a.png", ImageReference(path="/data/a.png")),
        (f"data:image/png;base64,{TEXT}", ImageReference(content=PNG)),
        (f"DATA:image/png;charset=x;base64,{TEXT[:40]}\n{TEXT[40:]}", ImageReference(content=PNG)),
        (f"data:,{'%00' * 3}", ImageReference(content=b"\0\0\0")),
        (TEXT, ImageReference(content=PNG)),
        ("A" * 64, ImageReference(path="A" * 64)),
        (PNG, ImageReference(content=PNG)),
        (bytearray(PNG), ImageReference(content=PNG)),
        (memoryview(PNG), ImageReference(content=PNG)),
        ({"bytes": PNG, "path": "x.png"}, ImageReference(content=PNG)),
        ({"bytes": None, "path": "x.png"}, ImageReference(path="x.png")),
        ({"bytes": TEXT}, ImageReference(content=PNG)),
        ({"url": "x.png"}, ImageReference(path="x.png")),
    ],
)
def test_ways_to_write_an_image(value: Any, expected: ImageReference) -> None:
    assert read_reference(value, "image") == expected


def test_pillow_images_are_written_without_loss() -> None:
    found = read_reference(drawn(1, 7, 5), "image")
    assert found.content == encoded(drawn(1, 7, 5))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image"}, None),
        ({"type": "image", "image": None, "text": None}, None),
        ({"type": "image", "image": "a.png"}, ImageReference(path="a.png")),
        ({"type": "image", "path": "a.png", "detail": "low"}, ImageReference(path="a.png")),
        ({"type": "image", "url": "a.png"}, ImageReference(path="a.png")),
        ({"type": "image", "base64": TEXT}, ImageReference(content=PNG)),
        ({"type": "image", "bytes": PNG, "path": "a.png"}, ImageReference(content=PNG)),
        ({"type": "image_url", "image_url": "a.png"}, ImageReference(path="a.png")),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}, ImageReference(path="a.png")),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{TEXT}"}, ImageReference(content=PNG)),
    ],
)
def test_ways_to_write_a_part(part: dict[str, Any], expected: ImageReference | None) -> None:
    assert read_part(part, "content[0]") == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("http://example.org/a.png", "fetches no images"),
        ("https://example.org/a.png", "fetches no images"),
        ("s3://bucket/a.png", "fetches no images"),
        ("", "is empty"),
        ("   ", "is empty"),
        ("a\0b.png", "null character"),
        ("x/" * 5000, "10,000 characters"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,%%%%", "is not base64"),
        ("data:text/plain;base64,QUJD", "text/plain"),
        (b"", "is empty"),
        ({}, "neither bytes nor a path"),
        ({"bytes": 3}, "expected bytes"),
        ({"bytes": b""}, "is empty"),
        (7, "expected a path"),
        ([1], "expected a path"),
        ("\ud800.png", "surrogate"),
    ],
)
def test_what_is_not_an_image(value: Any, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        read_reference(value, "images[0]")


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image", "image": "a.png", "max_pixels": 4}, "max_pixels"),
        ({"type": "image", "image": "a.png", "url": "b.png"}, "'image' and 'url'"),
    ],
)
def test_parts_with_other_keys_are_refused(part: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        read_part(part, "content[0]")


def shown(messages: list[dict[str, Any]], images: Any = None) -> Conversation:
    given = None if images is None else read_column(images, "images")
    return with_images(read_conversation(messages, "messages", images=True), given)


def test_images_of_the_column_take_the_places_of_the_text() -> None:
    found = shown([{"role": "user", "content": "<image>Who is older, <image> or he?"}], ["a.png", "b.png"])
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "Who is older, "}, image, {"type": "text", "text": " or he?"}]
    assert found.messages[0]["content"] == parts
    assert [one.path for one in found.images] == ["a.png", "b.png"]


def test_images_of_the_column_fill_empty_parts_in_order() -> None:
    content = [{"type": "image"}, {"type": "image", "image": "own.png"}, {"type": "text", "text": "<image>"}]
    later = {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "image"}]}
    answer = {"role": "assistant", "content": "x"}
    found = shown([{"role": "user", "content": content}, answer, later], ["a.png", "b.png"])
    assert [one.path for one in found.images] == ["a.png", "own.png", "b.png"]
    assert found.messages[0]["content"][2] == {"type": "text", "text": "<image>"}


def test_images_without_a_place_come_before_the_first_question() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    found = shown(messages, ["a.png", "b.png"])
    assert found.messages[1]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "q"}]
    assert found.messages[0] == messages[0]


def test_a_column_may_be_json_or_one_image() -> None:
    assert read_column(json.dumps(["a.png", "b.png"]), "images") == read_column(["a.png", "b.png"], "images")
    assert read_column("a.png", "images") == (ImageReference(path="a.png"),)


def test_text_stays_text() -> None:
    messages = [{"role": "user", "content": "an <image> tag"}]
    assert shown(messages) == read_conversation(messages, "messages", images=True)
    assert shown([{"role": "user", "content": "q"}], []).messages[0]["content"] == "q"


@pytest.mark.parametrize(
    ("messages", "images", "problem"),
    [
        ([{"role": "user", "content": "<image> and <image>"}], ["a.png"], "1 images.*2 times"),
        ([{"role": "user", "content": "<image>"}], [], "0 images.*1 times"),
        ([{"role": "user", "content": [{"type": "image"}]}], ["a.png", "b.png"], "2 images.*1 image parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "has no image"),
        ([{"role": "assistant", "content": "a"}], ["a.png"], "no message is from the user"),
    ],
)
def test_the_numbers_of_images_and_places_must_agree(messages: list[Any], images: Any, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        shown(messages, images)


@pytest.mark.parametrize("kind", ["video", "input_audio", "audio_url"])
def test_other_media_are_refused(kind: str) -> None:
    with pytest.raises(RowError, match="text and images only"):
        read_conversation([{"role": "user", "content": [{"type": kind, kind: "x"}]}], "messages", images=True)
