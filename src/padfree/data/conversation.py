"""Read messages in several common formats into OpenAI's format.

    {"from": "human", "value": "Hi"}                                    ->  {"role": "user", "content": "Hi"}
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]}       ->  {"role": "user", "content": "Hi"}

In the result, content is a string, and the arguments of a tool call are an object. Only content with images stays a
list of parts.

A key with null counts as missing, because Parquet gives every message the keys of all messages. Nulls in arguments
given as JSON text are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from padfree.data.chat_roles import SHAREGPT_ROLES, usual_role
from padfree.data.image_references import OTHER_MEDIA, ImageReference, is_image_part, read_part
from padfree.data.records import RowError, check_encodable, parse_json, shown

Message = dict[str, Any]

WEIGHTS = ("weight", "train", "loss")
"""Fields that say whether a message is trained: OpenAI's `weight` is 0 or 1, `train` and `loss` are booleans."""
METADATA = ("id", "message_id", "parent_id", "uuid", "index", "timestamp", "created", "created_at", "model")
"""Fields of a message that are metadata; they are dropped."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the message field that holds the assistant's reasoning. Data sets use different names, and padfree changes
each of them to the first one, which chat templates read.
"""
TEXT_PARTS = ("text", "input_text", "output_text")
DEEPEST = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages and tools of a conversation.

    `untrained` holds the indices of assistant messages that are not trained (OpenAI's `weight: 0`). `images` has the
    image of each image part of the messages, in order.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()
    images: tuple[ImageReference, ...] = ()

    @property
    def has_system(self) -> bool:
        return usual_role(self.messages[0]["role"]) == "system"

    def with_system(self, text: str) -> Conversation:
        """Return a copy of the conversation that begins with the system message `text`."""
        return replace(
            self,
            messages=({"role": "system", "content": text}, *self.messages),
            untrained=frozenset(index + 1 for index in self.untrained),
        )


def read_conversation(
    messages: object,
    column: str,
    *,
    tools: object = None,
    tools_column: str = "tools",
    system: str | None = None,
    images: bool = False,
) -> Conversation:
    """Read a list of messages in OpenAI's or ShareGPT's format, or such a list as JSON text.

    `column`, `tools_column`: names for error messages. `system`: a system prompt to put first. Raise a `RowError` for
    messages with images, unless `images` is True.
    """
    listed = _listed(messages, column, "a list of messages")
    if not listed:
        raise RowError(f"{column!r} is empty; give one message or more")
    read: list[Message] = []
    untrained: set[int] = set()
    for index, message in enumerate(listed):
        name = f"{column}[{index}]"
        read.append(_message(message, name, untrained, index))
    _check_results(read, column)
    found = Conversation(
        messages=tuple(read),
        tools=None if tools is None else _tools(tools, tools_column),
        untrained=frozenset(untrained),
    )
    if not images:
        need_no_images(found)
    if not system:
        return found
    if found.has_system:
        raise RowError(
            f"{column}[0] is a {read[0]['role']} message, but the row has a separate system prompt as well; remove one "
            "of them"
        )
    return found.with_system(check_encodable(system, "system"))


def need_no_images(conversation: Conversation) -> Conversation:
    """Return the conversation if it has no images; otherwise raise a `RowError`, because the model reads only text."""
    for index, message in enumerate(conversation.messages):
        if image_parts(message):
            raise RowError(
                f"message {index + 1} ({message['role']}) has an image, but the data is read as text; remove the "
                "image, or set model.vision=true"
            )
    return conversation


def image_parts(message: Message) -> list[Message]:
    """Return the parts of a message that are images."""
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _listed(value: object, column: str, expected: str) -> list[Any]:
    found = value
    if isinstance(value, str):
        try:
            found = parse_json(value)
        except RowError as error:
            raise RowError(f"{column}: {error.problem}") from None
        except (ValueError, RecursionError):
            pass
    if isinstance(found, tuple):
        found = list(found)
    if not isinstance(found, list):
        raise RowError(f"{column!r} is {shown(value)}; expected {expected}, or such a list as JSON text")
    return found


def _parsed(text: str, name: str, expected: str) -> Any:
    try:
        return parse_json(text)
    except RowError as error:
        raise RowError(f"{name}: {error.problem}") from None
    except (ValueError, RecursionError):
        raise RowError(f"{name} is {shown(text)}, which is not JSON; expected {expected}") from None


def _message(message: object, name: str, untrained: set[int], index: int) -> Message:
    if not isinstance(message, dict):
        raise RowError(f"{name} is {shown(message)}; expected an object with role and content")
    given = {str(key): value for key, value in message.items() if value is not None}
    if "from" in given and "role" not in given:
        given = _from_sharegpt(given, name)
    role = given.pop("role", None)
    if not isinstance(role, str) or not role:
        raise RowError(f"{name}.role is {shown(role)}; expected a string such as 'user'")
    if usual_role(role) == "assistant":
        role = "assistant"
    trained = _trained(given, role, name)
    calls = [*_calls(given.pop("tool_calls", None), f"{name}.tool_calls"), *_legacy_call(given, name)]
    content = given.pop("content", None)
    plain = {key: value for key, value in _plain(given, name).items() if key not in METADATA}
    thoughts = {key: plain.pop(key) for key in THOUGHTS if key in plain}
    rest = {key: value for key, value in plain.items() if not _empty(value)}
    if thoughts:
        rest["reasoning_content"] = _thought(thoughts, name)
    if content is None and not (calls or "refusal" in rest):
        raise RowError(f"{name}.content is null; expected a string or a list of text parts")
    kept: Message = {"role": check_encodable(role, f"{name}.role"), "content": _content(content, f"{name}.content")}
    kept |= rest
    if calls:
        kept["tool_calls"] = calls
    if not trained:
        untrained.add(index)
    return kept


def _thought(thoughts: dict[str, Any], name: str) -> str:
    for key, value in thoughts.items():
        if not isinstance(value, str):
            raise RowError(f"{name}.{key} is {shown(value)}; expected a string")
    if len(set(thoughts.values())) > 1:
        raise RowError(f"{name} has different texts in {' and '.join(thoughts)}; keep one of them")
    return str(next(iter(thoughts.values())))


def _empty(value: Any) -> bool:
    """Return whether a field counts as missing: null, blank text, or a list or object without any other value."""
    if isinstance(value, (list, dict)):
        return all(map(_empty, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and not value.strip())


def _trained(given: dict[str, Any], role: str, name: str) -> bool:
    """Remove the fields `WEIGHTS` from a message, and return whether they allow training on it.

    Only assistant messages can have the value 1 or true.
    """
    found = {key: given.pop(key) for key in WEIGHTS if key in given}
    for key, value in found.items():
        if key != "weight" and not isinstance(value, bool):
            raise RowError(f"{name}.{key} is {shown(value)}; expected true to train on the message or false not to")
        if key == "weight" and (isinstance(value, bool) or value not in (0, 1)):
            raise RowError(f"{name}.weight is {shown(value)}; expected 1 to train on the message or 0 not to")
        if value and role != "assistant":
            raise RowError(
                f"{name}.{key} is {shown(value)}, but the message has the role {role!r}; give {key} {shown(value)} to "
                "assistant messages only"
            )
    if len(set(found.values())) > 1:
        raise RowError(f"{name} has different values in {' and '.join(found)}; keep one of them")
    return all(found.values())


def _from_sharegpt(given: dict[str, Any], name: str) -> dict[str, Any]:
    sender = given.pop("from")
    if "content" in given:
        raise RowError(f"{name} has 'from' and 'content'; expected 'from' and 'value', or 'role' and 'content'")
    value = given.pop("value", None)
    sender = sender.lower() if isinstance(sender, str) else sender
    if sender == "function_call":
        if not isinstance(value, (str, dict, list)):
            raise RowError(f"{name}.value is {shown(value)}; expected a tool call as JSON text")
        calls = _parsed(value, f"{name}.value", "a tool call") if isinstance(value, str) else value
        return {**given, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
        known = ", ".join((*SHAREGPT_ROLES, "function_call"))
        raise RowError(f"{name}.from is {shown(sender)}; expected one of {known}")
    if value is None and not given.get("tool_calls"):
        raise RowError(f"{name}.value is null; expected a string")
    return {**given, "role": SHAREGPT_ROLES[sender], "content": value}


def _content(content: object, name: str) -> str | list[Message]:
    """Return the content of a message: a text, or a list of parts if it has images.

    Consecutive text parts are concatenated.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return check_encodable(content, name)
    if not isinstance(content, list):
        raise RowError(f"{name} is {shown(content)}; expected a string or a list of parts")
    parts: list[Message] = []
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and is_image_part(part):
            if texts:
                parts.append({"type": "text", "text": "".join(texts)})
            parts.append({"type": "image", "image": read_part(part, f"{name}[{index}]")})
            texts = []
            continue
        if isinstance(part, dict) and part.get("type") in OTHER_MEDIA:
            raise RowError(f"{name}[{index}].type is {shown(part['type'])}; padfree reads text and images only")
        if isinstance(part, dict):
            part = {key: value for key, value in part.items() if value is not None}
            kind = part.pop("type", "text" if set(part) == {"text"} else None)
            if kind not in TEXT_PARTS:
                raise RowError(f"{name}[{index}].type is {shown(kind)}; expected 'text' or 'image'")
            text = part.pop("text", None)
            if part and any(value not in ("", [], {}) for value in part.values()):
                raise RowError(f"{name}[{index}] has the key {next(iter(part))!r}; expected 'type' and 'text' only")
        else:
            text = part
        if not isinstance(text, str):
            raise RowError(f"{name}[{index}].text is {shown(text)}; expected a string")
        texts.append(check_encodable(text, f"{name}[{index}].text"))
    if not parts:
        return "".join(texts)
    return [*parts, {"type": "text", "text": "".join(texts)}] if texts else parts


def _calls(calls: object, name: str) -> list[Message]:
    if calls is None:
        return []
    return [_call(call, f"{name}[{index}]") for index, call in enumerate(_listed(calls, name, "a list of tool calls"))]


def _call(call: object, name: str) -> Message:
    """Convert a tool call to `{"id", "type", "function": {"name", "arguments"}}`, with arguments as an object."""
    if not isinstance(call, dict):
        raise RowError(f"{name} is {shown(call)}; expected an object with function.name and function.arguments")
    given = {key: value for key, value in call.items() if value is not None}
    kind = given.pop("type", "function")
    if kind != "function":
        raise RowError(f"{name}.type is {shown(kind)}; expected 'function'")
    if "function" not in given:
        given["function"] = {key: given.pop(key) for key in ("name", "arguments", "parameters") if key in given}
    function = given.pop("function")
    if not isinstance(function, dict):
        raise RowError(f"{name}.function is {shown(function)}; expected an object with name and arguments")
    function = {key: value for key, value in function.items() if value is not None}
    called = function.pop("name", None)
    if not isinstance(called, str) or not called.strip():
        raise RowError(f"{name}.function.name is {shown(called)}; expected the name of a tool")
    field = "parameters" if "arguments" not in function and "parameters" in function else "arguments"
    arguments = function.pop(field, {})
    if isinstance(arguments, str):
        text = arguments or "{}"
        arguments = _plain(_parsed(text, f"{name}.function.{field}", "an object"), name, nulls=True)
    else:
        arguments = _plain(arguments, f"{name}.function.{field}")
    if not isinstance(arguments, dict):
        raise RowError(f"{name}.function.{field} is {shown(arguments)}; expected an object, or an object as JSON text")
    kept: Message = {"type": "function"}
    if "id" in given:
        kept["id"] = given.pop("id")
        if not isinstance(kept["id"], str):
            raise RowError(f"{name}.id is {shown(kept['id'])}; expected a string")
    kept["function"] = {
        "name": check_encodable(called, f"{name}.function.name"),
        "arguments": arguments,
        **_plain(function, f"{name}.function"),
    }
    kept |= {key: value for key, value in _plain(given, name).items() if key != "index" and value not in ("", [], {})}
    return kept


def _legacy_call(given: dict[str, Any], name: str) -> list[Message]:
    """Convert OpenAI's `function_call`, the predecessor of `tool_calls`, to a list with one tool call."""
    call = given.pop("function_call", None)
    return [] if call is None else [_call({"function": call}, f"{name}.function_call")]


def _check_results(messages: list[Message], column: str) -> None:
    """Raise a `RowError` unless each tool message has the `tool_call_id` of an earlier call without a result."""
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        waiting |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        answered = message.get("tool_call_id")
        if answered is None:
            continue
        if not isinstance(answered, str) or (waiting and answered not in waiting):
            raise RowError(
                f"{column}[{index}].tool_call_id is {shown(answered)}; expected the id of an earlier call that has no "
                "result yet"
            )
        waiting.discard(answered)


def _tools(tools: object, column: str) -> list[Any] | None:
    listed = _listed(tools, column, "a list of tools") if tools != "" else []
    read: list[Any] = []
    for index, tool in enumerate(listed):
        name = f"{column}[{index}]"
        if isinstance(tool, str):
            tool = _parsed(tool, name, "a tool")
        if not isinstance(tool, dict):
            raise RowError(f"{name} is {shown(tool)}; expected an object with type and function")
        plain: dict[str, Any] = _plain(tool, name)
        if "function" not in plain and "name" in plain and plain.get("type", "function") == "function":
            plain = {"type": "function", "function": {key: plain[key] for key in plain if key != "type"}}
        function = plain.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}.function is {shown(function)}; expected an object with a name")
        if isinstance(function.get("parameters"), str):
            function["parameters"] = _plain(
                _parsed(function["parameters"], f"{name}.function.parameters", "an object"), name, nulls=True
            )
        read.append(plain if "type" in plain else {"type": "function", **plain})
    return read or None


def _plain(value: Any, name: str, *, nulls: bool = False, depth: int = 0) -> Any:
    """Check that a value is JSON, and return a copy. Keys whose value is null are dropped, unless `nulls` is True."""
    if depth > DEEPEST:
        raise RowError(f"{name[:100]}... is nested too deeply; expected at most {DEEPEST} levels")
    if isinstance(value, str):
        return check_encodable(value, name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{name} is {shown(value)}; expected a finite number")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{name}[{index}]", nulls=nulls, depth=depth + 1) for index, one in enumerate(value)]
    if isinstance(value, Mapping):
        kept = {}
        for key, one in value.items():
            if not isinstance(key, str):
                raise RowError(f"{name} has the key {shown(key)}; expected strings as keys")
            if one is not None or nulls:
                check_encodable(key, name)
                kept[key] = _plain(one, f"{name}.{key}", nulls=nulls, depth=depth + 1)
        return kept
    raise RowError(f"{name} has the type {type(value).__name__}; expected a JSON value")
