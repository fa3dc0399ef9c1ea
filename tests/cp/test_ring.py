"""The arithmetic of the ring with simulated ranks, and how its error depends on their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import apply_sinks, sinks_gradient
from padfree.batch import PackedBatch
from padfree.cp.ring import PlayedRing, prepare_steps, ring_backward, ring_forward
from tests.cp.cases import KINDS, ROWS, Inputs, context_of, inputs_for, one_process, packed, relative_error


def played(inputs: Inputs, batch: PackedBatch, world: int, kind: str, backend: str = "reference") -> list[Tensor]:
    """Output and gradients of the whole pack, computed one simulated rank after another."""
    causal = inputs.options.get("causal", True)
    options = {"scale": None, "softcap": inputs.options.get("softcap"), "backend": backend}
    plans = [context_of(batch, world, rank, kind=kind).plan for rank in range(world)]
    blocks = [(inputs.k[plan.own], inputs.v[plan.own]) for plan in plans]
    results = [torch.zeros_like(t) for t in (inputs.dout, inputs.q, inputs.k, inputs.v)]
    dsinks = [] if inputs.sinks is None else [torch.zeros_like(inputs.sinks)]
    for rank, plan in enumerate(plans):
        steps = prepare_steps(plan, causal=causal)
        q, dout = inputs.q[plan.own], inputs.dout[plan.own]
        out, lse = ring_forward(q, *blocks[rank], steps, PlayedRing(rank, blocks), **options)
        if inputs.sinks is not None:
            out, lse = apply_sinks(out, lse, inputs.sinks)
        out = out.to(q.dtype)
        gradients = PlayedRing(rank)
        dq, _, _ = ring_backward(
            dout, q, *blocks[rank], out, lse, steps, PlayedRing(rank, blocks), gradients, **options
        )
        results[0][plan.own], results[1][plan.own] = out, dq.to(q.dtype)
        for distance, parts in enumerate(gradients.posted):
            owner = plans[(rank - distance) % world].own
            for result, part in zip(results[2:], parts, strict=True):
                result.index_add_(0, owner, part.to(result.dtype))
        if inputs.sinks is not None:
            dsinks[0] += sinks_gradient(dout, out, lse, inputs.sinks)
    return results + dsinks


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
@pytest.mark.parametrize("options", [{"causal": False}, {"softcap": 2.0}])
def test_soft_caps_and_full_attention(options: dict[str, Any], kind: str) -> None:
    for name in ("short documents", "over three ranks", "one document"):
        batch = packed(ROWS[name], 4)
        inputs = inputs_for(batch.num_tokens, **options).to(torch.float64)
        expected = one_process(inputs, batch.segments)
        for got, want in zip(played(inputs, batch, 4, kind), expected, strict=True):
            assert relative_error(got, want) < 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
def test_error_does_not_grow_with_the_ring(kind: str) -> None:
    """Against float64, the float32 error on 2, 4 and 8 ranks stays that of one rank: sums are merged in float32."""
    batch = packed([150, 3, 200, 47], 8)
    inputs = inputs_for(batch.num_tokens, dim=16)
    exact = one_process(inputs.to(torch.float64), batch.segments)
    alone = [relative_error(got, want) for got, want in zip(one_process(inputs, batch.segments), exact, strict=True)]
    for world in (2, 4, 8):
        for one, got, want in zip(alone, played(inputs, batch, world, kind), exact, strict=True):
            assert relative_error(got, want) < 8 * max(one, 2**-23), world


def test_a_step_without_keys_is_not_computed() -> None:
    batch = packed([16, 16, 16, 16], 4)
    for rank in range(4):
        steps = prepare_steps(context_of(batch, 4, rank, kind="contiguous").plan)
        assert steps[0] is not None
        assert steps[1:] == (None, None, None)


def test_queries_that_see_nothing_of_a_block_are_left_out() -> None:
    batch = packed([4, 8, 4], 2)  # ranks hold 4 + 4 of the second document, and the rest of it + 4
    step = prepare_steps(context_of(batch, 2, 1, kind="contiguous").plan)[1]
    assert step is not None
    assert step.queries is not None
    assert step.queries.tolist() == [0, 1, 2, 3]
    assert step.segments_k.lengths.tolist() == [4]
    assert not step.causal
