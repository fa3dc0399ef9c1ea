"""Samples that share prefixes train as they do one at a time: gradients, log-probabilities, reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.config import LoraConfig
from padfree.cp import shard
from padfree.distributed import Mesh, make_mesh
from padfree.head import score
from padfree.layers.compiler_watch import CompilerWatch
from padfree.losses import (
    ClipSettings,
    DPOSettings,
    IcePopSettings,
    LossInputs,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
    dpo_loss,
    preference_pairs,
)
from padfree.model import attach, hidden_states, lm_head_of
from padfree.packing import collate
from padfree.sample import Sample, with_arrays
from padfree.testing.models import build
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer
from padfree.warning import PadfreeWarning
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LOSSES, VOCABULARY, make_engine, small_model

CORRECTIONS = {
    "token_tis": TokenTISSettings(),
    "sequence_tis": SequenceTISSettings(),
    "icepop": IcePopSettings(),
    "sequence_mask": SequenceMaskSettings(),
}
ALL_LOSSES: dict[str, LossSettings] = {
    **LOSSES,
    "reinforce": LossSettings(loss=PolicySettings(objective=ReinforceSettings()), aggregation="sample-sum"),
    **{
        name: LossSettings(loss=PolicySettings(objective=ClipSettings(), corrections=(correction,)))
        for name, correction in CORRECTIONS.items()
    },
}
# dense, experts, latent heads, windows, soft caps, sinks, learned positions
ARCHITECTURES = ["llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "glm4"]


def tree_samples(seed: int = 0) -> list[Sample]:
    """A group of depth 3 with branches at trained tokens, equal samples, a sample that is the prefix of others, a
    second group, and a single sample. Each is trained from token 4 on and has its own advantages."""
    rng = np.random.default_rng(seed)

    def new(length: int) -> list[int]:
        return rng.integers(0, VOCABULARY, length).tolist()

    prompt, turn, other = new(8), new(4), new(5)
    deep = prompt + turn
    lists = [deep + new(3), deep + new(5), prompt + new(6), prompt, deep, deep, other + new(3), other + new(2), new(7)]
    groups: list[Any] = ["a"] * 6 + ["b"] * 2 + ["c"]
    return [
        Sample(
            tokens=np.array(tokens),
            loss_mask=np.arange(len(tokens)) >= 4,
            logprobs=-rng.random(len(tokens)).astype(np.float32) * 3,
            ref_logprobs=-rng.random(len(tokens)).astype(np.float32) * 3,
            advantages=np.full(len(tokens), rng.normal()),
            group=group,
            uid=index,
        )
        for index, (tokens, group) in enumerate(zip(lists, groups, strict=True))
    ]


def gradients(
    engine: Engine, samples: list[Sample], old: Any, pack_settings: PackSettings, max_tokens: int
) -> dict[str, Tensor]:
    engine.scorer.packer.pack_settings, engine.scorer.packer.max_tokens = pack_settings, max_tokens
    engine.gradients(engine.prepare(samples if old is None else with_arrays(samples, old_logprobs=old)))
    found = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
    }
    engine.optimizer.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= tolerance * max(float(gradient.abs().max()), 1e-2 * largest), (name, error)


def both_ways(mesh: Mesh, settings: LossSettings, name: str = "qwen3") -> None:
    samples = tree_samples()
    engine = make_engine(mesh, settings, small_model(name))
    old = [sample.ref_logprobs for sample in samples]
    expected = gradients(engine, samples, old, PackSettings(), 1)  # every sample in its own pack
    shared = gradients(engine, samples, old, PackSettings(share_prefixes=True), 1000)
    plan = engine.scorer.packer.plan(samples)
    assert plan.sharing > 1.8
    assert plan.num_micro_batches == 1
    assert_close(shared, expected, 1e-5)


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_every_loss_has_the_gradients_of_one_sample_at_a_time(name: str, mesh: Mesh) -> None:
    both_ways(mesh, ALL_LOSSES[name])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, mesh: Mesh) -> None:
    both_ways(mesh, LOSSES["clip"], name)


def test_float64_to_the_last_digits() -> None:
    """GPT-2 computes in one dtype throughout; other models compute norms in float32."""
    model = attach(build("gpt2").double())
    samples = [replace(sample, group=None) for sample in tree_samples()]

    def outcome(shared: bool) -> dict[str, Tensor]:
        model.zero_grad()
        row = collate(samples, share_prefixes=shared)
        local = shard(row)
        scored = local.labels != -100
        scores = score(hidden_states(model, local), lm_head_of(model), local.labels, num_labels=int(scored.sum()))
        (scores.logprobs * local.weights.double()).sum().backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    assert_close(outcome(True), outcome(False), 1e-12)


def test_dpo_pairs_share_their_prompt() -> None:
    model = attach(build("llama"))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 64, 9)
    samples = [
        Sample(
            tokens=np.append(prompt, rng.integers(0, 64, length)),
            loss_mask=np.arange(9 + length) >= 9,
            ref_logprobs=-rng.random(9 + length).astype(np.float32),
            group=0,
            reward=float(length),
        )
        for length in (4, 6)
    ]
    found = []
    for shared in (False, True):
        model.zero_grad()
        row = collate(samples, share_prefixes=shared)
        assert row.num_tokens == (19 if shared else 28)
        local = shard(row)
        scores = score(hidden_states(model, local), lm_head_of(model), local.labels)
        inputs = LossInputs.from_batch(local, logprobs=scores.logprobs)
        pairs = torch.from_numpy(preference_pairs(row.samples))
        dpo_loss(inputs, DPOSettings(), pairs, torch.ones(1)).loss.backward()
        found.append(
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    assert_close(found[1], found[0], 1e-5)


def test_log_probabilities_and_reports_are_those_of_the_samples(mesh: Mesh) -> None:
    samples = tree_samples()
    engine = make_engine(mesh, LOSSES["clip"])
    plain = engine.scorer.logprobs(samples)
    engine.scorer.packer.pack_settings = PackSettings(share_prefixes=True)
    engine.scorer.packer.max_tokens = 1000
    for one, other in zip(engine.scorer.logprobs(samples), plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    report = engine.step(with_arrays(samples, old_logprobs=plain), lr_factor=0.0)
    assert report.num_labels == sum(sample.num_labels for sample in samples)
    assert report.num_tokens == sum(len(sample) for sample in samples)
    assert report.padding_share == 0.0
    assert int(report.plan.computed_tokens.sum()) < report.num_tokens


def test_a_changed_leaf_changes_no_other_sample_bitwise(mesh: Mesh) -> None:
    samples = tree_samples()
    engine = make_engine(mesh, LOSSES["sft"])
    engine.scorer.packer.pack_settings, engine.scorer.packer.max_tokens = PackSettings(share_prefixes=True), 1000
    before = engine.scorer.logprobs(samples)
    tokens = samples[1].tokens.copy()
    tokens[-3:] = (tokens[-3:] + 1) % VOCABULARY
    samples[1] = replace(samples[1], tokens=tokens)
    after = engine.scorer.logprobs(samples)
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(one, other) == (index != 1), index


NO_ARRAYS: dict[str, Any] = dict.fromkeys(("loss_mask", "logprobs", "ref_logprobs", "advantages"))

WAYS = [
    ("allgather", "contiguous"), ("allgather", "headtail"), ("allgather", "balanced"), ("ring", "contiguous"),
    ("ring", "headtail"), ("ring", "balanced"), ("ulysses", "contiguous"), ("ulysses", "headtail"),
    ("ulysses", "balanced"),
]  # fmt: skip


def on_ranks(rank: int, world: int) -> list[dict[str, Tensor]]:
    samples = tree_samples()
    engine = make_engine(make_mesh("cpu", context=world), LOSSES["clip"], small_model("llama"))
    old = [sample.ref_logprobs for sample in samples]
    found = []
    for method, layout in WAYS:
        rows = PackSettings(method=method, layout=layout, share_prefixes=True)  # type: ignore[arg-type]
        found.append(gradients(engine, samples, old, rows, 1000))
    scored = engine.scorer.logprobs(samples)
    return [*found, {str(i): torch.from_numpy(each.copy()) for i, each in enumerate(scored)}]


@pytest.mark.parametrize("world", [2, 4])
def test_context_ranks(world: int, mesh: Mesh) -> None:
    samples = tree_samples()
    engine = make_engine(mesh, LOSSES["clip"], small_model("llama"))
    old = [sample.ref_logprobs for sample in samples]
    expected = gradients(engine, samples, old, PackSettings(), 1)
    logprobs = engine.scorer.logprobs(samples)
    *found, scored = run_ranks(world, on_ranks)[0]
    for each in found:
        assert_close(each, expected, 1e-5)
    for index, values in enumerate(logprobs):
        np.testing.assert_allclose(scored[str(index)].numpy(), values, atol=1e-5)


def test_windows_over_context_ranks() -> None:
    *found, _ = run_ranks(2, windowed)[0], None
    assert_close(found[0][1], found[0][0], 1e-5)


def windowed(rank: int, world: int) -> list[dict[str, Tensor]]:
    samples = tree_samples()
    engine = make_engine(make_mesh("cpu", context=world), LOSSES["sft"], small_model("mistral"))
    ways = [(PackSettings(), 1), (PackSettings(share_prefixes=True), 1000)]
    return [gradients(engine, samples, None, rows, tokens) for rows, tokens in ways]


def test_dropout_is_not_shared(mesh: Mesh) -> None:
    model = small_model("gpt2", resid_pdrop=0.1)
    attach(model)
    with refused("batch.share_prefixes"):
        Scorer(model, mesh, max_tokens=1000, pack_settings=PackSettings(share_prefixes=True))
    scorer = Scorer(model, mesh, max_tokens=1000, pack_settings=PackSettings(share_prefixes="auto"))
    assert scorer.packer.unshared_reason is not None
    samples = [
        replace(sample, tokens=np.append(np.arange(90) % VOCABULARY, sample.tokens), **NO_ARRAYS)
        for sample in tree_samples()
    ]
    with pytest.warns(PadfreeWarning, match=r"each sample computes its own prefix: dropout 0\.1"):
        assert scorer.packer.plan(samples).prefixes is None
    assert scorer.packer.plan(samples).prefixes is None  # it warns once


@pytest.mark.parametrize(
    "changes",
    [{"checkpointing": "full"}, {"compile": "aot_eager"}, {"lora": LoraConfig(rank=4)}],
    ids=["recomputed", "compiled", "adapters"],
)
def test_ways_of_training(changes: dict[str, Any], mesh: Mesh) -> None:
    samples = tree_samples()
    engine = make_engine(mesh, LOSSES["sft"], small_model("llama"), **changes)
    expected = gradients(engine, samples, None, PackSettings(), 1)
    found = gradients(engine, samples, None, PackSettings(share_prefixes=True), 1000)
    assert_close(found, expected, 1e-5)
    assert expected


def test_other_trees_compile_nothing(mesh: Mesh) -> None:
    engine = make_engine(mesh, LOSSES["sft"], small_model("llama"), compile="aot_eager")
    shared = PackSettings(share_prefixes=True)
    gradients(engine, tree_samples(), None, shared, 1000)
    with CompilerWatch() as compiler:
        for samples in (tree_samples(1)[:6], tree_samples(2)[1:], [s.truncated(len(s) - 1) for s in tree_samples(3)]):
            assert engine.scorer.packer.plan(samples).prefixes is not None
            gradients(engine, samples, None, shared, 1000)
        assert compiler.count == 0


@pytest.mark.parametrize("name", ["lfm2", "llama4"])
def test_layers_that_carry_a_state_or_count_positions_are_not_shared(name: str, mesh: Mesh) -> None:
    """The model itself also refuses a pack with shared prefixes."""
    model = attach(build(name))
    assert (
        Scorer(model, mesh, max_tokens=1000, pack_settings=PackSettings(share_prefixes="auto")).packer.unshared_reason
        is not None
    )
    with refused("batch.share_prefixes"):
        Scorer(model, mesh, max_tokens=1000, pack_settings=PackSettings(share_prefixes=True))
    with refused("share_prefixes"):
        hidden_states(model, shard(collate(tree_samples(), share_prefixes=True)))
