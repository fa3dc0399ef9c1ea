"""The SFT loss against a loop."""

from __future__ import annotations

import numpy as np
import torch

from padfree.losses import sft_loss
from tests.losses.cases import by_sample, random_inputs, with_grad


def test_weighted_negative_log_likelihood(rng: np.random.Generator) -> None:
    inputs, (logprobs,) = with_grad(random_inputs(rng), "logprobs")
    output = sft_loss(inputs)
    expected = -sum((sample["weights"] * sample["logprobs"]).sum() for sample in by_sample(inputs))
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    torch.testing.assert_close(logprobs.grad, -inputs.weights)
    total, count = output.statistics["nll"]
    torch.testing.assert_close(total, -logprobs[inputs.mask].detach().sum())
    assert int(count) == int(inputs.mask.sum())
