"""Put the images of a row into the messages of its conversation.

Messages can contain images. A row can also have a column `images`. The first rule that fits decides where the images of
the column are shown:

1. Image parts without an image, `{"type": "image"}`, are filled in order (TRL, Hugging Face).
2. Each text `<image>` is replaced by an image, in order (ms-swift, LLaVA).
3. All images are put at the beginning of the first user message.

In rules 1 and 2, the column must have as many images as there are such parts or texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from padfree.data.chat_roles import usual_role
from padfree.data.conversation import Conversation, Message, image_parts
from padfree.data.image_references import ImageReference, read_reference
from padfree.data.records import RowError, parse_json

PLACE = "<image>"
"""The text in a message that marks the place of an image of the column `images`."""


def read_column(value: object, column: str) -> tuple[ImageReference, ...]:
    """Read the column with the images of a row: a list, JSON text of a list, or a single image."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, (list, tuple)):
        return tuple(read_reference(one, f"{column}[{index}]") for index, one in enumerate(value))
    return (read_reference(value, column),)


def with_images(
    conversation: Conversation, given: Sequence[ImageReference] | None, column: str = "images"
) -> Conversation:
    """Move the images of a row, from its messages and from its image column, into `Conversation.images`, in order.

    `given`: the images of the column; None if the row has no such column. Without any image, the conversation is
    returned unchanged.
    """
    parts = [part for message in conversation.messages for part in image_parts(message)]
    messages = conversation.messages
    if given is not None:
        empty = sum(part["image"] is None for part in parts)
        if not empty:
            messages = _placed(messages, len(given), column)
        elif empty != len(given):
            raise RowError(f"{column!r} has {len(given)} images, but the messages have {empty} image parts to fill")
    elif any(part["image"] is None for part in parts):
        raise RowError("an image part of the messages has no image; give a path, a data URI or bytes in 'image'")
    waiting = iter(given or ())
    images = [
        next(waiting) if part["image"] is None else part["image"]
        for message in messages
        for part in image_parts(message)
    ]
    if not images:
        return conversation
    return replace(conversation, messages=tuple(map(_without_images, messages)), images=tuple(images))


def need_no_places(conversation: Conversation, column: str) -> Conversation:
    """Return the conversation of a row without image column; raise a `RowError` if its messages have `<image>`."""
    if any(PLACE in text_of(message["content"]) for message in conversation.messages):
        raise RowError(f"{column!r} is missing, but the messages have the text {PLACE!r}; add the images of the row")
    return conversation


def num_images(messages: Sequence[Message]) -> int:
    """Return the number of images that these messages show."""
    return sum(len(image_parts(message)) for message in messages)


def text_of(content: str | list[Message]) -> str:
    """Return the text of a message's content, without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_images(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


def _placed(messages: tuple[Message, ...], count: int, column: str) -> tuple[Message, ...]:
    """Add `count` image parts to the messages. The caller puts the images into them.

    Each text `<image>` becomes an image part. Without such texts, all image parts are put at the beginning of the first
    user message.
    """
    places = sum(text_of(message["content"]).count(PLACE) for message in messages)
    if places:
        if places != count:
            raise RowError(f"{column!r} has {count} images, but the messages have the text {PLACE!r} {places} times")
        return tuple({**message, "content": _split(message["content"])} for message in messages)
    if not count:
        return messages
    first = next((index for index, message in enumerate(messages) if usual_role(message["role"]) == "user"), None)
    if first is None:
        raise RowError(
            f"{column!r} has {count} images, but no message is from the user; mark the place of each image: {PLACE!r}"
        )
    content = messages[first]["content"]
    own = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown_first = {**messages[first], "content": [{"type": "image", "image": None}] * count + own}
    return (*messages[:first], shown_first, *messages[first + 1 :])


def _split(content: str | list[Message]) -> str | list[Message]:
    if PLACE not in text_of(content):
        return content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [piece for part in parts for piece in _pieces(part)]


def _pieces(part: Message) -> Iterator[dict[str, Any]]:
    if part["type"] != "text":
        yield part
        return
    for index, text in enumerate(part["text"].split(PLACE)):
        if index:
            yield {"type": "image", "image": None}
        if text:
            yield {"type": "text", "text": text}
