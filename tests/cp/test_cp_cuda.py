"""Context ranks simulated sequentially on one GPU: bf16 kernels against a float32 reference.

One GPU is enough: gathering keys and the arithmetic of the ring are the same; only the communication is replaced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import choose_backend
from padfree.batch import PackedBatch
from tests.cp.cases import KINDS, Inputs, inputs_for, one_process, packed
from tests.cp.test_allgather import played as played_allgather
from tests.cp.test_ring import played as played_ring

pytestmark = pytest.mark.gpu

LENGTHS = [700, 1, 2500, 64, 129, 3000, 5, 1024]
WORLD = 8
PLAYED = {"allgather": played_allgather, "ring": played_ring}


def bf16_row(seed: int = 0, **options: Any) -> tuple[PackedBatch, Inputs]:
    batch = packed(LENGTHS, WORLD).to("cuda")
    inputs = inputs_for(batch.num_tokens, heads=8, key_heads=2, dim=128, seed=seed, **options)
    return batch, inputs.to(torch.bfloat16, "cuda")


def need(backend: str, **needs: bool) -> None:
    try:
        choose_backend("cuda", torch.bfloat16, 128, requested=backend, **needs)
    except ValueError as reason:
        pytest.skip(str(reason))


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", PLAYED)
@pytest.mark.parametrize("backend", ["torch", "fa4", "flex"])
def test_simulated_ranks_are_as_exact_as_one_call(backend: str, method: str, kind: str) -> None:
    need(backend, raw_backward=method == "ring")
    batch, inputs = bf16_row(sinks=True)
    exact = one_process(inputs.to(torch.float32), batch.segments)
    alone = one_process(inputs, batch.segments, backend)
    got = PLAYED[method](inputs, batch, WORLD, kind, backend)
    for name, one, many, want in zip(("out", "dq", "dk", "dv", "dsinks"), alone, got, exact, strict=True):
        # The gradient of eight sinks is eight bfloat16 numbers: their rounding alone scatters by this much.
        assert error(many, want) < max(1.5 * error(one, want), 2e-2 if name == "dsinks" else 4e-3), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "fa4", "flex"])
def test_windows_cross_the_boundary_of_a_rank(backend: str, kind: str) -> None:
    need(backend)
    batch, inputs = bf16_row(window=200)
    exact = one_process(inputs.to(torch.float32), batch.segments)
    for got, want in zip(played_allgather(inputs, batch, WORLD, kind, backend), exact, strict=True):
        assert error(got, want) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", PLAYED)
@pytest.mark.parametrize("backend", ["torch", "fa4", "flex"])
def test_no_document_sees_another(backend: str, method: str, kind: str) -> None:
    need(backend, raw_backward=method == "ring")
    batch, before = bf16_row(0)
    _, other = bf16_row(1)
    out = PLAYED[method](before, batch, WORLD, kind, backend)[0]
    for document in (2, 4, 8):  # a long one, a short one, the pad
        kept = (batch.sample_index == document)[:, None, None]
        mixed = Inputs(
            torch.where(kept, before.q, other.q),
            torch.where(kept, before.k, other.k),
            torch.where(kept, before.v, other.v),
            before.dout,
        )
        again = PLAYED[method](mixed, batch, WORLD, kind, backend)[0]
        tokens = kept[:, 0, 0]
        assert torch.equal(out[tokens], again[tokens])
        assert not torch.equal(out[~tokens], again[~tokens])


def test_a_step_does_not_synchronise_with_the_device() -> None:
    """After a micro-batch is prepared, attention does not synchronise with the GPU."""
    need("torch")
    batch, inputs = bf16_row()
    for method in PLAYED.values():
        method(inputs, batch, WORLD, "balanced", "torch")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for method in PLAYED.values():
            method(inputs, batch, WORLD, "balanced", "torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
