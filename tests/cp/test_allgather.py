"""The all-gather method with simulated ranks, one after the other: no process group, exact attention and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
        pool = prepare_keys(plan, causal=inputs.options.get("causal", True), window=window).pool_tokens
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
