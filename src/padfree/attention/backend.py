"""The interface of an attention backend: one file with one object that states its capabilities and implements them.

    forward     q [Tq, H, d], k [Tk, Hkv, d], v [Tk, Hkv, dv]   ->   out [Tq, H, dv], lse [Tq, H]
    backward    dout, q, k, v, out, lse                         ->   dq, dk, dv

Every backend supports gradients, lse, windows, MQA and GQA, and different segments for queries and keys. Sinks are
applied outside (`padfree.attention.sinks`). Other features differ between backends; `Capabilities` lists them.

A raw backward accepts the `out` and `lse` of a larger softmax of which k and v are one block, as ring attention needs.
A backend without a raw backward is differentiated by autograd: its forward records a graph, its backward is not called.

Some backends read keys in pages of `PAGE_SIZE` tokens through a page table per segment, so that segments can share
pages.
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
from padfree.segments import Segments

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (*HALF_TYPES, torch.float32, torch.float64)
ANY_HEAD_DIM = range(1, 1 << 16)
MULTIPLES_OF_8 = range(8, 257, 8)
PAGE_SIZE = 128


class Pages(NamedTuple):
    """The pages that the queries of each segment see, in order."""

    table: Tensor  # [S, m] int32; entries after a segment's last page are arbitrary
    lengths: Tensor  # [S] int32, number of keys of each segment; its queries are aligned with the last keys
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What one call requires of its backend. `compute_capability` is the compute capability of the CUDA device."""

    device: str
    compute_capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool
    raw_backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The features that a backend supports."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Sequence[int] = ANY_HEAD_DIM
    any_value_dim: bool = False  # the head size of v may differ from that of q and k
    softcap: bool = True
    raw_backward: bool = True
    majors: range = range(100)  # supported major compute capabilities of CUDA devices
    lengths_on_host: bool = False  # the backend also reads the segment offsets on the host
    package: str = ""  # the command that installs the required package
    auto_dtypes: tuple[torch.dtype, ...] = FLOAT_TYPES  # dtypes for which `auto` may choose this backend; (): never

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Why the backend does not support this call, or None if it does."""
        major, minor = needs.compute_capability
        if needs.device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, not on {needs.device}"
        if needs.device == "cuda" and major not in self.majors:
            return f"compute capability {major}.{minor} is not supported (only {span(self.majors)})"
        if needs.dtype not in self.dtypes:
            return f"{needs.dtype} is not among its dtypes ({', '.join(map(str, self.dtypes))})"
        if needs.head_dim not in self.head_dims:
            return f"head size {needs.head_dim} is not among its head sizes ({span(self.head_dims)})"
        if needs.head_dim != needs.value_dim and not self.any_value_dim:
            return f"q and k have head size {needs.head_dim} but v has {needs.value_dim}"
        if needs.value_dim not in self.head_dims:
            return f"the head size {needs.value_dim} of v is not among its head sizes ({span(self.head_dims)})"
        if needs.softcap and not self.softcap:
            return "it does not support softcap"
        if needs.raw_backward and not self.raw_backward:
            return "its backward does not accept the lse of a larger softmax, which ring attention needs"
        return None


class AttentionBackend(Protocol):
    """Base class of the backends. A subclass sets `name` and `capabilities`."""

    name: str
    capabilities: Capabilities

    def is_installed(self) -> bool:
        """Whether `capabilities.package` is installed."""
        return True

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Why the backend does not support this call on this machine, or None if it does."""
        reason = self.capabilities.unsupported_reason(needs)
        if reason is None and not self.is_installed():
            return f"its package is not installed ({self.capabilities.package})"
        return reason

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return out [Tq, H, dv] and lse [Tq, H]. For a query that sees no key, out is 0 and lse is -inf."""
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
        """Return dq, dk, dv in the shapes and dtypes of q, k, v. `out` and `lse` may belong to a larger softmax."""
        ...

    def reads_pages(self, q: Tensor, spec: AttentionSpec) -> bool:
        """Whether to call `paged_forward` for these queries."""
        return False

    def paged_forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, pages: Pages, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """`forward` with k and v in pages [n, PAGE_SIZE, Hkv, d]. This default gathers the keys from the pages."""
        lengths = pages.lengths.tolist()
        slots = pages.table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=q.device)
        index = torch.cat([keys[:length] for keys, length in zip(slots.flatten(1), lengths, strict=True)])
        k, v = (tensor.flatten(0, 1)[index] for tensor in (k, v))
        return self.forward(q, k, v, segments_q, Segments.from_lengths(lengths, device=q.device), spec)


@functools.cache
def has_module(name: str) -> bool:
    return find_spec(name) is not None


def span(values: Sequence[int]) -> str:
    """A range of numbers as text, for example "8 to 256 in steps of 8"."""
    if not isinstance(values, range):
        return ", ".join(map(str, values))
    step = f" in steps of {values.step}" if values.step > 1 else ""
    return f"{values[0]} to {values[-1]}{step}"
