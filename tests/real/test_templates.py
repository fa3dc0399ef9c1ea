"""Seven real chat templates with every shape of conversation: rendered correctly, or refused with a reason.

The expected results do not use padfree. The text is rendered by transformers from the messages, in the form that
the template was written for. The trained part is found by a regular expression written from reading the
template: after the header of the assistant's turn, up to and including the token that ends it.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from padfree.data.chat_renderer import ChatRenderer, RenderedSample
from padfree.data.conversation import Conversation, read_conversation
from padfree.data.records import RowError

REAL = os.environ.get("PADFREE_REAL")
pytestmark = pytest.mark.skipif(REAL is None, reason="PADFREE_REAL does not name a folder with real tokenizers")

CHATML = r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>"
TURN = {
    "smollm2": CHATML,
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "llama3_2": r"(?<=<\|start_header_id\|>assistant<\|end_header_id\|>\n\n).*?<\|eot_id\|>",
    "gemma3": r"(?<=<start_of_turn>model\n).*?<end_of_turn>",
    # after a single call the template writes no end of sentence
    "deepseek_v3": (
        r"(?:(?<=<｜Assistant｜>)|(?<=<｜tool▁outputs▁end｜>))"
        r".*?(?:<｜end▁of▁sentence｜>|<｜tool▁call▁end｜>(?=<｜tool▁outputs▁begin｜>|$))"
    ),
    "mistral_nemo": r"(?:(?<=\[/INST\])|(?<=\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\])).*?</s>",
}
TEMPLATES = list(TURN)

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ASSISTANT = {"role": "user", "content": "What is up?"}, {"role": "assistant", "content": "All fine."}
USER_2, ASSISTANT_2 = {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Still fine."}
THOUGHT = {**ASSISTANT, "reasoning_content": "Think hard."}
THOUGHT_2 = {**ASSISTANT_2, "reasoning_content": "Think again."}
INLINE = {"role": "assistant", "content": "<think>\nThink hard.\n</think>\n\nAll fine."}
ARGUMENTS = {"city": 'Zürich "Old" Town', "days": 3, "now": True, "near": ["a", {"b": 1.5}]}


def call(identifier: str = "abcdefgh1", arguments: Any = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": ARGUMENTS if arguments is None else arguments}
    return {"id": identifier, "type": "function", "function": function}


CALL = {"role": "assistant", "content": None, "tool_calls": [call()]}
CALL_TEXT = {"role": "assistant", "content": None, "tool_calls": [call(arguments=json.dumps(ARGUMENTS))]}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call(), call("abcdefgh2", {"city": "Rome"})]}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": '{"sky": "grey"}'}
RESULT_2 = {"role": "tool", "tool_call_id": "abcdefgh2", "content": "rain"}
PROPERTIES = {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]

SHAPES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "user, assistant": ([USER, ASSISTANT], None),
    "system": ([SYSTEM, USER, ASSISTANT], None),
    "two turns": ([USER, ASSISTANT, USER_2, ASSISTANT_2], None),
    "system, two turns": ([SYSTEM, USER, ASSISTANT, USER_2, ASSISTANT_2], None),
    "a user at the end": ([USER, ASSISTANT, USER_2], None),
    "thought": ([USER, THOUGHT], None),
    "two thoughts": ([USER, THOUGHT, USER_2, THOUGHT_2], None),
    "thought in the first turn": ([USER, THOUGHT, USER_2, ASSISTANT_2], None),
    "thought in the text": ([USER, INLINE], None),
    "thoughts in two texts": ([USER, INLINE, USER_2, INLINE], None),
    "call": ([USER, CALL, RESULT, ASSISTANT], None),
    "call as JSON text": ([USER, CALL_TEXT, RESULT, ASSISTANT], None),
    "call at the end": ([USER, CALL], None),
    "call and tools": ([USER, CALL, RESULT, ASSISTANT], TOOLS),
    "call beside text": ([USER, {**CALL, "content": "Let me see."}, RESULT, ASSISTANT], None),
    "call and thoughts": ([USER, {**CALL, "reasoning_content": "Hm."}, RESULT, THOUGHT], None),
    "two calls": ([USER, CALLS, RESULT, RESULT_2, ASSISTANT], None),
    "results in another order": ([USER, CALLS, RESULT_2, RESULT, ASSISTANT], None),
    "calls in two turns": ([USER, CALL, RESULT, CALL, RESULT, ASSISTANT], None),
    "system and call": ([SYSTEM, USER, CALL, RESULT, ASSISTANT], None),
    "tools without a call": ([USER, ASSISTANT], TOOLS),
    "tools, two turns": ([USER, ASSISTANT, USER_2, ASSISTANT_2], TOOLS),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT], None),
    "image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ASSISTANT], None),
    "weight 0": ([USER, {**ASSISTANT, "weight": 0}, USER_2, ASSISTANT_2], None),
    "weight 0 everywhere": ([USER, {**ASSISTANT, "weight": 0}], None),
    "empty assistant": ([USER, {"role": "assistant", "content": ""}], None),
    "empty user": ([{"role": "user", "content": ""}, ASSISTANT], None),
    "null content": ([USER, {"role": "assistant", "content": None}], None),
    "white space": ([{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "\n Ho \n"}], None),
    "developer": ([{**SYSTEM, "role": "developer"}, USER, ASSISTANT], None),
    "human and gpt": ([{**USER, "role": "human"}, {**ASSISTANT, "role": "gpt"}], None),
    "User": ([{**USER, "role": "User"}, ASSISTANT], None),
    "ShareGPT": ([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], None),
    "critic": ([USER, {"role": "critic", "content": "Bad."}, ASSISTANT], None),
    "name": ([{**USER, "name": "Bob"}, ASSISTANT], None),
    "refusal": ([USER, {"role": "assistant", "content": None, "refusal": "No."}], None),
    "audio": ([USER, {**ASSISTANT, "audio": {"id": "x"}}], None),
    "two assistants": ([USER, ASSISTANT, ASSISTANT_2], None),
    "assistant first": ([ASSISTANT, USER_2, ASSISTANT_2], None),
    "system in between": ([USER, ASSISTANT, SYSTEM, USER_2, ASSISTANT_2], None),
    "metadata": ([{**USER, "id": "7", "timestamp": 1}, ASSISTANT], None),
    "nulls of Parquet": ([{**USER, "tool_calls": None}, {**ASSISTANT, "name": None}], None),
}

NO_THOUGHT = r"message 2 \(assistant\): reasoning_content is missing from the rendered text"
NO_CALL = r"message 2 \(assistant\): tool_calls\[0\]\.function\.name is missing from the rendered text"
NO_TEXT = r"message 2 \(assistant\): content is missing from the rendered text"
NO_TOOLS = r"tools\[0\]\.name \('weather'\) is missing from the rendered text, because the chat template drops tools"
ALTERNATE = "the chat template raised an error: TemplateError: .*roles must alternate"
FIRST = "message 1 is from the assistant, so the start of its text is unknown"
ONE_CALL = "the chat template raised an error: TemplateError: This model only supports single tool-calls"
ORDER = r"message 3 \(tool\) is not the result of the next tool call, and the chat template does not show call ids"
CALL_SHAPES = [name for name in SHAPES if "call" in name and name != "tools without a call" and name != "image"]

REFUSED: dict[tuple[str, str], str] = {
    **{
        (template, shape): NO_THOUGHT
        for template in TEMPLATES
        for shape in ("thought", "two thoughts", "thought in the first turn", "call and thoughts")
        if template != "qwen3"
    },
    **{("smollm2", shape): NO_CALL for shape in CALL_SHAPES},
    **{("gemma3", shape): ALTERNATE for shape in CALL_SHAPES},
    ("gemma3", "call at the end"): NO_CALL,
    **{
        (template, shape): NO_TOOLS
        for template in ("smollm2", "gemma3", "deepseek_v3")
        for shape in ("tools without a call", "tools, two turns", "call and tools")
    },
    ("smollm2", "call and thoughts"): NO_THOUGHT,
    ("smollm2", "system and call"): NO_CALL.replace("2", "3"),
    ("gemma3", "call and tools"): ALTERNATE,
    ("gemma3", "results in another order"): ALTERNATE,
    ("smollm2", "results in another order"): NO_CALL,
    ("qwen3", "results in another order"): ORDER,
    ("qwen2_5", "results in another order"): ORDER,
    ("deepseek_v3", "results in another order"): ORDER,
    ("llama3_2", "results in another order"): ONE_CALL,
    ("llama3_2", "two calls"): ONE_CALL,
    ("llama3_2", "call beside text"): NO_TEXT,
    ("mistral_nemo", "call beside text"): NO_TEXT,
    ("deepseek_v3", "call beside text"): NO_CALL,
    ("deepseek_v3", "calls in two turns"): "the text before message 4, with the generation prompt, is not a prefix",
    ("mistral_nemo", "system and call"): r"message 1 \(system\): content is missing from the rendered text",
    **{(template, "image"): "has an image, but the data is read as text" for template in TEMPLATES},
    **{(template, "weight 0 everywhere"): "all assistant messages have weight 0" for template in TEMPLATES},
    **{(template, "null content"): r"messages\[1\]\.content is null" for template in TEMPLATES},
    **{(template, "name"): r"message 1 \(user\): name is missing from the rendered text" for template in TEMPLATES},
    **{
        (template, "refusal"): r"message 2 \(assistant\): refusal is missing from the rendered text"
        for template in TEMPLATES
    },
    **{
        (template, "audio"): r"message 2 \(assistant\): audio\.id is missing from the rendered text"
        for template in TEMPLATES
    },
    **{(template, "assistant first"): FIRST for template in TEMPLATES},
    ("qwen3", "critic"): r"message 2 \(critic\): content is missing from the rendered text",
    ("qwen2_5", "critic"): r"message 2 \(critic\): content is missing from the rendered text",
    ("deepseek_v3", "critic"): r"message 2 \(critic\): content is missing from the rendered text",
    ("qwen3", "two assistants"): "the text before message 3, with the generation prompt, is not a prefix",
    **{
        (template, shape): ALTERNATE
        for template in ("gemma3", "mistral_nemo")
        for shape in ("critic", "two assistants", "assistant first", "system in between")
    },
}
APART = {
    **{("qwen3", shape): 2 for shape in SHAPES},
    ("qwen3", "calls in two turns"): 3,
    ("mistral_nemo", "system, two turns"): 2,
    ("mistral_nemo", "tools, two turns"): 2,
    ("deepseek_v3", "system in between"): 2,
}
"""The number of samples of a conversation with several turns, if not one."""


@cache
def tokenizer_of(template: str) -> Any:
    folder = Path(str(REAL))
    return AutoTokenizer.from_pretrained(
        folder / "smollm2" if template == "smollm2" else folder / "tokenizers" / template
    )


@cache
def renderer_of(template: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template))


def as_written_for(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the authors of the template pass them."""
    usual = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None and key not in ("weight", "id")}
        message.pop("timestamp", None)
        if "from" in message:
            message = {"role": message["from"], "content": message["value"]}
        roles = {"human": "user", "gpt": "assistant", "User": "user", "developer": "system"}
        message["role"] = roles.get(message["role"], message["role"])
        if isinstance(message.get("content"), list):
            message["content"] = message["content"][0]["text"]
        if "tool_calls" in message:
            calls = []
            for one in message["tool_calls"]:
                arguments = one["function"]["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                if template == "deepseek_v3":
                    arguments = json.dumps(arguments, ensure_ascii=False)
                calls.append({**one, "function": {**one["function"], "arguments": arguments}})
            message = {"content": None if template == "deepseek_v3" else "", **message, "tool_calls": calls}
        usual.append(message)
    return usual


def expected(template: str, shape: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts and trained spans, from transformers and from `TURN` alone."""
    tokenizer = tokenizer_of(template)
    messages, tools = SHAPES[shape]
    weights = [message.get("weight", 1) for message in messages]
    messages = as_written_for(template, messages)

    def render(stop: int, prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(messages[:stop], tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    def turns(text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(TURN[template], text, re.DOTALL)]

    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [index for index in answers if weights[index]]
    split = APART.get((template, shape)) if len(answers) > 1 or template == "qwen3" else None
    if template == "mistral_nemo" and messages[0]["role"] == "system":
        # the template shows the system message while the model is asked, and not once it has answered
        asked = [(render(index, True), messages[index]["content"] + "</s>") for index in trained]
        return [(before + answer, [(len(before), len(before) + len(answer))]) for before, answer in asked]
    if split is None or (template == "qwen3" and shape == "call and thoughts"):
        text = render(len(messages))
        found = turns(text)
        assert len(found) == len(answers)
        return [(text, [span for span, index in zip(found, answers, strict=True) if index in trained])]
    texts = [render(index + 1) for index in trained]
    for index, text in zip(trained, texts, strict=True):
        assert text.startswith(render(index, True))
    return [(text, turns(text)[-1:]) for text in texts]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_shape_is_right_or_refused_with_a_reason(template: str, shape: str) -> None:
    messages, tools = SHAPES[shape]

    def samples() -> list[RenderedSample]:
        conversation = read_conversation(messages, "messages", tools=tools)
        return renderer_of(template).samples(conversation, loss_on="assistant", turns="auto")

    if (template, shape) in REFUSED:
        with pytest.raises(RowError, match=REFUSED[template, shape]):
            samples()
        return
    assert [(sample.text, list(sample.spans)) for sample in samples()] == expected(template, shape)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_what_transformers_renders(template: str) -> None:
    for messages in ([USER], [SYSTEM, USER], [USER, ASSISTANT, USER_2], [SYSTEM, USER, ASSISTANT, USER_2]):
        found = renderer_of(template).prompt(Conversation(messages=tuple(messages)))
        wanted = tokenizer_of(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert found == wanted


def test_thinking_can_be_switched_off() -> None:
    """With `enable_thinking=False` the empty reasoning block belongs to the generation prompt and is not trained."""
    renderer = ChatRenderer(tokenizer_of("qwen3"), arguments={"enable_thinking": False})
    conversation = Conversation(messages=(USER, ASSISTANT, USER_2, ASSISTANT_2))
    samples = renderer.samples(conversation, loss_on="assistant", turns="auto")
    assert [sample.text[start:end] for sample in samples for start, end in sample.spans] == [
        "All fine.<|im_end|>",
        "Still fine.<|im_end|>",
    ]
    with pytest.raises(
        RowError, match="the text before message 2, with the generation prompt, is not a prefix of the text"
    ):
        renderer.samples(Conversation(messages=(USER, THOUGHT)), loss_on="assistant", turns="auto")


def test_only_llama_depends_on_the_day() -> None:
    assert [template for template in TEMPLATES if renderer_of(template).depends_on_day] == ["llama3_2"]
    fixed = ChatRenderer(tokenizer_of("llama3_2"), arguments={"date_string": "26 Jul 2024"})
    assert not fixed.depends_on_day
    assert "Today Date: 26 Jul 2024" in fixed.render([USER])


def test_turns_with_thoughts_and_tools_of_qwen3_are_equal_to_a_hand_split_file() -> None:
    tokenizer = tokenizer_of("qwen3")
    conversation = Conversation(messages=(SYSTEM, USER, THOUGHT, USER_2, {**CALL, "content": ""}, RESULT, THOUGHT_2))
    samples = renderer_of("qwen3").samples(conversation, loss_on="assistant", turns="auto")
    hand = [tokenizer.apply_chat_template(list(conversation.messages[:stop]), tokenize=False) for stop in (3, 5, 7)]
    assert [sample.text for sample in samples] == hand
    assert ["Think hard." in text for text in hand] == [True, False, False]


WORDS = st.text(st.sampled_from("ab é東🙂\n\t .'\"\\{}[]%&"), max_size=12)
SPOKEN = st.one_of(WORDS, st.builds("<think>{}</think>{}".format, WORDS, WORDS), st.just("</think>"))


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer", "critic"])), "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if draw(st.integers(0, 3)) == 0:
            arguments = draw(
                st.dictionaries(WORDS, st.one_of(WORDS, st.integers(), st.booleans(), st.none()), max_size=2)
            )
            name = draw(st.sampled_from(["f", "python"]))
            called = {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": "abcdefgh1", "content": draw(WORDS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(SPOKEN)}
        if draw(st.integers(0, 4)) == 0:
            answer["reasoning_content"] = draw(WORDS)
        messages.append(answer)
    return messages


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations())
def test_whatever_is_not_refused_is_whole_and_masked_to_the_character(
    template: str, messages: list[dict[str, Any]]
) -> None:
    conversation = read_conversation(messages, "messages")
    try:
        samples = renderer_of(template).samples(conversation, loss_on="assistant", turns="auto")
    except RowError:
        return
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(samples) in (1, len(answers))
    usual = as_written_for(template, messages)
    trained: list[str] = []
    for number, sample in enumerate(samples):
        found = [match.span() for match in re.finditer(TURN[template], sample.text, re.DOTALL)]
        assert list(sample.spans) == (found if len(samples) == 1 else found[-1:])
        trained += [sample.text[start:end] for start, end in sample.spans]
        stop = len(messages) if len(samples) == 1 else answers[number] + 1
        if not (template == "mistral_nemo" and usual[0]["role"] == "system"):
            roles = [{**one, "role": "system" if one["role"] == "developer" else one["role"]} for one in usual]
            assert sample.text == tokenizer_of(template).apply_chat_template(roles[:stop], tokenize=False)
        for message in messages[:stop]:
            if isinstance(message["content"], str) and message["role"] != "assistant":
                text = message["content"].strip()
                assert text in sample.text or json.dumps(text, ensure_ascii=False)[1:-1] in sample.text
    assert len(trained) == len(answers)
    for index, text in zip(answers, trained, strict=True):
        for piece in re.split(r"</?think>", messages[index]["content"] or ""):
            assert piece.strip() in text
        assert messages[index].get("reasoning_content", "").strip() in text
