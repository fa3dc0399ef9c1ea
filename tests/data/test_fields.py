"""Formats are recognised by their columns, and an ambiguous file is refused with choices that work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from padfree.config import load_config
from padfree.data.fields import Format, Schema, check_mapping, has_value, resolve, setting
from padfree.data.formats import PAIR_SCHEMA, PROMPT_SCHEMA, REWARD_SCHEMA, SFT_SCHEMA, described, reading_notes
from padfree.data.formats import ROLLOUT_SCHEMA as ROLLOUTS
from padfree.data.records import RowError
from padfree.errors import UserError
from tests.refused import refused

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def row(*columns: str, **values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(columns, "some text"), **values}


@pytest.mark.parametrize(
    ("schema", "first", "kind", "fields"),
    [
        (SFT_SCHEMA, row("id", messages=CHAT), "messages", {"messages": "messages"}),
        (SFT_SCHEMA, row("system", "tools", conversations=CHAT), "messages", {"messages": "conversations"}),
        (SFT_SCHEMA, row("prompt", "response", "answer"), "pair", {"prompt": "prompt", "response": "response"}),
        (SFT_SCHEMA, row("prompt", "completion"), "pair", {"prompt": "prompt", "response": "completion"}),
        (SFT_SCHEMA, row("question", "answer"), "pair", {"prompt": "question", "response": "answer"}),
        (SFT_SCHEMA, row("Question", "Answer"), "pair", {"prompt": "Question", "response": "Answer"}),
        (SFT_SCHEMA, row("problem", "solution"), "pair", {"prompt": "problem", "response": "solution"}),
        (SFT_SCHEMA, row("system_prompt", "question", "response"), "pair", {"system": "system_prompt"}),
        (SFT_SCHEMA, row("instruction", "input", "output"), "pair", {"prompt": "instruction", "input": "input"}),
        (SFT_SCHEMA, row("instruction", "output"), "pair", {"prompt": "instruction", "input": "input"}),
        (SFT_SCHEMA, row("input", "output"), "pair", {"prompt": "input", "response": "output"}),
        (SFT_SCHEMA, row("text", "url"), "text", {"text": "text"}),
        (SFT_SCHEMA, row(input_ids=[1], labels=[1]), "tokens", {"input_ids": "input_ids", "labels": "labels"}),
        (SFT_SCHEMA, row(input_ids=[1], completion_mask=[1]), "tokens", {"loss_mask": "completion_mask"}),
        (PAIR_SCHEMA, row("prompt", "chosen", "rejected"), "prompted", {"prompt": "prompt"}),
        (PAIR_SCHEMA, row("prompt", "chosen", "rejected", messages=CHAT), "prompted", {"prompt": "prompt"}),
        (PAIR_SCHEMA, row("question", "chosen", "rejected"), "prompted", {"prompt": "question"}),
        (PAIR_SCHEMA, row("instruction", "input", "chosen", "rejected"), "prompted", {"input": "input"}),
        (PAIR_SCHEMA, row("chosen", "rejected", conversations=CHAT), "continued", {"messages": "conversations"}),
        (PAIR_SCHEMA, row("chosen", "rejected", "score_chosen"), "implicit", {"chosen": "chosen"}),
        (REWARD_SCHEMA, row("chosen", "rejected", margin=1.0), "implicit", {"margin": "margin"}),
        (PROMPT_SCHEMA, row("question", "answer", "output"), "prompt", {"prompt": "question", "answer": "answer"}),
        (PROMPT_SCHEMA, row("instruction", "input"), "prompt", {"prompt": "instruction", "input": "input"}),
        (PROMPT_SCHEMA, row("prompt", "question"), "prompt", {"prompt": "prompt"}),
        (PROMPT_SCHEMA, row(conversations=CHAT), "messages", {"messages": "conversations"}),
        (ROLLOUTS, row(tokens=[1], reward=1, prompt="1", response="2"), "tokens", {"tokens": "tokens"}),
        (ROLLOUTS, row("prompt", "response", reward=1), "text", {"prompt": "prompt"}),
    ],
)
def test_a_format_is_recognised_by_its_columns(
    schema: Schema, first: dict[str, Any], kind: str, fields: dict[str, str]
) -> None:
    found = resolve(first, {}, schema, "f")
    assert found.kind == kind
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("schema", "first", "kinds"),
    [
        (SFT_SCHEMA, row("text", messages=CHAT), ["messages", "text"]),
        (SFT_SCHEMA, row("prompt", "response", messages=CHAT), ["messages", "pair"]),
        (SFT_SCHEMA, row("conversations", messages=CHAT), ["messages", "messages"]),
        (SFT_SCHEMA, row("problem", "solution", "answer"), ["pair", "pair"]),
        (SFT_SCHEMA, row("query", "instruction", "response"), ["pair", "pair"]),
        (SFT_SCHEMA, row("question", "Question", "answer"), ["pair", "pair"]),
        (SFT_SCHEMA, row("question", "response", "answer"), ["pair", "pair"]),
        (SFT_SCHEMA, row("instruction", "input", "output", "text"), ["pair", "text"]),
        (SFT_SCHEMA, row("text", input_ids=[1, 2], labels=[1, 2]), ["text", "tokens"]),
        (SFT_SCHEMA, row("my prompt", "it's", "question", "problem", "output"), ["pair", "pair"]),
        (PAIR_SCHEMA, row("question", "problem", "chosen", "rejected"), ["prompted", "prompted"]),
        (PAIR_SCHEMA, row("question", "chosen", "rejected", messages=CHAT), ["prompted", "continued"]),
        (PROMPT_SCHEMA, row("prompt", messages=CHAT), ["prompt", "messages"]),
        (PROMPT_SCHEMA, row("problem", "question"), ["prompt", "prompt"]),
    ],
)
def test_what_can_be_read_in_several_ways_is_refused_with_choices_that_work(
    schema: Schema, first: dict[str, Any], kinds: list[str]
) -> None:
    with refused("data.columns", f"f can be read in {len(kinds)} ways") as caught:
        resolve(first, {}, schema, "f")
    choices = str(caught.value).partition("; set ")[2].split(", or ")
    found = [resolve(first, mapping_of(choice), schema, "f") for choice in choices]
    assert [fields.kind for fields in found] == kinds
    assert len({tuple(sorted(fields.columns.items())) for fields in found}) == len(kinds)


def mapping_of(words: str) -> dict[str, str]:
    """The settings of a command line with these words."""
    needed = ["model.path=m", "data.path=d", "batch.samples=1", "batch.max_tokens=8", "run.folder=r"]
    return load_config(None, [*needed, *shlex.split(words)]).data.columns


def test_a_mapping_renames_and_speaks_for_its_format() -> None:
    fields = resolve(row("question", "answer", "text"), {"question": "prompt", "answer": "response"}, SFT_SCHEMA, "f")
    assert (fields.kind, fields["prompt"], fields["response"]) == ("pair", "question", "answer")
    half = resolve(row("question", "response", "prompt"), {"question": "prompt"}, SFT_SCHEMA, "f")
    assert (half.kind, half["prompt"], half["response"]) == ("pair", "question", "response")
    assert half.unused == ("prompt",)
    assert resolve(row("text", messages=CHAT), {"text": "text"}, SFT_SCHEMA, "f").kind == "text"
    assert resolve(row("text", messages=CHAT), {"text": "unused"}, SFT_SCHEMA, "f").kind == "messages"
    context = resolve(row("question", "context", "answer"), {"context": "input"}, SFT_SCHEMA, "f")
    assert context["input"] == "context"


@pytest.mark.parametrize(
    ("schema", "first", "mapping", "words"),
    [
        (SFT_SCHEMA, row("prompt"), {}, r"f has the columns \['prompt'\]; expected .*; add the missing columns$"),
        (
            SFT_SCHEMA,
            row("question", "text"),
            {"question": "prompt"},
            r"f has the columns \['question', 'text'\]; expected",
        ),
        (
            SFT_SCHEMA,
            row("prompt", "response"),
            {"questoin": "prompt"},
            r"'questoin' \(mapped to 'prompt'\) is not a column of f",
        ),
        (
            SFT_SCHEMA,
            row("prompt", "chosen", "rejected"),
            {},
            r"padfree dpo or padfree reward for preference pairs; .*chosen=response",
        ),
        (SFT_SCHEMA, row(a=1, b=[2]), {}, r"add the missing columns$"),
        # No suggestion of a wrong kind: KTO's label is not an answer, and token ids are not a text.
        (PAIR_SCHEMA, row("prompt", "completion", label=True), {}, r"padfree kto for single answers with a label$"),
        (PAIR_SCHEMA, row("question", "answer", label=False), {}, r"padfree kto for single answers with a label$"),
        (PAIR_SCHEMA, row(input_ids=[1], labels=[1], attention_mask=[1]), {}, r"give text: only [^;]*$"),
        (PAIR_SCHEMA, row(a=1.0, prompt_ids=[3], chosen_ids=[4]), {}, r"add the missing columns$"),
        (PROMPT_SCHEMA, row(input_ids=[1], labels=[1]), {}, r"give text: only [^;]*$"),
        (PROMPT_SCHEMA, row(level=3, tokens=[1]), {}, r"add the missing columns$"),
    ],
)
def test_no_format_is_refused_with_what_to_do(
    schema: Schema, first: dict[str, Any], mapping: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(first, mapping, schema, "f")


@pytest.mark.parametrize(
    ("schema", "first", "kind"),
    [
        (SFT_SCHEMA, row("prompt", "its reply"), "pair"),
        (SFT_SCHEMA, row("x"), "text"),
        (SFT_SCHEMA, row("x", "y", "z", id=7), "pair"),
        (SFT_SCHEMA, row('say "it"', "it's"), "pair"),
        (SFT_SCHEMA, row("content", "url"), "text"),
        (SFT_SCHEMA, row("question", "chosen", "rejected"), "pair"),
        (SFT_SCHEMA, row(chosen=CHAT, rejected=CHAT), "messages"),
        (PAIR_SCHEMA, row("question", "chosen_response", "rejected_response"), "prompted"),
        (PROMPT_SCHEMA, row("task", "answer"), "prompt"),
        (ROLLOUTS, row(input_ids=[1], reward=1), "tokens"),
        (ROLLOUTS, row("question", "answer", reward=1), "text"),
        (ROLLOUTS, row(prompt_ids=[1], completion_ids=[1], reward=1), "token pair"),
    ],
)
def test_the_mapping_in_a_message_works_when_a_shell_reads_it(schema: Schema, first: dict[str, Any], kind: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(first, {}, schema, "f")
    advice = str(caught.value).partition("as in ")[2]
    mapping = mapping_of(advice)
    assert resolve(first, mapping, schema, "f").kind == kind
    assert setting(mapping) == advice


def test_a_preferred_format_wins_over_others_but_not_over_its_like() -> None:
    formats = tuple(Format(kind=kind, needs=needs) for kind, needs in (("ids", ("ids",)), ("pair", ("p", "r"))))
    schema = Schema(formats=(*formats, Format(kind="text", needs=("text",))), preferred=("ids", "pair"))
    assert resolve(row("ids", "text"), {}, schema, "f").kind == "ids"
    assert resolve(row("ids", "text"), {"text": "text"}, schema, "f").kind == "text"
    with pytest.raises(ValueError, match="can be read in 2 ways"):
        resolve(row("ids", "p", "r", "text"), {}, schema, "f")


@pytest.mark.parametrize(
    ("schema", "first", "column", "choices"),
    [
        (SFT_SCHEMA, row("prompt", "completion", label=False), "label", ["unused"]),
        (SFT_SCHEMA, row("text", label=0), "label", ["unused"]),
        (SFT_SCHEMA, row("prompt", "response", weight=0.5), "weight", ["unused"]),
        (SFT_SCHEMA, row("instruction", "context", "response"), "context", ["input", "unused"]),
        (SFT_SCHEMA, row("question", "passage", "answer"), "passage", ["input", "unused"]),
        (SFT_SCHEMA, row("question", "input", "output"), "input", ["input", "unused"]),
        (SFT_SCHEMA, row(messages=CHAT, images=["a.png"]), "images", ["unused"]),
        (SFT_SCHEMA, row(messages=CHAT, functions=[{"name": "add"}]), "functions", ["unused"]),
        (SFT_SCHEMA, row("text", system="Be nice."), "system", ["unused"]),
        (SFT_SCHEMA, row("question", "reasoning", "answer"), "reasoning", ["unused"]),
        (SFT_SCHEMA, row("prompt", "response", labels=[1, 2]), "labels", ["unused"]),
        (SFT_SCHEMA, row(input_ids=[1, 2], position_ids=[0, 0]), "position_ids", ["unused"]),
        (PAIR_SCHEMA, row("prompt", "chosen", "rejected", margin=0.5), "margin", ["unused"]),
        (PAIR_SCHEMA, row("prompt", "chosen", "rejected", image={"bytes": b"x"}), "image", ["unused"]),
        (PROMPT_SCHEMA, row("question", "context", "answer"), "context", ["input", "unused"]),
    ],
)
def test_a_column_that_changes_what_rows_mean_is_used_or_refused(
    schema: Schema, first: dict[str, Any], column: str, choices: list[str]
) -> None:
    with refused("data.columns", f"f has a column {column!r}, which .*") as caught:
        resolve(first, {}, schema, "f")
    words = re.findall(r"data\.columns\.\w+=\w+", str(caught.value))
    assert words == [f"data.columns.{column}={choice}" for choice in choices]
    for word in words:
        found = resolve(first, mapping_of(word), schema, "f")
        assert (column in found.used) == word.endswith("=input")
        found.check(first)
    # An empty column changes nothing, until a row has a value in it.
    for nothing in (None, "", [], {}):
        found = resolve({**first, column: nothing}, {}, schema, "f")
        found.check({**first, column: nothing})
        with pytest.raises(RowError, match=rf"^{column!r} is .*, which .*; set data.columns.{column}=unused"):
            found.check(first)
    without = {name: value for name, value in first.items() if name != column}
    with pytest.raises(RowError, match=rf"^{column!r} is "):
        resolve(without, {}, schema, "f").check(first)


def test_later_rows_may_have_optional_fields_and_no_other_format() -> None:
    found = resolve(row("instruction", "output", "id"), {}, SFT_SCHEMA, "f")
    found.check(row("instruction", "output", "input", "system", "note"))
    for column in ("messages", "text", "input_ids", "response", "conversations", "Prompt"):
        with pytest.raises(RowError, match=rf"^'{column}' is 'some text', which the first row of the file does not"):
            found.check(row("instruction", "output", column))
    resolve(row("prompt", "response"), {"text": "unused"}, SFT_SCHEMA, "f").check(row("prompt", "response", "text"))


@pytest.mark.parametrize("value", [False, 0, 0.0, "x", [0], {"a": {"b": 1}}])
def test_false_and_zero_are_values(value: Any) -> None:
    assert has_value(value)
    assert not any(map(has_value, (None, "", "  ", [], {}, {"bytes": None, "path": None})))


@pytest.mark.parametrize(
    ("schema", "first", "line"),
    [
        (
            SFT_SCHEMA,
            row("instruction", "input", "output", "id", "source"),
            "Alpaca (instruction, input, output); not used: id, source",
        ),
        (SFT_SCHEMA, row(conversations=[{"from": "human", "value": "Hi"}]), "ShareGPT (conversations)"),
        (SFT_SCHEMA, row(messages=CHAT, tools=[]), "messages (messages, tools)"),
        (PAIR_SCHEMA, row("question", "chosen", "rejected"), "pairs (question, chosen, rejected)"),
        (
            PROMPT_SCHEMA,
            row("question", "answer", "id"),
            "prompts (question, answer); passed to the reward: id",
        ),
    ],
)
def test_what_was_recognised_is_said_in_one_line(schema: Schema, first: dict[str, Any], line: str) -> None:
    assert described(resolve(first, {}, schema, "f"), first, schema) == line
    one, several = [{"name": "a", "read_as": line}], [{"name": name, "read_as": line} for name in "abc"]
    assert reading_notes(one) == (f"data: a is read as {line}",)
    assert reading_notes(several) == (f"data: 3 files (a, ...) are read as {line}",)
    assert reading_notes([*one, {"name": "b", "read_as": "text (text)"}])[1] == "data: b is read as text (text)"


MAPPINGS: list[tuple[Schema, dict[str, Any], dict[str, str], str]] = [
    (PROMPT_SCHEMA, row("prompt", "answer"), {"question": "prompt"}, "prompt"),
    (PROMPT_SCHEMA, row("task", "answer"), {"question": "prompt"}, "prompt"),
    (PROMPT_SCHEMA, row("task", "note"), {"question": "prompt", "note": "unused"}, "prompt"),
    (PROMPT_SCHEMA, row("question", "prompt"), {"question": "prompt", "prompt": "prompt"}, "prompt"),
    (PROMPT_SCHEMA, row(messages=CHAT), {"question": "prompt"}, "messages"),
    (SFT_SCHEMA, row("prompt", "response"), {"question": "prompt", "answer": "response"}, "pair"),
    (SFT_SCHEMA, row("q", "a", "note"), {"q": "prompt", "a": "prompt", "note": "unused"}, "pair"),
    (SFT_SCHEMA, row("q", "a"), {"q": "response"}, "pair"),
    (SFT_SCHEMA, row("prompt", "response", "x"), {"x": "text", "y": "unused"}, "text"),
    (SFT_SCHEMA, row("question", "reply", "a"), {"a": "input_ids", "b": "labels"}, "tokens"),
    (PAIR_SCHEMA, row("q", "chosen", "rejected"), {"x": "prompt"}, "implicit"),
    (PAIR_SCHEMA, row("question", "preferred", "dispreferred"), {"question": "chosen"}, "prompted"),
    (ROLLOUTS, row(input_ids=[1], reward=1), {"ids": "tokens"}, "tokens"),
]


@pytest.mark.parametrize(("schema", "first", "mapping", "kind"), MAPPINGS)
def test_advice_about_columns_does_not_lead_in_a_circle(
    schema: Schema, first: dict[str, Any], mapping: dict[str, str], kind: str, tmp_path: Path
) -> None:
    """A recipe has a wrong mapping, and the user applies the last advice of every message."""
    columns = ", ".join(f'"{column}" = "{name}"' for column, name in mapping.items())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model.path = "m"\nbatch = { samples = 1, max_tokens = 8 }\nrun.folder = "r"\n'
        f'data = {{ path = "d", epochs = 1, columns = {{ {columns} }} }}'
    )
    overrides: list[str] = []
    for _ in range(4):
        mapping = load_config(recipe, overrides).data.columns
        try:
            check_mapping(mapping, schema)
            found = resolve(first, mapping, schema, "f")
            break
        except UserError as error:
            advice = re.split(r",? or (?=data\.columns)", error.fix)[-1]
            overrides += [word for word in shlex.split(advice) if word.startswith("data.columns")]
    assert found.kind == kind
