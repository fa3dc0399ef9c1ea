"""Samples whose gradient is 0 are left out of an update, and the update stays the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.choices import Advantage
from padfree.config import CriticConfig, config_from_dict
from padfree.config.policy_settings import Objective
from padfree.distributed import Mesh, make_mesh
from padfree.losses import (
    WEIGHT_MODES,
    CISPOSettings,
    ClipSettings,
    CustomObjective,
    GSPOSettings,
    IcePopSettings,
    ObjectiveInputs,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    SFTSettings,
    TokenTISSettings,
    objective,
)
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample, with_arrays
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks.batch_advantages import has_advantage, may_skip, run_may_skip, teacher_advantages, with_advantages
from padfree.tasks.rl import TASK
from padfree.tasks.task import Models
from padfree.testing.models import build
from padfree.train.critic import with_gae
from padfree.train.engine import Engine, LossSettings
from padfree.train.global_batch import update_parts
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer
from padfree.train.step import SkippedSamples, StepReport
from padfree.train.step_pipeline import step_metrics
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import OPTIMIZER, weights_of
from tests.train.trainer_cases import lines, make_config, make_trainer, save_config

VOCABULARY = 40
REWARDS = {"a": (1, 0, 0, 1), "b": (1, 1, 1, 1), "c": (0, 0, 0), "d": (1,), "e": (0, 1, 0), "f": (0.3, 0.3)}
LEFT_OUT = ("b", "c", "d", "f")
OBJECTIVES: dict[str, Objective] = {
    "clip": ClipSettings(low=0.05, high=0.1, dual=3.0),
    "gspo": GSPOSettings(low=0.1, high=0.2),
    "cispo": CISPOSettings(high=0.2),
    "reinforce": ReinforceSettings(),
}
CORRECTIONS = (TokenTISSettings(), SequenceTISSettings(), IcePopSettings(), SequenceMaskSettings(), OPSMSettings())
LOSSES = {
    **{name: PolicySettings(objective=each) for name, each in OBJECTIVES.items()},
    **{f"current {name}": PolicySettings(objective=each, old_policy="current") for name, each in OBJECTIVES.items()},
    **{each.kind: PolicySettings(objective=ClipSettings(), corrections=(each,)) for each in CORRECTIONS},
}
LAYOUTS: list[dict[str, int]] = [{"context": 1}, {"context": 2}]


def grouped(rewards: dict[str, Sequence[float]] = REWARDS) -> list[Sample]:
    """Rollouts in groups with a common prompt; the samples of groups come in turns, so that packs mix them."""
    rng = np.random.default_rng(0)
    found = []
    for group, of_group in rewards.items():
        prompt = rng.integers(0, VOCABULARY, 6).tolist()
        for number, reward in enumerate(of_group):
            tokens = np.array(prompt + rng.integers(0, VOCABULARY, 3 + int(rng.integers(9))).tolist())
            mask = np.arange(len(tokens)) >= 6
            if (group, number) == ("e", 2):
                mask[:] = False  # has an advantage, but no scored token
            logprobs = -rng.random((2, len(tokens))).astype(np.float32) - 3.0
            found.append(
                (
                    number,
                    Sample(
                        tokens=tokens,
                        loss_mask=mask,
                        logprobs=logprobs[0],
                        old_logprobs=logprobs[0] + 0.3 * (logprobs[1] + 3.5),
                        reward=reward,
                        group=group,
                        uid=f"{group}{number}",
                    ),
                )
            )
    return [sample for _, sample in sorted(found, key=lambda pair: pair[0])]


def engines(
    mesh: Mesh, loss: Any, *, share: bool = False, optimizer: OptimizerConfig | None = None, **options: Any
) -> tuple[Engine, Engine]:
    """Two engines with equal models of their own: one computes all samples, one leaves samples out.

    GPT-2 computes in one dtype throughout: float64.
    """
    found = []
    for skips in (False, True):
        model = build("gpt2", vocab_size=VOCABULARY, n_positions=64).double()
        parallelize(model, transformations(mesh))
        scorer = Scorer(
            model, mesh, max_tokens=40 // mesh.context.size, pack_settings=PackSettings(share_prefixes=share)
        )
        settings = LossSettings(loss=loss, skip_zero_gradient=skips, **options)
        found.append(Engine(scorer, make_optimizer(model, optimizer or OPTIMIZER), settings))
    return found[0], found[1]


def gradients(engine: Engine, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    sums = engine.gradients(engine.prepare(samples))
    loss = sums.loss.clone()
    dist.all_reduce(loss, group=engine.mesh.loss.group)
    found = {
        name: (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad).clone()
        for name, each in engine.model.named_parameters()
        if each.grad is not None
    }
    engine.optimizer.zero_grad(set_to_none=True)
    return loss, found


def distance(first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]) -> float:
    """The largest difference of loss and gradients, relative to the largest gradient, but at least to 1e-3."""
    assert first[1].keys() == second[1].keys()
    largest = max(1e-3, *(float(gradient.abs().max()) for gradient in first[1].values()))
    differences = [float((gradient - second[1][name]).abs().max()) for name, gradient in first[1].items()]
    return max(float((first[0] - second[0]).abs()), *differences) / largest


def largest_distance(mesh: Mesh, *, losses: Sequence[str], shares: Sequence[bool] = (False, True)) -> float:
    """Over all losses, aggregations and both ways of sharing prefixes; and over the mini-batches of an epoch."""
    samples = with_advantages(grouped(), "grpo")
    parts = update_parts(len(samples), epochs=1, mini_batches=3, seed=0, number=1)
    found = 0.0
    for loss, mode, share in product(losses, WEIGHT_MODES, shares):
        options = {"aggregation": mode, "constant": 77.0 if mode == "constant" else None}
        full, skipping = engines(mesh, LOSSES[loss], share=share, **options)
        expected = gradients(full, samples)
        assert max(float(gradient.abs().max()) for gradient in expected[1].values()) > 1e-3
        found = max(found, distance(expected, gradients(skipping, samples)))
        for part in parts if mode == "token-mean" else ():
            mini_batch = [samples[index] for index in part]
            found = max(found, distance(gradients(full, mini_batch), gradients(skipping, mini_batch)))
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradients_are_those_of_all_samples(loss: str, mesh: Mesh) -> None:
    assert largest_distance(mesh, losses=[loss]) < 1e-12


def on_ranks(rank: int, world: int, layout: dict[str, int]) -> tuple[float, list[list[Any]]]:
    mesh = make_mesh("cpu", **layout)
    losses = ["clip", "gspo", "sequence_mask"]
    return largest_distance(mesh, losses=losses), without_signal(mesh)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["data", "context"])
def test_two_ranks(layout: dict[str, int], mesh: Mesh) -> None:
    alone = without_signal(mesh)
    for found, weights in run_ranks(2, on_ranks, layout):
        assert found < 1e-12
        for first, second in zip(weights, alone, strict=True):
            np.testing.assert_allclose(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", get_args(Advantage))
def test_every_kind_of_advantage(kind: Advantage, mesh: Mesh) -> None:
    samples = grouped()
    values = [np.full(len(sample), sample.reward, np.float32) for sample in samples]
    if kind == "given":
        given = [own * (number % 3) for number, own in enumerate(values)]
        samples = with_advantages(with_arrays(samples, advantages=given), kind)
    elif kind == "gae":  # without discount, a value that equals the reward is a perfect baseline
        values[0] = values[0] - 0.5
        samples = with_gae(samples, values, CriticConfig(whiten=False, gae_lambda=1.0))
    elif kind == "teacher":
        own = [sample.old_logprobs for sample in samples]
        assert all(each is not None for each in own)
        theirs: Any = [each + number % 2 for number, each in enumerate(own) if each is not None]
        samples = teacher_advantages(samples, theirs, own)  # type: ignore[arg-type]
    else:
        samples = with_advantages(samples, kind)
    full, skipping = engines(mesh, PolicySettings(objective=ClipSettings()))
    found = skipping.prepare(samples).skipped
    assert found is not None
    expected = [not (sample.advantages * sample.scored).any() for sample in samples]  # type: ignore[operator]
    assert found.samples == sum(expected) > 0
    assert found.tokens == sum(len(sample) for sample, zero in zip(samples, expected, strict=True) if zero)
    assert distance(gradients(full, samples), gradients(skipping, samples)) < 1e-12


def without_signal(mesh: Mesh, optimizer: OptimizerConfig | None = None, first: bool = True) -> list[list[Any]]:
    """The weights after steps with and without signal, of both engines. `first`: begin with a step without signal."""
    optimizer = optimizer or OPTIMIZER
    samples = with_advantages(grouped(), "grpo")
    nothing = [sample for sample in samples if sample.group in LEFT_OUT]
    batches = [*([nothing] if first else []), samples, nothing, nothing, samples]
    found = []
    for engine in engines(mesh, PolicySettings(objective=ReinforceSettings()), optimizer=optimizer):
        reports = [
            engine.step(batch, step=step, lr_factor=(step + 1) / len(batches)) for step, batch in enumerate(batches)
        ]
        for report, batch in zip(reports, batches, strict=True):
            assert report.num_samples == len(batch)
            assert report.num_tokens == sum(map(len, batch))
            assert report.num_labels == sum(sample.num_labels for sample in batch)
            if batch is nothing:
                assert (report.loss, report.gradient_norm) == (0.0, 0.0)
        found.append([weight.numpy() for weight in weights_of(engine.model).values()])
        steps = {float(state["step"]) for state in engine.optimizer.state.values() if "step" in state}
        assert steps <= {float(len(batches))}
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    return found[1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_signal_is_a_step_with_a_zero_gradient(name: Any, first: bool, mesh: Mesh) -> None:
    without_signal(mesh, replace(OPTIMIZER, name=name), first)


def test_a_step_without_signal_leaves_unused_parameters_alone(mesh: Mesh) -> None:
    """The optimizer does not decay a parameter that no forward pass reads."""
    samples = with_advantages(grouped(), "grpo")
    nothing = [sample for sample in samples if sample.group in LEFT_OUT]
    outcomes = []
    for engine in engines(mesh, PolicySettings(objective=ReinforceSettings())):
        unused = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        engine.optimizer.add_param_group({**engine.optimizer.param_groups[0], "params": [unused]})
        engine.parameters.append(unused)
        engine.step(nothing)
        outcomes.append([unused.detach().clone(), *weights_of(engine.model).values()])
    assert torch.equal(outcomes[0][0], torch.ones(3, 3, dtype=torch.float64))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_no_pass_without_signal(mesh: Mesh) -> None:
    samples = with_advantages(grouped(), "grpo")
    nothing = [sample for sample in samples if sample.group in LEFT_OUT]
    _, engine = engines(mesh, PolicySettings(objective=ReinforceSettings()))
    passes: list[int] = []
    engine.model.register_forward_hook(lambda *_: passes.append(1))
    hook = next(engine.model.modules()).register_forward_pre_hook(lambda *_: passes.append(1))
    first = engine.micro_batch_loss
    calls: list[int] = []

    class Counted:
        keeps_groups, teacher = False, None

        def __call__(self, model: Any, batch: Any) -> Any:
            calls.append(len(batch.input_ids))
            return first(model, batch)

    engine.micro_batch_loss = Counted()  # type: ignore[assignment]
    engine.step(nothing)
    assert calls == [1], "the first step of all finds the parameters with a gradient"
    report = engine.step(nothing)
    assert calls == [1]
    assert report.statistics == {"advantage": 0.0}
    assert report.plan.num_micro_batches == 0
    assert report.padding_share == 0.0
    engine.step(samples)
    assert sum(calls[1:]) == sum(len(sample) for sample in samples if sample.group in ("a", "e")) - len(
        next(sample for sample in samples if sample.uid == "e2")
    )
    hook.remove()


def test_report_and_metrics(mesh: Mesh) -> None:
    samples = with_advantages(grouped(), "grpo")
    full, skipping = engines(mesh, PolicySettings(objective=ClipSettings()))
    reports: list[StepReport] = [engine.step(samples) for engine in (full, skipping)]
    left_out = [sample for sample in samples if sample.group in LEFT_OUT or sample.uid == "e2"]
    assert reports[0].skipped is None
    assert reports[1].skipped == SkippedSamples(
        samples=len(left_out),
        tokens=sum(map(len, left_out)),
        labels=sum(sample.num_labels for sample in left_out),
    )
    for name in ("num_samples", "num_tokens", "num_labels"):
        assert getattr(reports[0], name) == getattr(reports[1], name)
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-12)
    assert reports[1].statistics["advantage"] == pytest.approx(reports[0].statistics["advantage"], abs=1e-9)
    before, after = (step_metrics(0, report, rates={}, seconds=2.0) for report in reports)
    assert "skipped_tokens" not in before
    assert after["skipped_samples"] == len(left_out)
    assert after["tokens"] == before["tokens"]
    assert after["tokens_per_second"] == (after["tokens"] - after["skipped_tokens"]) / 2.0
    assert after["computed_tokens"] == after["tokens"] - after["skipped_tokens"]


@objective(elementwise=True, needs_no_old_logprobs=True)
def careful(tokens: ObjectiveInputs) -> Tensor:
    return -(tokens.advantages + 0.1) * tokens.logprobs


@objective(elementwise=True, needs_no_old_logprobs=True, zero_without_advantage=True)
def declared(tokens: ObjectiveInputs) -> Tensor:
    return -tokens.advantages * tokens.logprobs


def test_losses_that_compute_all_samples(mesh: Mesh) -> None:
    clip = PolicySettings(objective=ClipSettings())
    assert may_skip(clip, has_router_term=False)
    assert not may_skip(clip, has_router_term=True)
    assert not may_skip(SFTSettings(), has_router_term=False)
    for changes in ({"kl_coefficient": 0.1}, {"entropy_coefficient": -0.1}):
        assert not may_skip(replace(clip, **changes), has_router_term=False)
    for name, allowed in (("careful", False), ("declared", True)):
        own = PolicySettings(objective=CustomObjective(path=f"{__name__}:{name}"))
        assert may_skip(own, has_router_term=False) is allowed
        full, skipping = engines(mesh, own)
        samples = with_advantages(grouped(), "grpo")
        assert (skipping.prepare(samples).skipped is not None) is allowed
        assert distance(gradients(full, samples), gradients(skipping, samples)) < 1e-12


def test_settings() -> None:
    def loss(**values: Any) -> Any:
        sections = {
            "model": {"path": "m"}, "data": {"path": ["d"]}, "batch": {"samples": 4, "max_tokens": 8},
            "run": {"folder": "r"}, "loss": {"kind": "clip", **values},
        }  # fmt: skip
        return config_from_dict(sections).loss

    assert loss().skip_zero_gradient == "auto"
    assert run_may_skip(loss())
    assert not run_may_skip(loss(skip_zero_gradient=False))
    assert not run_may_skip(loss(router_bias=0.1))
    assert not run_may_skip(loss(load_balancing=0.1))
    with refused("loss.skip_zero_gradient"):
        loss(skip_zero_gradient=True)
    with refused("loss.skip_zero_gradient"):
        loss(kind="sft", skip_zero_gradient=False)


def test_advantages_that_count() -> None:
    tokens = np.arange(3)
    samples = [
        Sample(tokens=tokens, advantages=np.array([0.0, -0.0, 0.0])),
        Sample(tokens=tokens, advantages=np.array([0.0, 0.0, 1e-30])),
        Sample(tokens=tokens, advantages=np.array([0.0, 0.0, 1.0]), loss_mask=np.array([True, True, False])),
        Sample(tokens=tokens, advantages=np.array([1.0, 0.0, 0.0])),  # the first token is never scored
        Sample(tokens=tokens),  # the loss refuses it
    ]
    assert has_advantage(samples).tolist() == [False, True, False, False, True]


def test_old_logprobs_of_samples_that_are_left_out_are_not_computed() -> None:
    asked: list[list[Any]] = []

    def policy(samples: Sequence[Sample]) -> list[Any]:
        asked.append([sample.uid for sample in samples])
        return [np.full(len(sample), -1.5, np.float32) for sample in samples]

    def prepared(samples: list[Sample], **values: Any) -> list[Sample]:
        loss = {"kind": "clip", "old_policy": "trainer", **values}
        batch = {"samples": 4, "max_tokens": 64}
        config = make_config(Path("run"), Path("model"), batch=batch, loss=loss)
        bare = [replace(sample, old_logprobs=None) for sample in samples]
        return TASK.prepare(bare, Models(policy=policy), config.loss)[0]

    samples = grouped()
    found = prepared(samples)
    computed = [sample.uid for sample in samples if sample.group in ("a", "e") and sample.uid != "e2"]
    assert asked == [computed]
    assert [sample.uid for sample in found] == [sample.uid for sample in samples]
    assert [sample.uid for sample in found if sample.old_logprobs is not None] == computed
    asked.clear()
    prepared(samples, skip_zero_gradient=False)
    assert asked == [[sample.uid for sample in samples]]
    asked.clear()
    prepared([sample for sample in samples if sample.group == "b"])
    assert asked == []


def test_runs_with_mini_batches_learn_the_same(mesh: Mesh, tmp_path: Path) -> None:
    """Also if the run is stopped inside a batch whose samples have no old log-probabilities."""
    model = save_config(tmp_path / "model")
    samples = [replace(sample, old_logprobs=None, logprobs=None) for sample in grouped()]
    weights, metrics = {}, {}
    for name, skips in (("full", False), ("auto", "auto"), ("resumed", "auto")):
        config = make_config(
            tmp_path / name,
            model,
            data={"epochs": 4},
            batch={"samples": 6, "max_tokens": 64},
            loss={"kind": "clip", "epochs": 2, "mini_batches": 2, "skip_zero_gradient": skips},
            run={"steps": 12},
        )
        if name == "resumed":
            make_trainer(replace(config, run=replace(config.run, steps=5)), mesh, samples).run()
        trainer = make_trainer(config, mesh, samples)
        trainer.run()
        weights[name], metrics[name] = weights_of(trainer.engine.model), lines(tmp_path / name)
    for name in weights["full"]:
        torch.testing.assert_close(weights["auto"][name], weights["full"][name], atol=2e-5, rtol=0)
        assert torch.equal(weights["auto"][name], weights["resumed"][name])
    assert [line["skipped_samples"] for line in metrics["auto"]] == [
        line["skipped_samples"] for line in metrics["resumed"]
    ]
    assert sum(line["skipped_samples"] for line in metrics["auto"]) > 0
    assert all("skipped_samples" not in line for line in metrics["full"])
    json.dumps(metrics["auto"])


def test_samples_without_old_logprobs_are_refused_if_they_must_be_computed(mesh: Mesh) -> None:
    full, skipping = engines(mesh, PolicySettings(objective=ClipSettings()))
    samples = with_advantages(grouped(), "grpo")
    samples = [sample if sample.group in ("a", "e") else replace(sample, old_logprobs=None) for sample in samples]
    gradients(skipping, samples)
    with refused("old_logprobs"):
        gradients(full, samples)
    assert with_arrays(samples[:1], old_logprobs=[samples[0].tokens])[0].old_logprobs is not None
