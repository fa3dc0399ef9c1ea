"""The reference against one dense softmax over the whole pack, whose gradients come from autograd."""

from __future__ import annotations

import pytest
import torch

from padfree.attention import reference, varlen_attention
from padfree.segments import Segments
from tests.attention.cases import CASES, FEWER_QUERIES, MASKS, Case, assert_same, dense, make_inputs, run


@pytest.mark.parametrize("case", [*CASES, Case(head_dim=24, value_dim=40)], ids=str)
def test_it_is_a_softmax_over_the_keys_of_the_segment(case: Case) -> None:
    inputs = make_inputs(case, torch.float64)
    assert_same(run(case, inputs, "reference"), dense(case, inputs), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("mask", MASKS)
def test_the_gradients_of_blocks_of_keys_add_up_to_the_whole(mask: str) -> None:
    """Each block gets the out and lse of the whole softmax, as in ring attention."""
    case = Case(mask=mask, queries=FEWER_QUERIES)
    inputs = make_inputs(case, torch.float64)
    spec, segments_q, segments_k = case.spec, inputs.segments_q, inputs.segments_k
    out, lse = reference.BACKEND.forward(inputs.q, inputs.k, inputs.v, segments_q, segments_k, spec)
    whole = reference.BACKEND.backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, segments_q, segments_k, spec
    )
    total = [torch.zeros_like(tensor) for tensor in whole]
    for queries, keys in reference._segment_slices(segments_q, segments_k):
        visible = reference.visible_keys(queries.stop - queries.start, keys.stop - keys.start, spec, out.device)
        middle = (keys.stop - keys.start) // 3
        for block in (slice(0, middle), slice(middle, None)):
            k, v = inputs.k[keys][block], inputs.v[keys][block]
            dq, dk, dv = reference.block_backward(
                inputs.dout[queries], inputs.q[queries], k, v, out[queries], lse[queries], visible[:, block], spec
            )
            total[0][queries] += dq
            total[1][keys][block] += dk
            total[2][keys][block] += dv
    for got, want in zip(total, whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_gradcheck_with_softcap_window_and_sinks() -> None:
    segments_q, segments_k = Segments.from_lengths([2, 3, 0]), Segments.from_lengths([4, 2, 3])
    q, k, v, sinks = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4, 3), (9, 2, 3), (9, 2, 2), (4,))
    )

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return varlen_attention(
            *tensors[:3], segments_q, segments_k, window=3, softcap=0.8, sinks=tensors[3], backend="reference"
        )

    assert torch.autograd.gradcheck(function, (q, k, v, sinks))


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 5e-2, 5e-2)])
def test_smaller_types_are_computed_in_float32(dtype: torch.dtype, atol: float, rtol: float) -> None:
    case = Case(sinks=True)
    inputs = make_inputs(case, dtype)
    got = run(case, inputs, "reference")
    assert got["out"].dtype == got["dk"].dtype == dtype
    assert got["lse"].dtype == torch.float32
    wide = make_inputs(case, torch.float64)
    for name in ("q", "k", "v", "dout", "sinks"):
        setattr(wide, name, getattr(inputs, name).double())
    assert_same({name: tensor.double() for name, tensor in got.items()}, dense(case, wide), atol=atol, rtol=rtol)
