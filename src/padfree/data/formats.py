"""The formats that data files come in, by task, and the names that their columns usually have.

    SFT       messages | prompt, response | text | input_ids
    pairs     prompt, chosen, rejected | messages, chosen, rejected | chosen, rejected
    prompts   prompt | messages

`response` is also called `output` or `answer`, and so on (`NAMES`): Alpaca, ShareGPT and the formats of TRL, OpenAI and
LLaMA-Factory are these formats under other names. docs/data.md has the list. Rollouts are in `padfree.data.rollouts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

_TEXT_ONLY = "which is not text; padfree trains on text only"
_PROMPT = "which belongs to the prompt"
_RESPONSE = "which belongs to the response"
_TOKENS = "which is about token ids in 'input_ids'"
_CHAT = "which only a conversation or a prompt can have"
GUARDED = {
    "label": "which says whether an answer is good; padfree kto reads it, and here every answer would count as good",
    "weight": "which weighs rows; padfree has weights of sources (data.sources) and of messages only",
    "weights": "which weighs rows; padfree has weights of sources (data.sources) and of messages only",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT_ONLY),
    **dict.fromkeys(("input", "context", "passage"), _PROMPT),
    "functions": "which are tools in a former format of OpenAI; rewrite them as 'tools'",
    "chat_template_kwargs": "which are arguments of the chat template for each row",
    **dict.fromkeys(("system", "system_prompt", "tools", "history"), _CHAT),
}
"""Columns that change what a row means."""

_PAIRS = frozenset(("chosen", "rejected")), "train on preference pairs with padfree dpo or padfree reward"
_UNPAIRED = (
    frozenset(("label",)),
    "train on single answers with a label with padfree kto",
)
_TOKENIZED = frozenset(("input_ids",)), "bring text: token ids are for padfree sft and for rollouts"
_ROLLOUTS = frozenset(("reward",)), "train on rollouts with padfree rl"

SFT_SCHEMA = Schema(
    formats=(
        Format(kind="messages", needs=("messages",), may=("system", "tools")),
        Format(kind="pair", needs=("prompt", "response"), may=("input", "system", "history", "tools")),
        Format(kind="text", needs=("text",)),
        Format(kind="tokens", needs=("input_ids",), may=("labels", "loss_mask", "attention_mask")),
    ),
    names=NAMES,
    hints=HINTS,
    guarded={
        **GUARDED,
        **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _RESPONSE),
        **dict.fromkeys(("labels", "loss_mask", "completion_mask", "assistant_masks", "attention_mask"), _TOKENS),
        **dict.fromkeys(("position_ids", "seq_lengths"), "which belongs to rows that are packed; bring single samples"),
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
    guarded={**GUARDED, "margin": "which padfree reward uses and padfree dpo does not"},
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
    rest="other columns, for the reward",
)

TITLES = {
    "messages": "messages",
    "pair": "prompt and response",
    "text": "text",
    "tokens": "token ids",
    "prompted": "pairs",
    "continued": "pairs that continue a conversation",
    "implicit": "pairs whose common beginning is the prompt",
    "prompt": "prompts",
}


def described(fields: Fields, first: Mapping[str, Any], schema: Schema, title: str | None = None) -> str:
    """How a file is read: `Alpaca (instruction, input, output); not used: id`."""
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
    """A line for each way in which files are read: `data: train.jsonl is read as ...`."""
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
