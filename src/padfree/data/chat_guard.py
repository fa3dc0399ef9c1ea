"""Check that a chat template neither drops nor garbles parts of a conversation.

Templates silently drop fields, roles and tools that they do not know. The model would then be trained on incomplete
conversations.

Every field must appear in the rendered text, unchanged or as JSON. The text must depend on each boolean. Three parts
may be missing:

- the reasoning of earlier turns, if the template shows the reasoning of the last turn
- the ids of tool calls, if the tool results come in the order of the calls
- the keywords of tool schemas, if names and descriptions appear
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
"""The keys of a tool's schema whose values must appear in the rendered text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """The rendered text of the first `stop` messages of a conversation, and functions that render other messages.

    The functions return None if the template raises an error.
    """

    text: str
    stop: int
    prompt: bool  # whether the text is a prompt for sampling, and not a training sample
    again: Callable[[Conversation], str | None]  # renders another conversation in the same way
    alone: Callable[[int], str | None]  # renders the messages up to and including this index


def check_twin(shape: ConversationShape, shown: Shown, *, keep_thoughts: bool) -> None:
    """Raise a `RowError` if the chat template drops or garbles a part of a conversation.

    `shown`: the rendered twin (the conversation with markers in place of texts and numbers). `keep_thoughts`: whether
    the reasoning of all turns must appear.
    """

    def found(text: str) -> set[int]:
        slots = [slot for slot in slots_of(text) if slot.leaf < len(shape.leaves)]
        mangled = next((slot for slot in slots if not slot.form), None)
        if mangled is not None:
            raise _mangled(shape.twin, shape.leaves[mangled.leaf])
        return {slot.leaf for slot in slots}

    _check(shape, shape.twin, shown, found, keep_thoughts=keep_thoughts, twin=True)


def check_row(shape: ConversationShape, conversation: Conversation, shown: Shown, *, keep_thoughts: bool) -> None:
    """Raise a `RowError` if the chat template drops or garbles a part of one row's conversation.

    Use it for a row that the template renders differently from its twin (see `check_twin`). `shown`: the rendered row.
    """

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
            continue  # in a prompt, a template may shorten or rewrite earlier answers
        elif leaf.thought and leaf.message < last and index in found(shown.alone(leaf.message) or ""):
            if keep_thoughts:
                raise RowError(
                    f"{_named(conversation, leaf.message)}: {leaf.field} is missing from the rendered text, because "
                    "the chat template strips the reasoning of earlier turns; set data.loss_on=assistant to make one "
                    "sample per turn"
                )
        else:
            raise _untraced(conversation, leaf)
    if nameless and shape.shuffled is not None and shape.shuffled <= last:
        raise RowError(
            f"message {shape.shuffled + 1} (tool) is not the result of the next tool call, and the chat template does "
            "not show call ids; put the results in the order of their calls"
        )
    _check_empty(conversation, shown, {shape.leaves[index].message for index in traced})
    _check_arguments(conversation, shown)
    _check_booleans(conversation, shown)
    _check_roles(conversation, shown)


def _is_answer(conversation: Conversation, leaf: TemplateValue) -> bool:
    return leaf.field == "content" and conversation.messages[leaf.message]["role"] == "assistant"


def _untraced(conversation: Conversation, leaf: TemplateValue) -> RowError:
    return RowError(
        f"{_named(conversation, leaf.message)}: {leaf.field} is missing from the rendered text, because the chat "
        "template drops it; remove it from the row, or set data.chat_template to a template that shows it"
    )


def _mangled(conversation: Conversation, leaf: TemplateValue) -> RowError:
    return RowError(
        f"{_named(conversation, leaf.message)}: {leaf.field} is garbled: the chat template renders it neither as text "
        "nor as JSON; set data.chat_template to a template that shows it unchanged"
    )


def _named(conversation: Conversation, index: int) -> str:
    return f"message {index + 1} ({conversation.messages[index]['role']})"


def _check_empty(conversation: Conversation, shown: Shown, traced: set[int]) -> None:
    """Raise a `RowError` if the template drops a message, i.e. if removing it does not change the rendered text.

    `traced`: the indices of messages whose texts were found in the rendered text. These messages need no check.
    """
    messages = conversation.messages
    for index in range(len(messages)):
        if index in traced or len(messages) == 1:
            continue
        if shown.again(replace(conversation, messages=messages[:index] + messages[index + 1 :])) == shown.text:
            raise RowError(
                f"{_named(conversation, index)} is missing from the rendered text, because the chat template drops it; "
                "remove it from the row, or set data.chat_template to a template that shows it"
            )


def _check_booleans(conversation: Conversation, shown: Shown) -> None:
    """Raise a `RowError` if the rendered text does not depend on a boolean in a field of a message.

    Arguments of tool calls are checked by `_check_arguments`.
    """
    messages = conversation.messages
    for index, message in enumerate(messages):
        for field, changed in _negations(message, ""):
            others = (*messages[:index], changed, *messages[index + 1 :])
            if shown.again(replace(conversation, messages=others)) == shown.text:
                raise RowError(
                    f"{_named(conversation, index)}: {field[1:]} is missing from the rendered text, because the chat "
                    "template drops it; remove it from the row, or set data.chat_template to a template that shows it "
                    "(to exclude a message from training, give it the weight 0)"
                )


def _negations(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """For each boolean in `value`, yield its path and a copy of `value` with this boolean negated.

    Arguments of tool calls are skipped.
    """
    if isinstance(value, bool):
        yield path, not value
    elif isinstance(value, dict):
        for key, one in value.items():
            if key != "arguments" or not path.endswith(".function"):
                for where, changed in _negations(one, f"{path}.{key}"):
                    yield where, {**value, key: changed}
    elif isinstance(value, list):
        for index, one in enumerate(value):
            for where, changed in _negations(one, f"{path}[{index}]"):
                yield where, [*value[:index], changed, *value[index + 1 :]]


def _check_roles(conversation: Conversation, shown: Shown) -> None:
    """Raise a `RowError` if the template renders another role, such as `tool`, exactly like the role `assistant`."""
    roles = [message["role"] for message in conversation.messages]
    for role in set(roles) - {"assistant", "user"}:
        changed = tuple(
            {**message, "role": "assistant"} if message["role"] == role else message
            for message in conversation.messages
        )
        if shown.again(replace(conversation, messages=changed)) == shown.text:
            raise RowError(
                f"{_named(conversation, roles.index(role))} is rendered as if the assistant had written it, because "
                "the chat template does not know this role; set data.chat_template to a template that knows it"
            )


# Tool calls and tools


def _check_arguments(conversation: Conversation, shown: Shown) -> None:
    """Raise a `RowError` if a key, boolean, null, list or object in tool call arguments is not rendered as JSON.

    Strings and numbers in arguments are checked by `_check`.
    """
    for index, message in enumerate(conversation.messages):
        for at, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if arguments and not _holds_json(shown.text, arguments):
                _check_one_by_one(conversation, shown, index, at, arguments)


def _check_one_by_one(conversation: Conversation, shown: Shown, index: int, at: int, arguments: dict[str, Any]) -> None:
    """Check a tool call whose arguments are not rendered as one JSON object, e.g. as `<arg_key>city</arg_key>...`.

    Every key must appear. Booleans, nulls, lists and objects must appear as JSON. `index`: the message. `at`: the tool
    call in the message.
    """

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
                f"{field} is missing from the rendered text, because the chat template drops the key; set "
                "data.chat_template to a template that shows it"
            )
        if value is None or isinstance(value, bool):
            right = _swaps(shown.text, value, again({**arguments, key: not value}))
        else:
            right = not isinstance(value, (list, dict)) or _holds_json(shown.text, value)
        if not right:
            raise RowError(
                f"{field} is garbled: the chat template renders it neither as text nor as JSON; set data.chat_template "
                "to a template that shows it unchanged"
            )


def _swaps(text: str, value: bool | None, changed: str | None) -> bool:
    """Return whether the template renders `value` as JSON: `true`, `false` or `null`.

    `text`: the conversation rendered with `value`. `changed`: the conversation rendered with `not value`.
    """
    if changed is None:
        return False
    # The texts first differ at the value, because true, false and null begin with different letters.
    start = next((index for index, (one, other) in enumerate(zip(text, changed, strict=False)) if one != other), 0)
    return text.startswith(json.dumps(value), start) and changed.startswith(json.dumps(not value), start)


def _holds_json(text: str, value: Any) -> bool:
    """Return whether the text contains `value` as JSON, with any spacing and any order of keys."""
    if json.dumps(value, ensure_ascii=False) in text:
        return True
    wanted = _canonical(value)
    return any(_canonical(found) == wanted for found in _json_values(text, "{" if isinstance(value, dict) else "["))


def _json_values(text: str, opening: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    start = text.find(opening)
    while start >= 0:
        with contextlib.suppress(ValueError, RecursionError):
            yield decoder.raw_decode(text, start)[0]
        start = text.find(opening, start + 1)


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
                    f"{path} ({said[:40]!r}) is missing from the rendered text, because the chat template drops tools "
                    "or parts of them; remove the tools, or set data.chat_template to a template that shows them"
                )
        parameters = function.get("parameters")
        if parameters and repr(parameters) in text:
            raise RowError(
                f"tools[{index}] is rendered as Python's repr; set data.chat_template to a template that writes JSON"
            )


def _schema_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each name, description and parameter name in a tool's schema."""
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
