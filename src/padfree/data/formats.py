"""The formats of data files by task, and the usual names of their columns.

A format is shown by its required fields, and `|` separates the formats of a task:

    SFT       messages | prompt, response | text | input_ids
    pairs     prompt, chosen, rejected | messages, chosen, rejected | chosen, rejected
    labelled  prompt, response, label
    prompts   prompt | messages
    rollouts  tokens | prompt_tokens, response_tokens | prompt, response

This module does not import torch, so that wrong columns are reported within a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from padfree.choices import ROLLOUT_ARRAYS
from padfree.data.fields import Fields, Format, Schema

NAMES = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "response": ("completion", "output", "answer", "solution", "target", "reply"),
    "messages": ("conversations", "conversation", "dialogue", "dialog", "chat"),
    "system": ("system_prompt",),
    "loss_mask": ("completion_mask", "assistant_masks"),
}
HINTS = {
    "response": ("chosen",),
    "messages": ("chosen",),
    "text": ("content", "document", "body"),
    "input_ids": ("token_ids", "tokens"),
    "chosen": ("chosen_response", "preferred"),
    "rejected": ("rejected_response", "dispreferred"),
}

_NO_TEXT = "which is not text; padfree trains on text and images only"
_IMAGES = "which is not text; set model.vision=true to train a vision-language model on conversations with images"
_PROMPT = "which belongs to the prompt"
_RESPONSE = "which belongs to the response"
_TOKENS = "which is about token ids in 'input_ids'"
_CHAT = "which only a conversation or a prompt can have"
_WEIGHT = "which weighs rows; padfree supports weights of sources (data.sources) and of messages only"
GUARDED = {
    "label": "which marks answers as good or bad; padfree kto reads it, but this command would train on all answers",
    "weight": _WEIGHT,
    "weights": _WEIGHT,
    **dict.fromkeys(("image", "images"), _IMAGES),
    **dict.fromkeys(("video", "videos", "audio", "audios"), _NO_TEXT),
    **dict.fromkeys(("input", "context", "passage"), _PROMPT),
    "functions": "which holds tools in an old OpenAI format; convert it to 'tools'",
    "chat_template_kwargs": "which sets template arguments per row; data.chat_template can set them for all rows",
    **dict.fromkeys(("system", "system_prompt", "tools", "history"), _CHAT),
}
"""Columns that would change the meaning of a row, each with the reason that the error message gives."""

_PAIRS = frozenset(("chosen", "rejected")), "use padfree dpo or padfree reward for preference pairs"
_UNPAIRED = (
    frozenset(("label",)),
    "use padfree kto for single answers with a label",
)
_TOKENIZED = frozenset(("input_ids",)), "give text: only padfree sft and rollouts accept token ids"
_ROLLOUTS = frozenset(("reward",)), "use padfree rl for rollouts"

_MASKS = ("labels", "loss_mask", "attention_mask")
SFT_SCHEMA = Schema(
    formats=(
        Format(kind="messages", needs=("messages",), may=("system", "tools")),
        Format(kind="pair", needs=("prompt", "response"), may=("input", "system", "history", "tools")),
        Format(kind="text", needs=("text",)),
        Format(kind="tokens", needs=("input_ids",), may=_MASKS, uniform=_MASKS),
    ),
    names=NAMES,
    hints=HINTS,
    guarded={
        **GUARDED,
        **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _RESPONSE),
        **dict.fromkeys(("labels", "loss_mask", "completion_mask", "assistant_masks", "attention_mask"), _TOKENS),
        **dict.fromkeys(("position_ids", "seq_lengths"), "which only packed data has; give unpacked samples"),
    },
    elsewhere=(_PAIRS, _ROLLOUTS),
)

_PAIR_FIELDS = ("system", "tools")
PAIR_SCHEMA = Schema(
    formats=(
        Format(kind="prompted", needs=("prompt", "chosen", "rejected"), may=("input", "history", *_PAIR_FIELDS)),
        Format(kind="continued", needs=("messages", "chosen", "rejected"), may=_PAIR_FIELDS),
        Format(kind="implicit", needs=("chosen", "rejected"), may=_PAIR_FIELDS),
    ),
    names=NAMES,
    hints=HINTS,
    guarded={**GUARDED, "margin": "which padfree reward reads, but padfree dpo does not"},
    elsewhere=(_UNPAIRED, _TOKENIZED),
    preferred=("prompted",),
)
REWARD_SCHEMA = Schema(
    formats=tuple(
        Format(kind=format.kind, needs=format.needs, may=(*format.may, "margin")) for format in PAIR_SCHEMA.formats
    ),
    names=NAMES,
    hints=HINTS,
    guarded=GUARDED,
    elsewhere=PAIR_SCHEMA.elsewhere,
    preferred=PAIR_SCHEMA.preferred,
    number="margin",
)

PROMPT_SCHEMA = Schema(
    formats=(
        Format(kind="prompt", needs=("prompt",), may=("input", "system", "history", "tools", "answer")),
        Format(kind="messages", needs=("messages",), may=("system", "tools", "answer")),
    ),
    names=NAMES,
    hints={"prompt": ("task", "user")},
    guarded={name: why for name, why in GUARDED.items() if name not in ("label", "weight", "weights")},
    elsewhere=(_PAIRS, _TOKENIZED),
    rest="passed to the reward",
)

LABEL_SCHEMA = Schema(
    formats=(Format(kind="pair", needs=("prompt", "response", "label"), may=("input", "system", "history", "tools")),),
    names=NAMES,
    hints=HINTS,
    guarded={name: why for name, why in GUARDED.items() if name != "label"},
    elsewhere=SFT_SCHEMA.elsewhere,
    number="label",
)

_OPTIONAL = (
    "response_length",
    "loss_mask",
    "reward",
    "raw_reward",
    "group",
    "uid",
    *ROLLOUT_ARRAYS,
    "routes",
    "kept",
)
ROLLOUT_SCHEMA = Schema(
    formats=(
        Format(kind="tokens", needs=("tokens",), may=_OPTIONAL, uniform=("loss_mask",)),
        Format(kind="token pair", needs=("prompt_tokens", "response_tokens"), may=_OPTIONAL, uniform=("loss_mask",)),
        Format(kind="text", needs=("prompt", "response"), may=(*_OPTIONAL, "system", "tools")),
    ),
    hints={
        "prompt": ("question", "query", "instruction", "problem", "input"),
        "response": ("answer", "output", "completion", "solution"),
        "tokens": ("input_ids", "token_ids"),
        "prompt_tokens": ("prompt_ids", "prompt_token_ids"),
        "response_tokens": ("response_ids", "completion_ids", "response_token_ids"),
    },
    preferred=("tokens", "token pair"),
)

SHOW_IMAGES = ("messages", "pair", "prompt", "prompted", "continued", "implicit")
ROLLOUTS_SHOW_IMAGES = ("tokens", "token pair", "text")
"""The kinds of formats whose rows can have a column with images, in rollout files and in all other files."""


def reading_images(schema: Schema, kinds: Sequence[str] = SHOW_IMAGES) -> Schema:
    """Return a copy of `schema` for vision-language models, whose formats of these kinds have a field `images`."""
    formats = tuple(
        replace(format, may=(*format.may, "images")) if format.kind in kinds else format for format in schema.formats
    )
    return replace(schema, formats=formats, names={**schema.names, "images": ("image",)})


SCHEMAS = {
    "sft": SFT_SCHEMA,
    "pairs": PAIR_SCHEMA,
    "rewards": REWARD_SCHEMA,
    "prompts": PROMPT_SCHEMA,
    "labelled": LABEL_SCHEMA,
    "rollouts": ROLLOUT_SCHEMA,
}
"""All schemas (sets of formats) by name. A training command reads the schema that `TaskSettings.data_format` names."""

TITLES = {
    "messages": "messages",
    "pair": "prompt and response",
    "text": "text",
    "tokens": "token ids",
    "prompted": "pairs",
    "continued": "pairs that continue a conversation",
    "implicit": "pairs whose common prefix is the prompt",
    "prompt": "prompts",
}


def described(fields: Fields, first: Mapping[str, Any], schema: Schema, title: str | None = None) -> str:
    """Describe how a file is read: `Alpaca (instruction, input, output); not used: id`."""
    title = title or TITLES[fields.kind]
    if fields.columns.get("prompt", "").lower() == "instruction":
        title = "Alpaca" if fields.kind == "pair" else f"Alpaca {title}"
    elif "messages" in fields.columns and _is_sharegpt(first.get(fields["messages"])):
        title = "ShareGPT" if fields.kind == "messages" else f"ShareGPT {title}"
    rest = f"; {schema.rest}: {', '.join(fields.unused)}" if fields.unused else ""
    return f"{title} ({', '.join(fields.used)}){rest}"


def _is_sharegpt(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], dict) and "from" in messages[0]


def reading_notes(files: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return notes on how the files are read: `data: train.jsonl is read as ...`.

    Files that are read in the same way share one note.
    """
    names: dict[str, list[str]] = {}
    for file in files:
        if file.get("read_as"):
            names.setdefault(file["read_as"], []).append(file["name"])
    return tuple(
        f"data: {group[0]} is read as {how}"
        if len(group) == 1
        else f"data: {len(group)} files ({group[0]}, ...) are read as {how}"
        for how, group in names.items()
    )
