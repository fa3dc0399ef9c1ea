"""Activations that wait for backward in the host's memory.

    forward     layer 0 ... layer 1 ... layer 2 ... layer 3 ... head     the device computes
                       copy 0 -> host ........ copy 1 -> host ......     beside it, on a stream of its own
    backward    layer 3 ..... layer 2 ..... layer 1 ..... layer 0
                              copy 1 -> device  copy 0 -> device         one layer ahead of where it is needed

A layer is called between two hooks of autograd, which show each tensor that its backward will ask for. Those of the
first layers, which wait longest, are copied into page-locked memory and let go of when the copy has ended; the others
stay on the device, as weights do. The link to the host is slower than the layers are: layer i is let go of when the
device comes to layer `PACE` (i + 1), by which time its copy should have ended, and the rest when backward begins.

The host never waits for the device. Streams wait for each other by events, and memory is given back to the stream that
it was taken from after that stream has waited for the copy, so that nothing is overwritten that is still being read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

AWAY = 0.62
"""The share of the layers that put their tensors away: so many that a link of 50 GB/s is done when backward begins."""

PACE = 1.6
"""How many layers are computed while the tensors of one are copied: a 4B model's on an H200."""

SMALLEST = 8 << 20
"""Bytes below which a tensor stays where it is."""


class HostMemory:
    """What the layers of one model have put away."""

    def __init__(self, num_layers: int, *, away: float = AWAY, pace: float = PACE, smallest: int = SMALLEST) -> None:
        self.num_layers, self.num_away, self.smallest = num_layers, math.ceil(away * num_layers), smallest
        # Which layers are let go of when the device comes to each.
        self.let_go = [[i for i in range(self.num_away) if math.ceil(pace * (i + 1)) == n] for n in range(num_layers)]
        self.calls: dict[int, _Call] = {}  # the last one of each layer
        self.streams: tuple[Any, Any] | None = None  # to the host, and to the device

    def around(self, layer: nn.Module, call: Callable[..., Any], number: int) -> Callable[..., Any]:
        """`call` of layer `number`, with what it keeps for backward put away, if it is one of those."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            for earlier in self.let_go[number]:
                self.calls[earlier].let_go()
            previous = self.calls[number - 1] if number else None
            record = self.calls[number] = _Call(self, layer, previous, stays=number >= self.num_away)
            with torch.autograd.graph.saved_tensors_hooks(record.pack, _unpack):
                return call(*args, **kwargs)

        return called

    def copy(self, pairs: list[tuple[Tensor, Tensor]], *, to_host: bool) -> Any:
        """Begin to copy (target, source) pairs once the device has come here; the event of its end."""
        if not any(tensor.is_cuda for pair in pairs for tensor in pair):
            for target, source in pairs:
                target.copy_(source)
            return None
        if self.streams is None:
            stream: Any = torch.cuda.Stream
            self.streams = (stream(), stream())
        used = self.streams[0 if to_host else 1]
        used.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(used):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return used.record_event()


class _Parcel:
    """A tensor that is put away: on the device, in the host's memory, and on the device again."""

    def __init__(self, tensor: Tensor) -> None:
        self.place = tensor.device
        self.device: Tensor | None = tensor
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.owners = 0  # tensors that are (views of) this one


@dataclass(slots=True, eq=False)
class _Ticket:
    """What autograd keeps in place of a tensor."""

    call: _Call
    tensor: Tensor | None  # which stays where it is, or
    parcel: _Parcel | None = None  # where it is, and
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class _Call:
    """One forward call of a layer, and what of it is put away."""

    def __init__(self, memory: HostMemory, layer: nn.Module, previous: _Call | None, *, stays: bool) -> None:
        self.memory, self.layer, self.previous, self.stays = memory, layer, previous, stays
        self.weights: set[int] | None = None
        self.parcels: dict[tuple[int, int], _Parcel] = {}  # by address and bytes, while the tensors are on the device
        self.away: list[_Parcel] = []
        self.event: Any = None  # of the last copy

    def pack(self, tensor: Tensor) -> _Ticket:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside `vmap`, of which flex makes its masks
            return _Ticket(self, tensor)
        key = (tensor.data_ptr(), tensor.nbytes)
        parcel = self.parcels.get(key)
        if parcel is None:
            if self.stays or not self._is_activation(tensor):
                return _Ticket(self, tensor)
            parcel = self.parcels[key] = _Parcel(tensor)
            self.event = self.memory.copy([(parcel.host, tensor)], to_host=True)
        parcel.owners += 1
        return _Ticket(self, None, parcel, tuple(tensor.shape), tensor.stride())

    def let_go(self) -> None:
        """Wait until the host has it all; then the device's memory may be used for something else."""
        if self.parcels:
            self._wait()
            self.away = list(self.parcels.values())
            self.parcels = {}
            for parcel in self.away:
                parcel.device = None

    def fetch(self) -> None:
        """Begin to bring back what is away."""
        if not self.away:
            return
        pairs = []
        for parcel in self.away:
            parcel.device = torch.empty_like(parcel.host, device=parcel.place)
            pairs.append((parcel.device, parcel.host))
        self.event = self.memory.copy(pairs, to_host=False)
        self.away = []

    def arrive(self) -> None:
        """Backward has come to this layer; the layer before it is next."""
        self.fetch()
        self._wait()
        self.parcels = {}
        if self.previous is not None:
            self._let_all_go()
            self.previous.fetch()
            self.previous = None

    def _let_all_go(self) -> None:
        """Whatever of earlier layers is still here, though backward is a while from asking for it."""
        earlier = None if self.previous is None else self.previous.previous
        while earlier is not None:
            earlier.let_go()
            earlier = earlier.previous

    def _wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def _is_activation(self, tensor: Tensor) -> bool:
        if tensor.nbytes < self.memory.smallest or not tensor.is_contiguous():
            return False
        if self.weights is None:  # not before: FSDP2 gathers them when the layer is called
            own = (*self.layer.parameters(), *self.layer.buffers())
            self.weights = {weight.untyped_storage().data_ptr() for weight in own}
        return tensor.untyped_storage().data_ptr() not in self.weights


def _unpack(ticket: _Ticket) -> Tensor:
    ticket.call.arrive()
    if ticket.tensor is not None:
        return ticket.tensor
    parcel = ticket.parcel
    assert parcel is not None
    tensor = parcel.device
    assert tensor is not None, "backward asks for a tensor more often than forward kept it"
    parcel.owners -= 1
    if not parcel.owners:
        parcel.device = None
    return tensor.as_strided(ticket.shape, ticket.strides)
