"""Replace the texts and numbers of a conversation by markers, to see what a chat template does with them.

The copy with markers is the *twin* of the conversation. The replaced texts and numbers are its *leaves*, and everything
else is its *shape*. All conversations of one shape have the same twin:

    rendered conversation    <|user|>Hi<|end|>
    rendered twin            <|user|>zq0x\\"éw<|end|>

The marker has a backslash, a quotation mark and a non-ASCII letter. The rendered twin therefore shows whether the
template writes the text unchanged, as JSON, or garbled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from padfree.data.conversation import Conversation, Message

Span = tuple[int, int]

THOUGHT_FIELDS = ("reasoning_content",)
RESULT_ROLES = ("tool", "function", "ipython")
MAX_LEAVES = 10_000
_TAGS = re.compile(r"(\s*(?:</?(?:think|thinking|thought|reasoning)>|\[/?THINK\])\s*)")
# A number is replaced by the marker 70000iiii07, in which iiii is the index of its leaf.
_FIRST_NUMBER = 70_000_000_007
_MARKER = re.compile(
    r'zq(?P<text>\d+)x(?:(?P<plain>\\"éw)|(?P<json>\\\\\\"éw)|(?P<ascii>\\\\\\"\\u00e9w))?'
    r"|zq(?P<id>\d+)yk*|70000(?P<number>\d{4})07(?:\.5)?"
)


class TemplateValue(NamedTuple):
    """A leaf of a conversation: a text or a number that the chat template renders."""

    message: int  # the index of the message
    field: str  # the field that holds the value, e.g. "tool_calls[0].function.name"
    value: str | int | float
    thought: bool = False  # whether the text is reasoning, which a template may drop in earlier turns
    identifier: bool = False  # whether the text is the id that connects a tool call with its result


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationShape:
    """The shape of a conversation (everything but its texts and numbers), its leaves and its twin."""

    key: Hashable  # equal for all conversations of the shape
    leaves: tuple[TemplateValue, ...]  # the texts and numbers of this conversation
    twin: Conversation  # the conversation with a marker in place of each leaf
    shuffled: int | None  # index of the first message with a tool result out of order; None if there is none


def shape_of(conversation: Conversation) -> ConversationShape:
    return _Dissection().dissect(conversation)


class _Dissection:
    def __init__(self) -> None:
        self._key: list[Hashable] = []
        self._leaves: list[TemplateValue] = []
        self._identifiers: dict[str, int] = {}
        # The tool calls without a result so far, each with the index of the leaf that holds its name.
        self._waiting: list[tuple[Message, int]] = []
        self._shuffled: int | None = None

    def dissect(self, conversation: Conversation) -> ConversationShape:
        twins = []
        for index, message in enumerate(conversation.messages):
            twins.append(self._message(message, index))
        self._key += [conversation.untrained, self._shuffled]
        if conversation.tools:
            self._key.append(json.dumps(conversation.tools))
        twin = Conversation(messages=tuple(twins), tools=conversation.tools, untrained=conversation.untrained)
        return ConversationShape(key=tuple(self._key), leaves=tuple(self._leaves), twin=twin, shuffled=self._shuffled)

    def _message(self, message: Message, index: int) -> Message:
        role = message["role"]
        self._key.append(role)
        answered = self._answered(message, index) if role in RESULT_ROLES else None
        twin: Message = {"role": role}
        for field, value in message.items():
            if field == "role":
                continue
            self._key.append(field)
            if field == "name" and answered is not None and value == answered[0]["function"]["name"]:
                self._key.append(answered[1])
                twin[field] = _text_marker(answered[1])
            elif isinstance(value, str) and field != "tool_call_id":
                twin[field] = self._text(value, field, index, assistant=role == "assistant")
            elif field == "content" and isinstance(value, list):
                twin[field] = self._parts(value, index, assistant=role == "assistant")
            elif field == "tool_calls":
                twin[field] = [self._call(call, f"{field}[{at}]", index) for at, call in enumerate(value)]
            else:
                twin[field] = self._value(value, field, index)
        return twin

    def _answered(self, message: Message, index: int) -> tuple[Message, int] | None:
        """Return the tool call that a tool result answers, and the index of the leaf that holds the function's name.

        It is the call with the same id, else the first call without a result, else None.
        """
        if not self._waiting:
            return None
        answered = message.get("tool_call_id")
        found = next((one for one in self._waiting if answered and one[0].get("id") == answered), self._waiting[0])
        if found is not self._waiting[0] and self._shuffled is None:
            self._shuffled = index
        self._waiting.remove(found)
        return found

    def _text(self, value: str, field: str, message: int, *, assistant: bool) -> str:
        thought = assistant and field in THOUGHT_FIELDS
        twin = []
        for literal, text, inside in _parts(value, tags=assistant and field == "content"):
            self._key += [literal, bool(text)]
            twin.append(literal)
            if text:
                twin.append(_text_marker(len(self._leaves)))
                self._leaves.append(TemplateValue(message, field, text, thought or inside))
        self._key.append(None)
        return "".join(twin)

    def _parts(self, parts: list[Message], message: int, *, assistant: bool) -> list[Message]:
        """Return the content parts (texts and images) of a message, with a marker in place of each text."""
        twins: list[Message] = []
        for part in parts:
            self._key.append(part["type"])
            twin = dict(part)
            if part["type"] == "text":
                twin["text"] = self._text(part["text"], "content", message, assistant=assistant)
            twins.append(twin)
        self._key.append(("parts", len(parts)))
        return twins

    def _call(self, call: Message, field: str, message: int) -> Message:
        function = call["function"]
        leaf = len(self._leaves)
        twin: Message = {}
        for name, value in call.items():
            self._key.append(name)
            if name == "function":
                leaf = len(self._leaves)
                twin[name] = self._value(function, f"{field}.function", message)
            elif name == "type":
                twin[name] = value
            else:
                twin[name] = self._value(value, f"{field}.{name}", message)
        self._waiting.append((call, leaf))
        return twin

    def _value(self, value: Any, field: str, message: int) -> Any:
        if isinstance(value, str):
            if field == "tool_call_id" or field.endswith("].id"):
                return self._identifier(value, field, message)
            return self._text(value, field, message, assistant=False)
        if value is None or isinstance(value, bool):
            self._key.append("null" if value is None else f"{value}")
            return value
        if isinstance(value, (int, float)):
            number = _FIRST_NUMBER + 100 * len(self._leaves)
            self._key.append(type(value).__name__)
            self._leaves.append(TemplateValue(message, field, value))
            return number if isinstance(value, int) else number + 0.5
        if isinstance(value, list):
            self._key.append(("list", len(value)))
            return [self._value(one, f"{field}[{index}]", message) for index, one in enumerate(value)]
        self._key.append(("object", *value))
        return {name: self._value(one, f"{field}.{name}", message) for name, one in value.items()}

    def _identifier(self, value: str, field: str, message: int) -> str:
        """Return the marker that replaces the id of a tool call. Equal ids have the same marker.

        The marker is padded to the length of the id, because some templates check the length: Mistral's ids have 9
        characters.
        """
        leaf = self._identifiers.setdefault(value, len(self._leaves))
        if leaf == len(self._leaves):
            self._leaves.append(TemplateValue(message, field, value, identifier=True))
        self._key += [leaf, len(value)]
        return f"zq{leaf}y".ljust(len(value), "k")


def _parts(value: str, *, tags: bool) -> Iterator[tuple[str, str, bool]]:
    """Split a text at tags such as `<think>`, and strip white space from the parts.

    Yield (tag and white space before the part, part, whether it is reasoning). If `tags` is False, the text is not
    split.
    """
    pieces = _TAGS.split(value) if tags else [value]
    if len(pieces) == 1:
        text = value.strip()
        start = value.index(text)
        yield value[:start], text, False
        if start + len(text) < len(value):
            yield value[start + len(text) :], "", False
        return
    # Every part before the last closing tag is reasoning.
    closing = max((index for index in range(1, len(pieces), 2) if "/" in pieces[index]), default=-1)
    literal = ""
    for index, piece in enumerate(pieces):
        if index % 2:
            literal += piece
            continue
        text = piece.strip()
        start = piece.index(text)
        yield literal + piece[:start], text, index < closing
        literal = piece[start + len(text) :]
    yield literal, "", False


def _text_marker(index: int) -> str:
    return f'zq{index}x\\"éw'


FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii": lambda text: json.dumps(text)[1:-1],
}


def written(value: str | int | float, form: str) -> str:
    return FORMS[form](value) if isinstance(value, str) else json.dumps(value)


class Slot(NamedTuple):
    """The place of a marker in a rendered text. The marker stands for a text or number, whose index is `leaf`.

    `form` says how the template writes the marker: a key of `FORMS`, or empty if it is none of these forms.
    """

    leaf: int
    start: int
    end: int
    form: str


def slots_of(text: str) -> list[Slot]:
    found = []
    for match in _MARKER.finditer(text):
        form = next((form for form in FORMS if match[form] is not None), "")
        if match["id"] is not None:
            form = "plain"
        elif match["number"] is not None:
            form = "json"
        leaf = int(match["text"] or match["id"] or match["number"])
        found.append(Slot(leaf, match.start(), match.end(), form))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """A rendered text with slots, into which the leaves (texts and numbers) of a row can be filled."""

    literals: tuple[str, ...]  # the texts before, between and after the slots
    slots: tuple[tuple[int, str], ...]  # (index of the leaf, how its value is written: a key of `FORMS`)
    borders: tuple[tuple[int, int], ...]  # start and end of each span, each as (index of the literal, offset in it)

    @staticmethod
    def of(text: str, spans: Sequence[Span]) -> Skeleton | None:
        """Turn a rendered `text` into a skeleton: each marker becomes a slot, into which a value can be filled.

        `spans`: the ranges of trained characters, which the skeleton keeps. Return None if a range begins or ends
        inside a marker.
        """
        literals, slots, done = [], [], 0
        starts = []
        for slot in slots_of(text):
            literals.append(text[done : slot.start])
            starts.append(done)
            slots.append((slot.leaf, slot.form))
            done = slot.end
        literals.append(text[done:])
        starts.append(done)
        borders = []
        for offset in (border for span in spans for border in span):
            for index, (start, literal) in enumerate(zip(starts, literals, strict=True)):
                if start <= offset <= start + len(literal):
                    borders.append((index, offset - start))
                    break
            else:
                return None
        return Skeleton(literals=tuple(literals), slots=tuple(slots), borders=tuple(borders))

    def filled(self, leaves: Sequence[TemplateValue]) -> tuple[str, list[Span], list[tuple[int, Span]]]:
        """Fill the leaves of a conversation of the same shape into the slots.

        Return the filled text, its trained spans, and (index of the message, span) for each message.
        """
        parts = [self.literals[0]]
        starts = [0]
        message_spans: dict[int, Span] = {}
        seen: set[int] = set()
        end = len(parts[0])
        for (index, form), literal in zip(self.slots, self.literals[1:], strict=True):
            leaf = leaves[index]
            value = leaf.value if form == "plain" and isinstance(leaf.value, str) else written(leaf.value, form)
            start, end = end, end + len(value)
            if index not in seen:
                seen.add(index)
                first = message_spans.get(leaf.message)
                message_spans[leaf.message] = (
                    (start, end) if first is None else (min(first[0], start), max(first[1], end))
                )
            parts += [value, literal]
            starts.append(end)
            end += len(literal)
        offsets = [starts[index] + character for index, character in self.borders]
        spans = list(zip(offsets[::2], offsets[1::2], strict=True))
        return "".join(parts), spans, sorted(message_spans.items())
