"""Packs with images on several context ranks: loss and every gradient equal those of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.cp import shard
from padfree.cp.image_owners import owners
from padfree.cp.ring import attend_ring
from padfree.cp.shard import METHODS
from padfree.model import attach, hidden_states, lm_head_of
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.testing.vision_models import VISION_MODELS, build_vision, picture, shown
from tests.model.vision.one_at_a_time import gradients, packed, sum_of_losses, without_rounding
from tests.model.vision.test_packed_images import RECURRENT, mixed, with_prompts
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import in_float64, largest_difference


def packs(name: str, world: int) -> dict[str, PackedBatch]:
    model = build_vision(name)
    last = shown(model, [9, picture(model, 3, rows=2, columns=2), 2], seed=7)
    found = {
        "mixed": collate(mixed(model)),
        "one image at the end": collate([shown(model, [17], seed=1), last]),
        "no image": collate([shown(model, [9]), shown(model, [9], seed=1)]),
    }
    if name not in RECURRENT:
        found["shared"] = collate(with_prompts(model), share_prefixes=True)
    return {key: batch.padded_to_multiple(world) for key, batch in found.items()}


def wide(name: str) -> PreTrainedModel:
    model: PreTrainedModel = in_float64(build_vision(name))
    return model


def on_ranks(rank: int, world: int, cases: Sequence[tuple[str, str, str]]) -> list[dict[str, dict[str, Tensor]]]:
    """For each case (name, layout, method) and pack: loss and gradients, summed over the ranks."""
    results = []
    with without_rounding():
        for name, kind, method in cases:
            model, found = attach(wide(name)), {}
            for key, batch in packs(name, world).items():
                local = shard(
                    batch, world=world, rank=rank, group=dist.group.WORLD, kind=kind, method=method,  # type: ignore[arg-type]
                )  # fmt: skip
                loss = sum_of_losses(lm_head_of(model).logits(hidden_states(model, local)), local.labels)
                found[key] = gradients(model, loss)
                for tensor in found[key].values():
                    dist.all_reduce(tensor)
            results.append(found)
    return results


def assert_equal_to_one_process(world: int, cases: Sequence[tuple[str, str, str]]) -> None:
    (results, *_) = run_ranks(world, on_ranks, cases)
    for (name, kind, method), found in zip(cases, results, strict=True):
        with without_rounding():
            for key, batch in packs(name, world).items():
                expected = packed(wide(name), batch)
                difference, where = largest_difference(found[key], expected)
                assert difference < 1e-12, f"{name}, {kind}, {method}, {key}: {where}: {difference:.1e}"


def test_every_family_on_two_ranks() -> None:
    layouts = {name: "balanced" if name in RECURRENT else "contiguous" for name in VISION_MODELS}
    assert_equal_to_one_process(2, [(name, layouts[name], "allgather") for name in VISION_MODELS])


def test_every_method_and_layout() -> None:
    """The layout headtail gives each rank two parts of an image."""
    cases = [("qwen3_vl", kind, method) for method in METHODS for kind in ("balanced", "contiguous", "headtail")]
    cases += [("gemma3", kind, method) for method in ("allgather", "ulysses") for kind in ("balanced", "headtail")]
    assert_equal_to_one_process(2, cases)


def test_four_ranks() -> None:
    """More ranks than images, so that some encode none."""
    cases = [("qwen3_vl", "contiguous", "allgather"), ("gemma3", "headtail", "allgather")]
    assert_equal_to_one_process(4, [*cases, ("internvl", "headtail", "ring")])


@pytest.mark.parametrize("kind", ["balanced", "contiguous", "headtail"])
def test_each_image_is_encoded_by_one_rank(kind: Any) -> None:
    model = build_vision("qwen3_vl")
    batch = collate(mixed(model)).padded_to_multiple(2)
    locals_ = [shard(batch, world=2, rank=rank, kind=kind) for rank in range(2)]
    assert batch.images is not None
    encoded = [local.images for local in locals_ if local.images is not None]
    assert sorted(count for one in encoded for count in one.counts) == sorted(batch.images.counts)
    rows = sum(len(one.inputs["pixel_values"]) for one in encoded)
    assert rows == len(batch.images.inputs["pixel_values"])
    for local in locals_:
        assert local.images is not None
        assert len(local.images.features.index) == int((local.input_ids == batch.images.placeholder).sum())
        assert local.rotary_positions is not None
        assert local.rotary_positions.shape == (3, local.num_tokens)
    with refused("group", "is not set"):
        hidden_states(attach(copy.deepcopy(model)), locals_[0])


def test_a_ring_does_not_support_whole_images() -> None:
    model = attach(build_vision("gemma3"))
    local = shard(collate(mixed(model)).padded_to_multiple(2), world=2, rank=0, method="ring", group=None)
    blocks = local.context.image_blocks
    states = torch.zeros(local.num_tokens, 2, 4)
    with refused("method", "ring"):
        attend_ring(
            states, states, states, local.context.plan, None, causal=True, window=None, sinks=None, image_blocks=blocks,  # type: ignore[arg-type]
        )  # fmt: skip


def test_images_are_balanced_by_their_patches() -> None:
    assert owners([4, 16, 4, 8], 2).tolist() == [1, 0, 1, 1]
    assert owners([3], 4).tolist() == [0]
    generator = np.random.default_rng(0)
    patches = generator.integers(1, 100, 64).tolist()
    loads = np.bincount(owners(patches, 8), weights=patches)
    assert loads.max() < 1.1 * loads.mean()


def test_a_lost_feature_would_be_seen() -> None:
    """Features in the wrong order change the loss, so that the comparisons above would fail."""
    model = build_vision("qwen3_vl")
    samples: list[Sample] = mixed(model)
    batch = collate(samples)
    assert batch.images is not None
    before = packed(model, batch)["loss"]
    batch.images.index[:] = batch.images.index[::-1]
    assert (packed(model, batch)["loss"] - before).abs() > 0.1
    assert torch.isfinite(before)
