"""Render a conversation with a chat template, and find the characters that the assistant wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                           ^^^^^^^^^^^^^^^ trained

A conversation becomes one sample, unless the template changes earlier turns. Qwen3's template, for example, strips the
reasoning of earlier turns. Each trained turn then becomes a sample, with the earlier messages as context.

Conversations that differ only in texts and numbers are checked once (`chat_shape`, `chat_guard`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from padfree.choices import LossOn, Turns
from padfree.data.chat_forms import Form, formed, formed_message, forms_of
from padfree.data.chat_guard import Shown, check_row, check_twin
from padfree.data.chat_roles import ROLES, usual_role
from padfree.data.chat_shape import MAX_LEAVES, ConversationShape, Skeleton, Span, TemplateValue, shape_of, written
from padfree.data.chat_turns import TurnCut, TurnCutter
from padfree.data.conversation import Conversation, Message
from padfree.data.data_settings import TextSettings
from padfree.data.records import RowError, shown
from padfree.data.template import compared_texts, compiled, rendered
from padfree.errors import UserError, shown_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Result = TypeVar("_Result")

MAX_SHAPES = 2048
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedSample:
    """The rendered text of one training sample. It shows the first `stop` messages of a conversation."""

    text: str
    spans: tuple[Span, ...]  # the ranges of trained characters: sorted, disjoint and not empty
    messages: tuple[tuple[int, Span], ...]  # for each message: its index, and the range of its text
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """Says what to render from a conversation: a prompt, or the training samples that `loss_on` and `turns` ask for."""

    prompt: bool = False
    loss_on: LossOn = "assistant"
    turns: Turns = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Says how to render conversations that differ only in their texts and numbers."""

    form: Form  # the variant of the messages that the chat template accepts
    # For each sample: the part of the conversation, and its rendered text with gaps for texts and numbers. Without a
    # rendered text, each conversation is rendered and checked by itself.
    cuts: tuple[tuple[TurnCut, Skeleton | None], ...]


class _RaisedError(RowError):
    """Raised if the chat template raises an exception."""


class ChatRenderer:
    """Renders conversations with a chat template and its arguments.

    `template` replaces the tokenizer's own template. `day` is the date that the template gets as the current date.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        day: datetime.date | None = None,
    ) -> None:
        if template is None and not tokenizer.chat_template:
            raise UserError(
                "data.chat_template",
                "is not set and the tokenizer has no chat template",
                "set it to a file with a template, or use prompt and response columns with data.prompt_format=plain",
            )
        self.day = day or datetime.date.today()
        self._sources = {tools: _source(tokenizer, template, tools) for tools in (False, True)}
        self._variables = {**tokenizer.special_tokens_map, **_checked_arguments(arguments or {}), "documents": None}
        contents = (token.content for token in tokenizer.added_tokens_decoder.values())
        self._closing = tuple(text for text in contents if text and text == text.strip())
        self._plans: dict[Hashable, _Plan | RowError] = {}
        for source in self._sources.values():
            compiled(source, self.day)

    @cached_property
    def depends_on_day(self) -> bool:
        """Whether the rendered text depends on `day`: the template reads the date, and no argument supplies it."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tool = {"type": "function", "function": {"name": "c", "description": "d", "parameters": {}}}
        conversations = [
            (messages, tools)
            for messages in (said[:1], said, [{"role": "system", "content": "e"}, *said])
            for tools in (None, [tool])
        ]
        for source in set(self._sources.values()):
            if "strftime_now" not in source:
                continue
            template = compiled(source, self.day)
            for messages, tools in conversations:
                with contextlib.suppress(Exception):  # a template can raise an error for tools or for a system message
                    rendered(template, {**self._variables, "add_generation_prompt": False, "tools": tools}, messages)
                if template.environment.clock_reads:
                    return True
        return False

    @cached_property
    def turn_end(self) -> str | None:
        """The special token that ends the trained text of an assistant turn, at which the model learns to stop.

        "" if it ends with no special token. None if the template raises an error for the conversation that is tried.
        """
        said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        try:
            (sample,) = self.samples(Conversation(messages=said), loss_on="assistant", turns="auto")
        except RowError:
            return None
        if not sample.spans:
            return None
        text = sample.text[: sample.spans[-1][1]].rstrip()
        return max((token for token in self._closing if text.endswith(token)), key=len, default="")

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """Render messages as text, without any check."""
        usual = [formed_message(message, Form()) for message in messages]
        return self._rendered(usual, tools, generation_prompt)[0]

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that the model sees before it answers: the conversation with the generation prompt."""
        (sample,) = self._made(conversation, _Task(prompt=True))
        return sample.text

    def samples(self, conversation: Conversation, *, loss_on: LossOn, turns: Turns) -> list[RenderedSample]:
        """Return the training samples of a conversation, in the order of its turns.

        What is trained depends on `loss_on`:
        - "assistant": every assistant message that is not in `conversation.untrained`
        - "last": only the last assistant message
        - "all": the whole text, always as one sample
        """
        return self._made(conversation, _Task(loss_on=loss_on, turns=turns))

    # Samples of a row, predicted from its shape

    def _made(self, conversation: Conversation, task: _Task) -> list[RenderedSample]:
        conversation = self._with_roles(conversation)
        shape = shape_of(conversation)
        plan = self._plan(shape, task) if len(shape.leaves) < MAX_LEAVES else _RaisedError("")
        if isinstance(plan, _Plan):
            made = self._predicted(conversation, shape, plan, task)
            return self._by_itself(conversation, shape, task, plan.form) if made is None else made
        # For the twin, whose texts are markers, a template can raise an error that it does not raise for the row
        # itself.
        if isinstance(plan, _RaisedError):
            return self._first_right(conversation, lambda form: self._by_itself(conversation, shape, task, form))
        raise RowError(str(plan))

    def _plan(self, shape: ConversationShape, task: _Task) -> _Plan | RowError:
        key = (shape.key, task)
        found = self._plans.get(key)
        if found is None:
            try:
                found = self._first_right(shape.twin, lambda form: self._planned(shape, task, form))
            except RowError as error:
                found = error.with_traceback(None)
            if len(self._plans) >= MAX_SHAPES:
                self._plans.clear()
            self._plans[key] = found
        return found

    def _planned(self, shape: ConversationShape, task: _Task, form: Form) -> _Plan:
        cuts = self._cut(shape.twin, task, form)
        alone = self._alone(shape.twin, form)
        for cut in cuts:
            check_twin(shape, self._shown(cut, task, form, alone), keep_thoughts=task.loss_on == "all")
        return _Plan(form=form, cuts=tuple((cut, Skeleton.of(cut.text, cut.spans)) for cut in cuts))

    def _predicted(
        self, conversation: Conversation, shape: ConversationShape, plan: _Plan, task: _Task
    ) -> list[RenderedSample] | None:
        """Return the samples of a row: the rendered texts of `plan`, with the row's texts and numbers in the gaps.

        Return None if the template renders the row differently, or if `plan` has no rendered texts.
        """
        made = []
        messages, tools = formed(conversation, plan.form)
        for cut, skeleton in plan.cuts:
            if skeleton is None:
                return None
            text, spans, message_spans = skeleton.filled(shape.leaves)
            if cut.joined:
                actual = self._cutter(tools).apart(messages, cut.stop - 1).text
            else:
                actual = self._rendered(messages[: cut.stop], tools, task.prompt)[0]
            if actual != text:
                return None
            if cut.alone and not text.startswith(self._rendered(messages[: cut.stop - 1], tools, True)[0]):
                return None
            made.append(RenderedSample(text=text, spans=tuple(spans), messages=tuple(message_spans), stop=cut.stop))
        return made

    def _by_itself(
        self, conversation: Conversation, shape: ConversationShape, task: _Task, form: Form
    ) -> list[RenderedSample]:
        made = []
        alone = self._alone(conversation, form)
        for cut in self._cut(conversation, task, form):
            shown = self._shown(cut, task, form, alone)
            check_row(shape, conversation, shown, keep_thoughts=task.loss_on == "all")
            message_spans = _message_spans(cut, shape.leaves)
            made.append(RenderedSample(text=cut.text, spans=cut.spans, messages=tuple(message_spans), stop=cut.stop))
        return made

    def _first_right(self, conversation: Conversation, work: Callable[[Form], _Result]) -> _Result:
        """Call `work` with each form (variant of the messages, see `chat_forms`) until a call raises no `RowError`.

        Return the result of that call. If all calls raise a `RowError`, raise the most helpful of these errors.
        """
        problems: list[RowError] = []
        for form in forms_of(conversation):
            try:
                return work(form)
            except RowError as error:
                problems.append(error)
        usual = problems[0]  # of the form that most templates expect
        if isinstance(usual, _RaisedError) or "tool_calls[" in str(usual):
            raise max(problems, key=_message_number)  # the form with which the template got furthest
        raise usual

    # Rendering

    def _cut(self, conversation: Conversation, task: _Task, form: Form) -> list[TurnCut]:
        messages, tools = formed(conversation, form)
        if task.prompt or task.loss_on == "all":
            text = self._rendered(messages, tools, task.prompt)[0]
            spans: tuple[Span, ...] = () if task.prompt or not text else ((0, len(text)),)
            return [TurnCut(stop=len(messages), text=text, spans=spans)]
        return self._cutter(tools).cut(messages, _trained(conversation, task.loss_on), task.turns)

    def _cutter(self, tools: list[Any] | None) -> TurnCutter:
        marked = _MARKER.search(self._sources[tools is not None]) is not None
        return TurnCutter(
            lambda messages, prompt, spans: self._rendered(messages, tools, prompt, spans=spans),
            marked=marked,
            closing=self._closing,
        )

    def _shown(self, cut: TurnCut, task: _Task, form: Form, alone: Callable[[int], str | None]) -> Shown:
        def again(other: Conversation) -> str | None:
            messages, tools = formed(other, form)
            if cut.joined:
                return _attempted(lambda: self._cutter(tools).apart(messages, len(messages) - 1).text)
            return _attempted(lambda: self._rendered(messages, tools, task.prompt)[0])

        return Shown(text=cut.text, stop=cut.stop, prompt=task.prompt, again=again, alone=alone)

    def _alone(self, conversation: Conversation, form: Form) -> Callable[[int], str | None]:
        """Return `Shown.alone` of a conversation. It renders each message once, because all samples ask for it."""
        messages, tools = formed(conversation, form)
        return cache(lambda index: _attempted(lambda: self._rendered(messages[: index + 1], tools)[0]))

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        generation_prompt: bool = False,
        *,
        spans: bool = False,
    ) -> tuple[str, list[Span]]:
        template = compiled(self._sources[tools is not None], self.day)
        variables = {"add_generation_prompt": generation_prompt, **self._variables, "tools": tools}
        try:
            found = rendered(template, variables, messages, spans=spans)
        except Exception as error:  # a template is untrusted code and can raise any exception
            raise _RaisedError(
                f"the chat template raised an error: {shown_error(error)}; change the row, or set data.chat_template "
                "to a template that accepts it"
            ) from error
        if template.environment.clock_reads and not self.depends_on_day:
            raise RowError(
                "the chat template reads the current date for this row but not for other rows; set data.chat_template "
                "to a template that does not read it"
            )
        return found

    def _with_roles(self, conversation: Conversation) -> Conversation:
        """Replace the aliases of roles, such as `human` by `user` (see `usual_role`).

        An alias is kept if the template itself compares the role with this alias.
        """
        source = self._sources[conversation.tools is not None]
        messages = []
        for message in conversation.messages:
            role = message["role"]
            if role not in ROLES:
                usual = usual_role(role)
                if usual in ROLES and role not in compared_texts(source):
                    message = {**message, "role": usual}
            messages.append(message)
        return replace(conversation, messages=tuple(messages))


def _source(tokenizer: PreTrainedTokenizerBase, template: str | None, tools: bool) -> str:
    usable = isinstance(template, str) or isinstance(tokenizer.chat_template, (str, dict))
    try:
        source = tokenizer.get_chat_template(template, [{}] if tools else None) if usable else None
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise UserError(
            "data.chat_template",
            f"is not set, and the tokenizer has several templates without a default ({names})",
            "write one of them to a file and set data.chat_template to that file",
        ) from None
    if not isinstance(source, str):
        given = tokenizer.chat_template if template is None else template
        raise UserError(
            "data.chat_template", f"the tokenizer's template is {shown(given)}", "give a Jinja template as text"
        )
    return source


def _checked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UserError(
                f"template_arguments.{name}",
                f"has the type {type(value).__name__}, which JSON does not have",
                "give a string, a number, a boolean, or a list or table of such values",
            ) from None
    return dict(arguments)


def _message_number(error: RowError) -> int:
    found = re.search(r"message (\d+)", str(error))
    return int(found[1]) if found else 0


def _attempted(render: Callable[[], _Result]) -> _Result | None:
    try:
        return render()
    except RowError:
        return None


def _trained(conversation: Conversation, loss_on: LossOn) -> list[int]:
    turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError(
            "no message has the role 'assistant', so there is nothing to train on; add one, or set data.loss_on=all to "
            "train on every token"
        )
    trained = [turn for turn in turns if turn not in conversation.untrained]
    if loss_on == "last":
        trained = [turn for turn in trained if turn == turns[-1]]
    if not trained:
        which = "the last assistant message has" if loss_on == "last" else "all assistant messages have"
        raise RowError(f"{which} weight 0, so there is nothing to train on; give one of them weight 1")
    return trained


def _message_spans(cut: TurnCut, leaves: Sequence[TemplateValue]) -> list[tuple[int, Span]]:
    """Return (index of the message, its span in the rendered text) for each message of a sample.

    The rendered text is searched for `leaves`, the strings and numbers that the messages contain.
    """
    message_spans: dict[int, Span] = {}
    done = 0
    for leaf in leaves:
        if leaf.message >= cut.stop:
            break
        found = [cut.text.find(text, done) for text in {written(leaf.value, "plain"), written(leaf.value, "json")}]
        start = min((offset for offset in found if offset >= 0), default=-1)
        if start >= 0:
            first = message_spans.get(leaf.message, (start, start))
            done = start + len(str(leaf.value))
            message_spans[leaf.message] = min(first[0], start), max(first[1], done)
    return sorted(message_spans.items())


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, settings: TextSettings, *, day: datetime.date | None = None
) -> ChatRenderer | None:
    """Return the renderer of conversations, or None if `prompt_format` says that prompts are used as plain text."""
    plain = settings.prompt_format == "plain"
    if plain or (settings.prompt_format == "auto" and not (settings.chat_template or tokenizer.chat_template)):
        return None
    return ChatRenderer(tokenizer, settings.chat_template, settings.template_arguments, day=day)
