"""Every policy loss against a loop over samples in float64, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.losses import (
    CISPOSettings,
    ClipSettings,
    GSPOSettings,
    IcePopSettings,
    LossInputs,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
    clipped_ratio,
    policy_loss,
)
from tests.losses.cases import by_sample, random_inputs, select_tokens, with_grad
from tests.refused import refused

OBJECTIVES = {
    "clip": ClipSettings(low=0.1, high=0.3),
    "dual": ClipSettings(low=0.1, high=0.2, dual=1.2),
    "gspo": GSPOSettings(low=0.05, high=0.08),
    "cispo": CISPOSettings(high=0.2),
    "cispo-low": CISPOSettings(low=0.3, high=0.2),
    "reinforce": ReinforceSettings(),
}
CORRECTIONS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "token-tis": (TokenTISSettings(high=1.2),),
    "token-tis-low": (TokenTISSettings(low=0.8, high=1.2),),
    "sequence-tis": (SequenceTISSettings(low=0.3, high=1.5),),
    "geometric-tis": (SequenceTISSettings(low=0.9, high=1.1, geometric=True),),
    "icepop": (IcePopSettings(low=0.8, high=1.3),),
    "mask-mean": (SequenceMaskSettings(low=0.9, high=1.1),),
    "mask-sum": (SequenceMaskSettings(low=0.7, high=2.0, statistic="sum"),),
    "mask-token": (SequenceMaskSettings(low=0.6, high=1.6, statistic="token"),),
    "opsm": (OPSMSettings(delta=0.02),),
    "all": (TokenTISSettings(), SequenceMaskSettings(low=0.5, high=2.0), OPSMSettings(delta=0.02)),
}


def slow_factor(correction: Any, sample: dict[str, Any], t: int, old: Tensor) -> float:
    """The factor of token t, written down from the definitions."""
    differences = [float(d) for d in (old - sample["rollout_logprobs"]).detach()]
    ratio = math.exp(differences[t])
    whole, mean = math.exp(sum(differences)), math.exp(sum(differences) / len(differences))
    if isinstance(correction, TokenTISSettings):
        return min(max(ratio, correction.low), correction.high)
    if isinstance(correction, IcePopSettings):
        return ratio if correction.low <= ratio <= correction.high else 0.0
    if isinstance(correction, SequenceTISSettings):
        return min(max(mean if correction.geometric else whole, correction.low), correction.high)
    if isinstance(correction, SequenceMaskSettings):
        judged = {"mean": [mean], "sum": [whole], "token": [math.exp(d) for d in differences]}[correction.statistic]
        return float(all(correction.low <= one <= correction.high for one in judged))
    assert isinstance(correction, OPSMSettings)
    moved = sum(float(d) for d in (old - sample["logprobs"]).detach()) / len(differences)
    return 0.0 if float(sample["advantages"][t]) < 0 and moved > correction.delta else 1.0


def slow_token(settings: PolicySettings, sample: dict[str, Any], t: int) -> Tensor:
    """The loss of token t of a sample, written down from the definitions; GSPO differentiates through the mean."""
    objective = settings.objective
    old = {
        "trainer": sample["old_logprobs"],
        "sampler": sample["rollout_logprobs"],
        "current": sample["logprobs"].detach(),
    }[settings.old_policy]
    logprob, advantage = sample["logprobs"][t], sample["advantages"][t]
    if isinstance(objective, ReinforceSettings):
        loss = -advantage * logprob
    elif isinstance(objective, CISPOSettings):
        ratio = torch.exp(logprob - old[t]).detach()
        lowest = 0.0 if objective.low is None else 1 - objective.low
        loss = -ratio.clamp(lowest, 1 + objective.high) * advantage * logprob
    else:
        if isinstance(objective, GSPOSettings):
            ratio = torch.exp((sample["logprobs"] - old).mean())
        else:
            ratio = torch.exp(logprob - old[t])
        loss = torch.max(-ratio * advantage, -ratio.clamp(1 - objective.low, 1 + objective.high) * advantage)
        if isinstance(objective, ClipSettings) and objective.dual is not None and advantage < 0:
            loss = torch.min(loss, -objective.dual * advantage)
    for correction in settings.corrections:
        loss = loss * slow_factor(correction, sample, t, old)
    x = logprob - sample["ref_logprobs"][t]
    divergence = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}.get(settings.kl_estimator)
    if divergence is None:
        divergence = (torch.exp(-x) - 1 + x).clamp(-10, 10)
    return loss + settings.kl_coefficient * divergence - settings.entropy_coefficient * sample["entropy"][t]


def slow_loss(settings: PolicySettings, inputs: LossInputs) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sample in by_sample(inputs):
        for t in range(len(sample["logprobs"])):
            total = total + sample["weights"][t] * slow_token(settings, sample, t)
    return total


def check(settings: PolicySettings, inputs: LossInputs) -> None:
    ours, leaves = with_grad(inputs, "logprobs", "entropy")
    slow, slow_leaves = with_grad(inputs, "logprobs", "entropy")
    output, expected = policy_loss(ours, settings), slow_loss(settings, slow)
    torch.testing.assert_close(output.loss, expected, rtol=1e-11, atol=1e-12)
    output.loss.backward()
    expected.backward()
    for ours_leaf, slow_leaf in zip(leaves, slow_leaves, strict=True):
        grad = torch.zeros_like(slow_leaf) if slow_leaf.grad is None else slow_leaf.grad
        found = torch.zeros_like(ours_leaf) if ours_leaf.grad is None else ours_leaf.grad
        torch.testing.assert_close(found, grad, rtol=1e-11, atol=1e-12)
        assert not found[~inputs.mask].any()


@pytest.mark.parametrize("old_policy", ["trainer", "sampler", "current"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(objective: str, old_policy: Any, rng: np.random.Generator) -> None:
    settings = PolicySettings(objective=OBJECTIVES[objective], old_policy=old_policy)
    for _ in range(3):
        check(settings, random_inputs(rng, constant_advantages=objective == "gspo"))


@pytest.mark.parametrize("old_policy", ["trainer", "current"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections(correction: str, old_policy: Any, rng: np.random.Generator) -> None:
    corrections = CORRECTIONS[correction]
    if old_policy == "current":
        corrections = tuple(c for c in corrections if not isinstance(c, OPSMSettings))
    settings = PolicySettings(old_policy=old_policy, corrections=corrections)
    for _ in range(3):
        check(settings, random_inputs(rng, lengths=(5, 1, 9, 3, 7, 4, 6)))


def test_every_correction_acts_on_these_inputs(rng: np.random.Generator) -> None:
    """Otherwise the tests above would pass without them."""
    inputs = random_inputs(rng, lengths=(5, 1, 9, 3, 7, 4, 6))
    plain = policy_loss(inputs, PolicySettings()).loss
    for name, corrections in CORRECTIONS.items():
        loss = policy_loss(inputs, PolicySettings(corrections=corrections)).loss
        assert (loss == plain) == (name == "none"), name


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_and_entropy_terms(estimator: Any, rng: np.random.Generator) -> None:
    settings = PolicySettings(
        kl_coefficient=0.3,
        kl_estimator=estimator,
        entropy_coefficient=0.05,
        corrections=(IcePopSettings(low=0.8, high=1.3),),
    )
    check(settings, random_inputs(rng, spread=1.5))


def test_gspo_with_different_advantages_in_a_sequence_is_gspo_token(rng: np.random.Generator) -> None:
    """Its gradient is then s·Aₜ for each token, as the paper defines it."""
    inputs, (logprobs,) = with_grad(random_inputs(rng), "logprobs")
    objective = GSPOSettings(low=1.0, high=50.0)
    policy_loss(inputs, PolicySettings(objective=objective)).loss.backward()
    assert logprobs.grad is not None
    for index, sample in enumerate(by_sample(inputs)):
        if not len(sample["logprobs"]):
            continue
        ratio = torch.exp((sample["logprobs"] - sample["old_logprobs"]).mean()).detach()
        here = (inputs.sample_index == index) & inputs.mask
        torch.testing.assert_close(logprobs.grad[here], -ratio * sample["advantages"] * sample["weights"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_shards_of_a_pack_add_up(objective: str, rng: np.random.Generator) -> None:
    """Two simulated context ranks: each holds some tokens, `reduce` sums the [B] tensors of both."""
    settings = PolicySettings(
        objective=OBJECTIVES[objective],
        corrections=(SequenceTISSettings(), SequenceMaskSettings(statistic="token"), OPSMSettings(delta=0.02)),
    )
    inputs = random_inputs(rng)
    whole, (logprobs,) = with_grad(inputs, "logprobs")
    expected = policy_loss(whole, settings)
    expected.loss.backward()

    held = torch.rand(len(inputs.mask)) < 0.5
    shares = [select_tokens(inputs, held.nonzero()[:, 0]), select_tokens(inputs, (~held).nonzero()[:, 0])]
    losses, grads, statistics = in_turns(
        lambda share, reduce: policy_loss(share, settings, reduce=reduce), [with_grad(s, "logprobs") for s in shares]
    )
    torch.testing.assert_close(sum(losses), expected.loss.detach())
    assert logprobs.grad is not None
    torch.testing.assert_close(grads[0], logprobs.grad[held])
    torch.testing.assert_close(grads[1], logprobs.grad[~held])
    for name, (total, count) in expected.statistics.items():
        torch.testing.assert_close(sum(s[name][0] for s in statistics), total)
        assert sum(s[name][1] for s in statistics) == count


def in_turns(loss: Callable[..., Any], shares: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Run each shard with a `reduce` that adds the values of the others: record first, then replay."""
    recorded: list[list[Tensor]] = []
    for inputs, _ in shares:
        handed: list[Tensor] = []

        def record(values: Tensor, handed: list[Tensor] = handed) -> Tensor:
            handed.append(values.clone())
            return values

        loss(inputs, record)
        recorded.append(handed)
    sums = [sum(one) for one in zip(*recorded, strict=True)]
    losses, grads, statistics = [], [], []
    for inputs, (leaf,) in shares:
        answers = iter(sums)
        output = loss(inputs, lambda values, answers=answers: next(answers))
        output.loss.backward()
        losses.append(output.loss.detach())
        grads.append(leaf.grad)
        statistics.append(output.statistics)
    return losses, grads, statistics


def test_statistics(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    settings = PolicySettings(
        objective=ClipSettings(low=0.1, high=0.1),
        kl_coefficient=0.1,
        kl_estimator="k3",
        corrections=(IcePopSettings(low=0.8, high=1.3),),
    )
    found = policy_loss(inputs, settings).statistics
    mask = inputs.mask
    column = {name: getattr(inputs, name)[mask].numpy() for name in ("logprobs", "old_logprobs", "rollout_logprobs")}
    log_ratio = column["logprobs"] - column["old_logprobs"]
    advantages = inputs.advantages[mask].numpy()
    difference = column["old_logprobs"] - column["rollout_logprobs"]
    inside = (np.exp(difference) >= 0.8) & (np.exp(difference) <= 1.3)
    x = column["logprobs"] - inputs.ref_logprobs[mask].numpy()
    expected = {
        "advantage": advantages.mean(),
        "clip_fraction": np.where(advantages > 0, np.exp(log_ratio) > 1.1, np.exp(log_ratio) < 0.9).mean(),
        "approx_kl": -log_ratio.mean(),
        "ratio": np.exp(log_ratio).mean(),
        "kl": (np.exp(-x) - 1 + x).mean(),
        "entropy": inputs.entropy[mask].numpy().mean(),
        "importance_weight": np.where(inside, np.exp(difference), 0).mean(),
        "masked_fraction": 1 - inside.mean(),
        "sampler_difference": np.abs(difference).mean(),
        "sampler_kl": (np.exp(difference) - 1 - difference).mean(),
    }
    assert set(found) == set(expected)
    for name, (total, count) in found.items():
        assert not total.requires_grad
        assert float(total / count) == pytest.approx(expected[name], rel=1e-10), name
        assert int(count) == int(mask.sum())


def test_no_scored_token_gives_zero_and_backward_runs(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    silent = replace(inputs, mask=torch.zeros_like(inputs.mask), weights=torch.zeros_like(inputs.weights))
    for objective in OBJECTIVES.values():
        settings = PolicySettings(objective=objective, corrections=(SequenceTISSettings(), OPSMSettings()))
        ready, (logprobs,) = with_grad(silent, "logprobs")
        output = policy_loss(ready, settings)
        output.loss.backward()
        assert output.loss == 0
        assert logprobs.grad is not None
        assert not logprobs.grad.any()
        assert all(total == 0 and count == 0 for total, count in output.statistics.values())


@pytest.mark.parametrize("distance", [-200.0, 200.0])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_far_off_policy_stays_finite(objective: str, distance: float) -> None:
    """exp(200) is infinite in float32; neither value nor gradient may be."""
    zero = torch.zeros(4)
    inputs = LossInputs(
        mask=torch.ones(4, dtype=torch.bool),
        weights=torch.full((4,), 0.25),
        sample_index=torch.tensor([0, 1, 2, 3]),
        num_samples=4,
        logprobs=(zero - 1.0).requires_grad_(),
        old_logprobs=zero - 1.0 + distance,
        rollout_logprobs=zero - 1.0 - distance,
        ref_logprobs=zero - 1.0 + distance,
        advantages=torch.tensor([1.0, -1.0, 0.0, 0.5]),
    )
    for estimator in ("k3", "low_var_kl"):
        for correction in ((), (TokenTISSettings(),), (IcePopSettings(),), (SequenceTISSettings(),)):
            settings = PolicySettings(
                objective=OBJECTIVES[objective],
                corrections=correction,
                kl_coefficient=0.1,
                kl_estimator=estimator,  # type: ignore[arg-type]
            )
            inputs.logprobs.grad = None
            output = policy_loss(inputs, settings)
            output.loss.backward()
            assert output.loss.isfinite()
            assert inputs.logprobs.grad.isfinite().all()
            assert all(total.isfinite() for total, _ in output.statistics.values())


def test_worked_clip() -> None:
    """Ratio 1.5: clipped at 1.2 for A > 0; free for A < 0, unless dual clip bounds it at 1.3."""
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses, clipped = clipped_ratio(log_ratio, advantages, low=0.2, high=0.2)
    torch.testing.assert_close(losses, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clipped.tolist() == [True, False, False, True]
    torch.testing.assert_close(
        clipped_ratio(log_ratio, advantages, low=0.2, high=0.2, dual=1.3)[0], torch.tensor([-1.2, 1.3, -0.5, 0.8])
    )


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (PolicySettings(), "logprobs"),
        (PolicySettings(), "old_logprobs"),
        (PolicySettings(), "advantages"),
        (PolicySettings(old_policy="sampler"), "rollout_logprobs"),
        (PolicySettings(corrections=(TokenTISSettings(),)), "rollout_logprobs"),
        (PolicySettings(kl_coefficient=0.1), "ref_logprobs"),
        (PolicySettings(entropy_coefficient=0.1), "entropy"),
        (PolicySettings(objective=ReinforceSettings(), corrections=(OPSMSettings(),)), "old_logprobs"),
    ],
)
def test_missing_fields_are_named(settings: PolicySettings, missing: str, rng: np.random.Generator) -> None:
    inputs = replace(random_inputs(rng), **{missing: None})
    with refused(missing):
        policy_loss(inputs, settings)


def test_wrong_shape_is_named(rng: np.random.Generator) -> None:
    inputs = replace(random_inputs(rng), old_logprobs=torch.zeros(3))
    with refused("old_logprobs"):
        policy_loss(inputs, PolicySettings())


def test_reinforce_needs_nothing_but_advantages(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    bare = replace(inputs, old_logprobs=None, rollout_logprobs=None, ref_logprobs=None, entropy=None)
    output = policy_loss(bare, PolicySettings(objective=ReinforceSettings()))
    torch.testing.assert_close(output.loss, policy_loss(inputs, PolicySettings(objective=ReinforceSettings())).loss)
    assert set(output.statistics) == {"advantage"}


def test_nothing_but_the_scores_gets_a_gradient(rng: np.random.Generator) -> None:
    """Passing the attached current log-probabilities as the old ones must not make the ratio's gradient vanish."""
    inputs, (logprobs,) = with_grad(random_inputs(rng), "logprobs")
    attached = replace(inputs, old_logprobs=logprobs, advantages=inputs.advantages.clone().requires_grad_())
    policy_loss(attached, PolicySettings()).loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.where(inputs.mask, -inputs.weights * inputs.advantages, 0.0))
    assert attached.advantages.grad is None


def test_sampler_difference_uses_the_best_trainer_numbers_there_are(rng: np.random.Generator) -> None:
    inputs = random_inputs(rng)
    mask, sampler = inputs.mask, inputs.rollout_logprobs
    for old_policy, trainer in {
        "trainer": inputs.old_logprobs,
        "sampler": inputs.logprobs,
        "current": inputs.logprobs,
    }.items():
        total, _ = policy_loss(inputs, PolicySettings(old_policy=old_policy)).statistics["sampler_difference"]  # type: ignore[arg-type]
        torch.testing.assert_close(total, (trainer - sampler)[mask].abs().sum())
