"""`padfree generate` and `padfree chat` with a real model. PADFREE_REAL names the folder that holds `smollm2`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.cli.main import main
from padfree.tools.talk.chat_session import ChatSession
from padfree.tools.talk.find_model import find_model
from padfree.tools.talk.speaker import Speaker, open_speaker

REAL = os.environ.get("PADFREE_REAL")
pytestmark = pytest.mark.skipif(REAL is None, reason="PADFREE_REAL, the folder of real models, is not set")
QUESTIONS = ("What is the capital of France?", "Write a sentence with an emoji and the word Zürich.", "Count to five.")
MAX_NEW_TOKENS = 48


@pytest.fixture(scope="module")
def folder() -> str:
    assert REAL is not None
    return str(Path(REAL) / "smollm2")


@pytest.fixture(scope="module")
def speaker(folder: str) -> Speaker:
    return open_speaker(find_model(folder), device="cpu")


@pytest.fixture(scope="module")
def stock(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_greedy_tokens_are_those_of_transformers(speaker: Speaker, stock: Any, folder: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [speaker.prompt(question) for question in QUESTIONS]
    for answer, prompt, question in zip(
        speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS), prompts, QUESTIONS, strict=True
    ):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )
        assert prompt == rendered["input_ids"]
        with torch.no_grad():
            written = stock.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[
                0, len(prompt) :
            ]
        assert answer.tokens.tolist() == written.tolist()


def test_logprobs_are_those_of_teacher_forcing(folder: str, stock: Any) -> None:
    speaker = open_speaker(find_model(folder), device="cpu", temperature=0.8, seed=2)
    prompt = speaker.prompt(QUESTIONS[1])
    (answer,) = speaker.answer([prompt], max_new_tokens=MAX_NEW_TOKENS)
    with torch.no_grad():
        logits = stock(torch.tensor([[*prompt, *answer.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.8, -1).gather(1, torch.from_numpy(answer.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-3)


def test_the_capital_of_france(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, QUESTIONS[0], "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_a_chat_remembers(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n"))
    assert main(["chat", folder, "--device", "cpu", "--max-new-tokens", "40"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "The capital of France is Paris."
    assert "Rome" in second


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "gemma3", "deepseek_v3", "mistral_nemo"])
def test_second_turns_of_real_templates(name: str) -> None:
    """In a second turn, the model gets both turns as the template renders them, with or without reasoning."""
    assert REAL is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(REAL) / "tokenizers" / name)
    from padfree.data.chat_renderer import ChatRenderer
    from padfree.rollout.environment.episode_policy import ChatTokenizer

    class Scripted:
        """Gives prescribed answers, in token ids that its tokenizer would not choose."""

        def __init__(self, text: str) -> None:
            self.chat_tokenizer = ChatTokenizer(tokenizer, ChatRenderer(tokenizer), len(tokenizer))
            self.ids = [token for letter in text for token in self.chat_tokenizer.encode(letter)]
            self.text = text

        render, prompt = Speaker.render, Speaker.prompt

        def answer(self, prompts: Any, **_: Any) -> Any:
            from padfree.tools.talk.speaker import Answer

            self.prompt_ids = prompts[0]
            tokens = np.array([*self.ids, tokenizer.eos_token_id])
            return [Answer(text=self.text, tokens=tokens, logprobs=-np.ones(len(tokens), np.float32), end="stop")]

    thought = "<think>\nHm.\n</think>\n\nParis"
    for text in ("Paris", thought):
        scripted: Any = Scripted(text)
        conversation = ChatSession(scripted)
        conversation.ask("Capital of France?", max_new_tokens=9)
        first = list(scripted.prompt_ids)
        conversation.ask("And of Italy?", max_new_tokens=9)
        messages = conversation.messages[:3]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert scripted.chat_tokenizer.decode(scripted.prompt_ids) == rendered
        kept = scripted.prompt_ids[: len(first) + len(scripted.ids)] == [*first, *scripted.ids]
        forgets = text == thought and "Hm." not in rendered
        assert kept is not forgets
