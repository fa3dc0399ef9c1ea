"""A checkpoint holds only tensors that can be written and read back."""

from __future__ import annotations

import torch
from torch import nn

from padfree.checkpoint.manifest import state_tensors
from tests.refused import refused


def test_what_has_no_name_in_safetensors_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))
    with refused("checkpoint", r"model/spectrum has dtype torch\.complex64"):
        state_tensors(model, None)
