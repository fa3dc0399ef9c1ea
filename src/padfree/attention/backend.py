"""The interface of an attention backend. Each backend is one file that defines one object.

Every backend supports gradients, windows and grouped key heads. `Capabilities` lists the features that differ between
backends. No backend computes attention sinks (learned extra scores in the softmax). `padfree.attention.sinks` adds the
sinks afterwards.

A backend with a *raw backward* can compute the gradients of one block of keys without the other blocks. Ring attention
needs this. The other backends use autograd, and their `backward` is never called.
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
    """The page table of an attention call. A page holds the keys of `PAGE_SIZE` tokens. The table lists, for each
    segment, the pages that its queries read.
    """

    table: Tensor  # [S, m] int32: the pages of each segment, in order; entries after its last page are arbitrary
    lengths: Tensor  # [S] int32: the number of keys of each segment; its last query is aligned with its last key
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """The features that one attention call requires of its backend.

    `compute_capability` is (0, 0) if the device is not a CUDA device.
    """

    device: str
    compute_capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool
    raw_backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The features, devices and dtypes that an attention backend supports."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: Sequence[int] = ANY_HEAD_DIM
    any_value_dim: bool = False  # whether the head size of v may differ from the head size of q and k
    softcap: bool = True
    raw_backward: bool = True
    majors: range = range(100)  # supported major compute capabilities of CUDA devices
    lengths_on_host: bool = False  # whether the backend also reads the segment offsets on the host
    package: str = ""  # the command that installs the package that the backend needs
    # dtypes for which `auto` may choose this backend; empty if `auto` never chooses it
    auto_dtypes: tuple[torch.dtype, ...] = FLOAT_TYPES

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Return the reason why a backend with these capabilities cannot serve a call with these `needs`, or None if it
        can.
        """
        major, minor = needs.compute_capability
        if needs.device not in self.devices:
            return f"the backend runs on {' and '.join(self.devices)}, not on {needs.device}"
        if needs.device == "cuda" and major not in self.majors:
            return f"compute capability {major}.{minor} is not supported (only {span(self.majors)})"
        if needs.dtype not in self.dtypes:
            return f"{needs.dtype} is not supported (only {', '.join(map(str, self.dtypes))})"
        if needs.head_dim not in self.head_dims:
            return f"head size {needs.head_dim} is not supported (only {span(self.head_dims)})"
        if needs.head_dim != needs.value_dim and not self.any_value_dim:
            return f"q and k have head size {needs.head_dim} but v has {needs.value_dim}"
        if needs.value_dim not in self.head_dims:
            return f"head size {needs.value_dim} of v is not supported (only {span(self.head_dims)})"
        if needs.softcap and not self.softcap:
            return "the backend does not support softcap"
        if needs.raw_backward and not self.raw_backward:
            return "the backend cannot compute the gradients of one block of the keys, which ring attention needs"
        return None


class AttentionBackend(Protocol):
    """Base class of the attention backends, such as `torch` or `flex`. A subclass sets `name` and `capabilities`."""

    name: str
    capabilities: Capabilities
    # the size of the blocks of keys, counted from the first key of a segment, on which the bits of a result depend; 1
    # if a caller may leave out keys that no query sees
    key_block: int = 1

    def is_installed(self) -> bool:
        """Return whether the package that the backend needs is installed."""
        return True

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Return the reason why the backend cannot serve a call with these `needs` on this machine, or None if it can.

        A reason is an unsupported feature or a package that is not installed.
        """
        reason = self.capabilities.unsupported_reason(needs)
        if reason is None and not self.is_installed():
            return f"the backend's package is not installed ({self.capabilities.package})"
        return reason

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of q [Tq, H, d] to k [Tk, Hkv, d] and v [Tk, Hkv, dv]. Returns the output `out` [Tq, H, dv]
        and the log-sum-exp `lse` [Tq, H].

        For a query that sees no key, out is 0 and lse is -inf.
        """
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
        """Return the gradients dq, dk and dv, with the shapes and dtypes of q, k and v.

        `k` and `v` may be one block of the keys and values. `out` and `lse` are the results over all blocks.
        """
        ...

    def reads_pages(self, q: Tensor, spec: AttentionSpec) -> bool:
        """Return whether the backend reads keys in pages for queries like `q`. If so, callers use `paged_forward`."""
        return False

    def has_decode_bits(self, q: Tensor, spec: AttentionSpec) -> bool:
        """Return whether a decode step gives the same bits as training.

        A decode step is `paged_forward` with one query per segment; training calls `forward` on a whole pack. Only the
        dtype, the device and the head size of `q` matter.
        """
        return False

    def paged_forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, pages: Pages, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Compute the same attention as `forward`, from keys and values in n pages: k [n, PAGE_SIZE, Hkv, d], v [n,
        PAGE_SIZE, Hkv, dv].

        `pages` says which pages each segment reads. This default implementation gathers the keys and calls `forward`.
        """
        lengths = pages.lengths.tolist()
        slots = pages.table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=q.device)
        index = torch.cat([keys[:length] for keys, length in zip(slots.flatten(1), lengths, strict=True)])
        k, v = (tensor.flatten(0, 1)[index] for tensor in (k, v))
        return self.forward(q, k, v, segments_q, Segments.from_lengths(lengths, device=q.device), spec)


@functools.cache
def has_module(name: str) -> bool:
    return find_spec(name) is not None


def span(values: Sequence[int]) -> str:
    """Describe a list of numbers as text, for example "8 to 256 in steps of 8"."""
    if not isinstance(values, range):
        return ", ".join(map(str, values))
    step = f" in steps of {values.step}" if values.step > 1 else ""
    return f"{values[0]} to {values[-1]}{step}"
