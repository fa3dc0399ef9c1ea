"""A conversation as text, and which characters of it the assistant wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                           [------------)          the span of the assistant's turn

Spans come from the template itself where it has `{% generation %}` markers. Where it has none they are found by growing
prefixes: a turn begins where the conversation before it, with the generation prompt, ends, and it ends where the
conversation up to and with it ends. For that to mean anything each prefix must be how the next one begins, which is
verified; a template that rewrites earlier turns (drops their reasoning, say) is refused, with three cures.

White space behind a turn's closing control token (`<|im_end|>\\n`) belongs to the template: the model stops at the
token and never writes it. So the prefix rule leaves it out, and templates with markers put the end there too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from padfree.config.choices import LossOn
from padfree.config.rules import shown_error
from padfree.data.records import RowError, check_encodable, shown, string
from padfree.data.settings import TextSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatRenderer:
    """A tokenizer's chat template with its arguments; `template` takes the place of the tokenizer's own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if template is None and not tokenizer.chat_template:
            raise ValueError(
                "data.chat_template: the tokenizer has none; give a file with one, or prompt and response columns and "
                "data.prompt_format=plain"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._arguments = dict(arguments or {})
        contents = (token.content for token in tokenizer.added_tokens_decoder.values())
        self._control_tokens = tuple(text for text in contents if text and text == text.strip())

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        return self._rendered(messages, tools, generation_prompt, spans=False)[0]

    def trained_spans(
        self, messages: Sequence[Message], tools: list[Any] | None, loss_on: LossOn
    ) -> tuple[str, list[Span]]:
        """The whole conversation as text, and the spans of it that are trained on: sorted, apart, none empty."""
        if loss_on == "all":
            text = self.render(messages, tools)
            return text, [(0, len(text))]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise RowError(
                "no message with role 'assistant'; expected one to train on (data.loss_on=all trains on every token)"
            )
        if self._has_markers(tools):
            text, spans = self._rendered(messages, tools, False, spans=True)
            if loss_on == "last" and len(turns) > 1:
                start = len(self._before(messages, tools, turns[-1], text))
                spans = [span for span in spans if span[0] >= start]
        else:
            text = self.render(messages, tools)
            spans = [self._turn(messages, tools, turn, text) for turn in (turns[-1:] if loss_on == "last" else turns)]
        return text, _merged(spans)

    def _has_markers(self, tools: list[Any] | None) -> bool:
        return _MARKER.search(self._tokenizer.get_chat_template(self._template, tools)) is not None

    def _turn(self, messages: Sequence[Message], tools: list[Any] | None, turn: int, text: str) -> Span:
        start = len(self._before(messages, tools, turn, text))
        last = turn == len(messages) - 1
        through = text if last else self.render(messages[: turn + 1], tools)
        if not text.startswith(through):
            raise RowError(
                f"message {turn + 1} reads differently once others follow: the chat template rewrites earlier turns; "
                "put {% generation %} markers into data.chat_template, or set data.loss_on=last or data.loss_on=all"
            )
        body = through[start:].rstrip()
        return start, start + len(body) if body.endswith(self._control_tokens) else len(through)

    def _before(self, messages: Sequence[Message], tools: list[Any] | None, turn: int, text: str) -> str:
        if turn == 0:
            raise RowError(
                "message 1 is the assistant's: no prefix shows where it begins; begin with the user, "
                "put {% generation %} markers into data.chat_template, or set data.loss_on=all"
            )
        before = self.render(messages[:turn], tools, generation_prompt=True)
        if not text.startswith(before):
            raise RowError(
                f"the text before message {turn + 1}, with the generation prompt, is not how the conversation begins: "
                "the chat template is not prefix-stable; put {% generation %} markers into it, or set data.loss_on=all"
            )
        return before

    def _rendered(
        self, messages: Sequence[Message], tools: list[Any] | None, generation_prompt: bool, *, spans: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(self._template, tools)
        try:
            # What `apply_chat_template` renders, before it tokenises: the spans are exact to the character here, while
            # a mask over tokens would hide a token that lies across a border.
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=spans,
                add_generation_prompt=generation_prompt,
                **{**self._tokenizer.special_tokens_map, **self._arguments},
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise RowError(
                f"the chat template refused it: {shown_error(error)}; change the row or the template"
            ) from error
        texts, found = rendered
        return texts[0], [(int(start), int(end)) for start, end in found[0]] if spans else []


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def check_messages(messages: list[Any], column: str) -> list[Message]:
    """The messages of a row, checked. Keys whose value is null are left out: Parquet has them in every message."""
    if not messages:
        raise RowError(f"{column!r} is empty; expected a list of messages")
    checked: list[Message] = []
    for index, message in enumerate(messages):
        name = f"{column}[{index}]"
        if not isinstance(message, dict):
            raise RowError(f"{name} is {shown(message)}; expected an object with role and content")
        kept: Message = {key: value for key, value in message.items() if value is not None}
        if not isinstance(kept.get("role"), str):
            raise RowError(f"{name}.role is {shown(message.get('role'))}; expected a string such as 'user'")
        if kept.get("tool_calls"):
            kept.setdefault("content", "")
        content = kept.get("content")
        if isinstance(content, str):
            check_encodable(content, f"{name}.content")
        elif not isinstance(content, list):
            raise RowError(f"{name}.content is {shown(content)}; expected a string (or a list of parts)")
        checked.append(kept)
    return checked


def chat_renderer(tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> ChatRenderer | None:
    """What renders prompts; None where they stand as they are."""
    plain = settings.prompt_format == "plain"
    if plain or (settings.prompt_format == "auto" and not (settings.chat_template or tokenizer.chat_template)):
        return None
    return ChatRenderer(tokenizer, settings.chat_template, settings.template_arguments)


def prompt_messages(row: dict[str, Any], column: str) -> list[Message]:
    if isinstance(row.get(column), list):
        return check_messages(row[column], column)
    return [{"role": "user", "content": string(row, column)}]
