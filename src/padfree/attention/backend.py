"""What an attention backend is: one file with one object that states what it can do, and does it.

    forward     q [Tq, H, d], k [Tk, Hkv, d], v [Tk, Hkv, dv]   ->   out [Tq, H, dv], lse [Tq, H]
    backward    dout, q, k, v, out, lse                         ->   dq, dk, dv

Every backend has gradients, lse, windows, MQA and GQA, and takes different segments for queries and keys. Sinks are
applied outside (`padfree.attention.sinks`). In what else they can do backends differ, and `Capabilities` says it.

A raw backward may be given the `out` and `lse` of a larger softmax of which k and v are one block, as ring attention
needs it. A backend without one is differentiated by autograd: its forward records a graph, its backward is not called.

Some read keys in pages of `PAGE_SIZE`, by a table of each segment's pages, so that segments may have pages in common.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from padfree.attention.spec import AttentionSpec
from padfree.batch import Segments

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (*HALF_TYPES, torch.float32, torch.float64)
ANY_HEAD_DIM = range(1, 1 << 16)
MULTIPLES_OF_8 = range(8, 257, 8)
PAGE_SIZE = 128


class Pages(NamedTuple):
    """Which pages the queries of each segment see, in order."""

    table: Tensor  # [S, m] int32; any page behind a segment's last
    lengths: Tensor  # [S] int32, keys of each segment, of which its queries are the last
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What one call needs of its backend. `compute_capability` is that of its CUDA device."""

    device: str
    compute_capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool
    raw_backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Sequence[int] = ANY_HEAD_DIM
    any_value_dim: bool = False  # v's head size may differ from that of q and k
    softcap: bool = True
    raw_backward: bool = True
    majors: range = range(100)  # of the compute capabilities of CUDA devices
    lengths_on_host: bool = False  # it reads the offsets of the segments, and not only cu_seqlens on the device
    package: str = ""  # what must be installed, and how
    auto_dtypes: tuple[torch.dtype, ...] = FLOAT_TYPES  # the types for which `auto` may choose it; (): only by name

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Why a call cannot be served, or None."""
        major, minor = needs.compute_capability
        if needs.device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, not on {needs.device}"
        if needs.device == "cuda" and major not in self.majors:
            return f"compute capability {major}.{minor} is not among the {span(self.majors)} it has kernels for"
        if needs.dtype not in self.dtypes:
            return f"{needs.dtype} is not among its types ({', '.join(map(str, self.dtypes))})"
        if needs.head_dim not in self.head_dims:
            return f"head size {needs.head_dim} is not among its sizes ({span(self.head_dims)})"
        if needs.head_dim != needs.value_dim and not self.any_value_dim:
            return f"q and k have head size {needs.head_dim} but v has {needs.value_dim}"
        if needs.value_dim not in self.head_dims:
            return f"v's head size {needs.value_dim} is not among its sizes ({span(self.head_dims)})"
        if needs.softcap and not self.softcap:
            return "it has no softcap"
        if needs.raw_backward and not self.raw_backward:
            return "it has no backward that takes the lse of a larger softmax, which ring needs"
        return None


class AttentionBackend(Protocol):
    """Inherit it, and set `name` and `capabilities`."""

    name: str
    capabilities: Capabilities

    def is_installed(self) -> bool:
        """Whether `capabilities.package` is there."""
        return True

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Why a call cannot be served here, or None."""
        reason = self.capabilities.unsupported_reason(needs)
        if reason is None and not self.is_installed():
            return f"its package is not installed ({self.capabilities.package})"
        return reason

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """out [Tq, H, dv] and lse [Tq, H]: 0 and -inf for a query that sees no key."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments_q: Segments,
        segments_k: Segments,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, in the shapes and types of q, k, v; `out` and `lse` may be those of a larger softmax."""
        ...

    def reads_pages(self, q: Tensor, spec: AttentionSpec) -> bool:
        """Whether to call `paged_forward` for such queries."""
        return False

    def paged_forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, pages: Pages, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """`forward` with k and v in pages [n, PAGE_SIZE, Hkv, d]. This one takes the keys out of them again."""
        lengths = pages.lengths.tolist()
        places = pages.table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=q.device)
        index = torch.cat([row[:length] for row, length in zip(places.flatten(1), lengths, strict=True)])
        k, v = (tensor.flatten(0, 1)[index] for tensor in (k, v))
        return self.forward(q, k, v, segments_q, Segments.from_lengths(lengths, device=q.device), spec)


@functools.cache
def has_module(name: str) -> bool:
    return find_spec(name) is not None


def span(values: Sequence[int]) -> str:
    """8 to 256 in steps of 8"""
    if not isinstance(values, range):
        return ", ".join(map(str, values))
    step = f" in steps of {values.step}" if values.step > 1 else ""
    return f"{values[0]} to {values[-1]}{step}"
