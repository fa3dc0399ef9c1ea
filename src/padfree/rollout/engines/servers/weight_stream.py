"""Divide the weights of a model into buckets (groups of tensors that are sent together) for the servers.

`WeightStream` yields whole tensors with the names and shapes of HF files. All ranks gather each tensor in turn. Rank 0
holds one layer and one bucket of about BUCKET bytes at a time.

`SentWeights` yields only the elements that have changed since the last weight sync, with a checksum. Each rank compares
its shard with what it sent last, a copy in host memory with the size of the shard in `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from padfree.model.export import empty_copy, tensor_gatherers, whole_tensors
from padfree.model.named_tensors import clean_name, local_part, local_region, named_tensors
from padfree.rollout.engines.servers.buckets import host_copy
from padfree.rollout.engines.servers.differences import RegionDifference, bits_of, checksum, encode

BUCKET = 256 << 20
"""Maximum bytes of a bucket (tensors that are sent together). A larger tensor has a bucket of its own."""

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A group of tensors that are sent together.

    The tensors are whole weights, or the positions and the new values of the elements that have changed since the last
    weight sync. `differences` says to which tensors these elements belong; it is None for whole weights.
    """

    tensors: Sequence[Named] = ()
    differences: Sequence[RegionDifference] | None = None


class WeightStream:
    """Yields the weight tensors of a model with the names, shapes and dtypes of an HF checkpoint saved in `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._empty = empty_copy(model, dtype)
        parameters = {clean_name(name) for name, _ in self._empty.named_parameters()}
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(self._empty).items() if name in parameters}

    def buckets(self, model: PreTrainedModel, *, keep: bool, size: int = BUCKET) -> Iterator[Bucket]:
        """Yield all weights of the model in buckets (tensors that are sent together) of about `size` bytes. Collective.

        All ranks must exhaust the iterator. With `keep=False`, this rank only takes part in gathering and yields one
        empty bucket.
        """
        bucket: list[Named] = []
        held = 0
        for _, layer in groupby(whole_tensors(model), key=lambda named: _layer_of(named[0])):
            gathered: dict[str, Tensor] = {}
            for name, tensor in layer:
                if keep:
                    gathered[name] = tensor.to(self.dtype_of(name, tensor))
            for name, tensor in self.converted(gathered).items() if keep else ():
                bytes_ = tensor.numel() * tensor.element_size()
                if bucket and held + bytes_ > size:
                    yield Bucket(bucket)
                    bucket, held = [], 0
                bucket.append((name, tensor.contiguous()))
                held += bytes_
        yield Bucket(bucket)

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which this tensor of the model is sent."""
        return self._dtypes.get(name, tensor.dtype)

    def converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model, e.g. those of a layer, with the names and the layout of HF files."""
        return revert_weight_conversion(self._empty, tensors) if tensors else {}

    def unconverted(self) -> dict[str, str]:
        """Return {name in the model: name in HF files} of the tensors that have the same layout in both."""
        tensors = named_tensors(self._empty)
        names = {id(tensor): name for name, tensor in self.converted(dict(tensors)).items()}
        return {name: names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in names}


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of the tensor `name` that this rank compares with what it sent last. `start`: first index of the part."""

    name: str
    start: Sequence[int]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The changed elements of a part of a tensor, in the form in which one rank sends them to rank 0."""

    difference: RegionDifference
    positions: NDArray[Any]
    values: NDArray[Any]


@dataclass(kw_only=True, eq=False)
class SentWeights:
    """Holds the weights that this rank sent in the last weight sync, to find what has changed since then.

    The methods are collective over `group`.
    """

    stream: WeightStream
    group: ProcessGroup
    version: int | None = None  # the policy version that these bits belong to
    _bits: dict[str, Tensor] = field(default_factory=dict)  # [n] by name, in host memory

    def __post_init__(self) -> None:
        self._names = self.stream.unconverted()

    def keep(self, model: PreTrainedModel, version: int) -> None:
        """Copy the current weights to host memory, to find at the next weight sync which elements have changed.

        Call this method after a weight sync that has sent all weights as whole tensors.
        """
        for _, regions in self._layers(model):
            for region in regions:
                bits = bits_of(region.tensor)
                if region.name in self._bits:
                    self._bits[region.name].copy_(bits)
                else:
                    self._bits[region.name] = host_copy(bits)
        self.version = version

    def buckets(self, model: PreTrainedModel, version: int, *, size: int = BUCKET) -> Iterator[Bucket]:
        """Yield buckets (tensors that are sent together) of the weight elements that have changed since the last sync.

        All ranks must exhaust the iterator. Rank 0 yields the changes of all ranks. The other ranks yield empty
        buckets.
        """
        self.version = None  # invalid until all new bits are kept
        encoded: list[_Encoded] = []
        held = 0
        for num_bytes, regions in self._layers(model):
            encoded += map(self._difference, regions)
            held += num_bytes
            if held >= size:
                yield self._on_first(encoded)
                encoded, held = [], 0
        yield self._on_first(encoded)
        self.version = version

    def _layers(self, model: PreTrainedModel) -> Iterator[tuple[int, list[_Region]]]:
        """Yield for each layer its size in bytes, and the parts of its tensors that this rank compares with `_bits`.

        The size is that of the whole, unsharded tensors, so it is equal on all ranks.
        """
        tensors = named_tensors(model)
        gatherers = {} if tensors.keys() == self._names.keys() else tensor_gatherers(model)
        is_adapted = 0 < len(gatherers) < len(tensors)
        rank, world = self.group.rank(), self.group.size()
        for number, (_, names) in enumerate(groupby(gatherers or tensors, key=_layer_of)):
            regions: list[_Region] = []
            gathered: dict[str, Tensor] = {}
            num_bytes = 0
            for name in names:
                tensor, dtype = tensors[name], self.stream.dtype_of(name, tensors[name])
                num_bytes += tensor.numel() * dtype.itemsize
                # Compare whole tensors if HF files have another layout, or if adapters must be merged.
                if is_adapted or name not in self._names:
                    whole = gatherers[name]()
                    if number % world == rank:
                        gathered[name] = whole.to(dtype)
                elif (start := _own_start(tensor, rank)) is not None:
                    regions.append(_Region(self._names[name], start, local_part(tensor).to(dtype)))
            for name, tensor in self.stream.converted(gathered).items():
                regions.append(_Region(name, [0] * tensor.ndim, tensor))
            yield num_bytes, regions

    def _difference(self, region: _Region) -> _Encoded:
        bits, kept = bits_of(region.tensor), self._bits[region.name]
        encoding, positions, values = encode(kept.to(bits.device), bits)
        kept.copy_(bits)
        return _Encoded(
            RegionDifference(
                name=region.name,
                start=list(region.start),
                shape=list(region.tensor.shape),
                encoding=encoding,
                checksum=checksum(bits),
            ),
            positions.cpu().numpy(),
            values.cpu().numpy(),
        )

    def _on_first(self, encoded: list[_Encoded]) -> Bucket:
        """Gather the changed weight elements from all ranks, and return them on rank 0 as one bucket. Collective.

        The other ranks return an empty bucket.
        """
        by_rank: Any = [encoded]
        if self.group.size() > 1:
            by_rank = [None] * self.group.size() if self.group.rank() == 0 else None
            dist.gather_object(encoded, by_rank, dst=dist.get_global_rank(self.group, 0), group=self.group)
        if by_rank is None:
            return Bucket()
        ordered = sorted((one for part in by_rank for one in part), key=lambda one: one.difference.name)
        return Bucket(
            [
                (f"{number}.{kind}", torch.from_numpy(np.ascontiguousarray(array)))
                for number, one in enumerate(ordered)
                for kind, array in (("positions", one.positions), ("values", one.values))
            ],
            [one.difference for one in ordered],
        )


def _own_start(tensor: Tensor, rank: int) -> list[int] | None:
    """Return the index at which this rank's part of the tensor starts, or None if this rank sends no part of it.

    If several ranks hold the same part, only the first of them sends it.
    """
    if not isinstance(tensor, DTensor):
        return None if rank else [0] * tensor.ndim
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the device mesh of a parameter that it holds"
    is_copy = any(kind.is_replicate() and index for kind, index in zip(tensor.placements, coordinate, strict=True))
    if is_copy or not local_part(tensor).numel():
        return None
    return [part.start for part in local_region(tensor)]


def _layer_of(name: str) -> str:
    """Return the layer of a tensor: `model.layers.3.mlp.experts.7.up_proj.weight` -> `model.layers.3`.

    The name of a tensor outside of the layers is returned unchanged.
    """
    parts = name.split(".")
    return next((".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()), name)
