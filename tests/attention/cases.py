"""Odd shapes that every backend must handle, and helpers that run and compare backends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import choose_backend, varlen_attention
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments

ODD = (3, 47, 0, 31, 123, 1, 230, 31)
FEWER_QUERIES = (2, 10, 0, 31, 1, 0, 40, 7)  # at most the keys of ODD, so that each is a piece at the end of its sample
MORE_QUERIES = (5, 47, 9, 33, 0, 4, 260, 1)  # some of which see no key

MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window of 1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "softcap and window": {"softcap": 1.5, "window": 60},
    "softcap, full": {"softcap": 1.5, "causal": False},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call."""

    queries: tuple[int, ...] = ODD
    keys: tuple[int, ...] = ODD
    heads: tuple[int, int] = (6, 2)
    head_dim: int = 64
    value_dim: int | None = None
    mask: str = "causal"
    sinks: bool = False
    scale: float | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {**MASKS[self.mask], "scale": self.scale}

    @property
    def spec(self) -> AttentionSpec:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return AttentionSpec(**{**MASKS[self.mask], "scale": scale})

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.heads, self.head_dim, *([self.value_dim] if self.value_dim else []))))
        names = {ODD: "", FEWER_QUERIES: "-fewer", MORE_QUERIES: "-more"}
        extras = f"{names.get(self.queries, '-other')}{'-sinks' if self.sinks else ''}"
        return f"{self.mask}-{shape}{extras}"


CASES = [
    *(Case(mask=mask) for mask in MASKS),
    *(Case(mask=mask, queries=FEWER_QUERIES, heads=(4, 4)) for mask in MASKS),
    *(Case(mask=mask, queries=MORE_QUERIES, heads=(5, 1), head_dim=16) for mask in MASKS),
    *(Case(head_dim=head_dim) for head_dim in (16, 40, 80, 128, 256)),
    Case(sinks=True, scale=0.3),
    Case(sinks=True, mask="window", queries=MORE_QUERIES),
    Case(queries=(1, 1, 0, 1), keys=(4, 1, 3, 9), heads=(4, 2)),  # as in decoding
]


@dataclass
class Inputs:
    """Random tensors of a case, including the gradient of the output, so that every backend gets the same."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None
    segments_q: Segments
    segments_k: Segments


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Random numbers that `dtype` represents exactly."""
    generator = torch.Generator().manual_seed(1)
    value_dim = case.value_dim or case.head_dim
    num_heads, num_key_heads = case.heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    segments_k = Segments.from_lengths(case.keys, device=device)
    segments_q = segments_k if case.queries == case.keys else Segments.from_lengths(case.queries, device=device)
    return Inputs(
        q=draw(segments_q.num_tokens, num_heads, case.head_dim),
        k=draw(segments_k.num_tokens, num_key_heads, case.head_dim),
        v=draw(segments_k.num_tokens, num_key_heads, value_dim),
        dout=draw(segments_q.num_tokens, num_heads, value_dim),
        sinks=draw(num_heads) if case.sinks else None,
        segments_q=segments_q,
        segments_k=segments_k,
    )


def run(case: Case, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """All results of a call, forward and backward."""
    leaves = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks") if getattr(inputs, name) is not None}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    out, lse = varlen_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        inputs.segments_q,
        inputs.segments_k,
        **case.arguments,
        sinks=leaves.get("sinks"),
        return_lse=True,
        backend=backend,
    )
    assert not lse.requires_grad
    out.backward(inputs.dout)
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "lse": lse, **{name: grad for name, grad in grads.items() if grad is not None}}


def expected(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of the reference for the same inputs, computed in `dtype`."""
    wide = Inputs(
        **{
            name: None if getattr(inputs, name) is None else getattr(inputs, name).to(dtype)
            for name in ("q", "k", "v", "dout", "sinks")
        },
        segments_q=inputs.segments_q,
        segments_k=inputs.segments_k,
    )
    return run(case, wide, "reference")


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], *, atol: float, rtol: float) -> None:
    """Equal within atol + rtol · |want|, with the same infinities; the norm of all differences has a tighter bound."""
    assert got.keys() == want.keys()
    for name, expected_tensor in want.items():
        actual = got[name].to(expected_tensor.dtype)
        torch.testing.assert_close(
            actual, expected_tensor, atol=atol, rtol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )
        finite = expected_tensor.isfinite()
        difference = (actual - expected_tensor)[finite]
        assert difference.norm() <= rtol * expected_tensor[finite].norm() + atol * difference.numel() ** 0.5 / 10, name


def cuda_backend(name: str, case: Case, dtype: torch.dtype) -> str:
    """`name`, or skip the test with the reason why it cannot run here."""
    try:
        return choose_backend(
            torch.device("cuda"),
            dtype,
            case.head_dim,
            value_dim=case.value_dim,
            softcap="softcap" in MASKS[case.mask],
            requested=name,
        )
    except ValueError as refusal:
        pytest.skip(str(refusal))


def leaked(backend: str, case: Case, inputs: Inputs, changed: int) -> list[str]:
    """Change every number of one segment; return the results that changed by a bit in any other segment."""
    before = run(case, inputs, backend)
    others = {}
    for name, segments in (("q", inputs.segments_q), ("k", inputs.segments_k)):
        others[name] = torch.ones(segments.num_tokens, dtype=torch.bool, device=inputs.q.device)
        others[name][slice(*segments.offsets[changed : changed + 2].tolist())] = False
    for name, axis in (("q", "q"), ("dout", "q"), ("k", "k"), ("v", "k")):
        tensor = getattr(inputs, name)
        setattr(inputs, name, torch.where(others[axis][:, None, None], tensor, 3 - tensor))
    after = run(case, inputs, backend)
    axes = {"out": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "k"}
    assert all(not torch.equal(before[name], after[name]) for name in axes)
    return [
        name for name, axis in axes.items() if not torch.equal(before[name][others[axis]], after[name][others[axis]])
    ]


def dense(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """The whole pack as one softmax under a mask from segment indices and positions; independent of the package."""
    segment_q, position = _numbering(inputs.segments_q)
    segment_k, key = _numbering(inputs.segments_k)
    own = (
        position + (torch.as_tensor(inputs.segments_k.lengths) - torch.as_tensor(inputs.segments_q.lengths))[segment_q]
    )
    visible = segment_q[:, None] == segment_k
    if case.spec.causal:
        visible = visible & (key <= own[:, None])
    if case.spec.window is not None:
        visible = visible & (own[:, None] - key < case.spec.window)
    leaves = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks") if getattr(inputs, name) is not None}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    group = case.heads[0] // case.heads[1]
    k, v = (leaves[name].repeat_interleave(group, dim=1) for name in "kv")
    scores = torch.einsum("qhd,khd->hqk", leaves["q"], k) * case.spec.scale
    if case.spec.softcap is not None:
        scores = case.spec.softcap * torch.tanh(scores / case.spec.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    sinks = leaves.get("sinks")
    none = scores.new_full((case.heads[0],), -torch.inf)
    columns = (none if sinks is None else sinks)[:, None, None].expand(-1, len(inputs.q), 1)
    blind = ~visible.any(dim=1)
    joint = torch.cat([scores.masked_fill(blind[:, None], 0), columns], dim=-1)
    p = joint.softmax(dim=-1)[..., :-1].masked_fill(blind[:, None], 0)
    out = torch.einsum("hqk,khd->qhd", p, v)
    out.backward(inputs.dout)
    lse = scores.detach().logsumexp(dim=-1).T
    return {"out": out.detach(), "lse": lse, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def _numbering(segments: Segments) -> tuple[Tensor, Tensor]:
    lengths = segments.lengths.tolist()
    number = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    return number, torch.cat([torch.arange(length) for length in lengths])
