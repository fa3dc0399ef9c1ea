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

    docs/reference/settings.md has the meaning of each setting. Error messages name a setting as a recipe does, e.g.
    `data.columns`.
    """

    columns: Mapping[str, str] = field(default_factory=dict)  # column of the file -> field, or "unused"
    prompt_format: PromptFormat = "auto"
    chat_template: str | None = None  # None: the template of the tokenizer
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"enable_thinking": False}
    day: datetime.date | None = None  # the date that the template gets as the current date; None: today
    turns: Turns = "auto"
    system: str | None = None
    prompt_template: str | None = None
    append_eos: bool = True
    split: str = "train"
    subset: str | None = None
    max_length: int | None = None  # in tokens
    overlong: Overlong = "error"  # what happens to a sample that is longer than `max_length`
    on_bad_row: OnBadRow = "error"
    images: ImageSettings | None = None  # None: rows with images are bad rows

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
