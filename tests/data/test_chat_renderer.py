"""Chat templates: spans of the assistant from markers and from prefixes, and templates that allow neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from padfree.choices import LossOn, Turns
from padfree.data.chat_renderer import ChatRenderer, RenderedSample
from padfree.data.conversation import Conversation
from padfree.data.encode import Encoded, Encoder, Passage
from padfree.data.records import RowError
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer
from tests.refused import refused

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
    """Markers can include a newline or exclude a part; adjacent markers are one span."""
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
        RowError, match=r"renders message 3 differently once other messages follow.*data\.turns=auto.*loss_on=last"
    ):
        trained_texts(forgetful, TURNS)
    assert trained_texts(forgetful, TURNS, "last") == ["Four<|im_end|>"]
    assert trained_texts(forgetful, TURNS[:3]) == ["<think>polite</think>  Hello<|im_end|>"]


def test_a_generation_prompt_that_is_not_how_the_turn_begins_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["chatml"].replace("assistant\n{% endif", "assistant\n<think>{% endif")
    assert trained_texts(tokenizer, TURNS[:3]) == ["polite</think>  Hello <|im_end|>"]
    with pytest.raises(
        RowError,
        match=r"the text before message 5, .* is not a prefix of the rendered conversation; set data\.turns=auto",
    ):
        trained_texts(tokenizer, TURNS)
    # the text is the same with markers, and they need no prefix
    tokenizer.chat_template = TEMPLATES["chatml_marked"].replace("assistant\n{% endif", "assistant\n<think>{% endif")
    assert len(trained_texts(tokenizer, TURNS)) == 2
    assert len(trained_texts(tokenizer, TURNS[:3], "last")) == 1
    assert trained_texts(tokenizer, TURNS, "last") == ["Four<|im_end|>"]


def test_a_template_without_headers_or_system_role() -> None:
    tokenizer = tiny_tokenizer("no_system")
    assert trained_texts(tokenizer, TURNS[1:]) == [" <think>polite</think>  Hello <|im_end|>", " Four<|im_end|>"]
    with pytest.raises(RowError, match=r"the chat template raised an error: TemplateError: System role not supported"):
        trained_texts(tokenizer, TURNS)


def test_what_a_template_raises_is_a_bad_row() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + 1 }}{% endfor %}"
    with pytest.raises(RowError, match="the chat template raised an error: TypeError"):
        trained_texts(tokenizer, TURNS)


def test_conversations_without_a_turn_to_train_on() -> None:
    with pytest.raises(RowError, match="no message has the role 'assistant'"):
        trained_texts(PLAIN, TURNS[:2])
    assert trained_texts(PLAIN, TURNS[:2], "all") != []
    opening = [TURNS[2], TURNS[1], TURNS[4]]
    with pytest.raises(RowError, match="message 1 is from the assistant, so the start of its text is unknown"):
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


def test_several_templates_without_a_default_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"tool_use": TEMPLATES["chatml"], "rag": TEMPLATES["chatml"]}
    with refused("data.chat_template", r".* without a default \(rag, tool_use\)"):
        ChatRenderer(tokenizer)
    ChatRenderer(tokenizer, TEMPLATES["chatml"])


QUESTION = {"role": "user", "content": "And then?"}
THINKING = {"role": "assistant", "content": "<think>polite</think>Hello"}


def test_a_template_that_rewrites_earlier_turns_makes_a_sample_of_each_turn() -> None:
    forgetful = tiny_tokenizer("forgetful")
    messages = [TURNS[1], THINKING, QUESTION, THINKING, QUESTION]
    found = samples(forgetful, messages, turns="auto")
    first = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    second = first + "Hello<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    answer = "<think>polite</think>Hello<|im_end|>"
    assert [sample.text for sample in found] == [first + answer + "\n", second + answer + "\n"]
    assert [trained(sample) for sample in found] == [[answer], [answer]]
    for sample, asked in zip(found, (messages[:1], messages[:3]), strict=True):
        before = forgetful.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert sample.text[: sample.spans[0][0]] == before
    assert samples(forgetful, messages[:4], "last", "auto") == found[1:]
    # if the template changes nothing it is one sample, unless turns=apart
    plain = [TURNS[1], TURNS[4], QUESTION, TURNS[4]]
    assert len(samples(forgetful, plain, turns="auto")) == 1
    assert len(samples(forgetful, plain, turns="apart")) == 2
    assert len(samples(PLAIN, plain, turns="apart")) == 2
    assert samples(PLAIN, plain, "all", "apart") == samples(PLAIN, plain, "all", "together")


@pytest.mark.parametrize("template", ["chatml", "chatml_marked", "forgetful"])
def test_turns_of_weight_zero_are_context(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    messages = (TURNS[1], THINKING, QUESTION, TURNS[4], QUESTION, TURNS[4])
    for untrained in ({1}, {3}, {1, 5}, {3, 5}):
        conversation = Conversation(messages=messages, untrained=frozenset(untrained))
        found = ChatRenderer(tokenizer).samples(conversation, loss_on="assistant", turns="auto")
        texts = [text for sample in found for text in trained(sample)]
        said = [messages[index]["content"] + "<|im_end|>" for index in (1, 3, 5) if index not in untrained]
        assert texts == said
    nothing = Conversation(messages=messages, untrained=frozenset({1, 3, 5}))
    with pytest.raises(RowError, match="all assistant messages have weight 0"):
        ChatRenderer(tokenizer).samples(nothing, loss_on="assistant", turns="auto")
    last = Conversation(messages=messages, untrained=frozenset({5}))
    with pytest.raises(RowError, match="the last assistant message has weight 0"):
        ChatRenderer(tokenizer).samples(last, loss_on="last", turns="auto")


def test_thoughts_that_no_sample_shows_are_refused() -> None:
    forgetful = tiny_tokenizer("forgetful")
    messages = [TURNS[1], THINKING, QUESTION, TURNS[4]]
    with pytest.raises(
        RowError,
        match=r"message 2 \(assistant\): content is missing from the rendered text.*strips the reasoning of earlier",
    ):
        samples(forgetful, messages, "all", "auto")
    assert len(samples(forgetful, messages, "last", "auto")) == 1  # the first turn is context, as the model sees it


def test_a_turn_that_does_not_begin_with_the_generation_prompt_is_refused_apart() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["chatml"].replace("assistant\n{% endif", "assistant\n<think>{% endif")
    with pytest.raises(
        RowError, match="the text before message 5, with the generation prompt, is not a prefix of the text"
    ):
        samples(tokenizer, TURNS, turns="apart")
    with pytest.raises(RowError, match="the text before message 5"):
        samples(tokenizer, TURNS, turns="auto")


def test_a_template_that_shows_the_system_message_only_while_it_asks() -> None:
    """Like Mistral-Nemo's template: the sample is the prompt as the model sees it, followed by the answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{% set s, rest = messages[0].content, messages[1:] %}"
        "{% else %}{% set s, rest = '', messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}"
        "[{% if loop.last %}{{ s }}/{% endif %}{{ m.content }}]"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    found = samples(tokenizer, [TURNS[0], TURNS[1], TURNS[4], QUESTION, TURNS[4]], turns="auto")
    assert [sample.text for sample in found] == [
        "[Be short./Hi]Four<|im_end|>",
        "[Hi]Four<|im_end|>[Be short./And then?]Four<|im_end|>",
    ]
    assert [trained(sample) for sample in found] == [["Four<|im_end|>"]] * 2


def test_where_messages_stand() -> None:
    (sample,) = samples(PLAIN, TURNS)
    said = {index: sample.text[start:end] for index, (start, end) in sample.messages}
    assert said == {index: message["content"].strip().removeprefix("<think>") for index, message in enumerate(TURNS)}


def test_the_number_of_renderings_grows_linearly_with_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings = 0
    render = ChatRenderer._rendered

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal renderings
        renderings += 1
        return render(*given, **named)

    monkeypatch.setattr(ChatRenderer, "_rendered", counted)
    counts = []
    for rounds in (10, 20):
        renderings = 0
        pair = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>Hm.</think>Hello"}]
        assert len(samples(tiny_tokenizer("forgetful"), pair * rounds, turns="auto")) == rounds
        counts.append(renderings)
    assert counts[1] < 2.2 * counts[0]
