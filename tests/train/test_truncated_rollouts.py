"""RL on responses from a truncated softmax: the gradient, every layout, files and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.cp import shard
from padfree.data.data_settings import RolloutDataSettings
from padfree.data.rollouts import read_rollouts
from padfree.distributed import distributed, make_mesh
from padfree.kept_sets import KeptSets
from padfree.losses import ClipSettings, PolicySettings
from padfree.model import attach
from padfree.packing import collate, pack
from padfree.record.metrics_file import write_samples
from padfree.sample import Sample
from padfree.tasks.micro_batch_loss import TokenMicroBatchLoss
from padfree.train.global_batch import GlobalBatch, update_parts
from padfree.train.microbatch import filler
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import VOCABULARY, small_model
from tests.train.test_rollouts_run import first_samples, lines, make_config, model_folder

__all__ = ["model_folder"]  # a fixture
TEMPERATURE = 0.8
SETTINGS = PolicySettings(objective=ClipSettings(low=0.1, high=0.2), entropy_coefficient=0.05)


def make_samples() -> list[Sample]:
    """Two groups with a common prompt each; sets of every kind, one sample without any, and untrained tokens."""
    rng = np.random.default_rng(3)
    samples = []
    for index in range(6):
        prompt = np.arange(4) + 7 * (index // 3)
        response = rng.integers(0, VOCABULARY, 5 + index)
        tokens = np.concatenate([prompt, response])
        mask = np.arange(len(tokens)) >= 4
        mask[6] = index != 1  # written by a tool
        lists: list[list[int]] = []
        for place, token in enumerate(tokens.tolist()):
            others = [one for one in rng.permutation(VOCABULARY).tolist() if one != token]
            kinds = [[token, *others[:3]], [token], [], [-1 - one for one in others[:2]]]
            lists.append(kinds[int(rng.integers(4))] if mask[place] else [])
        samples.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                kept=None if index == 4 else KeptSets.of_lists(lists, "kept"),
                advantages=np.full(len(tokens), rng.normal()),
                old_logprobs=-rng.random(len(tokens)) * 2,
                group=index // 3,
                uid=f"s{index}",
            )
        )
    return samples


def token_weights(samples: list[Sample]) -> list[Any]:
    return [np.full(len(sample), 1 / 32, np.float32) for sample in samples]


def plain(samples: list[Sample]) -> dict[str, Tensor]:
    """One sample at a time with the plain HF model in float64: its gradients, and the loss."""
    model = small_model().double().train(False)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, :-1] / TEMPERATURE
        if sample.kept is not None:
            for row, one in enumerate(sample.kept.lists()[1:]):
                if one:
                    listed = torch.zeros(VOCABULARY, dtype=torch.bool)
                    listed[[max(number, -1 - number) for number in one]] = True
                    logits = logits.index_put(
                        (torch.tensor([row]),), logits[row].masked_fill(listed == (one[0] < 0), -torch.inf)
                    )
        log_p = logits.log_softmax(1)
        logprobs = log_p.gather(1, torch.from_numpy(sample.tokens[1:]).long()[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)
        advantages, old = (torch.from_numpy(one[1:]).double() for one in (sample.advantages, sample.old_logprobs))
        ratio = (logprobs - old).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.2) * advantages) - 0.05 * entropy
        total = total + (losses * torch.from_numpy(sample.mask[1:])).sum() / 32
    total.backward()
    return {"loss": total.detach(), **gradients(model)}


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def summed(batches: list[LocalBatch], model: PreTrainedModel) -> dict[str, Tensor]:
    loss = TokenMicroBatchLoss(SETTINGS, temperature=TEMPERATURE)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        found = loss(model, batch).loss
        found.backward()
        total = total + found.detach()
    return {"loss": total, **gradients(model)}


def packs(samples: list[Sample], form: str) -> list[LocalBatch]:
    weights = token_weights(samples)
    if form == "packs":
        return [shard(one) for one in pack(samples, weights=weights, max_tokens=24, multiple_of=4)]
    if form == "shared prefixes":
        return [shard(collate(samples, weights=weights, share_prefixes=True))]
    halves = [samples[:2], samples[2:]]
    return [shard(one) for half in halves for one in pack(half, weights=token_weights(half))]


@pytest.mark.parametrize("form", ["packs", "shared prefixes", "halves"])
def test_the_gradient_is_that_of_single_samples(form: str) -> None:
    model = attach(small_model().double().train(False))
    found = summed(packs(make_samples(), form), model)
    expected = plain(make_samples())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **tolerance(name, exact=form != "shared prefixes"), msg=name)


def tolerance(name: str, *, exact: bool) -> dict[str, float]:
    """Attention over shared prefixes and over context ranks sums gradients in float32, also without kept sets."""
    return {"atol": 1e-12 if exact or name == "loss" else 1e-6, "rtol": 0.0}


def context_ranks(rank: int, world: int) -> list[dict[str, Tensor]]:
    mesh = make_mesh("cpu", context=world)
    found = []
    for shared in (False, True):
        for kind in ("balanced", "contiguous", "headtail"):
            model = attach(small_model().double().train(False))
            packed = collate(make_samples(), weights=token_weights(make_samples()), share_prefixes=shared)
            batch = shard(packed.padded_to_multiple(world), world=world, rank=rank, group=mesh.context.group, kind=kind)  # type: ignore[arg-type]
            found.append(summed([batch], model))
    return found


def test_context_ranks_have_their_own_sets() -> None:
    expected = plain(make_samples())
    results = run_ranks(2, context_ranks)
    for parts in zip(*results, strict=True):
        for name, tensor in expected.items():
            found = sum(part[name] for part in parts if name in part)
            torch.testing.assert_close(found, tensor, **tolerance(name, exact=False), msg=name)


def test_a_filler_has_no_sets() -> None:
    batch = shard(collate([filler(make_samples())]))
    assert batch.kept is None


def ranks(rank: int, world: int, configs: list[Any]) -> list[list[Sample]]:
    found = []
    for config in configs:
        found.append(first_samples(config))
        train(config)
    return found


@pytest.mark.parametrize("rollout", [{"top_p": 0.7, "top_k": 30}, {"min_p": 0.05}], ids=["top-p", "min-p"])
def test_runs_are_the_same_on_any_layout(rollout: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    loss = {"old_policy": "trainer", "kl_coefficient": 0.05, "entropy_coefficient": 0.01}
    about: dict[str, Any] = {"loss": loss, "reference": {"path": str(model_folder)}}
    config = make_config(tmp_path / "one", model_folder, rollout=rollout, **about)
    with distributed(device="cpu"):
        expected = first_samples(config)
    train(config)
    others = [
        make_config(tmp_path / "data", model_folder, rollout=rollout, **about),
        make_config(
            tmp_path / "context", model_folder, parallel={"context": 2}, batch={"share_prefixes": True},
            rollout={**rollout, "max_concurrent": 64}, **about,
        ),
    ]  # fmt: skip
    assert all(sample.kept is not None and sample.kept.contain(sample.tokens).all() for sample in expected)
    for samples in [one for part in run_ranks(2, ranks, others) for one in part]:
        for sample, other in zip(samples, expected, strict=True):
            assert np.array_equal(sample.tokens, other.tokens)
            assert sample.kept is not None
            assert other.kept is not None
            assert sample.kept.lists() == other.kept.lists()
    written = lines(tmp_path / "one")
    for line in written:
        assert line["loss/sampler_difference"] < 1e-5
        assert line["kept_ids"] > 0
    assert written[0]["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    for folder in ("data", "context"):
        for line, other in zip(lines(tmp_path / folder), written, strict=True):
            for name in ("loss", "gradient_norm", "reward", "kept_ids", "kept_bytes", "loss/entropy"):
                assert line[name] == pytest.approx(other[name], rel=2e-4, abs=1e-5), (folder, name)


def test_a_file_of_rollouts_keeps_the_sets(tmp_path: Path) -> None:
    samples = [sample for sample in make_samples() if sample.kept is not None]
    for sample in samples:
        object.__setattr__(sample, "reward", 1.0)
    write_samples(tmp_path / "rollouts.jsonl", samples)
    read = read_rollouts([str(tmp_path / "rollouts.jsonl")], settings=RolloutDataSettings())
    for sample, other in zip(read.samples, samples, strict=True):
        assert sample.kept is not None
        assert other.kept is not None
        assert sample.kept.lists() == other.kept.lists()
    row = {"prompt_tokens": [1, 2], "response_tokens": [3, 4], "reward": 1.0, "kept": [[3, 5], None]}
    wrong = {**row, "kept": [[5], None]}
    short = {**row, "kept": [[3]]}
    mixed = {**row, "kept": [[3, -5], None]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (sample,) = read_rollouts([str(path)], settings=RolloutDataSettings()).samples
    assert sample.kept is not None
    assert sample.kept.lists() == [[], [], [3, 5], []]
    for bad, about in ((wrong, "does not contain the token 3"), (short, "has 1 entries"), (mixed, "is not a kept set")):
        path.write_text(json.dumps(bad) + "\n")
        with pytest.raises(ValueError, match=about):
            read_rollouts([str(path)], settings=RolloutDataSettings())


def test_a_checkpoint_between_updates_keeps_the_sets() -> None:
    samples = make_samples()
    course: dict[str, int] = {"epochs": 2, "mini_batches": 2, "seed": 3, "number": 5}
    batch = GlobalBatch(samples=samples, parts=update_parts(len(samples), **course), epochs=2)
    for sample, other in zip(GlobalBatch.restored(batch.state(), **course).samples, samples, strict=True):
        assert (sample.kept is None) == (other.kept is None)
        if sample.kept is not None and other.kept is not None:
            assert sample.kept.lists() == other.kept.lists()


def test_a_token_outside_its_set_names_the_sample() -> None:
    with refused("kept", "the ids kept at index 2 of sample 'x' do not contain the trained token 6"):
        Sample(tokens=[5, 5, 6], loss_mask=[0, 1, 1], kept=[[], [5], [7]], uid="x")  # type: ignore[arg-type]
    cut = make_samples()[0].truncated(6)
    assert cut.kept is not None
    assert len(cut.kept) == 6
