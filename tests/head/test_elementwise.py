"""The elementwise functions against formulas over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.head import elementwise
from padfree.head.elementwise import BlockedHead, BlockSums, LabelledRows, Softmax, Upstream

R, V = 5, 300


def make_head(*, softcap: float | None = None, bias: bool = False) -> BlockedHead:
    values = torch.linspace(-1, 1, V, dtype=torch.float64) if bias else None
    return BlockedHead(weight=torch.empty(V, 1), bias=values, softcap=softcap, logit_scale=1.5, block=64)


def make_rows(dtype: torch.dtype = torch.float64) -> LabelledRows:
    return LabelledRows(
        labels=torch.tensor([0, 63, 64, 299, 150]), inverse_temperature=torch.linspace(0.5, 2, R, dtype=dtype)
    )


def logits_of(raw_logits: Tensor, head: BlockedHead, rows: LabelledRows) -> Tensor:
    logits = head.logit_scale * (raw_logits if head.bias is None else raw_logits + head.bias)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits * rows.inverse_temperature[:, None]


def reduce_all(
    raw_logits: Tensor, head: BlockedHead, rows: LabelledRows, width: int, stored: Tensor | None = None
) -> BlockSums:
    """The sums of all columns, from tiles of `width` columns."""
    sums = BlockSums.empty(R, head.num_blocks, raw_logits, entropy=True)
    for first in range(0, V, width):
        part = None if stored is None else stored[:, first : first + width]
        elementwise.reduce_tile(raw_logits[:, first : first + width].clone(), first, head, rows, sums, part)
    return sums


@pytest.mark.parametrize("width", [64, 128, 320])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_merge_into_the_softmax(width: int, softcap: float | None, bias: bool) -> None:
    head, rows = make_head(softcap=softcap, bias=bias), make_rows()
    raw_logits = torch.randn(R, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    softmax = elementwise.merge(reduce_all(raw_logits, head, rows, width))
    log_p = logits_of(raw_logits, head, rows).log_softmax(1)
    torch.testing.assert_close(softmax.logprobs, log_p.gather(1, rows.labels[:, None])[:, 0])
    assert softmax.entropy is not None
    torch.testing.assert_close(softmax.entropy, -(log_p.exp() * log_p).sum(1))
    torch.testing.assert_close(
        softmax.peak + softmax.log_total, logits_of(raw_logits, head, rows).logsumexp(1), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_both_gradients_are_autograd_s(softcap: float | None, with_entropy: bool) -> None:
    head, rows = make_head(softcap=softcap, bias=True), make_rows()
    raw_logits = torch.randn(R, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    pull = torch.linspace(-1, 3, R, dtype=torch.float64)
    upstream = Upstream(logprobs=pull, entropy=pull.square() if with_entropy else None)

    leaf = raw_logits.clone().requires_grad_()
    log_p = logits_of(leaf, head, rows).log_softmax(1)
    loss = (log_p.gather(1, rows.labels[:, None])[:, 0] * pull).sum()
    if with_entropy:
        loss = loss - ((log_p.exp() * log_p).sum(1) * pull.square()).sum()
    (expected,) = torch.autograd.grad(loss, leaf)

    stored = torch.empty_like(raw_logits)
    sums = reduce_all(raw_logits, head, rows, 128, stored)
    softmax = elementwise.merge(sums)
    again = torch.full_like(raw_logits, float("nan"))
    for first in (0, 100):
        last = 100 if first == 0 else V
        elementwise.gradient_from_raw_logits(
            raw_logits[:, first:last].clone(), first, head, rows, softmax, upstream, again[:, first:last]
        )
    torch.testing.assert_close(again, expected)
    elementwise.gradient_from_stored(stored, head, rows, sums.peak, softmax, upstream, stored)
    torch.testing.assert_close(stored, expected)


def test_float16_keeps_what_carries_probability() -> None:
    """Logits near 1e4 and far apart: bfloat16 would err by 32 there."""
    head = BlockedHead(weight=torch.empty(V, 1), bias=None, softcap=None, logit_scale=1.0, block=64)
    rows = LabelledRows(labels=torch.tensor([0, 63, 64, 299, 150]), inverse_temperature=torch.ones(R))
    raw_logits = 1e4 + 3 * torch.randn(R, V, generator=torch.Generator().manual_seed(2))
    raw_logits[:, 7] = -1e5
    stored = torch.empty(R, V, dtype=torch.float16)
    sums = reduce_all(raw_logits, head, rows, 128, stored)
    softmax, upstream = elementwise.merge(sums), Upstream(logprobs=torch.ones(R), entropy=None)
    exact = torch.nn.functional.one_hot(rows.labels, V) - raw_logits.double().softmax(1)
    assert stored.isfinite().all()
    gradient = torch.empty(R, V)
    elementwise.gradient_from_stored(stored, head, rows, sums.peak, softmax, upstream, gradient)
    assert (gradient - exact).abs().max() < 5e-4


def test_a_label_outside_the_vocabulary_is_nan() -> None:
    head = make_head()
    rows = LabelledRows(labels=torch.tensor([0, 1, V, -5, 2]), inverse_temperature=torch.ones(R, dtype=torch.float64))
    softmax = elementwise.merge(reduce_all(torch.randn(R, V, dtype=torch.float64), head, rows, 64))
    assert softmax.logprobs.isnan().tolist() == [False, False, True, True, False]


def test_parts_and_joins() -> None:
    values = torch.arange(6.0)
    softmax = Softmax(peak=values, log_total=values + 1, logprobs=values + 2, entropy=values + 3)
    joined = Softmax.join([softmax.part(0, 2), softmax.part(2, 6)])
    for field in ("peak", "log_total", "logprobs", "entropy"):
        assert torch.equal(getattr(joined, field), getattr(softmax, field))
    upstream = Upstream(logprobs=values, entropy=None)
    assert torch.equal(Upstream.join([upstream.part(0, 1), upstream.part(1, 6)]).logprobs, values)
    assert Upstream.join([upstream]).entropy is None
