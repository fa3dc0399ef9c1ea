"""Find where the turns of a conversation begin and end in its rendered text, and cut it into samples.

    before the turn, with the generation prompt    <|user|>Hi<|end|>\\n<|assistant|>
    up to and including the turn                   <|user|>Hi<|end|>\\n<|assistant|>Hello<|end|>\\n

The turn is what the second text adds to the first text. If both texts of every turn are prefixes of the rendered
conversation, all turns are trained in one sample ("together"). Otherwise each turn is trained in its own sample
("apart").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from padfree.choices import Turns
from padfree.data.conversation import Message
from padfree.data.records import RowError

Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool, bool], tuple[str, list[Span]]]
"""A function render(messages, generation_prompt, markers) that returns the rendered text and spans.

`generation_prompt` says whether to append the generation prompt. `markers` says whether to return the spans inside the
template's `generation` markers.
"""

_OTHER_ANSWER = "\u00a4"


class UnstableError(RowError):
    """Raised if the template renders earlier turns differently once other messages follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCut:
    """The text of one sample, which shows the first `stop` messages, and its trained spans."""

    stop: int
    text: str
    spans: tuple[Span, ...]
    alone: bool = False  # whether only the last message of the sample is trained
    joined: bool = False  # whether the last message was appended to a separate rendering of the earlier messages


class TurnCutter:
    """Cuts conversations into samples.

    `marked`: whether the template has `{% generation %}` markers. `closing`: the special tokens that can end a turn.
    """

    def __init__(self, render: Render, *, marked: bool, closing: tuple[str, ...]) -> None:
        self._render, self._marked, self._closing = render, marked, closing

    def cut(self, messages: Sequence[Message], trained: Sequence[int], turns: Turns) -> list[TurnCut]:
        """Cut a conversation into training samples.

        `trained`: the indices of the assistant messages that are trained, in ascending order.
        """
        if turns != "apart":
            try:
                return [self.together(messages, trained)]
            except UnstableError:
                if turns == "together":
                    raise
        return [self.apart(messages, turn) for turn in trained]  # messages after the last trained turn are left out

    def together(self, messages: Sequence[Message], trained: Sequence[int]) -> TurnCut:
        text, marked = self._render(messages, False, self._marked)
        spans: list[Span] = []
        for turn in trained:
            through = text if turn == len(messages) - 1 else self._text(messages[: turn + 1])
            if not text.startswith(through):
                raise UnstableError(
                    f"the chat template renders message {turn + 1} differently once other messages follow; set "
                    "data.turns=auto, which makes one sample per turn, or data.loss_on=last"
                )
            if self._marked:
                start = self._begin(messages, turn, trained, text)
                spans += [span for span in marked if start <= span[0] < len(through)]
                continue
            before = self._before(messages, turn)
            if not text.startswith(before):
                raise UnstableError(
                    f"the text before message {turn + 1}, with the generation prompt, is not a prefix of the rendered "
                    "conversation; set data.turns=auto, which makes one sample per turn, or data.loss_on=all"
                )
            spans.append((len(before), self._end(through, len(before))))
        return TurnCut(stop=len(messages), text=text, spans=merged(spans))

    def apart(self, messages: Sequence[Message], turn: int) -> TurnCut:
        shown, marked = self._render(messages[: turn + 1], False, self._marked)
        before = self._before(messages, turn)
        if not shown.startswith(before):
            return self._joined(messages, turn, before, shown)
        spans = [(len(before), self._end(shown, len(before)))]
        if self._marked:
            start = len(self._text(messages[:turn]))
            spans = [span for span in marked if span[0] >= start]
        return TurnCut(stop=turn + 1, text=shown, spans=merged(spans), alone=True)

    def _joined(self, messages: Sequence[Message], turn: int, before: str, shown: str) -> TurnCut:
        # Mistral-Nemo's template, for example, shows the system message only if the last message is from the user.
        # Join the text before the turn and the turn, if both renderings agree from the previous message on.
        other = self._text([*messages[:turn], {"role": "assistant", "content": _OTHER_ANSWER}])
        common = _common(shown, other)
        said = messages[turn - 1].get("content")
        anchor = before.rfind(said.strip()) if isinstance(said, str) and said.strip() else -1
        if self._marked or anchor < 0 or not common.endswith(before[anchor:]):
            raise RowError(
                f"the text before message {turn + 1}, with the generation prompt, is not a prefix of the text with the "
                "message, so the model would be trained on another prompt than it sees at inference; set "
                "data.chat_template to another template"
            )
        text = before + shown[len(common) :]
        spans = [(len(before), self._end(text, len(before)))]
        return TurnCut(stop=turn + 1, text=text, spans=merged(spans), alone=True, joined=True)

    def _begin(self, messages: Sequence[Message], turn: int, trained: Sequence[int], text: str) -> int:
        """Return the index in `text` at which message `turn` begins, or 0 if all assistant messages are trained.

        The template's `{% generation %}` markers mark all assistant messages, even untrained ones. The caller therefore
        ignores marked spans before this index.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if turn == 0 or list(trained) == turns:
            return 0
        before = self._text(messages[:turn])
        if not text.startswith(before):
            raise UnstableError(
                f"the text before message {turn + 1} is not a prefix of the rendered conversation; set "
                "data.turns=auto, which makes one sample per turn, or data.loss_on=all"
            )
        return len(before)

    def _text(self, messages: Sequence[Message]) -> str:
        return self._render(messages, False, False)[0]

    def _before(self, messages: Sequence[Message], turn: int) -> str:
        if turn == 0:
            raise RowError(
                "message 1 is from the assistant, so the start of its text is unknown; begin with a user message, give "
                "message 1 the weight 0, add {% generation %} markers to data.chat_template, or set data.loss_on=all"
            )
        return self._render(messages[:turn], True, False)[0]

    def _end(self, through: str, start: int) -> int:
        body = through[start:].rstrip()  # the model stops at the closing token, so later white space is not trained
        return start + len(body) if body.endswith(self._closing) else len(through)


def _common(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Sort the spans, merge those that overlap or touch, and drop empty ones."""
    found: list[Span] = []
    for start, end in sorted(set(spans)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return tuple(found)
