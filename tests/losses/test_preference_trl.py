"""Losses of pairs against TRL's own, on the same log-probabilities. Skipped if TRL is not installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.losses import DPOSettings, LossInputs, dpo_loss

LENGTHS = [(5, 3), (2, 7), (6, 6)]  # tokens of the chosen and of the rejected answer
PROMPT = 4


def answers() -> tuple[Tensor, Tensor, Tensor]:
    """[2P, L] log-probabilities, those of a reference, and which tokens belong to an answer; chosen ones first."""
    rng = np.random.default_rng(0)
    counts = [chosen for chosen, _ in LENGTHS] + [rejected for _, rejected in LENGTHS]
    mask = torch.tensor([[PROMPT <= place < PROMPT + count for place in range(12)] for count in counts])
    policy, reference = (torch.from_numpy(-rng.exponential(size=mask.shape)) * mask for _ in range(2))
    return policy, reference, mask


def theirs(loss_type: str, beta: float, label_smoothing: float) -> tuple[float, Tensor]:
    """The result of TRL's method, called with only what it reads, and the gradient of the log-probabilities."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is not installed", exc_type=ImportError)
    policy, reference, mask = answers()
    policy.requires_grad_()
    nothing = torch.zeros_like(mask[:, 1:], dtype=torch.float64)
    output = SimpleNamespace(
        log_probs=policy[:, 1:], entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None
    )
    own: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    sums = reference.sum(1)
    inputs = {
        "input_ids": mask.long(),
        "attention_mask": mask.long(),
        "completion_mask": mask.long(),
        "ref_chosen_logps": sums[: len(LENGTHS)],
        "ref_rejected_logps": sums[len(LENGTHS) :],
    }
    loss = trainer.DPOTrainer._compute_loss(own, lambda **_: output, inputs, False)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad[mask]


def ours(settings: DPOSettings) -> tuple[float, Tensor]:
    policy, reference, mask = answers()
    logprobs = policy[mask].clone().requires_grad_()
    index = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
    inputs = LossInputs(
        mask=torch.ones(len(index), dtype=torch.bool),
        weights=torch.zeros(len(index)),
        sample_index=index,
        num_samples=len(mask),
        logprobs=logprobs,
        ref_logprobs=reference[mask],
    )
    pairs = torch.arange(len(mask)).view(2, -1).T
    output = dpo_loss(inputs, settings, pairs, torch.full((len(pairs),), 1 / len(pairs), dtype=torch.float64))
    output.loss.backward()
    assert logprobs.grad is not None
    return float(output.loss.detach()), logprobs.grad


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("sigmoid", DPOSettings(beta=0.3)),
        ("hinge", DPOSettings(variant="hinge", beta=0.7)),
        ("ipo", DPOSettings(variant="ipo", beta=0.2)),
        ("sigmoid_norm", DPOSettings(beta=0.5, normalise=True)),
    ],
)
def test_losses_and_gradients_are_theirs(loss_type: str, settings: DPOSettings) -> None:
    loss, gradient = ours(settings)
    expected, expected_gradient = theirs(loss_type, settings.beta, settings.label_smoothing)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
