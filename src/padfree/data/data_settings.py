"""The settings that decide how rows of a data file become tokens."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from padfree.choices import LossOn, OnBadRow, Overlong, PromptFormat, Turns
from padfree.config.prompt_template import template_parts
from padfree.data.image_processor import ImageSettings
from padfree.errors import UserError, check_choice


def check_max_length(max_length: int | None) -> None:
    if max_length is not None and max_length < 2:
        raise UserError(
            "max_length",
            "is too short, because the first token of a sample is never predicted",
            "give 2 or more, or None for no limit",
            value=max_length,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """The settings of `[data]` that decide how rows become tokens, for all tasks.

    An error message names a setting as a recipe does, e.g. `data.columns`.

    - `columns` maps a column of the file to a field: `{"question": "prompt", "answer": "response", "note": "unused"}`.
      A column mapped to "unused" is ignored.
    - `prompt_format`: "chat" renders a prompt with the chat template, and "plain" uses it as plain text. "auto" means
      "chat" if there is a template, else "plain".
    - `chat_template` replaces the tokenizer's template, and `template_arguments` are passed to the template, such as
      `{"enable_thinking": False}`. `day` is the date that the template gets as the current date.
    - `turns`: "together" trains all assistant turns of a conversation in one sample, and "apart" each turn in its own
      sample. "auto" means "together" if the template does not change earlier turns, else "apart".
    - `system`: the system prompt of conversations that have none.
    - `prompt_template`: a text that composes the prompt from several columns.
    - `append_eos`: append the end-of-sequence token to text that is not rendered with a chat template.
    - `split`, `subset`: the part of a Hub data set to read.
    - `overlong`: what happens to a sample of more than `max_length` tokens. "error" raises an error, "truncate" cuts
      the sample, and "drop" skips it.
    - `on_bad_row`: what happens to a row that cannot be used. "error" raises an error, and "skip" skips the row.
    - `images`: the model whose processor turns images into tokens. None refuses rows with images.
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
    images: ImageSettings | None = None

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
    """The settings for SFT data.

    `loss_on` says which tokens are trained: "assistant" means the tokens of every assistant turn, "last" only those of
    the last assistant turn, and "all" all tokens.
    """

    loss_on: LossOn = "assistant"

    def __post_init__(self) -> None:
        # `super()` cannot be used here: with `slots=True` the class is created a second time, but `super()` without
        # arguments refers to the first one.
        TextSettings.__post_init__(self)
        check_choice("loss_on", self.loss_on, LossOn)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutDataSettings(TextSettings):
    """The settings for rollout files: the same fields as in `TextSettings`.

    Which tokens are trained is not a setting: the columns `response_length` and `loss_mask` of a row decide.
    """
