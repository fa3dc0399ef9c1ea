"""Messages of several spellings are read into one, or an error names the message and the field."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any

import pytest

from padfree.data.conversation import Conversation, read_conversation
from padfree.data.records import RowError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(*messages: Any, **keywords: Any) -> Conversation:
    return read_conversation(list(messages), "messages", **keywords)


def test_openai_and_sharegpt_as_objects_and_as_json_text_are_the_same() -> None:
    wanted = read({"role": "system", "content": "Be brief."}, USER, ASSISTANT)
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ]
    assert read(*sharegpt) == wanted
    assert read_conversation(json.dumps(sharegpt), "conversations") == wanted
    assert read(USER, ASSISTANT, system="Be brief.") == wanted
    assert read(USER, ASSISTANT, system="").messages == (USER, ASSISTANT)


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
def test_roles_may_be_written_in_any_case(change: Callable[[str], str]) -> None:
    for sender, role in (("human", "user"), ("gpt", "assistant"), ("observation", "tool"), ("system", "system")):
        assert read({"from": change(sender), "value": "x"}).messages[0]["role"] == role
    assert "tool_calls" in read({"from": change("function_call"), "value": '{"name": "f"}'}).messages[0]
    for role in ("assistant", "gpt", "model"):
        assert read(USER, {"role": change(role), "content": "Hello", "weight": 1}) == read(USER, ASSISTANT)
    assert read({"role": change("system"), "content": "s"}, USER).has_system
    assert read({"role": change("developer"), "content": "s"}, USER).has_system


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"name": "add", "arguments": {"a": 1, "b": None}},
        {"name": "add", "parameters": '{"a": 1}', "index": 0},
    ],
)
def test_a_tool_call_in_any_spelling(call: dict[str, Any]) -> None:
    wanted = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read({"role": "assistant", "content": None, "tool_calls": [call]}).messages == (wanted,)
    assert read({"role": "assistant", "tool_calls": json.dumps([call])}).messages == (wanted,)
    assert read({"from": "function_call", "value": json.dumps(call)}).messages == (wanted,)
    function = call.get("function", call)
    legacy = {key: function[key] for key in ("name", "arguments") if key in function}
    if "arguments" in legacy:
        assert read({"role": "assistant", "content": None, "function_call": legacy}).messages == (wanted,)


def test_nulls_are_missing_keys_except_in_json_text_and_in_lists() -> None:
    objects = {"name": "f", "arguments": {"a": None, "b": {"c": None, "d": [None, 1]}}}
    text = {"name": "f", "arguments": '{"a": null}'}
    (message,) = read({"role": "assistant", "content": None, "name": None, "tool_calls": [objects, text]}).messages
    assert "name" not in message
    arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert arguments == [{"b": {"d": [None, 1]}}, {"a": None}]
    properties = {"a": {"type": "string", "enum": None}, "b": None}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    assert read(USER, tools=[tool]).tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    ]


def test_tools_as_json_text_without_their_wrapping_and_as_a_list_of_texts() -> None:
    bare = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    wanted = [{"type": "function", "function": bare}]
    for tools in (wanted, [bare], json.dumps(wanted), json.dumps([bare]), [json.dumps(bare)]):
        assert read(USER, tools=tools).tools == wanted
    empty: tuple[Any, ...] = (None, [], "", "[]")
    for nothing in empty:
        assert read(USER, tools=nothing).tools is None


def test_parts_of_text_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}, "c"]
    assert read({"role": "user", "content": parts}).messages[0]["content"] == "a bc"
    parquet = [{"type": "text", "text": "a", "image_url": None}]
    assert read({"role": "user", "content": parquet}).messages[0]["content"] == "a"
    problems = dict.fromkeys(("file", "thinking", "refusal", "tool_use"), "expected 'text' or 'image'")
    problems |= dict.fromkeys(("input_audio", "video"), "padfree reads text and images only")
    for kind, problem in problems.items():
        with pytest.raises(RowError, match=rf"messages\[0\]\.content\[1\]\.type is '{kind}'; {problem}"):
            read({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: "x"}]})


def test_weight_zero_is_not_trained() -> None:
    conversation = read(USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}, system="s")
    assert conversation.untrained == {2}
    assert all("weight" not in message for message in conversation.messages)
    for weight in (0.5, 2, -1, True, "0"):
        with pytest.raises(RowError, match=r"messages\[1\]\.weight is .*; expected 1 to train on the message or 0"):
            read(USER, {**ASSISTANT, "weight": weight})
    assert read({**USER, "weight": 0}, ASSISTANT).untrained == {0}
    with pytest.raises(RowError, match=r"messages\[0\]\.weight is 1, but the message has the role 'user'"):
        read({**USER, "weight": 1}, ASSISTANT)


@pytest.mark.parametrize("key", ["train", "loss"])
def test_train_and_loss_mean_the_weight(key: str) -> None:
    found = read(USER, {**ASSISTANT, key: False}, USER, {**ASSISTANT, key: True}, {**USER, key: False})
    assert found.untrained == {1, 4}
    assert found.messages == read(USER, ASSISTANT, USER, ASSISTANT, USER).messages
    assert read(USER, {**ASSISTANT, key: False, "weight": 0}).untrained == {1}
    for value in (0.3, 2, "no", [], {"a": 1}):
        with pytest.raises(RowError, match=rf"^messages\[1\]\.{key} is .*; expected true to train"):
            read(USER, {**ASSISTANT, key: value})
    with pytest.raises(RowError, match=rf"^messages\[0\]\.{key} is true, .* 'user'; give"):
        read({**USER, key: True})
    with pytest.raises(RowError, match=rf"^messages\[1\] has different values in weight and {key}; keep one"):
        read(USER, {**ASSISTANT, key: False, "weight": 1})


@pytest.mark.parametrize("value", [None, "", " \n", [], {}, [None, ""], {"a": None, "b": [{"c": ""}]}])
def test_an_empty_field_is_missing(value: Any) -> None:
    assert read(USER, {**ASSISTANT, "mood": value}) == read(USER, ASSISTANT)


def test_thoughts_have_one_name_and_metadata_is_left_out() -> None:
    wanted = ({**ASSISTANT, "reasoning_content": "Hm."},)
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert read({**ASSISTANT, name: "Hm."}).messages == wanted
    assert read({**ASSISTANT, "reasoning": "Hm.", "thinking": "Hm."}).messages == wanted
    with pytest.raises(RowError, match="has different texts in reasoning_content and thinking"):
        read({**ASSISTANT, "reasoning_content": "Hm.", "thinking": "Ah."})
    assert read({**USER, "id": "7", "timestamp": 3.5, "uuid": "u", "created_at": "now"}).messages == (USER,)
    assert read({**USER, "annotations": [], "refusal": None, "name": "", "extra": {}}).messages == (USER,)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", r"'messages' is 'Hi'; expected a list of messages, or such a list as JSON text"),
        ('{"role": "user"}', r"'messages' is .*; expected a list of messages"),
        (None, r"'messages' is null; expected a list of messages"),
        ("[]", r"'messages' is empty"),
        ([{"from": "narrator", "value": "x"}], r"messages\[0\]\.from is 'narrator'; expected one of human"),
        ([{"from": "human"}], r"messages\[0\]\.value is null; expected a string"),
        ([{"from": "human", "content": "x"}], r"messages\[0\] has 'from' and 'content'"),
        ([{"from": "function_call", "value": "add(1)"}], r"messages\[0\]\.value is 'add\(1\)', which is not JSON"),
        ([{**ASSISTANT, "tool_calls": [5]}], r"messages\[0\]\.tool_calls\[0\] is 5; expected an object"),
        ([{**ASSISTANT, "tool_calls": [{"name": " "}]}], r"tool_calls\[0\]\.function\.name is ' '"),
        ([{**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "x"}]}], r"arguments is 'x', which is not JSON"),
        ([{**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "[1]"}]}], r"arguments is a list of 1; expected an"),
        ([{**ASSISTANT, "tool_calls": [{"name": "f", "arguments": [("a", 1)]}]}], r"arguments is a list of 1"),
        ([{**ASSISTANT, "tool_calls": [{"type": "custom", "custom": {}}]}], r"type is 'custom'; expected 'function'"),
        ([{**ASSISTANT, "x": float("nan")}], r"messages\[0\]\.x is nan; expected a finite number"),
        ([{**ASSISTANT, "x": {1: 2}}], r"messages\[0\]\.x has the key 1; expected strings"),
        ([{**ASSISTANT, "x": datetime.date(2020, 1, 1)}], r"messages\[0\]\.x has the type date; expected a JSON value"),
        ([{**ASSISTANT, "x": b"x"}], r"messages\[0\]\.x has the type bytes"),
        ([{**ASSISTANT, "x": decimal.Decimal(1)}], r"messages\[0\]\.x has the type Decimal"),
        ([{**ASSISTANT, "x": "\udc00"}], r"messages\[0\]\.x' has a lone surrogate"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\]\.text is 5; expected a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], r"content\[0\] has the key 'b'"),
        (
            [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "f"}]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ],
            r"messages\[1\]\.tool_call_id is 'b'; expected the id of an earlier call",
        ),
    ],
)
def test_what_cannot_be_read_is_named(messages: Any, words: str) -> None:
    with pytest.raises(RowError, match=words):
        read_conversation(messages, "messages")


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("f", r"'tools' is 'f'; expected a list of tools"),
        ({"name": "f"}, r"'tools' is an object; expected a list of tools"),
        ([5], r"tools\[0\] is 5; expected an object"),
        ([{"type": "function"}], r"tools\[0\]\.function is null; expected an object with a name"),
        ([{"type": "function", "function": {"description": "d"}}], r"tools\[0\]\.function is an object; expected"),
    ],
)
def test_tools_that_cannot_be_read_are_named(tools: Any, words: str) -> None:
    with pytest.raises(RowError, match=words):
        read(USER, tools=tools)


def test_deep_nesting_is_refused() -> None:
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(RowError, match="nested too deeply; expected at most 64 levels"):
        read({**USER, "x": deep})
    with pytest.raises(RowError, match="expected a list of messages"):
        read_conversation("[" * 100_000, "messages")


def test_two_system_prompts_are_refused() -> None:
    with pytest.raises(RowError, match=r"messages\[0\] is a system message, but the row has a separate system prompt"):
        read({"role": "system", "content": "a"}, USER, system="b")


def test_images_are_refused_unless_they_are_asked_for() -> None:
    """Environments, agents and prompts read messages with the same function as rows, and show no images."""
    messages = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(RowError, match=r"message 1 \(user\) has an image"):
        read_conversation(messages, "messages")
    assert len(read_conversation(messages, "messages", images=True).messages) == 1
