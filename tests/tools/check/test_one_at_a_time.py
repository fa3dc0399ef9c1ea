"""The reference equals the results of transformers."""

from __future__ import annotations

import numpy as np
import torch

from padfree.testing.models import build
from padfree.tools.check.one_at_a_time import one_at_a_time, padded_pairs
from tests.tools.check.cases import make_samples


def test_one_at_a_time_is_the_loss_of_transformers() -> None:
    model, samples = build("qwen3", vocab_size=40).eval(), make_samples()
    outcome = one_at_a_time(model, samples)
    count = sum(sample.num_labels for sample in samples)
    assert all(parameter.grad is None for parameter in model.parameters())

    loss = 0.0
    for sample in samples:
        if not sample.num_labels:
            continue
        tokens = torch.from_numpy(sample.tokens)[None]
        labels = torch.where(torch.from_numpy(sample.mask), tokens, -100)
        own = model(input_ids=tokens, labels=labels).loss * sample.num_labels / count
        own.backward()
        loss += float(own.detach())
    assert abs(outcome.loss - loss) < 1e-5
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.gradients[name], parameter.grad)
    logits = model(input_ids=torch.from_numpy(samples[1].tokens)[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(samples[1].tokens[1:])[:, None])[:, 0]
    np.testing.assert_allclose(outcome.logprobs[1][1:], expected.detach().numpy(), atol=1e-5)
    assert outcome.logprobs[1][0] == 0


def test_padded_pairs_differ_by_rounding_only_and_leave_the_model_as_it_was() -> None:
    model, samples = build("gemma3", vocab_size=40).eval(), make_samples()
    alone, pairs = one_at_a_time(model, samples), padded_pairs(model, samples)
    assert model.config._attn_implementation == "sdpa"
    assert abs(alone.loss - pairs.loss) < 1e-5
    for a, b in zip(alone.logprobs, pairs.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(pairs.gradients[name], gradient, atol=1e-4, rtol=1e-3)


def test_gradients_of_a_bfloat16_model_are_added_in_float32() -> None:
    outcome = one_at_a_time(build("gpt2", vocab_size=40).bfloat16().eval(), make_samples((4, 5)))
    assert {gradient.dtype for gradient in outcome.gradients.values()} == {torch.float32}
