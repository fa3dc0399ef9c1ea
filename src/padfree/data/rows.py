"""Read a row as a conversation, or as a prompt in plain text.

    row                       {"instruction": "Add.", "input": "2+2", "output": "4"}
    RowReader.prompt          user: "Add.\\n\\n2+2"
    RowReader.completed       user: "Add.\\n\\n2+2"   assistant: "4"

A prompt or an answer is a text, a list of messages, or such a list as JSON text. An answer can also be a whole
conversation. The prompt must then be the first messages of this conversation, or the last user message.

Only the answer is trained, and not assistant turns in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from padfree.config.prompt_template import template_parts
from padfree.data.chat_roles import usual_role
from padfree.data.conversation import THOUGHTS, Conversation, Message, need_no_images, read_conversation
from padfree.data.data_settings import TextSettings
from padfree.data.fields import Fields, has_value
from padfree.data.records import RowError, check_encodable, parse_json, present, shown, string
from padfree.data.row_images import need_no_places, read_column, text_of, with_images
from padfree.errors import UserError

SAID = ("content", "value", "tool_calls", "function_call", "refusal", *THOUGHTS)
"""The keys that tell JSON text of messages from other JSON text: at least one message has one of them."""


class PlainPair(NamedTuple):
    """A prompt and two answers as plain texts, not as conversations."""

    prompt: str
    chosen: str
    rejected: str


class RowReader:
    """Turns rows into conversations, and applies the settings `data.system` and `data.prompt_template`."""

    def __init__(self, settings: TextSettings, *, renders_chat: bool) -> None:
        if settings.system is not None and not renders_chat:
            raise UserError(
                "data.system",
                "has no effect, because prompts are not rendered with a chat template",
                "remove data.system, or set data.chat_template to a file and data.prompt_format=chat",
                value=settings.system,
            )
        self._system = settings.system
        self._renders_chat = renders_chat
        self._reads_images = settings.images is not None
        self._implicit_text = settings.prompt_format != "chat"
        self._template = None if settings.prompt_template is None else template_parts(settings.prompt_template)

    @property
    def template_names(self) -> tuple[str, ...]:
        """The names of the columns that `data.prompt_template` contains."""
        return tuple(name for _, name in self._template or () if name is not None)

    # Conversations

    def conversation(self, row: Mapping[str, Any], fields: Fields) -> Conversation:
        """Return the conversation that a row has in its field `messages`."""
        return self._finished(self._own_conversation(row, fields), row, fields)

    def prompt(self, row: Mapping[str, Any], fields: Fields) -> Conversation:
        """Return the prompt of a row as a conversation, with the system prompt and the fields `input` and `history`."""
        return self._finished(self._own_prompt(row, fields), row, fields)

    def completed(self, row: Mapping[str, Any], fields: Fields) -> Conversation:
        """Return the fields `prompt` and `response` of a row as one conversation.

        Only the assistant messages of the response are trained.
        """
        context = self._own_prompt(row, fields)
        answer = _answer(row, fields["response"])
        messages, start = _joined(context, answer, fields["prompt"], fields["response"])
        found = _conversation(messages, start, context, answer)
        return self._finished(found, row, fields)

    def pair(self, row: Mapping[str, Any], fields: Fields) -> tuple[Conversation, Conversation] | PlainPair:
        """Return the chosen and the rejected conversation of a preference pair.

        Each conversation is the common context, followed by an answer. Without a chat template, plain texts are
        returned.
        """
        columns = fields["chosen"], fields["rejected"]
        if not self._renders_chat or (fields.kind == "implicit" and _are_texts(row, columns)):
            return self._plain_pair(row, fields)
        context = None
        if fields.kind == "prompted":
            context = self._own_prompt(row, fields)
        elif fields.kind == "continued":
            context = self._own_conversation(row, fields)
        whole: list[tuple[Message, ...]] = []
        answers = [_answer(row, column) for column in columns]
        for answer, column in zip(answers, columns, strict=True):
            if context is not None:
                name = fields["messages" if fields.kind == "continued" else "prompt"]
                whole.append(_joined(context, answer, name, column)[0])
            else:
                system = self._row_system(row, fields)
                whole.append(_with_system(answer, system, fields["system"], column).messages)
        start = _context_length(whole[0], whole[1], columns)
        for answer, messages, column in zip(answers, whole, columns, strict=True):
            if any(index + len(messages) - len(answer.messages) >= start for index in answer.untrained):
                raise RowError(f"{column!r} has a message of weight 0 in its answer; remove the weight")
        tools = context.tools if context is not None else _read_tools(row, fields)
        shared = whole[0][:start]
        chosen, rejected = (
            _conversation((*shared, *messages[start:]), start, Conversation(messages=shared, tools=tools))
            for messages in whole
        )
        return self._finished(chosen, row, fields), self._finished(rejected, row, fields)

    def _own_conversation(self, row: Mapping[str, Any], fields: Fields) -> Conversation:
        column = fields["messages"]
        given = present(row, column, "a list of messages")
        found = read_conversation(given, column, tools=_tools(row, fields), tools_column=fields["tools"], images=True)
        return _with_system(found, self._row_system(row, fields), fields["system"], column)

    def _own_prompt(self, row: Mapping[str, Any], fields: Fields) -> Conversation:
        column = fields["prompt"]
        value = row.get(column)
        given = listed_messages(value)
        if given is not None:
            for name in ("input", "history"):
                if name in fields.columns and has_value(row.get(fields[name])):
                    raise RowError(
                        f"{fields[name]!r} cannot be combined with messages in {column!r}; remove it, or give the "
                        "prompt as a string"
                    )
            if self._template is not None:
                raise RowError(f"{column!r} is {shown(value)}; expected a string, because data.prompt_template is set")
        else:
            given = [*_history(row, fields), {"role": "user", "content": self._prompt_text(row, fields)}]
        found = read_conversation(given, column, tools=_tools(row, fields), tools_column=fields["tools"], images=True)
        return _with_system(found, self._row_system(row, fields), fields["system"], column)

    def _row_system(self, row: Mapping[str, Any], fields: Fields) -> str | None:
        column = fields.columns.get("system")
        if column is None or not has_value(row.get(column)) or column in self.template_names:
            return None
        return string(row, column)

    def _finished(self, found: Conversation, row: Mapping[str, Any], fields: Fields) -> Conversation:
        """Add the default system prompt and the images of the row to `found`, the conversation of the row."""
        if self._system is not None and not found.has_system:
            found = found.with_system(self._system)
        if not self._reads_images:
            return need_no_images(found)
        column = fields.columns.get("images", "images")
        value = row.get(column)
        if value is None:
            return with_images(need_no_places(found, column), None, column)
        return with_images(found, read_column(value, column), column)

    # Plain text

    def plain_prompt(self, row: Mapping[str, Any], fields: Fields) -> str:
        """Return the prompt of a row as plain text, without a chat template."""
        for name in ("system", "history", "tools", "images"):
            column = fields.columns.get(name)
            if column is not None and column not in self.template_names and has_value(row.get(column)):
                raise RowError(
                    f"{column!r} is {shown(row[column])}, but prompts in plain text leave this column out; add "
                    f"{{{column}}} to data.prompt_template, or set data.chat_template"
                )
        return self._prompt_text(row, fields)

    def _prompt_text(self, row: Mapping[str, Any], fields: Fields) -> str:
        text = string(row, fields["prompt"])
        column = fields.columns.get("input")
        if column is not None and "input" not in self.template_names and column not in self.template_names:
            follow = string(row, column) if has_value(row.get(column)) else ""
            text = "\n\n".join(part for part in (text, follow) if part) if follow else text
        if self._template is None:
            return text
        return "".join(
            before + ("" if name is None else text if name == "prompt" else _filled(row, fields, name))
            for before, name in self._template
        )

    def _plain_pair(self, row: Mapping[str, Any], fields: Fields) -> PlainPair:
        chosen, rejected = string(row, fields["chosen"]), string(row, fields["rejected"])
        if chosen.strip() == rejected.strip():
            raise _same_answers(fields["chosen"], fields["rejected"])
        if fields.kind == "prompted":
            prompt = self.plain_prompt(row, fields)
            if len(prompt.split()) > 3 and chosen.startswith(prompt) and rejected.startswith(prompt):
                raise RowError(
                    f"{fields['chosen']!r} and {fields['rejected']!r} begin with the text of {fields['prompt']!r}; "
                    f"remove it from both, or set data.columns.{fields['prompt']}=unused"
                )
            return PlainPair(prompt, chosen, rejected)
        if fields.kind == "continued":
            raise RowError(
                f"{fields['messages']!r} needs a chat template; set data.chat_template, or give the prompt as a string"
            )
        if not self._implicit_text:
            raise RowError(
                f"{fields['chosen']!r} is a string and the row has no prompt; give messages, or set "
                "data.prompt_format=plain"
            )
        end = _common_words(chosen, rejected)
        if not chosen[:end].strip():
            raise RowError(
                f"{fields['chosen']!r} and {fields['rejected']!r} have no common prefix, and the row has no prompt; "
                "add a 'prompt' column"
            )
        return PlainPair(chosen[:end], chosen[end:], rejected[end:])


def listed_messages(value: object) -> list[Any] | None:
    """Return the messages of a prompt or an answer: a message, a list of messages, or their JSON text.

    Return None if the value is not messages but, for example, a plain text.
    """
    if not isinstance(value, str):
        if isinstance(value, dict):
            return [value] if "role" in value or "from" in value else None
        return value if isinstance(value, list) else None
    if not value.lstrip().startswith(("[", "{")):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    listed = found if isinstance(found, list) else [found]
    senders = all(isinstance(one, dict) and isinstance(one.get("role", one.get("from")), str) for one in listed)
    if not senders or not any(one.keys() & SAID for one in listed):
        return None
    parse_json(value)  # raises an error for keys that are given twice, which a plain text may have
    return listed


def _are_texts(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    return all(isinstance(row.get(column), str) and listed_messages(row[column]) is None for column in columns)


def _answer(row: Mapping[str, Any], column: str) -> Conversation:
    """Read an answer, which is a text, one message or a list of messages, as a conversation."""
    listed = listed_messages(row.get(column))
    if listed is None:
        return Conversation(messages=({"role": "assistant", "content": string(row, column)},))
    return read_conversation(listed, column, images=True)


def _tools(row: Mapping[str, Any], fields: Fields) -> object:
    value = row.get(fields["tools"])
    return value if has_value(value) else None


def _read_tools(row: Mapping[str, Any], fields: Fields) -> list[Any] | None:
    tools = _tools(row, fields)
    if tools is None:
        return None
    said = [{"role": "user", "content": ""}]
    return read_conversation(said, fields["tools"], tools=tools, tools_column=fields["tools"]).tools


def _history(row: Mapping[str, Any], fields: Fields) -> list[Message]:
    """Return the earlier turns in Alpaca's field `history` as messages.

    The field is a list of pairs [prompt, response], or a list of messages.
    """
    column = fields.columns.get("history")
    if column is None or not has_value(row.get(column)):
        return []
    turns = row[column]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        return list(read_conversation(turns, column, images=True).messages)
    messages: list[Message] = []
    for index, turn in enumerate(turns if isinstance(turns, list) else [turns]):
        if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(f"{column}[{index}] is {shown(turn)}; expected a list of two strings, [prompt, response]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


def _filled(row: Mapping[str, Any], fields: Fields, name: str) -> str:
    """Return the text that fills the placeholder of the column `name` in `data.prompt_template`."""
    column = name if name in row else fields.columns.get(name, name)
    value = row.get(column)
    if isinstance(value, (bool, int, float)):
        if value != value or value in (float("inf"), float("-inf")):
            raise RowError(f"{column!r} is {shown(value)}; expected a string or a finite number")
        return json.dumps(value)
    return string(row, column)


def _with_system(found: Conversation, system: str | None, system_column: str, column: str) -> Conversation:
    if system is None:
        return found
    check_encodable(system, system_column)
    if not found.has_system:
        return found.with_system(system)
    if text_of(found.messages[0]["content"]).strip() != system.strip():
        raise RowError(f"{system_column!r} and {column}[0] are different system prompts; keep one of them")
    return found


# Prompt and answer


def _joined(
    context: Conversation, answer: Conversation, prompt_column: str, column: str
) -> tuple[tuple[Message, ...], int]:
    """Join a prompt and an answer. Return all messages, and the index of the first message of the answer."""
    asked, said = context.messages, answer.messages
    if usual_role(said[0]["role"]) in ("assistant", "tool"):
        messages, start = (*asked, *said), len(asked)
    else:
        messages, start = _whole(asked, said, prompt_column, column)
    if messages[start - 1]["role"] == "assistant":
        raise RowError(
            f"{prompt_column!r} ends with an assistant message; expected it to end with a user or tool message"
        )
    if start == len(messages):
        raise RowError(f"{column!r} has no answer after {prompt_column!r}; add an assistant message")
    if messages[start]["role"] != "assistant":
        raise RowError(
            f"{column!r} continues {prompt_column!r} with the role {messages[start]['role']!r}; expected 'assistant'"
        )
    return messages, start


def _whole(
    asked: Sequence[Message], said: Sequence[Message], prompt_column: str, column: str
) -> tuple[tuple[Message, ...], int]:
    """Join a prompt and an answer that is a whole conversation, which repeats the prompt.

    `asked`: the messages of the prompt. `said`: the messages of the answer. Raise a `RowError` unless `asked` equals
    the first messages of `said`, or the last user turn of `said`.
    """
    own, rest = _split(asked)
    system, turns = _split(said)
    if own and system and not _alike(own, system):
        raise RowError(f"{prompt_column!r} and {column!r} have different system messages; make them equal")
    system = own or system
    users = [index for index, message in enumerate(turns) if usual_role(message["role"]) == "user"]
    if _alike(rest, turns[: len(rest)]):
        return (*system, *rest, *turns[len(rest) :]), len(system) + len(rest)
    if len(rest) == 1 and users and _alike(rest, [turns[users[-1]]]):
        return (*system, *turns), len(system) + users[-1] + 1
    raise RowError(
        f"{column!r} is a whole conversation, but {prompt_column!r} is neither its first messages nor its last user "
        "turn; give the same prompt in both columns, or only the answer"
    )


def _split(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Split messages into the system message, if there is one, and the turns."""
    first = 1 if usual_role(messages[0]["role"]) == "system" else 0
    return messages[:first], messages[first:]


def _conversation(
    messages: tuple[Message, ...], start: int, context: Conversation, answer: Conversation | None = None
) -> Conversation:
    """Make a conversation of `messages`, with the tools of `context`.

    Assistant messages before index `start` are untrained. If `answer` (a conversation that ends `messages`) is given,
    its messages of weight 0 are untrained too.
    """
    untrained = {index for index in range(start) if messages[index]["role"] == "assistant"}
    if answer is not None:
        before = len(messages) - len(answer.messages)
        untrained |= {before + index for index in answer.untrained}
    return Conversation(messages=messages, tools=context.tools, untrained=frozenset(untrained))


# Two answers


def _context_length(chosen: Sequence[Message], rejected: Sequence[Message], columns: tuple[str, str]) -> int:
    """Return the number of messages that the two conversations of a pair share before their answers."""
    start = 0
    while start < min(len(chosen), len(rejected)) and _alike([chosen[start]], [rejected[start]]):
        start += 1
    if start == len(chosen) == len(rejected):
        raise _same_answers(*columns)
    if start == 0:
        raise RowError(f"{columns[0]!r} and {columns[1]!r} have no message in common; begin both with the same prompt")
    for messages, column in zip((chosen, rejected), columns, strict=True):
        if start == len(messages):
            raise RowError(
                f"{column!r} is only the beginning of the other answer's conversation; expected two answers to the "
                "same prompt"
            )
    for messages, column in zip((chosen, rejected), columns, strict=True):
        if messages[start]["role"] != "assistant":
            raise RowError(
                f"{column!r} has a message of role {messages[start]['role']!r} where the two conversations first "
                "differ; expected the same messages before the assistant's answers"
            )
        for message in messages[start:]:
            if usual_role(message["role"]) not in ("assistant", "tool"):
                raise RowError(
                    f"{column!r} has a message of role {message['role']!r} after the first difference between the "
                    "answers; expected them to differ in the last assistant turn only"
                )
        if messages[-1]["role"] != "assistant":
            raise RowError(
                f"{column!r} ends with a message of role {messages[-1]['role']!r}; expected the role 'assistant'"
            )
    if chosen[start - 1]["role"] == "assistant":
        raise RowError(
            f"message {start}, the last one before the answers, is from the assistant; expected a user or tool message"
        )
    return start


def _same_answers(chosen: str, rejected: str) -> RowError:
    return RowError(f"{chosen!r} and {rejected!r} are equal; give two different answers")


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return whether two lists of messages are equal, ignoring white space around their content."""
    return len(some) == len(others) and all(
        one == other or {**one, "content": _trimmed(one["content"])} == {**other, "content": _trimmed(other["content"])}
        for one, other in zip(some, others, strict=True)
    )


def _trimmed(content: str | list[Message]) -> str | list[Message]:
    return content.strip() if isinstance(content, str) else content


def _common_words(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts that ends at the end of a word.

    The prefix is shorter than each of the texts. In scripts without spaces, it may end at any character.
    """
    most = min(len(one), len(other)) - 1
    end = next((index for index in range(most) if one[index] != other[index]), most)
    if end > 0 and not one[end - 1].isascii():  # cut at any character of a script such as Chinese, which has no spaces
        return end
    # Cut before the white space, so that the answers begin with it: tokenizers make one token of a word and the space
    # before it.
    while end > 0 and not (one[end].isspace() and other[end].isspace() and not one[end - 1].isspace()):
        end -= 1
    return end
