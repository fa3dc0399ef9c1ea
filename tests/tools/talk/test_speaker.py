"""Answers: greedy ones equal transformers', streaming changes nothing, and wrong inputs give one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from padfree.rollout.truncation import Truncation
from padfree.tools.talk.find_model import find_model
from padfree.tools.talk.speaker import Answer, Speaker, StopAnswer, open_speaker
from tests.refused import refused
from tests.tools.talk.talk_cases import save_adapters, save_model, tiny_speaker

PROMPTS = ("Hello there!", "Two plus two?", "naïve café, 東京, 🙂", "x")
MAX_NEW_TOKENS = 24


def ids_of(speaker: Speaker, *prompts: str) -> list[list[int]]:
    return [speaker.prompt(prompt) for prompt in prompts or PROMPTS]


def greedy(model: Any, prompt: list[int], stops: tuple[int, ...], max_new_tokens: int = MAX_NEW_TOKENS) -> list[int]:
    """The output of transformers' `generate`."""
    written = model.eval().generate(
        torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(stops), pad_token_id=0
    )
    return [int(token) for token in written[0, len(prompt) :]]


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, decodes: bool | None) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    speaker = tiny_speaker(decodes=decodes)
    prompts = ids_of(speaker)
    answers = speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    expected = [greedy(model, prompt, speaker.stops) for prompt in prompts]
    assert [answer.tokens.tolist() for answer in answers] == expected
    for answer, ids in zip(answers, expected, strict=True):
        assert answer.end == ("stop" if ids[-1] in speaker.stops else "length")
        assert answer.text == speaker.chat_tokenizer.decode(ids[:-1] if answer.end == "stop" else ids)
        assert len(answer.logprobs) == len(ids)
        assert (answer.logprobs < 0).all()


def test_a_folder_of_adapters_answers_as_the_model_with_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_model(tmp_path / "base")
    folder = save_adapters(tmp_path / "adapters", base)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    speaker, plain = (open_speaker(find_model(str(path)), device="cpu") for path in (folder, base))
    prompts = ids_of(speaker)
    found = [answer.tokens.tolist() for answer in speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)]
    assert found == [greedy(model, prompt, speaker.stops) for prompt in prompts]
    assert found != [answer.tokens.tolist() for answer in plain.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)]
    other = save_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(
        ValueError, match=r"do not fit .*; set --base to the base model that the adapters were trained on"
    ):
        open_speaker(find_model(str(folder), base=str(other)), device="cpu")
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"do not fit .*: only one of the two has"):
        open_speaker(find_model(str(folder), base=str(deeper)), device="cpu")


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
def test_streamed_or_not_alone_or_not_the_same_is_drawn(decodes: bool | None) -> None:
    speaker = tiny_speaker(temperature=0.8, seed=5, decodes=decodes)
    prompts = ids_of(speaker)
    together = speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    pieces: dict[int, list[str]] = {number: [] for number in range(len(prompts))}
    streamed = speaker.answer(
        prompts, max_new_tokens=MAX_NEW_TOKENS, on_text=lambda number, text: pieces[number].append(text)
    )
    assert [texts_of(one) for one in streamed] == [texts_of(one) for one in together]
    for number, answer in enumerate(together):
        assert "".join(pieces[number]) == answer.text
        assert len(pieces[number]) > 1
        (alone,) = speaker.answer([prompts[number]], max_new_tokens=MAX_NEW_TOKENS, first=number)
        assert texts_of(alone) == texts_of(answer)
        np.testing.assert_allclose(alone.logprobs, answer.logprobs, atol=1e-4)
    other = tiny_speaker(temperature=0.8, seed=6, decodes=decodes).answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    assert [texts_of(one) for one in other] != [texts_of(one) for one in together]
    later = speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS, turn=1)
    assert [texts_of(one) for one in later] != [texts_of(one) for one in together]


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
def test_answers_can_be_truncated(decodes: bool | None) -> None:
    prompts = ids_of(tiny_speaker())
    greedy = tiny_speaker(decodes=decodes).answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    for rule in (Truncation(top_k=1), Truncation(top_p=1e-6), Truncation(min_p=1.0)):
        speaker = tiny_speaker(temperature=0.8, truncation=rule, decodes=decodes)
        found = speaker.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
        assert [texts_of(one) for one in found] == [texts_of(one) for one in greedy]
        assert not any(one.logprobs.any() for one in found), "a set of one token has probability 1"


def texts_of(answer: Answer) -> tuple[str, list[int], str]:
    return answer.text, answer.tokens.tolist(), answer.end


def test_an_answer_can_be_stopped() -> None:
    speaker = tiny_speaker()
    seen: list[str] = []

    def stop(_: int, text: str) -> None:
        seen.append(text)
        if len(seen) == 3:
            raise StopAnswer

    (whole,) = speaker.answer(ids_of(speaker, "x"), max_new_tokens=MAX_NEW_TOKENS)
    (answer,) = speaker.answer(ids_of(speaker, "x"), max_new_tokens=MAX_NEW_TOKENS, on_text=stop)
    assert answer.end == "interrupted"
    assert answer.tokens.tolist() == whole.tokens[:3].tolist()
    (again,) = speaker.answer(ids_of(speaker, "x"), max_new_tokens=MAX_NEW_TOKENS)
    assert texts_of(again) == texts_of(whole)


def test_the_context_ends_an_answer_and_a_full_one_is_refused() -> None:
    speaker = tiny_speaker()
    assert speaker.context == 256
    prompt = [9] * 250
    (answer,) = speaker.answer([prompt], max_new_tokens=MAX_NEW_TOKENS)
    assert answer.end == "context" if len(answer.tokens) == 6 else answer.end == "stop"
    with refused("prompt"):
        speaker.answer([[9] * 256], max_new_tokens=MAX_NEW_TOKENS)


def test_wrong_inputs_are_one_line(tmp_path: Path) -> None:
    speaker = tiny_speaker()
    for prompt, max_new_tokens, message in (
        ([5, 10_000], MAX_NEW_TOKENS, "prompt: contains token id 10000, but the model's vocabulary has"),
        ([], MAX_NEW_TOKENS, "prompt: ''; give a text of at least one token"),
        ([5], 0, "--max-new-tokens: 0; give 1 to 1,000,000"),
        ([5], 10**12, "--max-new-tokens: 1000000000000; give 1 to 1,000,000"),
    ):
        with pytest.raises(ValueError) as caught:
            speaker.answer([prompt], max_new_tokens=max_new_tokens)
        assert message in str(caught.value)
    for temperature in (float("nan"), float("inf"), -1.0, 1e-30):
        with refused("--temperature"):
            tiny_speaker(temperature=temperature)
    for name, rule in (
        ("--top-k", Truncation(top_k=0)),
        ("--top-p", Truncation(top_p=0.0)),
        ("--top-p", Truncation(top_p=float("nan"))),
        ("--min-p", Truncation(min_p=1.5)),
    ):
        with refused(name):
            tiny_speaker(temperature=1.0, truncation=rule)
    with refused("--top-p", about="temperature 0 takes the most likely token"):
        tiny_speaker(temperature=0.0, truncation=Truncation(top_p=0.9))
    for seed in (-1, 1 << 63):
        with refused("--seed"):
            tiny_speaker(seed=seed)
    with pytest.raises(ValueError, match=r"'user' has a lone surrogate .* at position 1"):
        speaker.prompt("\udcff")
    with refused("--system"):
        tiny_speaker(None).prompt("x", system="be kind")


def test_what_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{{ tone }}"
    )
    files = find_model(str(save_model(tmp_path / "m")))
    speaker = open_speaker(files, chat_template=str(template), template_arguments={"tone": "!"}, device="cpu")
    assert speaker.chat_tokenizer.decode(speaker.prompt("Hello")) == "Hello!"
    with pytest.raises(ValueError, match="chat template: does not render the system message"):
        speaker.prompt("Hello", system="Be kind.")
    with refused("--template-arguments"):
        open_speaker(files, chat_template=str(template), template_arguments={"tune": "!"}, device="cpu")
    with pytest.raises(ValueError, match=r"--chat-template: nowhere.jinja cannot be used"):
        open_speaker(files, chat_template="nowhere.jinja", device="cpu")
    refusing = tiny_speaker("no_system")
    with pytest.raises(ValueError, match="the chat template raised an error: TemplateError: System role not supported"):
        refusing.prompt("Hello", system="Be kind.")


def test_models_that_cannot_answer_are_refused(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", None)
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template; give a file with --chat-template"):
        open_speaker(find_model(str(plain)), device="cpu")
    assert open_speaker(find_model(str(plain)), plain=True, device="cpu").prompt("Hello")
    empty = save_model(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    with pytest.raises(ValueError) as caught:
        open_speaker(find_model(str(empty)), device="cpu")
    assert str(caught.value).endswith(
        "has no weights (model.safetensors or model.safetensors.index.json); copy or download the weights"
    )
    scores = save_model(tmp_path / "scores", architectures=["Qwen3ForSequenceClassification"])
    text = (scores / "config.json").read_text().replace("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
    (scores / "config.json").write_text(text)
    with pytest.raises(ValueError, match="which gives scores and no text"):
        open_speaker(find_model(str(scores)), device="cpu")


def test_weights_that_are_not_finite_are_said() -> None:
    speaker = tiny_speaker()
    with torch.no_grad():
        next(iter(speaker._sampler.policy.model.parameters())).fill_(float("nan"))
    with pytest.raises(ValueError, match="gives log-probabilities that are not finite; check the weights"):
        speaker.answer(ids_of(speaker, "x"), max_new_tokens=2)


@pytest.mark.gpu
def test_streaming_on_a_gpu_draws_the_same(tmp_path: Path) -> None:
    """On CUDA, steps are graphs, and tokens are reported in bursts."""
    files = find_model(str(save_model(tmp_path)))
    cpu, gpu = (open_speaker(files, temperature=0.8, dtype="float32", device=device) for device in ("cpu", "cuda"))
    prompts = ids_of(cpu)
    pieces: list[str] = []
    (streamed,) = gpu.answer(prompts[:1], max_new_tokens=MAX_NEW_TOKENS, on_text=lambda _, text: pieces.append(text))
    assert "".join(pieces) == streamed.text
    expected = cpu.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    found = gpu.answer(prompts, max_new_tokens=MAX_NEW_TOKENS)
    assert [texts_of(one) for one in found] == [texts_of(one) for one in expected]
    assert texts_of(streamed) == texts_of(expected[0])
