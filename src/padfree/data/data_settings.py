"""What can be chosen about data: plain values, checked once."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from padfree.config.choices import LossOn, OnBadRow, Overlong, PromptFormat, Turns
from padfree.config.prompt_template import template_parts
from padfree.errors import UserError, check_choice


def check_max_length(max_length: int | None) -> None:
    if max_length is not None and max_length < 2:
        raise UserError(
            "max_length", "", "give 2 or more (the first token is never predicted), or None", value=max_length
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """How rows become tokens, for all tasks. In a recipe each is a setting of `[data]`, and messages name it so:
    `data.columns`.

    `columns` maps a column of the file to its field: `{"question": "prompt", "answer": "response", "note": "unused"}`.
    `prompt_format`: a prompt goes through the chat template (`chat`) or is used as it is (`plain`). `auto` is `chat` if
    there is a template. `chat_template` replaces the tokenizer's own, and `template_arguments` are handed to it
    (`{"enable_thinking": False}`). `day` is what a template that writes the date takes for today.
    `turns`: whether the assistant turns of a conversation are trained in one sample (`together`) or in one sample each
    (`apart`). `auto` is `together` if the template shows earlier turns as they were written.
    `system`: the system prompt of conversations that have none. `prompt_template`: a text prompt made of columns.
    `append_eos`: text that is not ended by a chat template gets the tokenizer's end-of-sequence token.
    `split`, `subset`: of a Hub id.
    `overlong` samples, of more than `max_length` tokens, are an `error`, are cut (`truncate`) or left out (`drop`).
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_format: PromptFormat = "auto"
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    day: datetime.date | None = None
    turns: Turns = "auto"
    system: str | None = None
    prompt_template: str | None = None
    append_eos: bool = True
    split: str = "train"
    subset: str | None = None
    max_length: int | None = None
    overlong: Overlong = "error"
    on_bad_row: OnBadRow = "error"

    def __post_init__(self) -> None:
        check_choice("prompt_format", self.prompt_format, PromptFormat)
        check_choice("turns", self.turns, Turns)
        check_choice("overlong", self.overlong, Overlong)
        check_choice("on_bad_row", self.on_bad_row, OnBadRow)
        check_max_length(self.max_length)
        if self.prompt_template is not None:
            template_parts(self.prompt_template)


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTDataSettings(TextSettings):
    """`loss_on`: every `assistant` turn, the `last` one only, or `all` tokens."""

    loss_on: LossOn = "assistant"

    def __post_init__(self) -> None:
        # `super()` without arguments does not see the class that `slots` makes anew.
        TextSettings.__post_init__(self)
        check_choice("loss_on", self.loss_on, LossOn)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutDataSettings(TextSettings):
    """What a rollout trains on stands in its row (`response_length`, `loss_mask`), so there is no more to choose."""
