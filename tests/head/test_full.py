"""The reference, against a number worked out by hand."""

from __future__ import annotations

import math

import torch

from padfree.batch import LmHead
from padfree.head.full import full_scores


def test_two_tokens_by_hand() -> None:
    """hidden 1 and 2, weights 0, ln 2, ln 3: probabilities of token 0 are 1/6 2/6 3/6, of token 1 1/14 4/14 9/14."""
    logprobs, entropy = full_scores(
        torch.tensor([[1.0], [2.0]], dtype=torch.float64),
        LmHead(weight=torch.tensor([[0.0], [math.log(2)], [math.log(3)]], dtype=torch.float64)),
        torch.tensor([1, 2]),
        torch.ones(2, dtype=torch.float64),
        entropy=True,
    )
    torch.testing.assert_close(logprobs.exp(), torch.tensor([2 / 6, 9 / 14], dtype=torch.float64))
    assert entropy is not None
    shares = [[1 / 6, 2 / 6, 3 / 6], [1 / 14, 4 / 14, 9 / 14]]
    expected = [-sum(share * math.log(share) for share in row) for row in shares]
    torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float64))


def test_temperature_divides_and_cap_comes_first() -> None:
    logprobs, entropy = full_scores(
        torch.tensor([[10.0]]),
        LmHead(weight=torch.tensor([[1.0], [-1.0]]), bias=torch.tensor([0.0, 2.0]), softcap=4.0, logit_scale=0.1),
        torch.tensor([0]),
        torch.tensor([0.5]),
        entropy=False,
    )
    first, second = (4 * math.tanh(0.1 * raw / 4) * 0.5 for raw in (10.0, -8.0))
    assert entropy is None
    torch.testing.assert_close(logprobs, torch.tensor([-math.log1p(math.exp(second - first))]))
