"""The all-gather method with simulated ranks, one after the other: no process group, exact attention and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.attention.prefix_attention import prefix_attention, prepare_prefix_keys
from padfree.attention.selection import key_block
from padfree.batch import PackedBatch
from padfree.cp.allgather import local_attention
from padfree.cp.keys import prepare_keys
from tests.cp.cases import KINDS, ROWS, Inputs, context_of, inputs_for, one_process, packed, relative_error


def played(inputs: Inputs, batch: PackedBatch, world: int, kind: str, backend: str = "reference") -> list[Tensor]:
    """Output and gradients of the whole pack, computed one simulated rank after another."""
    q, k, v, sinks = (None if t is None else t.detach().requires_grad_() for t in (*inputs.tensors[:3], inputs.sinks))
    out = torch.zeros_like(inputs.dout)
    for rank in range(world):
        plan = context_of(batch, world, rank, kind=kind).plan
        window = inputs.options.get("window")
        causal = inputs.options.get("causal", True)
        pool = prepare_keys(plan, causal=causal, window=window, key_block=key_block(backend)).pool_tokens
        share = len(plan.own)
        v_parts = v[pool[:share]], v[pool[share:]]  # a pool may be whole or in two parts: k is the one, v the other
        part = local_attention(q[plan.own], k[pool], v_parts, plan, sinks=sinks, backend=backend, **inputs.options)
        out = out.index_copy(0, plan.own, part)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    return [out.detach(), *torch.autograd.grad((out * inputs.dout).sum(), leaves)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_simulated_ranks_equal_one_process(name: str, world: int, kind: str) -> None:
    batch = packed(ROWS[name], world)
    inputs = inputs_for(batch.num_tokens, value_dim=6, sinks=True).to(torch.float64)
    expected = one_process(inputs, batch.segments)
    for got, want in zip(played(inputs, batch, world, kind), expected, strict=True):
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"window": 1}, {"window": 4}, {"window": 11}, {"causal": False}, {"softcap": 2.0}])
def test_windows_soft_caps_and_full_attention(options: dict[str, Any], kind: str) -> None:
    for name in ("short documents", "over three ranks", "one document"):
        batch = packed(ROWS[name], 4)
        inputs = inputs_for(batch.num_tokens, **options).to(torch.float64)
        expected = one_process(inputs, batch.segments)
        for got, want in zip(played(inputs, batch, 4, kind), expected, strict=True):
            assert relative_error(got, want) < 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 5, 150, 300])
def test_tiles_give_the_bits_of_one_process(window: int | None, kind: str) -> None:
    """Windows that are longer and shorter than a block of keys; samples that are divided at any position."""
    for lengths, world in (([700, 33, 1, 150], 2), ([500, 411], 3), ([5, 90, 200, 130, 7], 4)):
        batch = packed(lengths, world)
        inputs = inputs_for(batch.num_tokens, value_dim=6, window=window)
        expected = one_process(inputs, batch.segments, backend="tiles")[0]
        assert torch.equal(played(inputs, batch, world, kind, backend="tiles")[0], expected), lengths


@pytest.mark.parametrize("window", [None, 100, 150])
def test_tiles_give_the_bits_of_one_process_with_shared_prefixes(window: int | None) -> None:
    parents = np.array([-1, 0, 0, 2, 2, -1])
    pack = packed([300, 90, 45, 200, 7, 62])
    segments = replace(pack.segments, parents=parents)
    pack = replace(pack, segments=segments)
    inputs = inputs_for(pack.num_tokens)
    keys = prepare_prefix_keys(segments)
    assert keys is not None
    expected = prefix_attention(inputs.q, inputs.k, inputs.v, segments, keys, window=window, backend="tiles")
    for kind in KINDS:
        for world in (2, 4):
            inputs.options = {"window": window}
            assert torch.equal(played(inputs, pack, world, kind, backend="tiles")[0], expected), (kind, world)
