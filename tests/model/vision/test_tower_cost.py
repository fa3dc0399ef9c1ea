"""The FLOPs of images: against torch's own counter, and in the plan of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from padfree.estimate.flops import Flops
from padfree.model.parts import freeze
from padfree.model.vision.families import family_of
from padfree.model.vision.tower_cost import TowerCost, tower_cost
from padfree.packing import CostModel, plan_step
from padfree.packing.collate import prefixes_of
from padfree.packing.shared_plan import plan_shared_step
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.testing.vision_models import VISION_MODELS, build_vision, picture, shown
from padfree.train.step import encoded_images


def counted(model: PreTrainedModel, image: Any) -> float:
    """The FLOPs of the tower and the projector for one image, forward, as torch counts them."""
    family = family_of(model)
    assert family is not None
    inputs = {name: torch.from_numpy(array) for name, array in image.inputs.items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        family.encode(model.base_model, inputs)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", VISION_MODELS)
def test_the_cost_of_a_frozen_tower_is_what_torch_counts(name: str) -> None:
    """Forward only: nothing in the tower is trained. Eager attention, which torch's counter sees."""
    model = build_vision(name)
    model.set_attn_implementation("eager")
    freeze(model, ["tower", "projector"])
    cost = tower_cost(model)
    assert cost is not None
    family = family_of(model)
    assert family is not None
    # A tile has a class token or a pooling head besides its patches, and the tile of a tiny model has 16 patches.
    # Windows at the border of an image are not full.
    exactly = 0.2 if family.tiles or name == "qwen2_5_vl" else 1e-9
    for rows in (1, 2):
        image = picture(model, 0, rows=rows, columns=4)
        assert float(cost(image.num_tokens)) == pytest.approx(counted(model, image), rel=exactly), rows


def test_passes_follow_from_what_is_trained() -> None:
    model = build_vision("qwen3_vl")
    trained = tower_cost(model)
    freeze(model, ["projector"])
    without_projector = tower_cost(model)
    freeze(model, ["tower"])
    frozen = tower_cost(model)
    assert trained is not None
    assert without_projector is not None
    assert frozen is not None
    assert trained.linear == pytest.approx(3 * frozen.linear)
    assert trained.quadratic == pytest.approx(3 * frozen.quadratic)
    assert frozen.linear < without_projector.linear < trained.linear
    assert tower_cost(build("llama")) is None


def shown_samples(model: PreTrainedModel) -> list[Sample]:
    large, small = picture(model, 0, rows=2, columns=4), picture(model, 1, rows=1, columns=1)
    return [shown(model, [4, large, 4]), *(shown(model, [11, small], seed=seed) for seed in (1, 2)), shown(model, [18])]


def test_the_cost_of_an_image_is_divided_over_its_samples() -> None:
    cost = TowerCost(linear=10.0, quadratic=1.0)
    samples = shown_samples(build_vision("qwen3_vl"))
    assert cost.of_samples(sample.images for sample in samples).tolist() == [144.0, 5.5, 5.5, 0.0]


def test_images_do_not_pile_up_on_one_rank() -> None:
    lengths = np.full(8, 10)
    added = np.array([100.0, 100.0, 100.0, 100.0, 0, 0, 0, 0])
    options: dict[str, Any] = {"ranks": 2, "max_tokens": 40, "cost": CostModel.tokens()}
    for plan in (
        plan_step(lengths, added=added, **options),
        plan_step(lengths, added=added, groups=list(range(8)), **options),
    ):
        assert plan.cost.tolist() == [[240.0], [240.0]]
    model = build_vision("qwen3_vl")
    samples = [shown(model, [6, picture(model, number), 2], seed=number) for number in (0, 0, 1, 1, 2, 2, 3, 3)]
    tree = prefixes_of(samples, True)
    lengths = np.array([len(sample) for sample in samples])
    added = np.array([300.0, 300.0, 300.0, 300.0, 0, 0, 0, 0])
    plan = plan_shared_step(tree, lengths, added=added, ranks=2, max_tokens=60)
    assert plan.imbalance < 1.1


def test_the_flops_of_a_step_count_each_image_of_a_pack_once() -> None:
    model = build_vision("qwen3_vl")
    samples = shown_samples(model)
    lengths = np.array([len(sample) for sample in samples])
    together = plan_step(lengths, ranks=1, max_tokens=100)
    apart = plan_step(lengths, ranks=1, max_tokens=18)
    assert sorted(encoded_images(samples, together)) == [1, 8]
    assert sorted(encoded_images(samples, apart)) == [1, 1, 8]
    assert encoded_images([samples[-1]], plan_step([18], ranks=1, max_tokens=100)) == ()
    cost = tower_cost(model)
    assert cost is not None
    flops = Flops.of(model.config, devices=1, device=torch.device("cpu"), dtype=torch.float32, image=cost)
    difference = flops.step(lengths, 10, image_features=(1, 8)) - flops.step(lengths, 10)
    assert difference == pytest.approx(float(cost(1) + cost(8)))
