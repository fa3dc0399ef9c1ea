"""With real weights, the sampler gives the tokens of `generate`, and the trainer's log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from padfree.distributed import distributed
from padfree.rollout import SamplingRequest
from padfree.rollout.base import Response
from padfree.rollout.engines.in_process.hf_cache import stop_tokens
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.sampling_rng import GREEDY, response_keys
from padfree.sample import Sample
from padfree.train.run import mesh_of
from padfree.train.setup import build_engine
from tests.real.cases import QUESTIONS, SMOLLM2, config_of, conversations, load, message, needs_smollm2

pytestmark = [needs_smollm2, pytest.mark.slow]

MAX_NEW_TOKENS, TEMPERATURE = 64, 0.8
PROMPTS = ("Once upon a time there was a", "def fibonacci(n):\n")
FACTOR = 8.0
"""Allows for the largest of a few hundred rounding errors."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Plain text and chats, of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    chats = [
        tokenizer.apply_chat_template(
            [message("user", question)], add_generation_prompt=True, return_dict=True, tokenize=True
        )["input_ids"]
        for question in QUESTIONS[:2]
    ]
    return [*(tokenizer(text)["input_ids"] for text in PROMPTS), *chats]


def sampled(prompts: list[list[int]], keys: list[int], temperature: float, *, decodes: bool) -> list[Response]:
    model = load()
    sampler = InProcessSampler(
        PolicyModel(model, torch.float32, torch.device("cpu")),
        stops=stop_tokens(AutoTokenizer.from_pretrained(SMOLLM2), model),
        temperature=temperature,
        batch_size=len(prompts),
        decodes=decodes,
    )
    sampler.update_weights(model, 0)
    requests = [
        SamplingRequest(tokens=np.array(prompt), max_new_tokens=MAX_NEW_TOKENS, key=key)
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    found = sampler.sample(requests)
    sampler.close()
    return found


def test_greedy_tokens_are_those_of_generate(prompts: list[list[int]]) -> None:
    """The responses of `generate` for each prompt alone; the sampler generates them together, with either cache."""
    model = load().eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        expected.append(written[0, len(prompt) :].tolist())
    assert max(map(len, expected)) == MAX_NEW_TOKENS
    assert min(map(len, expected)) < MAX_NEW_TOKENS, "one ends before that"
    for decodes in (False, True):
        found = sampled(prompts, [GREEDY] * len(prompts), 1.0, decodes=decodes)
        assert [response.tokens.tolist() for response in found] == expected


def test_sampled_logprobs_are_those_of_the_trainer(prompts: list[list[int]], tmp_path: Path) -> None:
    """And both are as close to float64 as transformers in float32."""
    keys = response_keys(0, 0, np.arange(len(prompts))).tolist()
    responses = sampled(prompts, keys, TEMPERATURE, decodes=False)
    assert len({tuple(response.tokens.tolist()) for response in responses}) == len(prompts)
    samples = [
        Sample(
            tokens=np.concatenate([prompt, response.tokens]),
            loss_mask=np.arange(len(prompt) + len(response.tokens)) >= len(prompt),
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    config = config_of(tmp_path, conversations(), loss={"temperature": TEMPERATURE})
    with distributed(device="cpu") as device:
        engine = build_engine(config, mesh_of(config, device))
        scored = engine.scorer.logprobs(samples)

    def forced(dtype: torch.dtype) -> np.ndarray:
        """Transformers, one sample at a time."""
        model, found = load(dtype=dtype).eval(), []
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            with torch.no_grad():
                scores = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
            found.append(scores.gather(1, tokens[1:, None])[:, 0][torch.tensor(sample.mask[1:])].double())
        return torch.cat(found).numpy()

    wide = forced(torch.float64)
    noise = np.abs(forced(torch.float32) - wide).max()
    assert 0 < noise < 1e-3
    trainer = np.concatenate([values[sample.mask] for values, sample in zip(scored, samples, strict=True)])
    sampler = np.concatenate([response.logprobs for response in responses])
    for found in (trainer, sampler):
        assert np.abs(found - wide).max() <= FACTOR * noise
