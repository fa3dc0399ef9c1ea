"""Several turns: ids of earlier answers are kept, unless the template rewrites them."""

from __future__ import annotations

import pytest

from padfree.tools.talk.conversation import Conversation
from tests.tools.talk.talk_cases import tiny_speaker

ROOM = 12


def test_earlier_answers_keep_their_ids() -> None:
    """Also where encoding their text would give others, which random ids nearly always do."""
    speaker = tiny_speaker(temperature=1.0)
    conversation = Conversation(speaker, "Be kind.")
    first = conversation.ask("Hello there!", max_new_tokens=ROOM)
    prompt = speaker.prompt("Hello there!", system="Be kind.")
    assert speaker.words.encode(first.text) != first.tokens.tolist()
    messages = [*conversation.messages, {"role": "user", "content": "Two?"}]
    rendered = speaker.render(messages)
    ids = conversation.prompt_ids(rendered)
    assert ids[: len(prompt) + len(first.tokens)] == [*prompt, *first.tokens.tolist()]
    assert speaker.words.decode(ids) == rendered
    conversation.ask("Two?", max_new_tokens=ROOM)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_template_that_rewrites_earlier_turns_is_obeyed() -> None:
    speaker = tiny_speaker("forgetful")
    conversation = Conversation(speaker)
    conversation.ask("Hello", max_new_tokens=ROOM)
    thought = {"role": "assistant", "content": "<think>long</think> Hi"}
    conversation.messages[-1] = thought
    rendered = speaker.render([*conversation.messages, {"role": "user", "content": "Two?"}])
    assert "<think>" not in rendered
    assert conversation.prompt_ids(rendered) == speaker.words.encode_prompt(rendered, begun=True)


def test_turns_draw_other_numbers_and_a_reset_begins_anew() -> None:
    conversation = Conversation(tiny_speaker(temperature=1.0))
    first = conversation.ask("Hello", max_new_tokens=ROOM)
    conversation.ask("Hello", max_new_tokens=ROOM)
    assert conversation.turn == 2
    conversation.reset()
    assert conversation.ask("Hello", max_new_tokens=ROOM).text == first.text
    conversation.reset("Be kind.")
    assert conversation.system == "Be kind."
    conversation.ask("Hello", max_new_tokens=ROOM)
    assert conversation.messages[0] == {"role": "system", "content": "Be kind."}


def test_what_cannot_be_asked_leaves_no_turn() -> None:
    conversation = Conversation(tiny_speaker())
    conversation.ask("Hello", max_new_tokens=ROOM)
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="fill the model's context"):
        conversation.ask("y" * 400, max_new_tokens=ROOM)
    assert conversation.messages == before
    assert conversation.ask("Hello", max_new_tokens=ROOM).text
