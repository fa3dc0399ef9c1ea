"""Loss inputs from a batch, and statistics that add up."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch

from padfree.losses import LossInputs, merge_statistics
from padfree.losses.types import weighted_loss
from padfree.packing.collate import collate
from padfree.sample import TOKEN_ARRAYS, Sample
from tests.refused import refused


def test_from_batch_takes_what_the_rollouts_brought() -> None:
    arrays = {name: np.arange(4, dtype=np.float32) + 10 * place for place, name in enumerate(TOKEN_ARRAYS)}
    packed = collate([Sample(tokens=np.arange(4), loss_mask=np.array([0, 0, 1, 1]), **arrays)]).padded_to(6)
    scores = torch.zeros(6)
    inputs = LossInputs.from_batch(packed, logprobs=scores, values=scores)
    assert inputs.mask.tolist() == [False, True, True, False, False, False]
    assert inputs.rollout_logprobs.tolist() == [1, 2, 3, 0, 0, 0]
    assert inputs.ref_logprobs.tolist() == [11, 12, 13, 0, 0, 0]
    assert inputs.advantages.tolist() == [21, 22, 23, 0, 0, 0]
    assert inputs.returns.tolist() == [31, 32, 33, 0, 0, 0]
    assert inputs.old_values.tolist() == [41, 42, 43, 0, 0, 0]
    assert inputs.old_logprobs.tolist() == [51, 52, 53, 0, 0, 0]
    assert inputs.logprobs is inputs.values is scores
    assert inputs.weights is packed.weights
    assert inputs.num_samples == 1


def test_from_batch_without_rollouts() -> None:
    packed = collate([Sample(tokens=np.arange(4))])
    inputs = LossInputs.from_batch(packed)
    optional = [f.name for f in fields(LossInputs) if f.default is None]
    assert all(getattr(inputs, name) is None for name in optional)
    scored = inputs.with_scores(torch.ones(4), torch.zeros(4))
    assert scored.logprobs.tolist() == [1] * 4
    assert scored.entropy.tolist() == [0] * 4


def test_need_hides_what_has_no_label_and_widens_half_precision() -> None:
    mask = torch.tensor([True, False])
    inputs = LossInputs(
        mask=mask,
        weights=torch.ones(2),
        sample_index=torch.zeros(2, dtype=torch.int32),
        num_samples=1,
        logprobs=torch.tensor([-1.0, float("nan")], dtype=torch.bfloat16),
    )
    assert inputs.need("logprobs", "a test").tolist() == [-1.0, 0.0]
    assert inputs.need("logprobs", "a test").dtype == torch.float32
    with refused("entropy"):
        inputs.need("entropy", "a test")


def test_weighted_loss() -> None:
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    inputs = LossInputs(
        mask=torch.tensor([True, False, True]),
        weights=torch.tensor([0.5, 0.0, 0.25]),
        sample_index=torch.zeros(3, dtype=torch.int32),
        num_samples=1,
    )
    output = weighted_loss(inputs, losses, {"a": losses, "b": torch.tensor([1.0, float("nan"), 2.0])})
    output.loss.backward()
    assert output.loss == 1.5
    assert losses.grad.tolist() == [0.5, 0.0, 0.25]
    assert output.token_losses.tolist() == [0.5, 0.0, 1.0]
    assert {name: (float(total), int(count)) for name, (total, count) in output.statistics.items()} == {
        "a": (5.0, 2),
        "b": (3.0, 2),
    }
    assert not any(number.requires_grad for pair in output.statistics.values() for number in pair)


def test_statistics_add_up() -> None:
    first = {"a": (torch.tensor(1.0), torch.tensor(1))}
    second = {"a": (torch.tensor(5.0), torch.tensor(1)), "b": (torch.ones(()), torch.ones(()))}
    merged = merge_statistics(first, second)
    assert (merged["a"][0], merged["a"][1], merged["b"][0]) == (6, 2, 1)
    assert set(first) == {"a"}
