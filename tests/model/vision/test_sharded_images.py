"""Updates of vision-language models by the engine: the same on one process and on two FSDP2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from padfree.distributed import Mesh, make_mesh
from padfree.model.structure import tower_blocks
from padfree.optim.optimizer import make_optimizer
from padfree.packing import CostModel
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.vision_models import build_vision, picture, shown
from padfree.train.engine import Engine
from padfree.train.microbatch import filler
from padfree.train.scorer import Scorer
from padfree.train.step import StepReport
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, OPTIMIZER, two_steps

NAMES = ("qwen2_5_vl", "qwen3_vl", "internvl")
MAX_TOKENS = 24

Outcome = tuple[list[StepReport], dict[str, Tensor]]


def samples_of(name: str) -> list[Sample]:
    """One image in three samples, and so much text that some packs of a rank have no image."""
    model = build_vision(name)
    first, second = picture(model, 0, rows=1, columns=2), picture(model, 1, rows=1, columns=1)
    parts = [[4, first, 5], [20], [3, first, 2], [19], [2, second, 2, first, 1], [7]]
    return [shown(model, own, seed=seed, uid=f"s{seed}") for seed, own in enumerate(parts)]


def make_vision_engine(mesh: Mesh, name: str) -> Engine:
    model = build_vision(name)
    parallelize(model, transformations(mesh))
    scorer = Scorer(model, mesh, max_tokens=MAX_TOKENS, overlong="alone", cost=CostModel.tokens())
    return Engine(scorer, make_optimizer(model, OPTIMIZER), LOSSES["sft"])


def outcome(mesh: Mesh, name: str) -> Outcome:
    return two_steps(make_vision_engine(mesh, name), samples_of(name))


def assert_same_updates(found: Outcome, expected: Outcome) -> None:
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-5)
        assert mine.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
    for key, weight in expected[1].items():
        torch.testing.assert_close(found[1][key], weight, atol=1e-5, rtol=0)


def on_two_ranks(rank: int, world: int) -> tuple[dict[str, Outcome], bool]:
    mesh = make_mesh("cpu")
    found = {name: outcome(mesh, name) for name in NAMES}
    model = build_vision("qwen3_vl")
    parallelize(model, transformations(mesh))
    layers = model.base_model.language_model.layers
    blocks: Any = tower_blocks(model)
    return found, len(blocks) == 3 and all(isinstance(layer, FSDPModule) for layer in (*layers, *blocks))


def test_two_ranks_equal_one_process(mesh: Mesh) -> None:
    (found, are_units), (other, _) = run_ranks(2, on_two_ranks)
    assert are_units
    for name in NAMES:
        expected = outcome(mesh, name)
        assert_same_updates(found[name], expected)
        assert_same_updates(other[name], expected)
        weights, before = expected[1], build_vision(name).state_dict()
        moved = {key for key, weight in weights.items() if not torch.equal(weight, before[key])}
        assert any("vis" in key for key in moved)
        assert any("language_model" in key for key in moved)


def on_two_context_ranks(rank: int, world: int) -> dict[str, Outcome]:
    mesh = make_mesh("cpu", context=2)
    return {name: outcome(mesh, name) for name in NAMES}


def test_two_context_ranks_equal_one_process(mesh: Mesh) -> None:
    for found in run_ranks(2, on_two_context_ranks):
        for name in NAMES:
            assert_same_updates(found[name], outcome(mesh, name))


def test_the_filler_of_a_batch_shows_no_image() -> None:
    model = build_vision("qwen3_vl")
    sample = shown(model, [picture(model, 0), 3])
    begins_with_image = Sample(
        tokens=sample.tokens[1:],
        images=tuple(
            type(image)(digest=image.digest, positions=image.positions - 1, load=image.load, grid=image.grid)
            for image in sample.images
        ),
    )
    assert filler([begins_with_image]).images == ()


def in_bfloat16(rank: int, world: int) -> list[float]:
    mesh, losses = make_mesh("cpu"), []
    for name in NAMES:
        model = build_vision(name)
        parallelize(model, transformations(mesh, dtype=torch.bfloat16))
        scorer = Scorer(model, mesh, max_tokens=MAX_TOKENS, overlong="alone", cost=CostModel.tokens())
        reports, _ = two_steps(Engine(scorer, make_optimizer(model, OPTIMIZER), LOSSES["sft"]), samples_of(name))
        losses += [report.loss for report in reports]
    return losses


def test_blocks_of_the_tower_compute_in_bfloat16(mesh: Mesh) -> None:
    expected = [report.loss for name in NAMES for report in outcome(mesh, name)[0]]
    for losses in run_ranks(2, in_bfloat16):
        assert losses == pytest.approx(expected, rel=0.05)
