"""Tokens and masks of rows of each format, with tiny tokenizers. tests/real has the same with real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.data import RolloutDataSettings, SFTDataSettings, TokenizedDataset, load_pairs, load_sft, read_rollouts
from padfree.data.formats import reading_notes
from padfree.data.store import read_metadata
from padfree.rollout import read_prompts
from padfree.sample import Sample
from padfree.testing.tokenizers import TEMPLATES, tiny_tokenizer
from tests.refused import refused

CHAT = tiny_tokenizer("chatml")
BASE = tiny_tokenizer(kind="bos")
END = "<|im_end|>"
Load = Callable[..., TokenizedDataset]


def turns(*messages: tuple[str, str]) -> str:
    """A conversation as ChatML."""
    return "".join(f"<|im_start|>{role}\n{content}{END}\n" for role, content in messages)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(*rows: Any, tokenizer: Any = CHAT, pairs: bool = False, **changes: Any) -> TokenizedDataset:
        path = tmp_path / "a.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        function = load_pairs if pairs else load_sft
        return function(path, tokenizer, SFTDataSettings(**changes), cache=tmp_path / "cache", num_workers=0)

    return loaded


def texts(sample: Sample, tokenizer: Any = CHAT) -> tuple[str, str]:
    """The whole text of a sample, and its trained text."""
    return tokenizer.decode(sample.tokens), tokenizer.decode(sample.tokens[sample.mask])


NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
UNTRAINED_END = TEMPLATES["chatml_marked"].replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TWO = turns(("user", "Hi"), ("assistant", "Hello"))
HUMAN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize(
    ("row", "text", "trained"),
    [
        ({"messages": [user("Hi"), assistant("Hello")]}, TWO, "Hello"),
        ({"messages": json.dumps([user("Hi"), assistant("Hello")])}, TWO, "Hello"),
        ({"conversations": HUMAN}, TWO, "Hello"),
        ({"conversation": json.dumps(HUMAN), "id": "x"}, TWO, "Hello"),
        ({"conversations": HUMAN, "system": "Be."}, turns(("system", "Be.")) + TWO, "Hello"),
        ({"conversations": HUMAN, "system": ""}, TWO, "Hello"),
        ({"messages": [system("Be."), user("Hi"), assistant("Hello")], "system": " Be."},
         turns(("system", "Be.")) + TWO, "Hello"),
        ({"prompt": "Hi", "completion": "Hello"}, TWO, "Hello"),
        ({"prompt": [user("Hi")], "completion": [assistant("Hello")]}, TWO, "Hello"),
        ({"prompt": user("Hi"), "completion": assistant("Hello")}, TWO, "Hello"),
        ({"prompt": json.dumps([user("Hi")]), "completion": json.dumps([assistant("Hello")])}, TWO, "Hello"),
        ({"prompt": [user("Hi")], "completion": [user("Hi "), assistant("Hello")]}, TWO, "Hello"),
        ({"prompt": json.dumps(user("Hi")), "completion": f" {json.dumps(assistant('Hello'))}"}, TWO, "Hello"),
        ({"prompt": json.dumps(HUMAN[:1]), "completion": json.dumps(HUMAN[1])}, TWO, "Hello"),
        ({"prompt": [user("A"), {"role": "Assistant", "content": "B"}, user("Hi")], "completion": "Hello"},
         turns(("user", "A"), ("assistant", "B")) + TWO, "Hello"),
        ({"prompt": [user("A"), {"role": "gpt", "content": "B"}, {"role": "User", "content": "Hi"}],
          "completion": {"role": "Assistant", "content": "Hello"}},
         turns(("user", "A"), ("assistant", "B")) + TWO, "Hello"),
        ({"prompt": [user("A"), assistant("B"), user("Hi")], "completion": [assistant("Hello")]},
         turns(("user", "A"), ("assistant", "B")) + TWO, "Hello"),
        ({"Question": "Hi", "Answer": "Hello"}, TWO, "Hello"),
        ({"system_prompt": "Be.", "question": "Hi", "response": "Hello"}, turns(("system", "Be.")) + TWO, "Hello"),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, TWO, "Hello"),
        ({"instruction": "Hi", "output": "Hello"}, TWO, "Hello"),
        ({"instruction": "Add.", "input": "2+2", "output": "4"},
         turns(("user", "Add.\n\n2+2"), ("assistant", "4")), "4"),
        ({"instruction": "Hi", "input": None, "output": "Hello", "system": "Be.", "history": [["A", "B"], ["C", "D"]]},
         turns(("system", "Be."), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")) + TWO, "Hello"),
        ({"instruction": "Hi", "output": "Hello", "history": [user("A"), assistant("B")]},
         turns(("user", "A"), ("assistant", "B")) + TWO, "Hello"),
        ({"prompt": "[1, 2]", "response": "Hello"}, turns(("user", "[1, 2]"), ("assistant", "Hello")), "Hello"),
        ({"prompt": "Hi", "response": '{"role": "admin", "from": "x"}'},
         turns(("user", "Hi"), ("assistant", '{"role": "admin", "from": "x"}')), '{"role": "admin", "from": "x"}'),
        ({"prompt": '[{"role": 1}]', "response": "x"}, turns(("user", '[{"role": 1}]'), ("assistant", "x")), "x"),
    ],
)  # fmt: skip
def test_rows_become_the_conversation_that_they_say(load: Load, row: Any, text: str, trained: str) -> None:
    (sample,) = load(row)
    assert texts(sample) == (text, trained + END)


@pytest.mark.parametrize("column", ["response", "chosen", "prompt"])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize("one", [True, False])
def test_json_text_of_a_tool_call_is_read_as_a_message(load: Load, column: str, key: str, one: bool) -> None:
    """The template drops tool calls, so both are refused: the message, and the same message as JSON text."""
    call = {"name": "add", "arguments": {"a": 1}}
    message = {"role": "assistant", key: [{"function": call}] if key == "tool_calls" else call}
    called = message if one else [message]
    row = {"prompt": "Hi", "response": "Hello"} if column != "chosen" else {"prompt": "Hi", "rejected": "No"}
    for value in (called, json.dumps(called)):
        with pytest.raises(ValueError, match=r"tool_calls\[0\]|ends with an assistant message"):
            load({**row, column: value}, pairs=column == "chosen")


def test_a_completion_of_several_turns_trains_its_own_assistant_turns(load: Load) -> None:
    prompt = [user("A"), assistant("B"), user("C")]
    row = {"prompt": prompt, "completion": [assistant("D"), user("E"), assistant("F")]}
    assert texts(load(row)[0])[1] == f"D{END}F{END}"
    assert texts(load(row, loss_on="last")[0])[1] == f"F{END}"
    silent = {"prompt": prompt, "completion": [{**assistant("D"), "weight": 0}, user("E"), assistant("F")]}
    assert texts(load(silent)[0])[1] == f"F{END}"


def test_turns_are_trained_apart_where_the_template_changes_them(load: Load) -> None:
    thought = "<think>x</think>"
    row = {"messages": [user("A"), assistant(f"{thought}B"), user("C"), assistant(f"{thought}D")], "id": 1}
    forgetful = tiny_tokenizer("forgetful")
    data = load(row, tokenizer=forgetful)
    assert [texts(sample, forgetful)[1] for sample in data] == [f"{thought}B{END}", f"{thought}D{END}"]
    assert texts(data[1], forgetful)[0] == turns(
        ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", f"{thought}D")
    )
    assert len(load(row)) == 1
    assert len(load(row, turns="apart")) == 2
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: "):
        load(row, tokenizer=forgetful, turns="together")


def test_a_default_system_prompt_is_for_conversations_without_one(load: Load) -> None:
    own = {"messages": [system("Own."), user("Hi"), assistant("Hello")]}
    data = load({"messages": [user("Hi"), assistant("Hello")]}, own, system="Be.")
    assert texts(data[0])[0] == turns(("system", "Be.")) + TWO
    assert texts(data[1])[0] == turns(("system", "Own.")) + TWO
    (pair,) = load({"prompt": "Hi", "response": "Hello"}, system="Be.")
    assert texts(pair) == (turns(("system", "Be.")) + TWO, f"Hello{END}")
    chosen, rejected = load({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, pairs=True, system="Be.")
    assert texts(chosen)[0] == turns(("system", "Be.")) + TWO
    assert texts(rejected)[0].startswith(turns(("system", "Be.")))
    with refused("data.system"):
        load({"prompt": "Hi", "response": "Hello"}, tokenizer=BASE, system="Be.")


def test_a_prompt_template_is_filled_with_columns(load: Load) -> None:
    row = {"question": "Hi", "level": 3, "right": True, "answer": "Hello"}
    (sample,) = load(row, prompt_template="{level}{right}: {question} {{x}}")
    assert texts(sample)[0] == turns(("user", "3true: Hi {x}"), ("assistant", "Hello"))
    assert texts(load(row, prompt_template="{prompt}\n")[0])[0] == turns(("user", "Hi\n"), ("assistant", "Hello"))
    plain = load(row, prompt_template="Q: {prompt}\nA:", prompt_format="plain")[0]
    assert texts(plain) == (f"Q: Hi\nA:Hello{END}", f"Hello{END}")
    alpaca = {"instruction": "Add.", "input": "2+2", "output": "4"}
    assert texts(load(alpaca, prompt_template="{prompt}!")[0])[0].startswith(turns(("user", "Add.\n\n2+2!")))
    assert texts(load(alpaca, prompt_template="{input}: {prompt}")[0])[0].startswith(turns(("user", "2+2: Add.")))
    context = {"question": "Hi", "context": "Now", "answer": "Hello"}  # a column that is named is used
    assert texts(load(context, prompt_template="{context} {prompt}")[0])[0].startswith(turns(("user", "Now Hi")))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{qestion}",
            r"data\.prompt_template: names \{qestion\}, but a\.jsonl has no such column, only \['answer', 'l', 'qu",
        ),
        (
            "{l}",
            r"data\.prompt_template: does not contain \{prompt\}, so that the column 'question' of a\.jsonl",
        ),
        ("{question} {answer.__class__}", r"\{answer\.__class__\}, but a\.jsonl has no such column"),
        ("{question} {l[0]}", r"\{l\[0\]\}, but a\.jsonl has no such column"),
        ("{question!r}", r"has braces without a column"),
        ("{question:>10}", r"has braces without a column"),
        ('{question} {"a": 1}', r"has braces without a column"),
        ("{question} {}", r"has braces without a column"),
        ("{question", r"expected '\}' before end of string"),
        ("Answer.", r"has no column name in braces; write for example \{prompt\}"),
        ("{question} {l}", r"a\.jsonl line 1: 'l' is a list of 1; expected a string"),
    ],
)
def test_a_prompt_template_with_a_mistake_is_refused(load: Load, template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load({"question": "Hi", "answer": "Hello", "l": [1]}, prompt_template=template)


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([{"messages": [system("A"), user("Hi"), assistant("x")], "system": "B"}], {}, r"different system prompts"),
        ([{"prompt": [user("Hi")], "input": "x", "response": "y"}], {"columns": {"input": "input"}}, r"'input' cannot"),
        ([{"instruction": "Hi", "output": "x", "history": [["A"]]}], {}, r"history\[0\] is a list of 1;"),
        ([{"instruction": "Hi", "output": "x", "history": "A"}], {}, r"history\[0\] is 'A'; expected a list of two"),
        ([{"prompt": [user("A"), assistant("B")], "completion": [assistant("C")]}], {}, r"'prompt' ends with an assi"),
        ([{"prompt": [user("A")], "completion": [user("B"), assistant("C")]}], {}, r"'prompt' is neither its"),
        ([{"prompt": [user("A")], "completion": [user("A")]}], {}, r"'completion' has no answer after 'prompt'"),
        ([{"prompt": "A", "response": "B", "system": "C"}], {"prompt_format": "plain"}, r"'system' is 'C', but"),
        ([{"prompt": "A", "completion": "B"}, {"prompt": "A", "completion": "B", "label": False}], {},
         r"^a\.jsonl line 2: 'label' is false, which marks answers"),
        ([{"prompt": "A", "response": "B"}, {"prompt": "A", "response": "B", "messages": [user("C")]}], {},
         r"^a\.jsonl line 2: 'messages' is a list of 1, which the first row of the file does not have"),
        ([{"messages": [user("A"), assistant("B")]}, {"messages": [user("A"), assistant("B")], "weight": 0}], {},
         r"^a\.jsonl line 2: 'weight' is 0, which weighs rows"),
    ],
)  # fmt: skip
def test_what_would_be_lost_or_doubled_is_refused(load: Load, rows: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(*rows, **changes)


# Token ids


@pytest.mark.parametrize(
    ("row", "tokens", "trained"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [5, 6, 7]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [5, 6, 7], [6, 7]),
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, [5, 6, 7], [7]),
        ({"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 0]}, [5, 6, 7], [6]),
        ({"input_ids": [0, 0, 5, 6], "labels": [-100, -100, -100, 6], "attention_mask": [0, 0, 1, 1]}, [5, 6], [6]),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "length": 2}, [5, 6], [5, 6]),
        ({"input_ids": [5, 6, 7], "labels": None, "attention_mask": None}, [5, 6, 7], [5, 6, 7]),
    ],
)
@pytest.mark.parametrize("tokenizer", [CHAT, BASE])
def test_token_ids_are_taken_as_they_are(load: Load, row: Any, tokens: Any, trained: Any, tokenizer: Any) -> None:
    (sample,) = load(row, tokenizer=tokenizer)
    assert sample.tokens.tolist() == tokens
    assert sample.tokens[sample.mask].tolist() == trained
    assert load(row, tokenizer=tokenizer, loss_on="all")[0].mask.all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [5, 6], "labels": [6, -100]}, r"labels\[0\] is 6; expected the token's own id, 5, or -100"),
        ({"input_ids": [5, 6], "labels": [-100]}, r"'labels' has 1 entries; expected 2"),
        ({"input_ids": [5, 6], "labels": [-100, True]}, r"labels\[1\] is true; expected the token's own id, 6"),
        ({"input_ids": [5, -1]}, r"input_ids\[1\] is -1; expected a token id"),
        ({"input_ids": [5, 2**31]}, r"input_ids\[1\] is 2147483648; expected a token id"),
        ({"input_ids": [5, 6.0]}, r"input_ids\[1\] is 6.0; expected a token id"),
        ({"input_ids": [[5, 6]]}, r"input_ids\[0\] is a list of 2; expected a token id"),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, r"has 2 tokens and none to train on"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, r"attention_mask\[1\] is 0 between entries"),
        ({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 0]}, r"attention_mask\[1\] is 0, but the token"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, r"attention_mask\[1\] is 2; expected 0 or 1"),
        ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [1, 1]}, r"has both 'labels' and 'loss_mask'; keep one"),
    ],
)
def test_token_ids_that_do_not_fit_together_are_bad_rows(load: Load, row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.jsonl line 2: {words}"):
        load({"input_ids": [5, 6], **({"labels": [5, 6]} if "labels" in row else {})}, row)


@pytest.mark.parametrize("column", ["labels", "completion_mask", "loss_mask", "attention_mask"])
@pytest.mark.parametrize("lacking", [{}, {"null": True}])
def test_a_column_that_decides_what_is_trained_is_in_all_rows_or_in_none(
    load: Load, column: str, lacking: dict[str, bool]
) -> None:
    given = {"input_ids": [5, 6], column: [1, 1] if "mask" in column else [5, 6]}
    without = {"input_ids": [5, 6], **({column: None} if lacking else {})}
    for first, second in ((given, without), (without, given)):
        with pytest.raises(ValueError, match=rf"^a\.jsonl line 2: '{column}' is"):
            load(first, second)
        assert len(load(first, second, first, on_bad_row="skip")) == 2
        assert len(load(first, first)) == 2


def test_token_ids_have_no_last_turn(load: Load) -> None:
    with refused("data.loss_on"):
        load({"input_ids": [5, 6]}, loss_on="last")


# Pairs

PAIR = turns(("user", "Hi")), f"Hello{END}", f"No{END}"
LONG = turns(("user", "A"), ("assistant", "B"), ("user", "Hi")), f"Hello{END}", f"No{END}"
OTHER = turns(("system", "Be.")), f"Hello{END}", f"No{END}"
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}


def both(row: dict[str, Any]) -> dict[str, Any]:
    """A row of two answers, Hello and No."""
    answers = {"chosen": "Hello", "rejected": "No"}
    return {
        name: [assistant(answers[name]) if one is ... else one for one in value] if isinstance(value, list) else value
        for name, value in row.items()
    }


EARLIER = [user("A"), assistant("B")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, PAIR),
        ({"prompt": [user("Hi")], "chosen": [...], "rejected": [...]}, PAIR),
        ({"prompt": [user("Hi")], "chosen": assistant("Hello"), "rejected": assistant("No")}, PAIR),
        ({"prompt": [user("Hi")], "chosen": [user("Hi"), ...], "rejected": [user("Hi"), ...]}, PAIR),
        # The answer does not begin with the literal prompt.
        ({"prompt": "Hi", "chosen": [user("Hi "), ...], "rejected": [user("Hi"), ...]}, PAIR),
        ({"prompt": [user("Hi\n")], "chosen": [user("Hi"), ...], "rejected": [user("Hi"), ...]},
         (turns(("user", "Hi\n")), *PAIR[1:])),
        ({"prompt": "Hi", "chosen": [system("Be."), user("Hi"), ...], "rejected": [system("Be."), user("Hi"), ...]},
         (OTHER[0] + PAIR[0], *PAIR[1:])),
        ({"prompt": [system("Be."), user("Hi")], "chosen": [user("Hi"), ...], "rejected": [...]},
         (OTHER[0] + PAIR[0], *PAIR[1:])),
        ({"prompt": [system("Be."), user("Hi")], "chosen": [system("Be. "), user("Hi"), ...], "rejected": [...]},
         (OTHER[0] + PAIR[0], *PAIR[1:])),
        # The prompt is the last user turn, or the first.
        ({"prompt": "Hi", "chosen": [*EARLIER, user("Hi"), ...], "rejected": [*EARLIER, user("Hi"), ...]}, LONG),
        ({"prompt": "A", "chosen": [*EARLIER, user("Hi"), ...], "rejected": [*EARLIER, user("Hi"), ...]}, LONG),
        ({"prompt": [*EARLIER, user("Hi")], "chosen": [...], "rejected": [*EARLIER, user("Hi"), ...]}, LONG),
        # Without a prompt.
        ({"chosen": [user("Hi"), ...], "rejected": [user("Hi"), ...]}, PAIR),
        ({"chosen": [*EARLIER, user("Hi"), ...], "rejected": [*EARLIER, user(" Hi"), ...]}, LONG),
        ({"chosen": [user("Hi"), ...], "rejected": [user("Hi"), ...], "system": "Be."},
         (OTHER[0] + PAIR[0], *PAIR[1:])),
        # LLaMA-Factory
        ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"},
          "rejected": {"from": "gpt", "value": "No"}}, PAIR),
        ({"conversations": [*EARLIER, user("Hi")], "chosen": assistant("Hello"), "rejected": assistant("No")}, LONG),
        ({"instruction": "Hi", "input": "you", "chosen": "Hello", "rejected": "No"},
         (turns(("user", "Hi\n\nyou")), *PAIR[1:])),
        ({"question": "Hi", "chosen": "Hello", "rejected": "No", "system": "Be.", "history": [["A", "B"]]},
         (OTHER[0] + LONG[0], *LONG[1:])),
    ],
)  # fmt: skip
def test_pairs_share_their_context_and_differ_in_the_answer(load: Load, row: Any, expected: Any) -> None:
    context, *answers = expected
    found = load(both(row), pairs=True)
    head = "<|im_start|>assistant\n"
    assert [texts(sample)[0] for sample in found] == [f"{context}{head}{answer}\n" for answer in answers]
    assert [texts(sample)[1] for sample in found] == answers


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Hi", "chosen": "No", "rejected": "No "}, r"'chosen' and 'rejected' are equal"),
        ({"chosen": [user("Hi"), ...], "rejected": [user("Hi"), assistant("Hello ")]}, r"are equal"),
        ({"prompt": "Hi", "chosen": [user("Ho"), ...], "rejected": [...]}, r"'prompt' is neither its first"),
        ({"prompt": "Hi", "chosen": [user("Hi"), ...], "rejected": [user("Ho"), ...]}, r"'rejected' is a whole conv"),
        ({"chosen": [user("Hi"), ...], "rejected": [user("Ho"), ...]}, r"have no message in common"),
        ({"chosen": [*EARLIER, user("C"), ...], "rejected": [*EARLIER, user("D"), ...]},
         r"'chosen' has a message of role 'user' where the two conversations first differ"),
        ({"prompt": "A", "chosen": [assistant("B"), user("C"), ...], "rejected": [assistant("D"), user("C"), ...]},
         r"'chosen' has a message of role 'user' after the first difference"),
        ({"chosen": [user("A"), assistant("B"), user("C"), ...], "rejected": [user("A"), assistant("B")]},
         r"'rejected' is only the beginning of the other answer's conversation"),
        ({"prompt": [system("X"), user("Hi")], "chosen": [system("Y"), user("Hi"), ...], "rejected": [...]},
         r"'prompt' and 'chosen' have different system messages"),
        ({"prompt": "Hi", "chosen": [system("X"), user("Hi"), ...], "rejected": [system("Y"), user("Hi"), ...]},
         r"have no message in common"),
        ({"prompt": "Hi", "chosen": [assistant("Hello"), user("Bye")], "rejected": [...]}, r"of role 'user'"),
        ({"prompt": "Hi", "chosen": [user("Hi")], "rejected": [...]}, r"'chosen' has no answer after 'prompt'"),
        ({"prompt": EARLIER, "chosen": "Hello", "rejected": "No"}, r"'prompt' ends with an assistant"),
        ({"chosen": [...], "rejected": [...]}, r"have no message in common"),
        ({"prompt": "Hi", "chosen": [{**assistant("Hello"), "weight": 0}], "rejected": [...]}, r"of weight 0 in its"),
        ({"prompt": "Hi", "chosen": [CALL, {"role": "tool", "content": "4"}], "rejected": [...]},
         r"'chosen' ends with a message of role 'tool'"),
        ({"prompt": "Hi", "chosen": None, "rejected": "No"}, r"'chosen' is null; expected a string"),
        ({"prompt": "Hi", "chosen": 4, "rejected": "No"}, r"'chosen' is 4; expected a string"),
        ({"conversations": [user("Hi"), assistant("B")], "chosen": "C", "rejected": "D"}, r"'conversations' ends with"),
    ],
)  # fmt: skip
def test_pairs_that_do_not_share_their_context_are_refused(load: Load, row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.jsonl line 1: .*{words}"):
        load(both(row), pairs=True)


def test_an_answer_may_use_tools(load: Load) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] }}{% endfor %}"
        "<|im_end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {
        "prompt": "2+2?",
        "chosen": [CALL, {"role": "tool", "content": "4"}, assistant("Four")],
        "rejected": "Five",
    }
    chosen, rejected = load(row, pairs=True, chat_template=template)
    assert texts(chosen)[1] == f"add{{}}{END}Four{END}"
    assert texts(rejected)[1] == f"Five{END}"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (
            "Human: Hi there\n\nAssistant: yes it is",
            "Human: Hi there\n\nAssistant: no",
            "Human: Hi there\n\nAssistant:",
        ),
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue and wide", "The sky is blue", "The sky is"),
        ("天空是蓝色", "天空是绿色", "天空是"),
    ],
)
def test_plain_pairs_without_a_prompt_share_their_beginning(
    load: Load, chosen: str, rejected: str, prompt: str
) -> None:
    for tokenizer in (CHAT, BASE):
        found = load({"chosen": chosen, "rejected": rejected}, pairs=True, tokenizer=tokenizer)
        begin = "<s>" if tokenizer is BASE else ""
        for sample, answer in zip(found, (chosen, rejected), strict=True):
            assert texts(sample, tokenizer) == (begin + answer + END, answer[len(prompt) :] + END)


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ({"chosen": "Yes it is", "rejected": "No"}, {}, r"have no common prefix"),
        ({"chosen": "Yesterday it was", "rejected": "Yes it is"}, {}, r"have no common prefix"),
        ({"chosen": "It is", "rejected": "It is "}, {}, r"are equal"),
        ({"chosen": "It is", "rejected": "It was"}, {"prompt_format": "chat"}, r"is a string and the"),
        ({"prompt": "What is the sky?", "chosen": "What is the sky? Blue", "rejected": "What is the sky? Green"},
         {"prompt_format": "plain"}, r"'chosen' and 'rejected' begin with the text of 'prompt'; remove it from both"),
    ],
)  # fmt: skip
def test_plain_pairs_that_are_refused(load: Load, row: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(row, pairs=True, **changes)


# Prompts and rollouts


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Hi"}, turns(("user", "Hi"))),
        ({"question": "Hi", "answer": "4"}, turns(("user", "Hi"))),
        ({"problem": "Hi", "solution": "4", "answer": "4"}, turns(("user", "Hi"))),
        ({"prompt": json.dumps([user("Hi")])}, turns(("user", "Hi"))),
        ({"messages": [user("Hi")]}, turns(("user", "Hi"))),
        ({"conversations": [{"from": "human", "value": "Hi"}], "system": "Be."}, OTHER[0] + turns(("user", "Hi"))),
        ({"instruction": "Hi", "input": "you", "output": "4"}, turns(("user", "Hi\n\nyou"))),
        ({"instruction": "Hi", "input": ""}, turns(("user", "Hi"))),
    ],
)
def test_prompts_to_answer(tmp_path: Path, row: Any, text: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(tmp_path / "p.jsonl", CHAT, max_new_tokens=4).prompts
    assert CHAT.decode(prompt.tokens) == f"{text}<|im_start|>assistant\n"
    assert {name: prompt.row[name] for name in row} == row


def test_what_a_reward_sees_of_a_prompt_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"Question": "Hi", "Answer": "4", "level": 2}))
    found = read_prompts(tmp_path / "p.jsonl", CHAT, max_new_tokens=4)
    assert found.prompts[0].row == {"Question": "Hi", "Answer": "4", "level": 2, "prompt": "Hi", "answer": "4"}
    assert found.notes == (
        "data: p.jsonl is read as prompts (Question, Answer); passed to the reward: level; through the chat template",
    )


def test_rollouts_in_text_have_the_same_prompts(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "response": "4", "reward": 1, "system": "Be.", "level": 2}
    (tmp_path / "r.jsonl").write_text(json.dumps(row))
    settings = RolloutDataSettings(prompt_template="{prompt} ({level})")
    found = read_rollouts(tmp_path / "r.jsonl", settings, tokenizer=CHAT)
    head = OTHER[0] + turns(("user", "Hi (2)")) + "<|im_start|>assistant\n"
    assert texts(found.samples[0]) == (f"{head}4{END}", f"4{END}")
    assert found.notes == ("data: r.jsonl is read as rollouts in text (prompt, response, reward, system, level)",)


# Notes about a file


@pytest.mark.parametrize(
    ("row", "changes", "line"),
    [
        ({"id": 1, "instruction": "Hi", "input": "", "output": "x", "source": "s"}, {},
         "Alpaca (instruction, input, output); not used: id, source; through the chat template"),
        ({"prompt": "Hi", "response": "x"}, {"prompt_format": "plain"},
         "prompt and response (prompt, response); as plain text"),
        ({"conversations": HUMAN, "id": 1}, {}, "ShareGPT (conversations); not used: id"),
        ({"text": "Hi there"}, {"system": "Be.", "prompt_template": "{prompt}"},
         "text (text); data.system and data.prompt_template do not apply"),
        ({"input_ids": [5, 6]}, {}, "token ids (input_ids)"),
        ({"input_ids": [5, 6]}, {"append_eos": False, "turns": "apart"},
         "token ids (input_ids); data.turns and data.append_eos do not apply"),
        ({"text": "Hi there"}, {"append_eos": False, "prompt_format": "chat", "turns": "together"},
         "text (text); data.prompt_format and data.turns do not apply"),
        ({"text": "Hi there"}, {"chat_template": TEMPLATES["chatml"]},
         "text (text); data.chat_template does not apply"),
        ({"prompt": "Hi", "response": "x"}, {"append_eos": False},
         "prompt and response (prompt, response); through the chat template; data.append_eos does not apply"),
        ({"prompt": "Hi", "response": "x"}, {"prompt_format": "plain", "append_eos": False, "turns": "apart"},
         "prompt and response (prompt, response); as plain text; data.turns does not apply"),
        ({"messages": [user("Hi"), assistant("x")]}, {"append_eos": False, "turns": "apart", "prompt_format": "chat"},
         "messages (messages); data.append_eos does not apply"),
        ({"messages": [user("Hi"), assistant("x")]}, {"chat_template": NO_END},
         "messages (messages); the chat template ends turns without a special token that is trained, so the model may "
         "not learn to stop"),
        ({"prompt": "Hi", "response": "x"}, {"chat_template": UNTRAINED_END},
         "prompt and response (prompt, response); through the chat template; the chat template ends turns without a "
         "special token that is trained, so the model may not learn to stop"),
        ({"prompt": "Hi", "response": "x"}, {"chat_template": NO_END, "prompt_format": "plain"},
         "prompt and response (prompt, response); as plain text"),
        ({"messages": [user("Hi"), assistant("x")], "weight": 1}, {"columns": {"weight": "unused"}},
         "messages (messages)"),
    ],
)  # fmt: skip
def test_the_store_says_how_a_file_was_read(load: Load, row: Any, changes: dict[str, Any], line: str) -> None:
    for _ in range(2):  # from the cache, too
        about = read_metadata(load(row, **changes).folder)
        assert reading_notes(about["files"]) == (f"data: a.jsonl is read as {line}",)
        assert about["given_ids"] == ("input_ids" in row)


def test_parquet_has_the_same_formats(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    import pyarrow

    rows = [
        {"instruction": "Add.", "input": "2+2", "output": "4", "label": None, "id": 1},
        {"instruction": "Hi", "input": None, "output": "Hello", "label": None, "id": 2},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = load_sft(tmp_path / "a.parquet", CHAT, cache=tmp_path / "cache", num_workers=0)
    assert texts(data[0])[0] == turns(("user", "Add.\n\n2+2"), ("assistant", "4"))
    assert texts(data[1])[0] == TWO
    rows[1]["label"] = False
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"^b\.parquet row 2: 'label' is false, which marks answers"):
        load_sft(tmp_path / "b.parquet", CHAT, cache=tmp_path / "cache", num_workers=0)


def test_samples_of_a_row_are_neighbours_with_its_line(load: Load) -> None:
    thought = "<think>x</think>"
    messages = [user("A"), assistant(f"{thought}B"), user("C"), assistant(f"{thought}D")]
    data = load({"messages": messages}, {"messages": messages[:2]}, tokenizer=tiny_tokenizer("forgetful"))
    assert [sample.uid for sample in data] == ["a.jsonl:1 turn 1", "a.jsonl:1 turn 2", "a.jsonl:2"]
    assert data.report.num_rows == 2


# Rows that would take very long, or that hold what JSON does not have


def test_a_text_of_many_megabytes_is_refused_at_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.data.encode.MOST_CHARACTERS", 1000)
    good = {"prompt": "Hi", "response": "x" * 500}
    words = r"^a\.jsonl line 2: the text has 1,0\d\d characters; expected at most 1,000, so split the row"
    for long in ({"prompt": "y" * 1000, "response": "x"}, {"prompt": "Hi", "response": "x" * 1000}):
        with pytest.raises(ValueError, match=words):
            load(good, long)
        with pytest.raises(ValueError, match=words.replace("0", r"\d", 1)):
            load(good, long, prompt_format="plain")
    assert len(load(good, {"prompt": "y" * 1000, "response": "x"}, on_bad_row="skip")) == 1
    with pytest.raises(ValueError, match=r"^a\.jsonl line 1: the text has 1,0\d\d characters"):
        load({"messages": [user("y" * 1000), assistant("x")]})
    with pytest.raises(ValueError, match=r"^a\.jsonl line 1: the text has 1,0\d\d characters"):
        load({"prompt": "y" * 1000, "chosen": "x", "rejected": "z"}, pairs=True)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "Hi", "response": NaN}', r"'response' is nan; expected a string"),
        ('{"instruction": "Hi", "input": NaN, "output": "x"}', r"'input' is nan; expected a string"),
        ('{"prompt": "Hi", "response": "x", "system": Infinity}', r"'system' is inf; expected a string"),
        ('{"input_ids": [1, NaN]}', r"input_ids\[1\] is nan; expected a token id"),
        ('{"input_ids": [1, 2], "labels": [1, -Infinity]}', r"labels\[1\] is -inf; expected the token's own id"),
        ('{"messages": [{"role": "user", "content": NaN}]}', r"messages\[0\]\.content is nan; expected a string"),
        ('{"messages": [{"role": "user", "content": "x", "n": 1e999}]}', r"messages\[0\]\.n is inf; expected a finite"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "a", "x": NaN}]}',
            r"tools\[0\]\.x is nan",
        ),
        ('{"messages": ' + "[" * 400 + "]" * 400 + "}", r"messages\[0\] is a list of 1; expected an object"),
        ('{"messages": [{"role": "user", "content": "x", "n": ' + "[" * 400 + "]" * 400 + "}]}", r"nested too deeply"),
    ],
)
def test_not_a_number_and_deep_nesting_are_bad_rows_with_their_field(load: Load, row: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^a\.jsonl line 1: .*{words}"):
        load(row)


CONTENT = '{"role": "assistant", "content": "a", "content": "b"}'
ARGUMENTS = '{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{\\"x\\": 1, \\"x\\": 2}"}]}'


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('{"prompt": "a", "prompt": "b", "response": "c"}', "prompt"),
        (f'{{"messages": [{{"role": "user", "content": "a"}}, {CONTENT}]}}', "content"),
        (f'{{"messages": [{{"role": "user", "content": "a"}}, {ARGUMENTS}]}}', "x"),
        (json.dumps({"messages": f'[{{"role": "user", "content": "a"}}, {CONTENT}]'}), "content"),
        (json.dumps({"prompt": "a", "response": CONTENT}), "content"),
        (json.dumps({"prompt": "a", "response": f"[{CONTENT}]"}), "content"),
        (json.dumps({"prompt": "a", "response": "c", "tools": '[{"name": "f", "name": "g"}]'}), "name"),
    ],
)
def test_a_key_that_is_given_twice_is_a_bad_row(load: Load, row: str, key: str) -> None:
    good = {"messages": [user("Hi"), assistant("x")]} if "messages" in row else {"prompt": "Hi", "response": "x"}
    assert len(load(good, row, on_bad_row="skip")) == 1
    with pytest.raises(ValueError, match=rf"an object has the key '{key}' twice; expected each key once"):
        load(row)


def test_a_text_may_be_json_with_a_key_twice(load: Load) -> None:
    text = '{"a": 1, "a": 2}'
    assert texts(load({"prompt": "Hi", "response": text})[0])[1] == f"{text}{END}"


def test_a_template_number_must_be_finite(load: Load) -> None:
    with pytest.raises(ValueError, match=r"^a\.jsonl line 1: 'level' is nan; expected a string or a finite number"):
        load('{"prompt": "Hi", "level": NaN, "response": "x"}', prompt_template="{prompt} {level}")
