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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from padfree.config.choices import LossOn, Turns
from padfree.config.rules import shown_error
from padfree.data.conversation import Conversation, Message, read_conversation
from padfree.data.records import RowError, string
from padfree.data.settings import TextSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedSample:
    """The text of one sample. `spans` are the trained characters: sorted, apart, none empty. `messages`: the index of
    a message and where its text stands.
    """

    text: str
    spans: tuple[Span, ...]
    messages: tuple[tuple[int, Span], ...]


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

    def prompt(self, conversation: Conversation) -> str:
        """What the model sees when it is to answer."""
        return self.render(conversation.messages, conversation.tools, generation_prompt=True)

    def samples(self, conversation: Conversation, *, loss_on: LossOn, turns: Turns) -> list[RenderedSample]:
        """The samples that a conversation makes, in the order of its turns."""
        messages, tools = conversation.messages, conversation.tools
        if loss_on == "all":
            text = self.render(messages, tools)
            return [self._sample(messages, text, [(0, len(text))])]
        trained = self._trained(conversation, loss_on)
        if turns != "apart":
            try:
                return [self._together(messages, tools, trained)]
            except RowError:
                if turns == "together":
                    raise
        return [self._apart(messages[: turn + 1], tools) for turn in trained]

    def _trained(self, conversation: Conversation, loss_on: LossOn) -> list[int]:
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not turns:
            raise RowError(
                "no message with role 'assistant'; expected one to train on (data.loss_on=all trains on every token)"
            )
        trained = [turn for turn in turns if turn not in conversation.untrained]
        if loss_on == "last":
            trained = [turn for turn in trained if turn == turns[-1]]
        if not trained:
            which = "the last assistant message has" if loss_on == "last" else "all assistant messages have"
            raise RowError(f"{which} weight 0; expected one to train on")
        return trained

    def _together(self, messages: Sequence[Message], tools: list[Any] | None, trained: list[int]) -> RenderedSample:
        if self._has_markers(tools):
            text, spans = self._rendered(messages, tools, False, spans=True)
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if trained != turns:
                start = len(self._before(messages, tools, trained[-1], text))
                spans = [span for span in spans if span[0] >= start]
        else:
            text = self.render(messages, tools)
            spans = [self._turn(messages, tools, turn, text) for turn in trained]
        return self._sample(messages, text, spans)

    def _apart(self, messages: Sequence[Message], tools: list[Any] | None) -> RenderedSample:
        return self._together(messages, tools, [len(messages) - 1])

    def _sample(self, messages: Sequence[Message], text: str, spans: Sequence[Span]) -> RenderedSample:
        places: list[tuple[int, Span]] = []
        done = 0
        for index, message in enumerate(messages):
            content = message["content"].strip()
            start = text.find(content, done)
            if content and start >= 0:
                done = start + len(content)
                places.append((index, (start, done)))
        return RenderedSample(text=text, spans=tuple(_merged(spans)), messages=tuple(places))

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


def chat_renderer(tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> ChatRenderer | None:
    """What renders prompts; None where they stand as they are."""
    plain = settings.prompt_format == "plain"
    if plain or (settings.prompt_format == "auto" and not (settings.chat_template or tokenizer.chat_template)):
        return None
    return ChatRenderer(tokenizer, settings.chat_template, settings.template_arguments)


def prompt_conversation(
    row: dict[str, Any], column: str, *, tools: object = None, tools_column: str = "tools"
) -> Conversation:
    """A prompt is a text, which the user says, or a list of messages."""
    if isinstance(row.get(column), list):
        return read_conversation(row[column], column, tools=tools, tools_column=tools_column)
    said = [{"role": "user", "content": string(row, column)}]
    return read_conversation(said, column, tools=tools, tools_column=tools_column)
