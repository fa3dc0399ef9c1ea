"""Activation offload: what is copied, and when device memory is freed. `test_compile` has the gradients."""

from __future__ import annotations

import torch
from torch import nn

from padfree.layers.offload import ActivationOffload, _LayerCall, _unpack


def test_what_vmap_sees_stays_where_it_is() -> None:
    call = _LayerCall(ActivationOffload(1, fraction=1.0, min_bytes=0), nn.Linear(2, 2), None, is_offloaded=True)
    saved = []
    torch.vmap(lambda row: saved.append(call.pack(row)) or row)(torch.randn(3, 4))  # type: ignore[func-returns-value]
    assert [each.offloaded for each in saved] == [None]


def test_device_memory_is_freed() -> None:
    offload = ActivationOffload(4, fraction=0.5, layers_per_copy=1.0, min_bytes=0)
    call = _LayerCall(offload, nn.Linear(2, 2), None, is_offloaded=True)
    tensor = torch.randn(3, 4)
    saved = [call.pack(tensor), call.pack(tensor.view(4, 3)), call.pack(call.layer.weight)]
    assert [each.offloaded is not None for each in saved] == [True, True, False]
    (offloaded,) = call.copied.values()
    call.free()
    assert offloaded.on_device is None
    assert torch.equal(_unpack(saved[1]), tensor.view(4, 3))
    assert offloaded.on_device is not None, "it is still needed"
    assert torch.equal(_unpack(saved[0]), tensor)
    assert offloaded.on_device is None
    assert _unpack(saved[2]) is call.layer.weight


def test_layers_are_freed_at_the_pace_of_the_link() -> None:
    offload = ActivationOffload(10, fraction=0.5, layers_per_copy=2.0)
    assert offload.offloaded == set(range(5))
    assert [number for number, layers in enumerate(offload.freed_at) for _ in layers] == [2, 4, 6, 8]
    assert offload.freed_at[8] == [3], "layer 4 is freed when backward begins"
