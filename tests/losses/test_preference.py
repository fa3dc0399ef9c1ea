"""Pair losses against loops, on a whole pack and shared between two ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from padfree.batch import SampleInfo
from padfree.losses import (
    DPOSettings,
    LossInputs,
    RewardModelSettings,
    dpo_loss,
    preference_pairs,
    reward_model_loss,
    sample_ends,
)
from tests.losses.cases import by_sample, random_inputs, select_tokens, with_grad
from tests.losses.test_policy_loss import in_turns
from tests.refused import refused

LENGTHS = (6, 4, 9, 3, 7, 5)  # the fourth sample has no scored token
PAIRS = torch.tensor([[0, 1], [4, 2], [3, 5]])
WEIGHTS = torch.tensor([0.5, 0.25, 0.3], dtype=torch.float64)


def slow_dpo(inputs: LossInputs, settings: DPOSettings) -> torch.Tensor:
    sums = [(s["logprobs"] - s["ref_logprobs"]).sum() for s in by_sample(inputs)]
    total = torch.zeros((), dtype=torch.float64)
    for weight, (chosen, rejected) in zip(WEIGHTS, PAIRS.tolist(), strict=True):
        d = settings.beta * (sums[chosen] - sums[rejected])
        smoothing = settings.label_smoothing
        total = total - weight * ((1 - smoothing) * logsigmoid(d) + smoothing * logsigmoid(-d))
    return total


@pytest.mark.parametrize("settings", [DPOSettings(), DPOSettings(beta=2.0, label_smoothing=0.2)], ids=str)
def test_dpo_against_the_loop(settings: DPOSettings, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, lengths=LENGTHS)
    ours, (logprobs,) = with_grad(inputs, "logprobs")
    theirs, (expected_logprobs,) = with_grad(inputs, "logprobs")
    output, expected = dpo_loss(ours, settings, PAIRS, WEIGHTS), slow_dpo(theirs, settings)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    expected.backward()
    torch.testing.assert_close(logprobs.grad, torch.where(inputs.mask, expected_logprobs.grad, 0.0))

    sums = [settings.beta * float((s["logprobs"] - s["ref_logprobs"]).sum()) for s in by_sample(inputs)]
    differences = [sums[c] - sums[r] for c, r in PAIRS.tolist()]
    expected_statistics = {
        "accuracy": sum(d > 0 for d in differences),
        "margin": sum(differences),
        "chosen": sum(sums[c] for c, _ in PAIRS.tolist()),
        "rejected": sum(sums[r] for _, r in PAIRS.tolist()),
    }
    for name, value in expected_statistics.items():
        total, count = output.statistics[name]
        assert float(total) == pytest.approx(value, rel=1e-12)
        assert float(count) == 3


def slow_variant(inputs: LossInputs, settings: DPOSettings) -> torch.Tensor:
    """By formula, one pair at a time."""
    total = torch.zeros((), dtype=torch.float64)
    values = []
    for sample in by_sample(inputs):
        tokens = sample["logprobs"] - (sample["ref_logprobs"] if settings.needs_reference else 0.0)
        values.append(tokens.sum() / max(len(tokens), 1) if settings.means else tokens.sum())
    beta, smoothing = settings.beta, settings.label_smoothing
    for weight, (chosen, rejected) in zip(WEIGHTS, ANSWERED.tolist(), strict=True):
        x, y = values[chosen], values[rejected]
        if settings.variant == "hinge":
            loss = torch.relu(1 - beta * (x - y))
        elif settings.variant == "ipo":
            loss = (x - y - 1 / (2 * beta)) ** 2
        elif settings.variant == "orpo":
            odds = (x - y) - (torch.log1p(-torch.exp(x)) - torch.log1p(-torch.exp(y)))
            loss = -x - beta * logsigmoid(odds)
        else:
            d = beta * (x - y) - settings.gamma
            loss = -(1 - smoothing) * logsigmoid(d) - smoothing * logsigmoid(-d)
        total = total + weight * loss
    return total


ANSWERED = torch.tensor([[0, 1], [4, 2], [5, 1]])
"""Pairs whose answers all have scored tokens: an empty answer has no odds."""

VARIANTS = [
    DPOSettings(normalise=True),
    DPOSettings(variant="hinge", beta=0.7),
    DPOSettings(variant="ipo"),
    DPOSettings(variant="ipo", beta=0.4, normalise=False),
    DPOSettings(variant="simpo", beta=2.0, gamma=0.5, label_smoothing=0.1),
    DPOSettings(variant="orpo", beta=0.3),
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_variants_against_their_formulas_whole_and_shared(settings: DPOSettings, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, lengths=LENGTHS)
    ours, (logprobs,) = with_grad(inputs, "logprobs")
    theirs, (expected_logprobs,) = with_grad(inputs, "logprobs")
    output, expected = dpo_loss(ours, settings, ANSWERED, WEIGHTS), slow_variant(theirs, settings)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    expected.backward()
    whole = torch.where(inputs.mask, expected_logprobs.grad, 0.0)
    torch.testing.assert_close(logprobs.grad, whole)
    held = torch.rand(len(inputs.mask)) < 0.4
    shares = [select_tokens(inputs, held.nonzero()[:, 0]), select_tokens(inputs, (~held).nonzero()[:, 0])]
    losses, grads, _ = in_turns(
        lambda share, reduce: dpo_loss(share, settings, ANSWERED, WEIGHTS, reduce=reduce),
        [with_grad(s, "logprobs") for s in shares],
    )
    torch.testing.assert_close(sum(losses), output.loss.detach())
    torch.testing.assert_close(grads[0], whole[held])
    torch.testing.assert_close(grads[1], whole[~held])


def test_dpo_shared_by_two_ranks(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, lengths=LENGTHS)
    settings = DPOSettings(beta=0.7, label_smoothing=0.1)
    whole, (logprobs,) = with_grad(inputs, "logprobs")
    expected = dpo_loss(whole, settings, PAIRS, WEIGHTS)
    expected.loss.backward()
    held = torch.rand(len(inputs.mask)) < 0.4
    shares = [select_tokens(inputs, held.nonzero()[:, 0]), select_tokens(inputs, (~held).nonzero()[:, 0])]
    losses, grads, statistics = in_turns(
        lambda share, reduce: dpo_loss(share, settings, PAIRS, WEIGHTS, reduce=reduce),
        [with_grad(s, "logprobs") for s in shares],
    )
    torch.testing.assert_close(sum(losses), expected.loss.detach())
    assert logprobs.grad is not None
    torch.testing.assert_close(grads[0], logprobs.grad[held])
    torch.testing.assert_close(grads[1], logprobs.grad[~held])
    for name, (total, count) in expected.statistics.items():
        torch.testing.assert_close(sum(s[name][0] for s in statistics), total)
        torch.testing.assert_close(sum(s[name][1] for s in statistics), count)


def test_a_pack_without_pairs_still_has_a_gradient(rng: np.random.Generator) -> None:
    inputs, (logprobs,) = with_grad(random_inputs(rng), "logprobs")
    output = dpo_loss(inputs, DPOSettings(), torch.zeros((0, 2), dtype=torch.long), torch.zeros(0))
    output.loss.backward()
    assert output.loss == 0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_reward_model_against_the_loop(margin: float) -> None:
    lengths = torch.tensor([3, 1, 4, 2])
    sample_index = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 1, 4, 2, 2]))
    position_ids = torch.cat([torch.arange(n) for n in (3, 1, 4, 2, 2)])
    ends = sample_ends(position_ids, sample_index, lengths)
    assert ends.nonzero()[:, 0].tolist() == [2, 3, 7, 9]
    scores = torch.randn(12, dtype=torch.float64, requires_grad=True)
    pairs, weights = torch.tensor([[0, 2], [3, 1]]), torch.tensor([0.5, 0.5], dtype=torch.float64)
    output = reward_model_loss(scores, ends, sample_index, 4, RewardModelSettings(margin=margin), pairs, weights)
    expected = -0.5 * (logsigmoid(scores[2] - scores[7] - margin) + logsigmoid(scores[9] - scores[3] - margin))
    torch.testing.assert_close(output.loss, expected)
    (grad,) = torch.autograd.grad(output.loss, scores)
    (expected_grad,) = torch.autograd.grad(expected, scores)
    torch.testing.assert_close(grad, expected_grad)


def info(index: int, group: str | None, reward: float | None) -> SampleInfo:
    return SampleInfo(index=index, length=3, group=group, reward=reward)


def test_pairs_from_groups_and_rewards() -> None:
    samples = [info(0, "a", 0.0), info(1, "b", 1.0), info(2, "a", 1.0), info(3, "b", -1.0)]
    assert preference_pairs(samples).tolist() == [[2, 0], [1, 3]]
    assert preference_pairs([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([info(0, "a", 0.0)], "group: 'a' is the group of 1 samples of a pack"),
        ([info(i, "a", float(i)) for i in range(3)], "group: 'a' is the group of 3 samples"),
        ([info(0, None, 0.0), info(1, None, 1.0)], "group: None"),
        ([info(0, "a", 1.0), info(1, "a", 1.0)], "reward: is 1.0 and 1.0 for the answers of group 'a'"),
        ([info(0, "a", None), info(1, "a", 1.0)], "reward: is None and 1.0"),
    ],
)
def test_what_is_not_a_pair_is_refused(samples: list[SampleInfo], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_pairs(samples)


def test_pairs_and_weights_must_fit(rng: np.random.Generator) -> None:
    with refused("pairs"):
        dpo_loss(random_inputs(rng, lengths=LENGTHS), DPOSettings(), PAIRS, WEIGHTS[:2])
