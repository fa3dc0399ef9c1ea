"""The per-chunk form of a loss equals the form for a whole pack, in value and gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from padfree.losses import (
    CISPOSettings,
    ClipSettings,
    GSPOSettings,
    IcePopSettings,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    SFTSettings,
    TokenTISSettings,
    compute_loss,
    is_elementwise,
    make_token_loss,
    needs_entropy,
)
from tests.losses.cases import random_inputs, with_grad

ELEMENTWISE: list[Any] = [
    SFTSettings(),
    PolicySettings(),
    PolicySettings(old_policy="sampler"),
    PolicySettings(old_policy="current", corrections=(TokenTISSettings(), IcePopSettings())),
    PolicySettings(objective=ClipSettings(low=0.1, high=0.3, dual=2.0), kl_coefficient=0.2, entropy_coefficient=0.01),
    PolicySettings(objective=CISPOSettings(high=0.1), corrections=(SequenceTISSettings(), SequenceMaskSettings())),
    PolicySettings(objective=ReinforceSettings(), kl_coefficient=0.1, kl_estimator="low_var_kl"),
    PolicySettings(kl_coefficient=0.2, kl_weighting="ratio"),
    PolicySettings(old_policy="current", kl_coefficient=0.2, kl_weighting="ratio"),
]
NOT_ELEMENTWISE = [
    PolicySettings(objective=GSPOSettings()),
    PolicySettings(corrections=(OPSMSettings(),)),
    PolicySettings(old_policy="current", corrections=(SequenceTISSettings(),)),
    PolicySettings(old_policy="current", corrections=(SequenceMaskSettings(),)),
]


@pytest.mark.parametrize("settings", ELEMENTWISE, ids=str)
def test_chunks_add_up_to_the_whole(settings: Any, rng: np.random.Generator) -> None:
    assert is_elementwise(settings)
    inputs = random_inputs(rng)
    whole, leaves = with_grad(inputs, "logprobs", "entropy")
    expected = compute_loss(whole, settings)
    expected.loss.backward()

    before = replace(inputs, logprobs=None, entropy=None)
    token_loss = make_token_loss(before, settings)
    labelled = inputs.mask.nonzero()[:, 0]
    total = torch.zeros((), dtype=torch.float64)
    for chunk in labelled.split(4):
        logprobs = inputs.logprobs[chunk].clone().requires_grad_()
        entropy = inputs.entropy[chunk].clone().requires_grad_() if needs_entropy(settings) else None
        losses = token_loss(logprobs, entropy, chunk)
        assert losses.shape == logprobs.shape
        losses.sum().backward()
        total += losses.sum().detach()
        torch.testing.assert_close(logprobs.grad, leaves[0].grad[chunk])
        if entropy is not None:
            torch.testing.assert_close(entropy.grad, leaves[1].grad[chunk])
    torch.testing.assert_close(total, expected.loss.detach())


@pytest.mark.parametrize("settings", NOT_ELEMENTWISE, ids=str)
def test_sequence_level_losses_are_refused(settings: PolicySettings, rng: np.random.Generator) -> None:
    assert not is_elementwise(settings)
    with pytest.raises(ValueError, match="not elementwise; compute scores first"):
        make_token_loss(random_inputs(rng), settings)


def test_entropy_is_only_needed_with_a_coefficient() -> None:
    assert needs_entropy(PolicySettings(entropy_coefficient=-0.1))
    assert not needs_entropy(PolicySettings())
    assert not needs_entropy(SFTSettings())
