"""Chat templates that drop or garble a part of a conversation are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.choices import LossOn, Turns
from padfree.data.chat_renderer import ChatRenderer, RenderedSample
from padfree.data.conversation import read_conversation
from padfree.data.records import RowError
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"term": {"type": "string", "description": "What."}}},
    },
}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"name": "look", "arguments": {"term": 'a "b"', "n": 2}}],
}
RESULT = {"role": "tool", "content": "found"}

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
FOOT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def samples(
    template: str,
    *messages: Any,
    tools: Any = None,
    loss_on: LossOn = "assistant",
    turns: Turns = "auto",
) -> list[RenderedSample]:
    conversation = read_conversation(list(messages), "messages", tools=tools)
    return ChatRenderer(tiny_tokenizer(), template).samples(conversation, loss_on=loss_on, turns=turns)


def chatml(body: str, before: str = "") -> str:
    return before + HEAD + body + FOOT


def calls(arguments: str) -> str:
    return chatml(
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}|" + arguments + "]{% endfor %}"
    )


# A message or a field is missing from the rendered text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**ASSISTANT, "reasoning_content": "Hm."}, "reasoning_content"),
        ({**ASSISTANT, "thinking": "Hm."}, "reasoning_content"),
        ({**ASSISTANT, "name": "Bob"}, "name"),
        ({**ASSISTANT, "mood": "good"}, "mood"),
        ({**ASSISTANT, "score": 5}, "score"),
        ({**ASSISTANT, "images": ["a.png"]}, r"images\[0\]"),
        ({**ASSISTANT, "audio": {"id": "a"}}, r"audio\.id"),
        ({**ASSISTANT, "annotations": [{"url": "x"}]}, r"annotations\[0\]\.url"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "refusal"),
        (CALLED, r"tool_calls\[0\]\.function\.name"),
        ({**ASSISTANT, "function_call": {"name": "look", "arguments": "{}"}}, r"tool_calls\[0\]\.function\.name"),
    ],
)
def test_a_field_that_the_template_does_not_show_is_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=rf"^message 2 \(assistant\): {words} is missing from the rendered text"):
        samples(TEMPLATES["chatml"], USER, message)
    shown = chatml("{{ m.content or '' }}{{ m|tojson }}")
    assert len(samples(shown, USER, message)) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mask": True}, "mask"),
        ({"trainable": False}, "trainable"),
        ({"meta": {"checked": False}}, r"meta\.checked"),
        ({"flags": [[True]]}, r"flags\[0\]\[0\]"),
        ({"mood": "Hello", "prefix": True}, "prefix"),
    ],
)
def test_a_boolean_that_does_not_change_the_text_is_refused(fields: dict[str, Any], words: str) -> None:
    template = chatml("{{ m.content }}{{ m.mood or '' }}")
    for message in (USER, ASSISTANT):
        messages = [{**one, **fields} if one is message else one for one in (USER, ASSISTANT)]
        match = rf"\): {words} is missing from the rendered text.* weight 0"
        with pytest.raises(RowError, match=match):
            samples(template, *messages)
        with pytest.raises(RowError, match=match):  # rendered unlike its twin
            samples(template + "{% if messages[0].content == 'Hi' %} {% endif %}", *messages)
        assert len(samples(chatml("{{ m.content }}{{ m|tojson }}"), *messages)) == 1
    used = chatml("{{ m.content }}{% if m.mask or (m.meta or {}).checked is false %}masked{% endif %}")
    if words in ("mask", r"meta\.checked"):
        assert len(samples(used, USER, {**ASSISTANT, **fields})) == 1


def test_a_boolean_of_a_tool_call_that_the_template_does_not_show_is_refused() -> None:
    call = {"function": {"name": "look", "arguments": {"deep": True}, "strict": True}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(RowError, match=r"^message 2 \(assistant\): tool_calls\[0\]\.function\.strict is missing"):
        samples(calls("{{ c.function.arguments|tojson }}"), USER, message)
    assert len(samples(calls("{{ c.function|tojson }}"), USER, message)) == 1


@pytest.mark.parametrize("role", ["critic", "narrator", "tool", "Tool", "function", "observation", "ipython"])
def test_a_role_that_the_template_skips_is_refused(role: str) -> None:
    known = HEAD.replace("{% for m in messages %}", "{% for m in messages if m.role in ['user', 'assistant'] %}")
    with pytest.raises(RowError, match=r"^message 2 \(.*\): content is missing from the rendered text"):
        samples(known + "{{ m.content }}" + FOOT, USER, {"role": role, "content": "So?"}, ASSISTANT)


@pytest.mark.parametrize("content", ["", "  "])
def test_an_empty_message_that_is_skipped_is_refused(content: str) -> None:
    template = chatml("{{ m.content }}").replace("in messages %}", "in messages if m.content.strip() %}")
    with pytest.raises(RowError, match=r"^message 2 \(system\) is missing from the rendered text"):
        samples(template, USER, {"role": "system", "content": content}, ASSISTANT)
    assert len(samples(TEMPLATES["chatml"], USER, {"role": "system", "content": content}, ASSISTANT)) == 1


@pytest.mark.parametrize("role", ["system", "tool", "critic"])
def test_a_role_that_is_rendered_as_the_assistant_is_refused(role: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(RowError, match=rf"^message 2 \({role}\) is rendered as if the assistant had written it"):
        samples(template, USER, {"role": role, "content": "x"}, USER, ASSISTANT)


@pytest.mark.parametrize(
    ("expression", "content"),
    [
        ("m.content.split('---')[-1]", "first---second"),
        ("m.content[:20]", "a text of more than twenty characters"),
        ("m.content|replace('é', 'e')", "café"),
        ("m.content|upper if 'loud' in m.content else m.content", "loud"),
        ("m.content|e", "a < b"),
        ("m.content if m.content != 'secret' else '***'", "secret"),
    ],
)
def test_a_text_that_the_template_changes_is_refused(expression: str, content: str) -> None:
    """The markers of the twin can pass or fail; the text of the row decides."""
    for messages in ([{**USER, "content": content}, ASSISTANT], [USER, {**ASSISTANT, "content": content}]):
        with pytest.raises(
            RowError, match=r"^message [12] \(.*\): content (is missing from the rendered text|is garbled)"
        ):
            samples(chatml("{{ " + expression + " }}"), *messages)
    assert len(samples(chatml("{{ m.content|trim }}"), {**USER, "content": f" {content}\n"}, ASSISTANT)) == 1


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    with pytest.raises(RowError, match=r"^tools\[0\]\.name \('look'\) is missing from the rendered text"):
        samples(TEMPLATES["chatml"], USER, ASSISTANT, tools=[TOOL])
    names = chatml("{{ m.content }}", "{% for t in tools %}{{ t.function.name }} {% endfor %}")
    with pytest.raises(
        RowError, match=r"^tools\[0\]\.description \('Look it up\.'\) is missing from the rendered text"
    ):
        samples(names, USER, ASSISTANT, tools=[TOOL])
    words = names.replace(
        "t.function.name }}",
        "t.function.name }}: {{ t.function.description }}"
        "{% for n, p in t.function.parameters.properties.items() %} {{ n }}, {{ p.description }}{% endfor %}",
    )
    for template in (
        words,
        chatml("{{ m.content }}", "{{ tools|tojson }}"),
        chatml("{{ m.content }}", "{{ tools|tojson(indent=4) }}"),
        chatml("{{ m.content }}", "{% for t in tools %}{{ t.name }}{{ t|tojson }}{% endfor %}"),
    ):
        assert len(samples(template, USER, ASSISTANT, tools=[TOOL])) == 1
    python = chatml("{{ m.content }}", "{{ tools|string }}")
    with pytest.raises(RowError, match=r"^tools\[0\] is rendered as Python's repr"):
        samples(python, USER, ASSISTANT, tools=[TOOL])


def test_results_in_another_order_need_ids() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "f"}, {"id": "b", "name": "g"}]}
    first, second = ({"role": "tool", "tool_call_id": one, "content": f"from {one}"} for one in "ab")
    template = calls("{{ c.function.arguments|tojson }}")
    assert len(samples(template, USER, called, first, second, ASSISTANT)) == 1
    with pytest.raises(RowError, match=r"^message 3 \(tool\) is not the result of the next tool call"):
        samples(template, USER, called, second, first, ASSISTANT)
    with_ids = template.replace("[{{ c.function", "[{{ c.id }}{{ c.function").replace(
        "{{ m.content or '' }}", "{{ m.tool_call_id or '' }}{{ m.content or '' }}"
    )
    assert len(samples(with_ids, USER, called, second, first, ASSISTANT)) == 1


def test_the_name_of_a_result_is_known_from_its_call() -> None:
    template = calls("{{ c.function.arguments|tojson }}")
    assert len(samples(template, USER, CALLED, {**RESULT, "name": "look"}, ASSISTANT)) == 1
    with pytest.raises(RowError, match=r"^message 3 \(tool\): name is missing from the rendered text"):
        samples(template, USER, CALLED, {**RESULT, "name": "other"}, ASSISTANT)


# A field is rendered as its text or as JSON


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments|tojson }}",
        "{{ c.function.arguments|tojson(indent=2) }}",
        "{{ c.function.arguments|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{{ '' + c.function.arguments }}",  # wants JSON text
        "{{ c.function.arguments|string }}",
        "{{ '%s' % c.function.arguments }}",
        "{% set a = c.function.arguments %}{% if a is string %}{{ a }}{% else %}{{ a|tojson }}{% endif %}",
        "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v if v is string else v|tojson }}</>{% endfor %}",
    ],
)
def test_arguments_are_their_json_in_whatever_way_a_template_writes_it(arguments: str) -> None:
    given = {
        "term": 'é "b"\n',
        "n": 2,
        "x": 1.5,
        "deep": {"list": [1, "two", {"three": True}], "no": False},
        "ok": True,
    }
    for value in (given, json.dumps(given)):
        called = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": value}]}
        (sample,) = samples(calls(arguments), USER, called, RESULT, ASSISTANT)
        text = sample.text[slice(*sample.spans[0])]
        assert text.startswith("[look|")
        if "items()" not in arguments:
            assert json.loads(text.removeprefix("[look|").removesuffix("]<|im_end|>")) == given
        assert "True" not in text
        assert "\\\\" not in text.replace('\\"', "")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("{{ c.function.arguments|tojson|tojson }}", {"a": "b"}),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v|string }}{% endfor %}", {"a": True}),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v|string }}{% endfor %}", {"a": ["b"]}),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v|string }}{% endfor %}", {"a": {"b": 1}}),
        ("{% for k, v in c.function.arguments.items() %}{{ v|string }}{% endfor %}", {"a": "b"}),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}", {"a": "b"}),
        ("{{ c.function.arguments.a }}", {"a": "b", "c": "d"}),
    ],
)
def test_pythons_repr_and_json_encoded_twice_are_refused(arguments: str, given: dict[str, Any]) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": given}]}
    with pytest.raises(RowError, match=r"is missing from the rendered text|is garbled|raised an error"):
        samples(calls(arguments), USER, called)


def test_content_is_given_as_text_or_as_parts() -> None:
    parts = chatml("{% for p in m.content %}{{ p.text }}{% endfor %}")
    for template in (parts, TEMPLATES["chatml"], chatml("{{ '%s' % m.content }}"), chatml("{{ m.content|string }}")):
        (sample,) = samples(template, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT)
        assert sample.text.startswith("<|im_start|>user\nHi<|im_end|>\n")


def test_null_beside_a_call_is_what_the_template_wants() -> None:
    body = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}|{{ c.function.arguments|tojson }}]{% endfor %}"
    wants_null = chatml("{% if m.content is none %}" + body + "{% else %}{{ m.content }}{% endif %}")
    wants_text = chatml("{{ m.content + '' }}" + body)
    for template in (wants_null, wants_text):
        (sample,) = samples(template, USER, CALLED)
        assert "[look|" in sample.text
        assert "None" not in sample.text
    with pytest.raises(
        RowError, match=r"^message 2 \(assistant\): tool_calls\[0\]\.function\.name is missing from the rendered text"
    ):
        samples(wants_null, USER, {**CALLED, "content": "See."})


# Roles by other names


def test_other_names_of_roles_are_understood_unless_the_template_knows_them() -> None:
    (sample,) = samples(TEMPLATES["chatml"], {**USER, "role": "human"}, {**ASSISTANT, "role": "gpt"})
    assert sample.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    own = chatml("{% if m.role == 'developer' %}!{% endif %}{{ m.content }}")
    (sample,) = samples(own, {"role": "developer", "content": "x"}, USER, ASSISTANT)
    assert sample.text.startswith("<|im_start|>developer\n!x")
    (sample,) = samples(TEMPLATES["chatml"], {"role": "developer", "content": "x"}, USER, ASSISTANT)
    assert sample.text.startswith("<|im_start|>system\nx")
    mentions = chatml("{{ m.content }}", "{{ 'developer' }}")
    (sample,) = samples(mentions, {"role": "Developer", "content": "x"}, USER, ASSISTANT)
    assert sample.text.startswith("developer<|im_start|>system\nx")


# Prompts


def test_prompts_are_guarded_and_what_the_model_once_wrote_may_be_cut() -> None:
    renderer = ChatRenderer(tiny_tokenizer("forgetful"))

    def prompt(*messages: Any) -> str:
        return renderer.prompt(read_conversation(list(messages), "prompt"))

    assert "secret" not in prompt(USER, {**ASSISTANT, "content": "secret</think>a</think>b"}, USER)
    with pytest.raises(RowError, match=r"^message 1 \(user\): name is missing from the rendered text"):
        prompt({**USER, "name": "Bob"})
    with pytest.raises(
        RowError, match=r"^message 2 \(assistant\): reasoning_content is missing from the rendered text"
    ):
        prompt(USER, {**ASSISTANT, "reasoning_content": "Hm."}, USER)


# Shapes


TEXT = st.text(st.sampled_from("ab\n \t\"\\é{}'"), max_size=5)
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(-5, 5), st.booleans(), st.none(), st.floats(-2, 2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
RENDERER = ChatRenderer(
    tiny_tokenizer(), chatml("{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %}")
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT, st.none() | VALUE), max_size=5))
def test_what_a_shape_predicts_is_what_is_rendered(turns: list[tuple[str, str, Any]]) -> None:
    """One renderer for all examples: conversations of different shapes must not be confused."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    for role, text, value in turns:
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and value is not None:
            message["tool_calls"] = [{"name": "f", "arguments": json.dumps({"a": value})}]
        messages.append(message)
    messages.append({"role": "assistant", "content": "ok"})
    conversation = read_conversation(messages, "messages")
    (sample,) = RENDERER.samples(conversation, loss_on="assistant", turns="auto")
    parts = [
        message["content"] + (json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else "")
        for message in conversation.messages
    ]
    roles = [message["role"] for message in messages]
    pairs = list(zip(roles, parts, strict=True))
    assert sample.text == "".join(f"<|im_start|>{role}\n{part}<|im_end|>\n" for role, part in pairs)
    trained = [sample.text[start:end] for start, end in sample.spans]
    assert trained == [f"{part}<|im_end|>" for role, part in pairs if role == "assistant"]
    for index, (start, end) in sample.messages:
        assert sample.text[start:end] in pairs[index][1]
