"""Columns to fields: one kind is found, none and several are refused with the cure."""

from __future__ import annotations

import shlex

import pytest

from padfree.config import load_config
from padfree.data.fields import SFT_SCHEMA, Schema, check_mapping, resolve, setting
from padfree.data.rollouts import SCHEMA as ROLLOUTS
from padfree.rollout.prompts import SCHEMA as PROMPTS


def test_each_kind_is_found_by_its_own_names() -> None:
    assert resolve(["id", "messages"], {}, SFT_SCHEMA, "f").kind == "messages"
    assert resolve(["response", "prompt", "source"], {}, SFT_SCHEMA, "f").kind == "pair"
    assert resolve(["text"], {}, SFT_SCHEMA, "f").kind == "text"


def test_a_mapping_renames_and_speaks_for_its_kind() -> None:
    fields = resolve(["question", "answer", "text"], {"question": "prompt", "answer": "response"}, SFT_SCHEMA, "f")
    assert (fields.kind, fields["prompt"], fields["response"]) == ("pair", "question", "answer")
    half = resolve(["question", "response", "prompt"], {"question": "prompt"}, SFT_SCHEMA, "f")
    assert (half.kind, half["prompt"], half["response"]) == ("pair", "question", "response")
    assert resolve(["messages", "text"], {"text": "text"}, SFT_SCHEMA, "f").kind == "text"


@pytest.mark.parametrize(
    ("columns", "mapping", "words"),
    [
        (
            ["question", "answer"],
            {},
            r"f has \['answer', 'question'\]; expected 'messages', or 'prompt' and 'response', or",
        ),
        (["prompt"], {}, r"f has \['prompt'\]; expected .*; add what is missing$"),
        (
            ["messages", "text"],
            {},
            r"f has 'messages' and also 'text'; say which is meant, as in data.columns='\{messages=",
        ),
        (["prompt", "response", "messages"], {}, r"'messages' and also 'prompt' and 'response'"),
        (["question", "text"], {"question": "prompt"}, r"f has \['question', 'text'\]; expected"),
        (["prompt", "response"], {"questoin": "prompt"}, r"'questoin' \(for 'prompt'\) is not in f, which has"),
    ],
)
def test_none_and_several_are_refused(columns: list[str], mapping: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(columns, mapping, SFT_SCHEMA, "f")


def test_a_mapping_names_known_fields_once() -> None:
    check_mapping({"a": "prompt", "b": "response"}, SFT_SCHEMA)
    with pytest.raises(ValueError, match="'a' is mapped to 'promt', which is no field; use one of messages, prompt"):
        check_mapping({"a": "promt"}, SFT_SCHEMA)
    with pytest.raises(ValueError, match=r"\['a', 'b'\] are all mapped to 'prompt'; map one"):
        check_mapping({"a": "prompt", "b": "prompt"}, SFT_SCHEMA)


def test_a_preferred_kind_wins_over_others_but_not_over_its_like() -> None:
    schema = Schema(kinds={"ids": ("ids",), "pair": ("p", "r"), "text": ("text",)}, preferred=("ids", "pair"))
    assert resolve(["ids", "text"], {}, schema, "f").kind == "ids"
    assert resolve(["ids", "text"], {"text": "text"}, schema, "f").kind == "text"
    with pytest.raises(ValueError, match="'ids' and also 'p' and 'r'"):
        resolve(["ids", "p", "r", "text"], {}, schema, "f")


@pytest.mark.parametrize(
    ("schema", "columns", "kind"),
    [
        (SFT_SCHEMA, ["question", "answer"], "pair"),
        (SFT_SCHEMA, ["id", "output", "instruction"], "pair"),
        (SFT_SCHEMA, ["prompt", "answer"], "pair"),
        (SFT_SCHEMA, ["prompt", "its reply"], "pair"),
        (SFT_SCHEMA, ["conversations", "id"], "messages"),
        (SFT_SCHEMA, ["x"], "text"),
        (SFT_SCHEMA, ["x", "y", "z"], "pair"),
        (SFT_SCHEMA, ['say "it"', "it's"], "pair"),
        (PROMPTS, ["question", "answer"], "prompt"),
        (PROMPTS, ["task", "answer"], "prompt"),
        (ROLLOUTS, ["input_ids", "reward"], "tokens"),
        (ROLLOUTS, ["question", "answer", "reward"], "text"),
        (ROLLOUTS, ["prompt_ids", "completion_ids", "reward"], "token pair"),
    ],
)
def test_the_mapping_in_a_message_works_when_a_shell_reads_it(schema: Schema, columns: list[str], kind: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(columns, {}, schema, "f")
    advice = str(caught.value).partition("as in ")[2]
    (word,) = shlex.split(advice)
    needed = ["model.path=m", "data.path=d", "batch.samples=1", "batch.max_tokens=8", "run.folder=r"]
    mapping = load_config(None, [*needed, word]).data.columns
    assert resolve(columns, mapping, schema, "f").kind == kind
    assert setting(mapping) == advice
