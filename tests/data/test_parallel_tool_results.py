"""Results of parallel tool calls stand in one turn where the template puts them there.

A conversation that is rendered message by message would begin a new turn for each result: the model would be trained on
a text that it never sees when it is asked.
"""

from __future__ import annotations

from typing import Any

import pytest

from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import Conversation
from padfree.data.encode import Encoder, Passage
from padfree.data.records import RowError
from padfree.testing.tokenizers import tiny_tokenizer

MARKS = {"prefixes": ("", ""), "markers": ("{% generation %}", "{% endgeneration %}")}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user\n{% endif %}"
    "<result>{{ message['content'] }}</result>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\nBEGIN{{ message['content'] }}<|im_end|>END\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Read a and b."},
    {"role": "assistant", "content": "read a, read b"},
    {"role": "tool", "content": "of a"},
    {"role": "tool", "content": "of b"},
    {"role": "assistant", "content": "Both read."},
]


@pytest.mark.parametrize("marks", MARKS)
def test_results_of_parallel_calls_are_one_turn(marks: str) -> None:
    begin, end = MARKS[marks]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("BEGIN", begin).replace("END", end)
    (sample,) = ChatRenderer(tokenizer).samples(
        Conversation(messages=tuple(MESSAGES)), loss_on="assistant", turns="together"
    )
    assert sample.text == tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert "<result>of a</result><result>of b</result><|im_end|>" in sample.text
    trained = [sample.text[start:end] for start, end in sample.spans]
    assert trained == ["read a, read b<|im_end|>", "Both read.<|im_end|>"]

    (encoded,) = Encoder(tokenizer).encode([Passage.of_spans(sample.text, sample.spans)])
    assert not isinstance(encoded, RowError)
    assert encoded.tokens.tolist() == tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    assert tokenizer.decode(encoded.tokens[encoded.loss_mask]) == "".join(trained)
