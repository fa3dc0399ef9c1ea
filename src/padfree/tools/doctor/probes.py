"""Ask a server for log-probabilities of prompts and responses, and for the token ids of texts and chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from padfree.rollout.engines.servers.canary import TEXT, canary_sequences
from padfree.tools.doctor.evidence import Evidence
from padfree.tools.doctor.openai_api import ServerAnswer, ServerProbe
from padfree.train.check_data import ModelLimits

LENGTH, NUM_SAMPLED = 64, 16
"""`LENGTH`: the number of tokens of a prompt. `NUM_SAMPLED`: the number of tokens of a response."""
NUM_RANDOM = 2
LONG, LONGEST = 192, 4096
"""The number of tokens of the long prompt: `LONG`, or more (up to `LONGEST`) to exceed the model's sliding window."""
MESSAGES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "How many bottles are in 17 crates of 24?"}],
    [
        {"role": "user", "content": "Which is heavier, a litre of water or a litre of oil?"},
        {"role": "assistant", "content": "Water."},
        {"role": "user", "content": "Why?"},
    ],
)
TEXTS = (TEXT[:60], TEXT[118:190])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextAnswer:
    """A prompt (a text or messages), the ids that the model's tokenizer gives it, and the answer of the server."""

    asked: str | list[dict[str, str]]
    expected: list[int]
    answer: ServerAnswer
    server_ids: list[int] | None  # None if the server does not return them


def probe_prompts(model: PreTrainedModel, tokenizer: Any, seed: int = 0) -> list[list[int]]:
    """Return prompts to send: texts, random tokens, and a long prompt that exceeds the model's sliding window."""
    limits = ModelLimits.of(model)
    most = limits.positions or limits.trained_positions or LONGEST
    length = max(2, min(LENGTH, most - NUM_SAMPLED))
    prompts = canary_sequences(tokenizer, vocabulary=limits.vocabulary, longest=length + 4)
    rng = np.random.default_rng(seed)
    prompts += [rng.integers(0, limits.vocabulary, length).tolist() for _ in range(NUM_RANDOM)]
    window = getattr(model.config, "sliding_window", None)
    long = max(LONG, 2 * window if isinstance(window, int) else 0)
    long = min(long, LONGEST, most - NUM_SAMPLED)
    if long > length:
        prompts.append([token for prompt in prompts for token in prompt][:long])
        while len(prompts[-1]) < long:
            prompts[-1] += prompts[-1][: long - len(prompts[-1])]
    return prompts


def probe_ids(
    probe: ServerProbe, prompts: Sequence[Sequence[int]], *, vocabulary: int, temperature: float
) -> tuple[Evidence | None, Evidence | None]:
    """Send prompts as token ids. Return the log-probabilities of the prompts and of the server's responses.

    A result is None if the server does not return these log-probabilities.
    """
    prompt_rows, response_rows = [], []
    for number, prompt in enumerate(prompts):
        answer = probe.complete(prompt, max_tokens=NUM_SAMPLED, temperature=temperature, seed=number)
        ids = list(prompt)
        if answer.prompt_ids is not None and answer.prompt_ids != ids:
            probe.missing.add("prompts given as token ids (the server read other ids)")
        if answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(ids) - 1:
            prompt_rows.append((ids, len(ids), list(range(1, len(ids))), answer.prompt_logprobs))
        if answer.is_scored:
            assert answer.tokens is not None
            assert answer.logprobs is not None
            whole = ids + answer.tokens
            response_rows.append((whole, len(ids), list(range(len(ids), len(whole))), answer.logprobs))
    if not response_rows:
        probe.missing.add("log-probabilities of responses with their token ids")
    found = Evidence.of("prompts", prompt_rows, vocabulary=vocabulary) if prompt_rows else None
    responses = None
    if response_rows:
        responses = Evidence.of("responses", response_rows, vocabulary=vocabulary, temperature=temperature)
    return found, responses


def probe_text(probe: ServerProbe, tokenizer: Any, text: str, temperature: float) -> TextAnswer:
    """Ask which token ids the server makes of a text.

    If the server does not return them, ask for a response, from whose log-probabilities they can be inferred.
    """
    answer = probe.complete(text, max_tokens=1, temperature=temperature)
    ids = answer.prompt_ids or probe.tokenize({"prompt": text, "add_special_tokens": True})
    if ids is None:
        answer = probe.complete(text, max_tokens=NUM_SAMPLED, temperature=temperature)
    expected = [int(token) for token in tokenizer(text)["input_ids"]]
    return TextAnswer(asked=text, expected=expected, answer=answer, server_ids=ids)


def probe_chat(
    probe: ServerProbe, messages: list[dict[str, str]], expected: list[int], temperature: float
) -> TextAnswer:
    """Ask which token ids the server makes of messages, in the same way as `probe_text`.

    `expected`: the ids that the model's tokenizer makes of the messages.
    """
    answer = probe.chat(messages, max_tokens=1, temperature=temperature)
    ids = answer.prompt_ids or probe.tokenize({"messages": messages, "add_generation_prompt": True})
    if ids is None:
        answer = probe.chat(messages, max_tokens=NUM_SAMPLED, temperature=temperature)
    return TextAnswer(asked=messages, expected=expected, answer=answer, server_ids=ids)
