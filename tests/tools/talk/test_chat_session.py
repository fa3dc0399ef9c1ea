"""Several turns: token ids of earlier answers are kept, unless the template changes them."""

from __future__ import annotations

import pytest

from padfree.tools.talk.chat_session import ChatSession
from tests.tools.talk.talk_cases import tiny_speaker

MAX_NEW_TOKENS = 12


def test_earlier_answers_keep_their_ids() -> None:
    """Also if encoding their text would give other ids, as for almost all random ids."""
    speaker = tiny_speaker(temperature=1.0)
    conversation = ChatSession(speaker, "Be kind.")
    first = conversation.ask("Hello there!", max_new_tokens=MAX_NEW_TOKENS)
    prompt = speaker.prompt("Hello there!", system="Be kind.")
    assert speaker.chat_tokenizer.encode(first.text) != first.tokens.tolist()
    messages = [*conversation.messages, {"role": "user", "content": "Two?"}]
    rendered = speaker.render(messages)
    ids = conversation.prompt_ids(rendered)
    assert ids[: len(prompt) + len(first.tokens)] == [*prompt, *first.tokens.tolist()]
    assert speaker.chat_tokenizer.decode(ids) == rendered
    conversation.ask("Two?", max_new_tokens=MAX_NEW_TOKENS)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_template_that_rewrites_earlier_turns_is_obeyed() -> None:
    speaker = tiny_speaker("forgetful")
    conversation = ChatSession(speaker)
    conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS)
    thought = {"role": "assistant", "content": "<think>long</think> Hi"}
    conversation.messages[-1] = thought
    rendered = speaker.render([*conversation.messages, {"role": "user", "content": "Two?"}])
    assert "<think>" not in rendered
    assert conversation.prompt_ids(rendered) == speaker.chat_tokenizer.encode_prompt(rendered, begun=True)


def test_turns_draw_other_numbers_and_a_reset_begins_anew() -> None:
    conversation = ChatSession(tiny_speaker(temperature=1.0))
    first = conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS)
    conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS)
    assert conversation.turn == 2
    conversation.reset()
    assert conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS).text == first.text
    conversation.reset("Be kind.")
    assert conversation.system == "Be kind."
    conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS)
    assert conversation.messages[0] == {"role": "system", "content": "Be kind."}


def test_what_cannot_be_asked_leaves_no_turn() -> None:
    conversation = ChatSession(tiny_speaker())
    conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="fill the model's context"):
        conversation.ask("y" * 400, max_new_tokens=MAX_NEW_TOKENS)
    assert conversation.messages == before
    assert conversation.ask("Hello", max_new_tokens=MAX_NEW_TOKENS).text
