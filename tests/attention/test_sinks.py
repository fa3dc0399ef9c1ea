from __future__ import annotations

import torch

from padfree.attention import apply_sinks, sinks_gradient


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    # Two keys with scores 0 and log 2, a sink with score 0: the keys had 1/3 and 2/3, and now have 1/4 and 2/4.
    v = torch.tensor([4.0, 8.0])
    lse = torch.tensor([[3.0]]).log()
    out = (torch.tensor([1.0, 2.0]) / 3 * v).sum().view(1, 1, 1)
    with_sink, with_sink_lse = apply_sinks(out, lse, torch.zeros(1))
    torch.testing.assert_close(with_sink, torch.tensor([[[5.0]]]))
    torch.testing.assert_close(with_sink_lse, torch.tensor([[4.0]]).log())


def test_a_query_without_keys_gives_nothing_and_no_gradient() -> None:
    out, lse = apply_sinks(torch.zeros(1, 2, 3), torch.full((1, 2), -torch.inf), torch.tensor([0.5, -1.0]))
    assert out.tolist() == [[[0.0] * 3] * 2]
    torch.testing.assert_close(lse, torch.tensor([[0.5, -1.0]]))
    assert sinks_gradient(torch.ones(1, 2, 3), out, lse, torch.tensor([0.5, -1.0])).tolist() == [0.0, 0.0]


def test_gradient_is_that_of_autograd() -> None:
    scores = torch.randn(7, 2, 5, dtype=torch.float64)
    v = torch.randn(5, 2, 3, dtype=torch.float64)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(7, 2, 3, dtype=torch.float64)
    joint = torch.cat([scores, sinks[None, :, None].expand(7, -1, 1)], dim=-1).softmax(dim=-1)[..., :-1]
    torch.einsum("qhk,khd->qhd", joint, v).backward(dout)
    out, lse = torch.einsum("qhk,khd->qhd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)
    got = sinks_gradient(dout, *apply_sinks(out, lse, sinks.detach()), sinks.detach())
    torch.testing.assert_close(got, sinks.grad)


def test_small_types_keep_their_type_and_round_once() -> None:
    out = torch.randn(100, 2, 4).bfloat16()
    lse, sinks = torch.randn(100, 2), torch.tensor([0.3, 2.0]).bfloat16()
    got, _ = apply_sinks(out, lse, sinks)
    want, _ = apply_sinks(out.double(), lse.double(), sinks.double())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.bfloat16())
