"""Convert a conversation to the form that a chat template expects.

`read_conversation` produces the form that most templates accept. DeepSeek-V3's template expects the arguments of a tool
call as JSON text, and null as the content of a message with tool calls. Other templates expect tools without
`{"type": "function", "function": ...}` around them, or content as a list of parts. `ChatRenderer` tries the forms in
order, and takes the first one that the template renders without dropping or garbling anything (`chat_guard`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from padfree.data.conversation import Conversation, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A form of conversations that a chat template may expect, such as null content next to tool calls.

    The fields say how it differs from the form that `read_conversation` produces.
    """

    arguments_as_text: bool = False  # arguments of tool calls as JSON text
    null_content: bool = False  # null instead of "" as the content of a message with tool calls
    bare_tools: bool = False  # tools without `{"type": "function", "function": ...}` around them
    content_parts: bool = False  # content as `[{"type": "text", "text": ...}]`


def forms_of(conversation: Conversation) -> Iterator[Form]:
    """Yield the forms of a conversation to try until the chat template accepts one.

    The form that `read_conversation` produces comes first. Forms that do not change the conversation are left out.
    """
    calls = [message for message in conversation.messages if message.get("tool_calls")]
    either, usual = (False, True), (False,)
    for parts, bare, text, null in product(
        either,
        either if conversation.tools else usual,
        either if calls else usual,
        either if any(not message["content"] for message in calls) else usual,
    ):
        yield Form(arguments_as_text=text, null_content=null, bare_tools=bare, content_parts=parts)


def formed(conversation: Conversation, form: Form) -> tuple[list[Message], list[Any] | None]:
    """Return the messages and the tools of a conversation, converted to `form`."""
    tools = conversation.tools
    if tools is not None and form.bare_tools:
        tools = [tool.get("function", tool) for tool in tools]
    return [formed_message(message, form) for message in conversation.messages], tools


def formed_message(message: Message, form: Form) -> Message:
    calls = message.get("tool_calls")
    if not calls and not form.content_parts and "reasoning_content" not in message:
        return message
    changed = dict(message)
    if "reasoning_content" in changed:
        changed.setdefault("thinking", changed["reasoning_content"])  # the field that gpt-oss's template reads
    if form.content_parts and isinstance(changed["content"], str) and changed["content"]:
        changed["content"] = [{"type": "text", "text": changed["content"]}]
    if calls and form.null_content and not changed["content"]:
        changed["content"] = None
    if calls and form.arguments_as_text:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return changed


def _as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
