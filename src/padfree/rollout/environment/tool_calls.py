"""Read the tool calls in a response: the text that the model wrote becomes a message with `tool_calls`.

    Let me see.<tool_call>                                       content     Let me see.
    {"name": "add", "arguments": {"a": 2, "b": 3}}          ->   tool_calls  add {"a": 2, "b": 3}
    </tool_call>

    format       example                                                       templates
    tags         <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Qwen 2.5 and 3, Hermes
    brackets     [TOOL_CALLS][{"name": ..., "arguments": {...}}]               Mistral
    object       {"name": ..., "parameters": {...}}                            Llama 3.1 and later

The format is the one in which the chat template of the model writes a tool call. Without a valid tool call, the whole
text is the content of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import Message, read_conversation
from padfree.data.records import RowError, shown
from padfree.errors import UserError
from padfree.rollout.environment.episode_policy import MARK

Found = tuple[str, list[dict[str, Any]]]
"""The tool calls found in a response: the text before them, then the name and arguments of each call."""
Reader = Callable[[str], tuple[str, Any] | None]
"""Parses the text of a response: returns the text before the tool calls, and the calls as parsed JSON, not checked yet.
Returns None if the text has no tool calls.
"""

_TAGS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BRACKETS = "[TOOL_CALLS]"
_EXAMPLE = {"name": "find", "arguments": {"text": "two words", "number": 3}}


def _tags(text: str) -> tuple[str, Any] | None:
    first = text.find("<tool_call>")
    return None if first < 0 else (text[:first], [json.loads(part) for part in _TAGS.findall(text[first:])])


def _brackets(text: str) -> tuple[str, Any] | None:
    before, mark, rest = text.partition(_BRACKETS)
    return None if not mark else (before, json.loads(rest))


def _object(text: str) -> tuple[str, Any] | None:
    return ("", [json.loads(text)]) if text.lstrip().startswith("{") else None


READERS: dict[str, Reader] = {"tags": _tags, "brackets": _brackets, "object": _object}


class ToolCallParser:
    """Turns the text of a response into an assistant message.

    Tool calls in the text must have the format in which the chat template writes tool calls.
    """

    def __init__(self, chat: ChatRenderer) -> None:
        self.format = _format_of(chat)
        self._read = READERS[self.format]

    def message(self, text: str, turn: int) -> Message:
        """Return the assistant message that a program receives for the text of a response.

        `turn`: the number of the response, which becomes part of the ids of its tool calls.
        """
        plain: Message = {"role": "assistant", "content": text}
        found = read_calls(self._read, text)
        if found is None:
            return plain
        calls = [
            {
                "id": f"call_{turn}_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for index, call in enumerate(found[1])
        ]
        message: Message = {"role": "assistant", "content": found[0], "tool_calls": calls}
        try:
            read_conversation([message], "messages")
        except RowError:  # for example, a name that is not Unicode, or arguments that are nested too deeply
            return plain
        return message


def read_calls(read: Reader, text: str) -> Found | None:
    """Parse the tool calls in a text with `read`. Return None if the text has no tool call, or an invalid one."""
    try:
        found = read(text)
    except (ValueError, RecursionError):
        return None
    if found is None or not isinstance(found[1], list) or not found[1]:
        return None
    calls = []
    for call in found[1]:
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str) or not call["name"].strip():
            return None
        calls.append({"name": call["name"], "arguments": arguments})
    return found[0], calls


def _format_of(chat: ChatRenderer) -> str:
    """Return the format in which the chat template writes tool calls."""
    tool = {
        "name": _EXAMPLE["name"],
        "description": "Finds a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["text", "number"],
        },
    }
    call = {"id": "call00000", "type": "function", "function": _EXAMPLE}
    asked: Message = {"role": "user", "content": "?"}
    written = None
    try:
        given = read_conversation(
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}],
            "messages",
            tools=[{"type": "function", "function": tool}],
        )
        marked = chat.render([asked, {"role": "assistant", "content": MARK}], given.tools)
        start, mark, end = marked.partition(MARK)
        whole = chat.render(given.messages, given.tools)
        if mark and whole.startswith(start.rstrip()) and whole.endswith(end):
            written = whole[len(start.rstrip()) : len(whole) - len(end)].strip()
            for name, read in READERS.items():
                found = read_calls(read, written)
                if found is not None and found[1] == [_EXAMPLE]:
                    return name
    except RowError:  # the template does not accept tools
        pass
    shows = f"writes tool calls as {shown(written)}, which padfree cannot read" if written else "shows no tool calls"
    raise UserError(
        "data.chat_template",
        f"the template cannot be used for the environment's tools, because it {shows}",
        'set a template that writes <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    )
