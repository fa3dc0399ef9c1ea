"""Formats of data files x real chat templates: tokens and masks compared with a derivation from the template.

The conversation of a row is written by hand (`Case.messages`). Its text comes from transformers'
`apply_chat_template`, and the trained part from two renderings of that text: the conversation before a turn with the
generation prompt, and the conversation up to and with the turn. A template that changes earlier turns makes one sample
for each turn. A row whose tools the template does not show must be refused.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from padfree.data import RolloutDataSettings, SFTDataSettings, load_pairs, load_sft
from padfree.rollout import read_prompts

REAL = os.environ.get("PADFREE_REAL")
pytestmark = pytest.mark.skipif(
    REAL is None, reason="PADFREE_REAL is not set: it names a folder with smollm2 and tokenizers"
)
TEMPLATES = ("qwen3", "qwen2_5", "llama3_2", "gemma3", "deepseek_v3", "mistral_nemo", "smollm2")
DAY = datetime.date(2024, 5, 6)

Message = dict[str, Any]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row and its conversation. `trained`: the trained messages of `messages` and of `rejected`."""

    task: Literal["sft", "pairs", "prompts"] = "sft"
    row: dict[str, Any]
    messages: Sequence[Message] = ()
    rejected: Sequence[Message] = ()
    trained: Sequence[int] = ()
    tools: list[Any] | None = None
    plain: tuple[tuple[str, str], ...] = ()  # prompt and answer of texts that no template renders
    refused: str | None = None  # with every template


Q, A = "Ann has 3 apples and buys 2. How many?", "She has 3+2=5 apples.\n#### 5"
Q2, A2 = "And if she eats one?", "Then 4.\n#### 4"
SYSTEM = "You are a patient teacher."
WRONG = "She has 6.\n#### 6"
TWO = [user(Q), assistant(A), user(Q2), assistant(A2)]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]} for one in TWO]
TOOL = {
    "type": "function",
    "function": {
        "name": "add_up",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}},
            "required": ["a"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add_up", "arguments": {"a": 3}}}
CALLED = [user(Q), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
WRITTEN = [
    user(Q),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "add_up", "arguments": '{"a": 3}'}}],
    },
]
SKY = "Complete the sentence. The sky over the sea is"

CASES = {
    "messages": Case(row={"messages": TWO, "id": 1}, messages=TWO, trained=(1, 3)),
    "messages as JSON": Case(row={"messages": json.dumps(TWO)}, messages=TWO, trained=(1, 3)),
    "messages, weight 0": Case(
        row={"messages": [TWO[0], {**TWO[1], "weight": 0}, *TWO[2:]]}, messages=TWO, trained=(3,)
    ),
    "messages, tools": Case(
        row={"messages": WRITTEN, "tools": json.dumps([TOOL])}, messages=CALLED, trained=(1,), tools=[TOOL]
    ),
    "ShareGPT": Case(row={"conversations": SHAREGPT}, messages=TWO, trained=(1, 3)),
    "ShareGPT, system": Case(
        row={"conversations": SHAREGPT, "system": SYSTEM}, messages=[system(SYSTEM), *TWO], trained=(2, 4)
    ),
    "prompt, completion": Case(row={"prompt": Q, "completion": A}, messages=TWO[:2], trained=(1,)),
    "prompt, completion as messages": Case(
        row={"prompt": TWO[:3], "completion": TWO[3:]}, messages=TWO, trained=(3,)
    ),
    "prompt, response": Case(row={"prompt": Q, "response": A}, messages=TWO[:2], trained=(1,)),
    "question, answer": Case(row={"question": Q, "answer": A, "level": 3}, messages=TWO[:2], trained=(1,)),
    "problem, solution": Case(row={"Problem": Q, "Solution": A}, messages=TWO[:2], trained=(1,)),
    "OpenOrca": Case(
        row={"system_prompt": SYSTEM, "question": Q, "response": A},
        messages=[system(SYSTEM), *TWO[:2]],
        trained=(2,),
    ),
    "Alpaca": Case(
        row={"instruction": "Solve it.", "input": Q, "output": A},
        messages=[user(f"Solve it.\n\n{Q}"), assistant(A)],
        trained=(1,),
    ),
    "Alpaca, empty input": Case(row={"instruction": Q, "input": "", "output": A}, messages=TWO[:2], trained=(1,)),
    "Alpaca, system, history": Case(
        row={"instruction": Q2, "input": "", "output": A2, "system": SYSTEM, "history": [[Q, A]]},
        messages=[system(SYSTEM), *TWO],
        trained=(4,),
    ),
    "text": Case(row={"text": f"{Q} {A}"}, plain=(("", f"{Q} {A}"),)),
    "input_ids, labels": Case(row={"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}),
    "KTO": Case(row={"prompt": Q, "completion": A, "label": False}, refused="has a column 'label', which marks"),
    "two readings": Case(row={"problem": Q, "solution": A, "answer": "5"}, refused="can be read in 2 ways"),
    "context": Case(row={"question": Q, "context": Q2, "answer": A}, refused="a column 'context', which belongs"),
    # Pairs
    "pair": Case(
        task="pairs",
        row={"prompt": Q, "chosen": A, "rejected": WRONG},
        messages=TWO[:2],
        rejected=[user(Q), assistant(WRONG)],
        trained=(1,),
    ),
    "pair as messages": Case(
        task="pairs",
        row={"prompt": TWO[:3], "chosen": [assistant(A2)], "rejected": [assistant(WRONG)]},
        messages=TWO,
        rejected=[*TWO[:3], assistant(WRONG)],
        trained=(3,),
    ),
    "pair, whole conversations": Case(
        task="pairs",
        row={"prompt": f"{Q} ", "chosen": TWO[:2], "rejected": [user(Q), assistant(WRONG)]},
        messages=[user(f"{Q} "), assistant(A)],
        rejected=[user(f"{Q} "), assistant(WRONG)],
        trained=(1,),
    ),
    "pair without prompt": Case(
        task="pairs",
        row={"chosen": [system(SYSTEM), *TWO], "rejected": [system(SYSTEM), *TWO[:3], assistant(WRONG)]},
        messages=[system(SYSTEM), *TWO],
        rejected=[system(SYSTEM), *TWO[:3], assistant(WRONG)],
        trained=(4,),
    ),
    "pair of texts without prompt": Case(
        task="pairs",
        row={"chosen": f"{SKY} blue.", "rejected": f"{SKY} green, often."},
        plain=((SKY, " blue."), (SKY, " green, often.")),
    ),
    "LLaMA-Factory pair": Case(
        task="pairs",
        row={
            "conversations": SHAREGPT[:3],
            "chosen": {"from": "gpt", "value": A2},
            "rejected": {"from": "gpt", "value": WRONG},
        },
        messages=TWO,
        rejected=[*TWO[:3], assistant(WRONG)],
        trained=(3,),
    ),
    "pair with other users": Case(
        task="pairs",
        row={"chosen": TWO, "rejected": [*TWO[:2], user("Other?"), assistant(WRONG)]},
        refused="has a message of role 'user' where the two",
    ),
    # Prompts
    "prompts": Case(task="prompts", row={"prompt": Q}, messages=TWO[:1]),
    "prompts, question and answer": Case(task="prompts", row={"question": Q, "answer": "5"}, messages=TWO[:1]),
    "prompts as messages": Case(task="prompts", row={"messages": [system(SYSTEM), *TWO[:3]]},
                                messages=[system(SYSTEM), *TWO[:3]]),
    "prompts, ShareGPT": Case(task="prompts", row={"conversations": SHAREGPT[:3]}, messages=TWO[:3]),
    "prompts, Alpaca": Case(
        task="prompts", row={"instruction": "Solve it.", "input": Q}, messages=[user(f"Solve it.\n\n{Q}")]
    ),
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> Any:
    from transformers import AutoTokenizer

    assert REAL is not None
    return AutoTokenizer.from_pretrained(Path(REAL, name) if name == "smollm2" else Path(REAL, "tokenizers", name))


class CannotShowError(Exception):
    """The template raises for a conversation, or drops a part of it."""


def rendered(tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False) -> str:
    date = DAY.strftime("%d %b %Y")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, date_string=date
        )
    except Exception as error:
        raise CannotShowError(str(error)) from error
    assert isinstance(text, str)
    if tools is not None and ('"name": "add_up"' not in text or '{"a": 3}' not in text) and not prompt:
        raise CannotShowError("tools")
    return text


def expected_samples(tokenizer: Any, case: Case, messages: Sequence[Message]) -> list[tuple[list[int], list[int]]]:
    """Tokens and the trained ones, sample by sample."""
    whole = rendered(tokenizer, messages, case.tools)
    spans = [_span(tokenizer, case, messages[: turn + 1]) for turn in case.trained]
    stable = all(whole.startswith(text[:end]) for text, _, end in spans)
    if stable:
        return [_tokens(tokenizer, whole, [(start, end) for _, start, end in spans])]
    return [_tokens(tokenizer, text, [(start, end)]) for text, start, end in spans]


def _span(tokenizer: Any, case: Case, messages: Sequence[Message]) -> tuple[str, int, int]:
    """A conversation that ends with a trained turn, and where that turn is in it."""
    text = rendered(tokenizer, messages, case.tools)
    before = rendered(tokenizer, messages[:-1], case.tools, prompt=True)
    if messages[0]["role"] == "system" and messages[0]["content"] not in text:
        # The template shows the system message before the last user turn, and only while that turn is the last: the
        # model sees it when it answers, and a conversation with the answer does not have it.
        bare = rendered(tokenizer, messages[1:-1], case.tools, prompt=True)
        assert text.startswith(bare)
        text = before + text[len(bare) :]
    if not text.startswith(before):
        # The template removes a part of the generation prompt, such as an empty reasoning block.
        pairs = zip(text, before, strict=False)
        before = text[: next(index for index, (one, other) in enumerate(pairs) if one != other)]
        assert text[len(before) :].lstrip().startswith(messages[-1]["content"].strip()[:10]), (before, text)
    return text, len(before), len(text.rstrip("\n"))


def _tokens(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [
        token
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        if any(first <= start and end <= last for first, last in spans)
    ]
    return encoded["input_ids"], trained


def expected_plain(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    begin = tokenizer("a")["input_ids"][: -len(tokenizer("a", add_special_tokens=False)["input_ids"])]
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    told = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [*begin, *asked, *told], told if prompt else [*begin, *told]


def found_samples(tokenizer: Any, case: Case, folder: Path) -> list[tuple[list[int], list[int]]]:
    path = folder / "a.jsonl"
    path.write_text(json.dumps(case.row) + "\n")
    if case.task == "prompts":
        found = read_prompts(path, tokenizer, RolloutDataSettings(day=DAY), max_new_tokens=4)
        return [(prompt.tokens.tolist(), []) for prompt in found.prompts]
    load = load_pairs if case.task == "pairs" else load_sft
    data = load(path, tokenizer, SFTDataSettings(day=DAY), cache=folder / "cache", num_workers=0)
    return [(sample.tokens.tolist(), sample.tokens[sample.mask].tolist()) for sample in data]


def expected(tokenizer: Any, case: Case) -> list[tuple[list[int], list[int]]]:
    if case.plain:
        return [expected_plain(tokenizer, *texts) for texts in case.plain]
    if "input_ids" in case.row:
        ids, labels = case.row["input_ids"], case.row["labels"]
        return [(ids, [label for label in labels if label != -100])]
    if case.task == "prompts":
        text = rendered(tokenizer, case.messages, case.tools, prompt=True)
        return [(tokenizer(text, add_special_tokens=False)["input_ids"], [])]
    both = [messages for messages in (case.messages, case.rejected) if messages]
    return [sample for messages in both for sample in expected_samples(tokenizer, case, messages)]


def outcome(name: str, case: Case, folder: Path) -> str:
    """Check a format with a template; fails if padfree and the derivation differ."""
    tokenizer = tokenizer_of(name)
    if case.refused is not None:
        with pytest.raises(ValueError, match=case.refused):
            found_samples(tokenizer, case, folder)
        return "refused"
    try:
        right = expected(tokenizer, case)
    except CannotShowError:
        with pytest.raises(ValueError, match=r"^a\.jsonl line 1: .*(tool|template)"):
            found_samples(tokenizer, case, folder)
        return "refused: template"
    found = found_samples(tokenizer, case, folder)
    assert found == right, [tokenizer.decode(tokens) for tokens, _ in found]
    samples = len(found) // (2 if case.task == "pairs" else 1)
    return "right" if samples == 1 else f"right, {samples} samples"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_a_row_is_read_right_or_refused_with_a_reason(case: str, template: str, tmp_path: Path) -> None:
    outcome(template, CASES[case], tmp_path)
