"""The GRPO loss against TRL's own, on the same log-probabilities. Skipped if TRL is not installed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.losses import (
    CISPOSettings,
    ClipSettings,
    LossInputs,
    PolicySettings,
    ReinforceSettings,
    compute_loss,
)
from padfree.losses.policy_loss import needs_old_logprobs

COUNTS = [5, 2, 7, 6]
ADVANTAGES = [0.9, -0.9, 1.3, -0.4]
COEFFICIENT, MAX_COMPLETION = 0.3, 10


def responses() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[B, L] log-probabilities of the policy, of the old one and of a reference, and a mask of existing tokens."""
    rng = np.random.default_rng(0)
    mask = torch.tensor([[place < count for place in range(max(COUNTS))] for count in COUNTS])
    policy = torch.from_numpy(-rng.exponential(size=mask.shape))
    old, reference = (policy + torch.from_numpy(0.3 * rng.normal(size=mask.shape)) for _ in range(2))
    return policy, old, reference, mask


def theirs(loss_type: str, *, weighted: bool, on_policy: bool, delta: float | None = None) -> tuple[float, Tensor]:
    """The result of TRL's method, called with only what it reads, and the gradient of the log-probabilities."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed", exc_type=ImportError)
    policy, old, reference, mask = responses()
    policy.requires_grad_()
    nothing = torch.zeros_like(policy)
    own: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, nothing, None),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=weighted, delta=delta, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=COEFFICIENT,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=5.0 if loss_type == "cispo" else 0.28,
        use_vllm=False,
        max_completion_length=MAX_COMPLETION,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
        **({} if on_policy else {"old_per_token_logps": old}),
    }
    loss = module.GRPOTrainer._compute_loss(own, None, inputs)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad[mask]


WEIGHTS: dict[str, Callable[[int], float]] = {
    "token-mean": lambda count: 1 / sum(COUNTS),
    "sample-mean": lambda count: 1 / (count * len(COUNTS)),
    "constant": lambda count: 1 / (len(COUNTS) * MAX_COMPLETION),
}
"""The weights of the tokens of each response; a run computes the same numbers in float32."""


def ours(settings: PolicySettings, weights: str) -> tuple[float, Tensor]:
    policy, old, reference, mask = responses()
    logprobs = policy[mask].clone().requires_grad_()
    index = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
    inputs = LossInputs(
        mask=torch.ones(len(index), dtype=torch.bool),
        weights=torch.tensor([WEIGHTS[weights](count) for count in COUNTS], dtype=torch.float64)[index],
        sample_index=index,
        num_samples=len(mask),
        logprobs=logprobs,
        old_logprobs=old[mask],
        ref_logprobs=reference[mask],
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[index],
    )
    loss = compute_loss(inputs, settings).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


MODES = [
    ("dapo", "token-mean"),
    ("bnpo", "token-mean"),
    ("grpo", "sample-mean"),
    ("dr_grpo", "constant"),
    ("cispo", "token-mean"),
]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("loss_type", "weights"), MODES)
def test_the_loss_and_its_gradient_are_those_of_trl(
    loss_type: str, weights: str, weighted: bool, on_policy: bool
) -> None:
    settings = PolicySettings(
        objective=CISPOSettings(high=4.0) if loss_type == "cispo" else ClipSettings(low=0.2, high=0.28),
        old_policy="current" if on_policy else "trainer",
        kl_coefficient=COEFFICIENT,
        kl_weighting="ratio" if weighted else "none",
    )
    loss, gradient = ours(settings, weights)
    expected, expected_gradient = theirs(loss_type, weighted=weighted, on_policy=on_policy)
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-12


def test_the_weighting_changes_the_gradient_on_policy_and_not_the_loss() -> None:
    plain, weighted = (
        ours(PolicySettings(old_policy="current", kl_coefficient=0.3, kl_weighting=kind), "token-mean")
        for kind in ("none", "ratio")
    )
    assert plain[0] == weighted[0]
    assert float((plain[1] - weighted[1]).norm() / plain[1].norm()) > 1e-3


def test_a_weighted_kl_needs_the_old_policy_also_where_the_objective_does_not() -> None:
    plain = PolicySettings(objective=ReinforceSettings(), kl_coefficient=0.1)
    weighted = PolicySettings(objective=ReinforceSettings(), kl_coefficient=0.1, kl_weighting="ratio")
    assert not needs_old_logprobs(plain)
    assert needs_old_logprobs(weighted)
    assert not needs_old_logprobs(PolicySettings(objective=ReinforceSettings(), kl_weighting="ratio"))
