"""Packs, tensors and single-process results that the tests of context parallelism share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from padfree.attention import varlen_attention
from padfree.batch import AttnContext, PackedBatch, SampleInfo
from padfree.choices import LayoutKind
from padfree.cp import shard
from padfree.segments import Segments

KINDS: tuple[LayoutKind, ...] = ("contiguous", "headtail", "balanced")

ROWS: dict[str, list[int]] = {
    "short documents": [1, 5, 3, 9, 1, 2, 7, 1, 4, 4, 3, 1],
    "one token each": [1] * 8,
    "longer than a share": [3, 29, 1, 2],
    "over three ranks": [2, 1, 40, 1, 3],
    "one document": [37],
    "fewer than ranks": [13, 18],
    "empty ones": [0, 4, 0, 0, 17, 0, 3, 0],
    "head and tail on a rank": [41, 6, 7, 11, 9],
}


def packed(lengths: list[int], multiple: int = 4) -> PackedBatch:
    """A pack of documents of these lengths, padded to a multiple; token ids count from 0."""
    total = sum(lengths)
    segments = Segments.from_lengths(lengths)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    return PackedBatch(
        input_ids=torch.arange(total),
        position_ids=torch.cat([torch.arange(n) for n in [*lengths, 0]]),
        labels=torch.arange(1, total + 1),
        weights=torch.rand(total),
        sample_index=index.to(torch.int32),
        segments=segments,
        samples=tuple(SampleInfo(index=i, length=n) for i, n in enumerate(lengths)),
    ).padded_to_multiple(multiple)


def context_of(batch: PackedBatch, world: int, rank: int, group: Any = None, **options: Any) -> AttnContext:
    return shard(batch, world=world, rank=rank, group=group, **options).context


@dataclass
class Inputs:
    """Whole-pack q [T, H, d], k [T, Hkv, d], v [T, Hkv, dv], sinks [H], and the gradient of the output [T, H, dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype | None = None, device: str | None = None) -> Inputs:
        tensors = [None if t is None else t.to(device=device, dtype=dtype) for t in self.tensors]
        return Inputs(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], self.options)

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.q, self.k, self.v, self.dout, self.sinks]


def inputs_for(
    num_tokens: int,
    *,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 8,
    value_dim: int | None = None,
    sinks: bool = False,
    seed: int = 0,
    **options: Any,
) -> Inputs:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    value_dim = dim if value_dim is None else value_dim
    return Inputs(
        q=normal(num_tokens, heads, dim),
        k=normal(num_tokens, key_heads, dim),
        v=normal(num_tokens, key_heads, value_dim),
        dout=normal(num_tokens, heads, value_dim),
        sinks=normal(heads) if sinks else None,
        options=options,
    )


def one_process(inputs: Inputs, segments: Segments, backend: str = "reference") -> list[Tensor]:
    """Output and the gradients of q, k, v (and sinks), computed on the whole pack at once."""
    q, k, v, sinks = (None if t is None else t.detach().requires_grad_() for t in (*inputs.tensors[:3], inputs.sinks))
    out = varlen_attention(q, k, v, segments, segments, sinks=sinks, backend=backend, **inputs.options)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    return [out.detach(), *torch.autograd.grad((out * inputs.dout).sum(), leaves)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if got.numel() == 0:
        return 0.0
    scale = expected.double().abs().max().clamp_min(0.1)  # inputs are of size 1; an expected 0 has rounding noise
    return float((got.double() - expected.double()).abs().max() / scale)
