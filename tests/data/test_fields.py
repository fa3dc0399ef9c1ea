"""Columns to fields: one kind is found, none and several are refused with the cure."""

from __future__ import annotations

import pytest

from padfree.data.fields import SFT_SCHEMA, Schema, check_mapping, resolve


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
        (["prompt"], {}, r"f has \['prompt'\]; expected"),
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
