"""Chat templates: the assistant's spans by markers and by prefixes, and templates that give neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from padfree.config.choices import LossOn, Turns
from padfree.data.chat import ChatRenderer, RenderedSample
from padfree.data.conversation import Conversation, read_conversation
from padfree.data.encode import Encoded, Encoder, Passage
from padfree.data.records import RowError
from tests.data.tiny_tokenizers import TEMPLATES, tiny_tokenizer

TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>polite</think>  Hello "},
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "Four"},
]
PLAIN = tiny_tokenizer("chatml")
MARKED = tiny_tokenizer("chatml_marked")


def samples(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[dict[str, Any]],
    loss_on: LossOn = "assistant",
    turns: Turns = "together",
) -> list[RenderedSample]:
    return ChatRenderer(tokenizer).samples(Conversation(messages=tuple(messages)), loss_on=loss_on, turns=turns)


def trained(sample: RenderedSample) -> list[str]:
    return [sample.text[start:end] for start, end in sample.spans]


def trained_texts(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], loss_on: LossOn = "assistant"
) -> list[str]:
    (sample,) = samples(tokenizer, messages, loss_on)
    return trained(sample)


def encoded(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> Encoded:
    (sample,) = samples(tokenizer, messages)
    passage = Passage.of_spans(sample.text, sample.spans)
    (result,) = Encoder(tokenizer).encode([passage])
    assert not isinstance(result, RowError)
    return result


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["prefixes", "markers"])
def test_every_turn_of_the_assistant_is_trained_with_its_end_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, last = "<think>polite</think>  Hello <|im_end|>", "Four<|im_end|>"
    assert trained_texts(tokenizer, TURNS) == [first, last]
    assert trained_texts(tokenizer, TURNS, "last") == [last]
    assert trained_texts(tokenizer, TURNS[:3], "last") == [first]
    assert trained_texts(tokenizer, TURNS[:4]) == [first]
    assert trained_texts(tokenizer, TURNS, "all") == [tokenizer.apply_chat_template(TURNS, tokenize=False)]


def test_the_text_is_what_the_tokenizer_itself_renders() -> None:
    for template in ("chatml", "chatml_marked", "forgetful"):
        tokenizer = tiny_tokenizer(template)
        renderer = ChatRenderer(tokenizer)
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=prompt)
            assert renderer.render(TURNS, generation_prompt=prompt) == expected


CONTENT = st.text(st.sampled_from("ab é東🙂\n\t .<>|</s>"), max_size=8)
ROLE = st.sampled_from(["user", "assistant", "tool"])


@settings(max_examples=100)
@given(st.lists(st.tuples(ROLE, CONTENT), min_size=1, max_size=6))
def test_markers_and_prefixes_agree_to_the_token(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": "user", "content": "Hi"}, *({"role": role, "content": text} for role, text in turns)]
    messages.append({"role": "assistant", "content": "ok"})
    by_prefixes, by_markers = encoded(PLAIN, messages), encoded(MARKED, messages)
    assert by_prefixes.tokens.tolist() == by_markers.tokens.tolist()
    assert by_prefixes.loss_mask.tolist() == by_markers.loss_mask.tolist()
    said = "".join(f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant")
    assert PLAIN.decode(by_prefixes.tokens[by_prefixes.loss_mask]) == said
    assert PLAIN.decode(by_prefixes.tokens) == PLAIN.apply_chat_template(messages, tokenize=False)


def test_the_mask_is_the_tokenizers_own_where_no_token_lies_across_a_border() -> None:
    theirs = MARKED.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ours = encoded(MARKED, TURNS)
    assert ours.tokens.tolist() == theirs["input_ids"]
    assert ours.loss_mask.tolist() == [bool(value) for value in theirs["assistant_masks"]]
    assert 0 < ours.loss_mask.sum() < len(ours.loss_mask)


def test_markers_decide_what_a_turn_is() -> None:
    """A template may count its newline, or leave a part out; markers next to each other are one span."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}A:"
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% generation %};\n{% endgeneration %}"
        "{% generation %}{% endgeneration %}{% else %}U:{{ message['content'] }};{% endif %}{% endfor %}"
    )
    assert trained_texts(tokenizer, TURNS[1:]) == ["<think>polite</think>  Hello ;\n", "Four;\n"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_cures() -> None:
    forgetful = tiny_tokenizer("forgetful")
    with pytest.raises(
        RowError, match=r"message 3 reads differently once others follow.*data\.turns=auto.*loss_on=last"
    ):
        trained_texts(forgetful, TURNS)
    assert trained_texts(forgetful, TURNS, "last") == ["Four<|im_end|>"]
    assert trained_texts(forgetful, TURNS[:3]) == ["<think>polite</think>  Hello<|im_end|>"]


def test_a_generation_prompt_that_is_not_how_the_turn_begins_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["chatml"].replace("assistant\n{% endif", "assistant\n<think>{% endif")
    assert trained_texts(tokenizer, TURNS[:3]) == ["polite</think>  Hello <|im_end|>"]
    with pytest.raises(RowError, match=r"the text before message 5, .* is not prefix-stable; set data\.turns=auto"):
        trained_texts(tokenizer, TURNS)
    # the text is the same with markers, and they need no prefix
    tokenizer.chat_template = TEMPLATES["chatml_marked"].replace("assistant\n{% endif", "assistant\n<think>{% endif")
    assert len(trained_texts(tokenizer, TURNS)) == 2
    assert len(trained_texts(tokenizer, TURNS[:3], "last")) == 1
    assert trained_texts(tokenizer, TURNS, "last") == ["Four<|im_end|>"]


def test_a_template_without_headers_or_system_role() -> None:
    tokenizer = tiny_tokenizer("no_system")
    assert trained_texts(tokenizer, TURNS[1:]) == [" <think>polite</think>  Hello <|im_end|>", " Four<|im_end|>"]
    with pytest.raises(RowError, match=r"the chat template refused it: TemplateError: System role not supported"):
        trained_texts(tokenizer, TURNS)


def test_what_a_template_raises_is_a_bad_row() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + 1 }}{% endfor %}"
    with pytest.raises(RowError, match="the chat template refused it: TypeError"):
        trained_texts(tokenizer, TURNS)


def test_conversations_without_a_turn_to_train_on() -> None:
    with pytest.raises(RowError, match="no message with role 'assistant'"):
        trained_texts(PLAIN, TURNS[:2])
    assert trained_texts(PLAIN, TURNS[:2], "all") != []
    opening = [TURNS[2], TURNS[1], TURNS[4]]
    with pytest.raises(RowError, match="message 1 is the assistant's: no prefix shows where it begins"):
        trained_texts(PLAIN, opening)
    assert len(trained_texts(MARKED, opening)) == 2
    assert trained_texts(PLAIN, opening, "last") == ["Four<|im_end|>"]


def test_arguments_tools_and_another_template_reach_the_template() -> None:
    template = "{{ bos_token }}{{ date }}{% for tool in tools %}[{{ tool['name'] }}]{% endfor %}" + TEMPLATES["chatml"]
    renderer = ChatRenderer(PLAIN, template, {"date": "today"})
    conversation = Conversation(messages=tuple(TURNS), tools=[{"name": "add"}])
    (sample,) = renderer.samples(conversation, loss_on="assistant", turns="auto")
    assert sample.text.startswith("<s>today[add]<|im_start|>system")
    assert trained(sample)[-1] == "Four<|im_end|>"


def test_no_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_template: the tokenizer has none; give a file"):
        ChatRenderer(tiny_tokenizer())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"'chat' is empty; expected a list of messages"),
        (["Hi"], r"chat\[0\] is 'Hi'; expected an object with role and content"),
        ([{"content": "Hi"}], r"chat\[0\]\.role is null; expected a string"),
        ([{"role": 1, "content": "Hi"}], r"chat\[0\]\.role is 1; expected a string"),
        ([{"role": "user"}], r"chat\[0\]\.content is null; expected a string"),
        ([TURNS[1], {"role": "user", "content": 5}], r"chat\[1\]\.content is 5; expected a string"),
        ([{"role": "user", "content": "\udc00"}], r"'chat\[0\]\.content' has a lone surrogate"),
    ],
)
def test_malformed_messages_are_named(messages: list[Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        read_conversation(messages, "chat")
