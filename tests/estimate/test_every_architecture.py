"""Every architecture that is attached can be planned: what a run asks of its sizes before it trains."""

from __future__ import annotations

import pytest

from padfree.estimate.activations import token_bytes
from padfree.packing.cost import CostModel
from padfree.sizes import ModelSizes
from tests.models import ARCHITECTURES, build


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes_memory_and_cost_are_found(name: str) -> None:
    model = build(name)
    sizes, cost = ModelSizes.of(model.config), CostModel.from_config(model.config)
    assert cost.linear > 0
    kept, recomputed = (token_bytes(model, 4, checkpointing) for checkpointing in ("none", "full"))  # type: ignore[arg-type]
    assert kept > recomputed >= 4 * sizes.hidden


def test_a_size_that_differs_between_layers_is_the_largest() -> None:
    model = build("gemma4")
    found = {layer.head_dim for layer in model.config.per_layer_config}
    assert len(found) > 1
    assert ModelSizes.of(model.config).head == max(found)
