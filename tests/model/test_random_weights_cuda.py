"""Random weights on a GPU."""

from __future__ import annotations

import pytest
import torch

from padfree.model.load import load_model
from padfree.model.named_tensors import named_tensors
from padfree.testing.models import build


@pytest.mark.gpu
def test_weights_are_drawn_on_the_device() -> None:
    """The same numbers again, other numbers with another seed, and the distributions of the CPU."""
    config = build("qwen3").config
    first, again, other = (named_tensors(load_model(config, device="cuda", seed=seed)) for seed in (1, 1, 2))
    host = named_tensors(load_model(config, device="cpu", seed=1))
    for name, tensor in first.items():
        assert tensor.is_cuda
        assert torch.equal(tensor, again[name])
        spread = float(host[name].double().std())
        if spread:
            assert not torch.equal(tensor, other[name])
            assert float(tensor.double().std()) == pytest.approx(spread, rel=6 / tensor.numel() ** 0.5)
        else:
            assert torch.equal(tensor.cpu(), host[name])
