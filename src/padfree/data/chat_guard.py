"""Two guards on a rendered conversation: nothing is lost, and nothing is written that nobody wrote.

1. Every message and every field of it leaves a trace in the text. A template that does not know a role, a field or the
   tools drops them without a word, and the model is trained on something else than the data.
2. A field is rendered as its text or its JSON. Python's repr (`[{'type': 'text'}]`, `None`) and JSON that is encoded
   twice are neither.

The guards look at the text of the twin of a conversation (`chat_shape`), once for every shape. If a template looks into
the texts, so that a row is not rendered as its twin, they look for the texts of the row itself.

What may be missing, because nothing is lost by it:

    thoughts of earlier turns     if the template shows them while the turn is the last: it strips them afterwards
    ids of tool calls             if results come in the order of their calls
    keywords of tools' schemas    in a template that writes tools in its own words: names and descriptions must be there
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from padfree.data.chat_shape import FORMS, ConversationShape, TemplateValue, slots_of, written
from padfree.data.conversation import Conversation
from padfree.data.records import RowError

SCHEMA_TEXTS = ("name", "description")
"""Keys of a tool's schema whose values are meant for the model to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A rendered text with the first `stop` messages of a conversation, to be trained or as a `prompt`. `again` renders
    another conversation in the same way; `alone` renders its messages up to and with one of them. Both give None if the
    template raises.
    """

    text: str
    stop: int
    prompt: bool
    again: Callable[[Conversation], str | None]
    alone: Callable[[int], str | None]


def check_twin(shape: ConversationShape, shown: Shown, *, keep_thoughts: bool) -> None:
    """Check the text of a twin. `keep_thoughts`: the thoughts of all turns must be in it."""

    def found(text: str) -> set[int]:
        slots = [slot for slot in slots_of(text) if slot.leaf < len(shape.leaves)]
        mangled = next((slot for slot in slots if not slot.form), None)
        if mangled is not None:
            raise _mangled(shape.twin, shape.leaves[mangled.leaf])
        return {slot.leaf for slot in slots}

    _check(shape, shape.twin, shown, found, keep_thoughts=keep_thoughts, twin=True)


def check_row(shape: ConversationShape, conversation: Conversation, shown: Shown, *, keep_thoughts: bool) -> None:
    """Check the text of a conversation that is not rendered as its twin."""

    def found(text: str) -> set[int]:
        leaves = enumerate(shape.leaves)
        return {index for index, leaf in leaves if any(written(leaf.value, form) in text for form in FORMS)}

    _check(shape, conversation, shown, found, keep_thoughts=keep_thoughts, twin=False)


def _check(
    shape: ConversationShape,
    conversation: Conversation,
    shown: Shown,
    found: Callable[[str], set[int]],
    *,
    keep_thoughts: bool,
    twin: bool,
) -> None:
    conversation = replace(conversation, messages=conversation.messages[: shown.stop])
    _check_tools(conversation, shown.text)
    traced = found(shown.text)
    last = shown.stop - 1
    nameless = False
    for index, leaf in enumerate(shape.leaves):
        if leaf.message > last or index in traced:
            continue
        if leaf.identifier:
            nameless = True
        elif shown.prompt and _is_answer(conversation, leaf) and (leaf.thought or not twin):
            continue  # of a prompt: what the model once wrote, as the template chooses to show it
        elif leaf.thought and leaf.message < last and index in found(shown.alone(leaf.message) or ""):
            if keep_thoughts:
                raise RowError(
                    f"{_named(conversation, leaf.message)}: {leaf.field} leaves no trace in the text: the chat "
                    "template strips the thoughts of earlier turns; set data.loss_on=assistant to train turn by turn"
                )
        else:
            raise _untraced(conversation, leaf)
    if nameless and shape.shuffled is not None and shape.shuffled <= last:
        raise RowError(
            f"message {shape.shuffled + 1} (tool) does not answer the next call, and the chat template shows no ids; "
            "put the results in the order of their calls"
        )
    _check_empty(conversation, shown, {shape.leaves[index].message for index in traced})
    _check_arguments(conversation, shown)
    _check_roles(conversation, shown)


def _is_answer(conversation: Conversation, leaf: TemplateValue) -> bool:
    return leaf.field == "content" and conversation.messages[leaf.message]["role"] == "assistant"


def _untraced(conversation: Conversation, leaf: TemplateValue) -> RowError:
    return RowError(
        f"{_named(conversation, leaf.message)}: {leaf.field} leaves no trace in the text: the chat template does not "
        "show it; remove it, or give a template that shows it as data.chat_template"
    )


def _mangled(conversation: Conversation, leaf: TemplateValue) -> RowError:
    return RowError(
        f"{_named(conversation, leaf.message)}: {leaf.field} is rendered neither as its text nor as its JSON; give a "
        "template that writes it as data.chat_template"
    )


def _named(conversation: Conversation, index: int) -> str:
    return f"message {index + 1} ({conversation.messages[index]['role']})"


def _check_empty(conversation: Conversation, shown: Shown, traced: set[int]) -> None:
    """A message without a text of its own is seen by what changes without it."""
    messages = conversation.messages
    for index in range(len(messages)):
        if index in traced or len(messages) == 1:
            continue
        if shown.again(replace(conversation, messages=messages[:index] + messages[index + 1 :])) == shown.text:
            raise RowError(
                f"{_named(conversation, index)} leaves no trace in the text: the chat template does not show it; "
                "remove it, or give a template that shows it as data.chat_template"
            )


def _check_roles(conversation: Conversation, shown: Shown) -> None:
    """A template that tells only the user from all others writes a tool's result as if the assistant had said it."""
    roles = [message["role"] for message in conversation.messages]
    for role in set(roles) - {"assistant", "user"}:
        changed = tuple(
            {**message, "role": "assistant"} if message["role"] == role else message
            for message in conversation.messages
        )
        if shown.again(replace(conversation, messages=changed)) == shown.text:
            raise RowError(
                f"{_named(conversation, roles.index(role))} is rendered as if the assistant had written it: the chat "
                "template does not know the role; give one that does as data.chat_template"
            )


# Tool calls and tools


def _check_arguments(conversation: Conversation, shown: Shown) -> None:
    """Strings and numbers are leaves; keys, booleans, nulls, lists and objects are checked here."""
    for index, message in enumerate(conversation.messages):
        for at, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if arguments and not _holds_json(shown.text, arguments):
                _check_one_by_one(conversation, shown, index, at, arguments)


def _check_one_by_one(conversation: Conversation, shown: Shown, index: int, at: int, arguments: dict[str, Any]) -> None:
    """Arguments that are not written as one JSON object: `<arg_key>city</arg_key><arg_value>Paris</arg_value>`."""

    def again(changed: dict[str, Any]) -> str | None:
        message = conversation.messages[index]
        calls = list(message["tool_calls"])
        calls[at] = {**calls[at], "function": {**calls[at]["function"], "arguments": changed}}
        messages = list(conversation.messages)
        messages[index] = {**message, "tool_calls": calls}
        return shown.again(replace(conversation, messages=tuple(messages)))

    for key, value in arguments.items():
        field = f"{_named(conversation, index)}: tool_calls[{at}].function.arguments.{key}"
        if again({(f"{name}k" if name == key else name): one for name, one in arguments.items()}) == shown.text:
            raise RowError(
                f"{field} leaves no trace in the text: the chat template does not show the key; give one that does as "
                "data.chat_template"
            )
        if value is None or isinstance(value, bool):
            right = _swaps(shown.text, value, again({**arguments, key: not value}))
        else:
            right = not isinstance(value, (list, dict)) or _holds_json(shown.text, value)
        if not right:
            raise RowError(
                f"{field} is rendered neither as its text nor as its JSON; give a template that writes it as "
                "data.chat_template"
            )


def _swaps(text: str, value: bool | None, changed: str | None) -> bool:
    """Whether the text has the JSON of a value where it has that of the opposite once the value is changed."""
    if changed is None:
        return False
    place = next((place for place, (one, other) in enumerate(zip(text, changed, strict=False)) if one != other), 0)
    return text.startswith(json.dumps(value), place) and changed.startswith(json.dumps(not value), place)


def _holds_json(text: str, value: Any) -> bool:
    """Whether a JSON text of this value, however spaced and ordered, is part of the text."""
    if json.dumps(value, ensure_ascii=False) in text:
        return True
    wanted = _canonical(value)
    return any(_canonical(found) == wanted for found in _json_values(text, "{" if isinstance(value, dict) else "["))


def _json_values(text: str, opening: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    place = text.find(opening)
    while place >= 0:
        with contextlib.suppress(ValueError, RecursionError):
            yield decoder.raw_decode(text, place)[0]
        place = text.find(opening, place + 1)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _check_tools(conversation: Conversation, text: str) -> None:
    for index, tool in enumerate(conversation.tools or ()):
        function = tool.get("function", tool)
        if _holds_json(text, tool) or _holds_json(text, function):
            continue
        for path, said in _schema_texts(function, f"tools[{index}]"):
            if not any(form(said) in text for form in FORMS.values()):
                raise RowError(
                    f"{path} ({said[:40]!r}) leaves no trace in the text: the chat template does not show tools, or "
                    "not whole; leave them out, or give a template that shows them as data.chat_template"
                )
        parameters = function.get("parameters")
        if parameters and repr(parameters) in text:
            raise RowError(f"tools[{index}] is rendered as Python writes it; give a template that writes JSON")


def _schema_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Names, descriptions and the names of parameters."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _schema_texts(one, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in SCHEMA_TEXTS and isinstance(one, str) and one.strip():
                yield f"{path}.{key}", one.strip()
            elif key == "properties" and isinstance(one, dict):
                for name, inner in one.items():
                    yield f"{path}.properties", name
                    yield from _schema_texts(inner, f"{path}.properties.{name}")
            else:
                yield from _schema_texts(one, f"{path}.{key}")
