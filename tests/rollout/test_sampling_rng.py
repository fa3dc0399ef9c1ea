"""Counter-based noise: it depends only on its key, and sampling with it follows the softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.arrays import splitmix64
from padfree.rollout import sampling_rng as module
from padfree.rollout.sampling_rng import GREEDY, LARGE, _mixed_on_device, gumbel_argmax, gumbel_noise, response_keys


def test_keys_depend_on_seed_batch_and_number_alone() -> None:
    keys = response_keys(3, 7, np.arange(6))
    assert np.array_equal(response_keys(3, 7, np.array([4, 1])), keys[[4, 1]])
    everything = [response_keys(seed, batch, np.arange(6)) for seed in (0, 3, 2**63 - 1) for batch in (0, 1, 7)]
    assert len(set(np.concatenate(everything).tolist())) == 3 * 3 * 6


def test_the_hash_is_splitmix64_and_stays_so() -> None:
    """A changed hash would change the rollouts of resumed runs."""
    assert splitmix64(np.zeros(1, np.uint64)).tolist() == [0xE220A8397B1DCDAF], (
        "the first values of splitmix64 with seed 0"
    )
    values = np.array([0, 1, 2**63, 2**64 - 1, 123456789], np.uint64)
    on_device = _mixed_on_device(torch.from_numpy(values.view(np.int64).copy()))
    assert np.array_equal(on_device.numpy().view(np.uint64), splitmix64(values))
    assert response_keys(1, 2, np.array([3, 4])).tolist() == [-3426316478316322125, -4390005432366339039]


def test_noise_of_a_response_does_not_depend_on_its_batch() -> None:
    keys = torch.from_numpy(response_keys(0, 1, np.arange(5)))
    sampling_rng = gumbel_noise(keys, 2, 11)
    assert sampling_rng.shape == (5, 11)
    assert torch.equal(gumbel_noise(keys[3:4], 2, 11), sampling_rng[3:4])
    assert not torch.equal(gumbel_noise(keys, 3, 11), sampling_rng)
    assert torch.isfinite(sampling_rng).all()


@pytest.mark.parametrize("position", [0, 5])
def test_samples_follow_the_softmax(position: int) -> None:
    number = 40_000
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    keys = torch.from_numpy(response_keys(9, 4, np.arange(number)))
    sampled = (probabilities.log() + gumbel_noise(keys, position, 5)).argmax(1)
    found = torch.bincount(sampled, minlength=5) / number
    deviation = (probabilities * (1 - probabilities) / number).sqrt()
    assert ((found - probabilities).abs() < 4 * deviation).all(), found


def test_noise_has_the_moments_of_a_gumbel_variable_and_no_correlation() -> None:
    keys = torch.from_numpy(response_keys(0, 0, np.arange(400)))
    sampling_rng = torch.stack([gumbel_noise(keys, position, 50).double() for position in range(4)])
    assert sampling_rng.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert sampling_rng.var().item() == pytest.approx(np.pi**2 / 6, abs=0.05)
    for first, second in (
        (sampling_rng[0], sampling_rng[1]),
        (sampling_rng[:, :-1], sampling_rng[:, 1:]),
        (sampling_rng[..., :-1], sampling_rng[..., 1:]),
    ):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.03


SCORES = {
    "peaked": lambda values: values * 6,
    "flat": lambda values: values * 0,
    "nearly flat": lambda values: values,
    "certain": lambda values: torch.where(torch.arange(values.shape[1]) == 17, 90.0, values),
    "impossible tokens": lambda values: torch.where(values < 0.5, -torch.inf, values),
    "one possible token": lambda values: torch.where(torch.arange(values.shape[1]) == 4095, values, -torch.inf),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scores_of", SCORES.values(), ids=SCORES)
def test_candidates_hold_the_largest_sum(scores_of: Callable[[Tensor], Tensor], threads: int) -> None:
    """`gumbel_argmax` checks few tokens of a large vocabulary and finds the same token as a full comparison."""
    number, vocabulary = 50, LARGE + 1
    logits = torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(0))
    scores = torch.log_softmax(scores_of(logits), dim=1)
    keys = torch.from_numpy(response_keys(5, 6, np.arange(number)))
    keys[7] = keys[20] = GREEDY
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for position in (3, torch.arange(number) * 5):
            expected = (scores + gumbel_noise(keys, position, vocabulary)).argmax(1)
            assert torch.equal(gumbel_argmax(scores, keys, position), expected)
    finally:
        torch.set_num_threads(before)


def test_all_tokens_are_compared_if_no_candidate_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small CANDIDATES the bound often fails, which must not change the sampled token."""
    monkeypatch.setattr(module, "CANDIDATES", 0.7)
    number, vocabulary = 200, LARGE
    scores = torch.log_softmax(torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(1)) * 3, dim=1)
    keys = torch.from_numpy(response_keys(1, 1, np.arange(number)))
    sums = scores + gumbel_noise(keys, 0, vocabulary)
    assert (sums.amax(1) < -np.log(0.7)).sum() > 40, "the bound fails for many of them"
    assert torch.equal(gumbel_argmax(scores, keys, 0), sums.argmax(1))


def test_scores_that_are_not_numbers_give_a_token_of_the_vocabulary() -> None:
    scores = torch.log_softmax(torch.randn(3, LARGE, generator=torch.Generator().manual_seed(2)), dim=1)
    scores[1] = torch.nan
    keys = torch.from_numpy(response_keys(1, 1, np.arange(3)))
    sampled = gumbel_argmax(scores, keys, 0)
    assert ((sampled >= 0) & (sampled < LARGE)).all()
    assert torch.equal(sampled, (scores + gumbel_noise(keys, 0, LARGE)).argmax(1))
