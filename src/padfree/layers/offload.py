"""Activation offload: tensors that layers save for backward are moved to pinned host memory.

Only the first layers are offloaded, because backward needs their tensors last. The copies run on another stream. The
device memory of a layer's tensors is freed some layers later, when the copy should have finished. In backward, the
tensors are copied back one layer before they are needed.

The host never waits for the device: streams wait for each other through events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

OFFLOADED_FRACTION = 0.62
"""The fraction of layers whose saved tensors are offloaded: as many layers as a link of 50 GB/s to the host can copy
during the forward pass.
"""

LAYERS_PER_COPY = 1.6
"""The number of layers that the forward pass computes while the saved tensors of one layer are copied to the host. It
was measured with a 4B model on an H200.
"""

MIN_OFFLOADED_BYTES = 8 << 20
"""Tensors with fewer bytes than this stay on the device."""


class ActivationOffload:
    """Keeps activations in host memory from forward to backward."""

    def __init__(
        self,
        num_layers: int,
        *,
        offloaded: Collection[int] | None = None,
        fraction: float = OFFLOADED_FRACTION,
        layers_per_copy: float = LAYERS_PER_COPY,
        min_bytes: int = MIN_OFFLOADED_BYTES,
    ) -> None:
        """Choose the layers whose saved tensors are offloaded: those in `offloaded`, or the first `fraction` of all
        layers if `offloaded` is None.
        """
        self.min_bytes = min_bytes
        self.offloaded = set(range(math.ceil(fraction * num_layers)) if offloaded is None else offloaded)
        # For each layer, the earlier layers whose device memory is freed when the forward pass reaches it.
        self.freed_at: list[list[int]] = [[] for _ in range(num_layers)]
        end = 0.0  # when the copies so far have ended, counted in layers that the forward pass has computed
        for number in sorted(self.offloaded):
            end = round(max(end, number) + layers_per_copy, 6)
            if math.ceil(end) < num_layers:
                self.freed_at[math.ceil(end)].append(number)
        self.calls: dict[int, _LayerCall] = {}  # layer -> its latest call
        self.streams: tuple[Any, Any] | None = None  # one stream for copies to the host, one for copies to the device

    def around(self, layer: nn.Module, call: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Wrap `call`, the function that runs layer `number`, so that its saved tensors are offloaded."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            for earlier in self.freed_at[number]:
                self.calls[earlier].free()
            previous = self.calls[number - 1] if number else None
            record = self.calls[number] = _LayerCall(self, layer, previous, is_offloaded=number in self.offloaded)
            with torch.autograd.graph.saved_tensors_hooks(record.pack, _unpack):
                return call(*args, **kwargs)

        return called

    def copy(self, pairs: list[tuple[Tensor, Tensor]], *, to_host: bool) -> Any:
        """Copy each source tensor to its target on a copy stream. Returns an event for the end of the copies."""
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


class _OffloadedTensor:
    """An offloaded tensor: the device tensor, its copy in host memory, and how many of its views autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.on_device: Tensor | None = tensor
        self.on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.num_views = 0


@dataclass(slots=True, eq=False)
class _SavedTensor:
    """The object that autograd stores instead of a saved tensor: it holds the tensor, or describes a view of an
    offloaded tensor.
    """

    call: _LayerCall
    tensor: Tensor | None
    offloaded: _OffloadedTensor | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class _LayerCall:
    """One forward call of a layer, with the tensors that it offloads."""

    def __init__(
        self, offload: ActivationOffload, layer: nn.Module, previous: _LayerCall | None, *, is_offloaded: bool
    ) -> None:
        self.offload, self.layer, self.previous, self.is_offloaded = offload, layer, previous, is_offloaded
        self.weights: set[int] | None = None
        # offloaded tensors that are still on the device, keyed by (address, size in bytes)
        self.copied: dict[tuple[int, int], _OffloadedTensor] = {}
        self.on_host: list[_OffloadedTensor] = []  # tensors whose device memory is freed
        self.event: Any = None  # end of the last copy

    def pack(self, tensor: Tensor) -> _SavedTensor:
        """Return the object that autograd stores for `tensor`. If the tensor is to be offloaded, start its copy to the
        host.
        """
        # Tensors of `vmap`, which flex attention uses for its masks, are not offloaded.
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return _SavedTensor(self, tensor)
        key = (tensor.data_ptr(), tensor.nbytes)
        offloaded = self.copied.get(key)
        if offloaded is None:
            if not self.is_offloaded or not self._is_activation(tensor):
                return _SavedTensor(self, tensor)
            offloaded = self.copied[key] = _OffloadedTensor(tensor)
            self.event = self.offload.copy([(offloaded.on_host, tensor)], to_host=True)
        offloaded.num_views += 1
        return _SavedTensor(self, None, offloaded, tuple(tensor.shape), tensor.stride())

    def free(self) -> None:
        """Free the device memory of this layer's offloaded tensors when they have been copied to the host."""
        if self.copied:
            self._wait()
            self.on_host = list(self.copied.values())
            self.copied = {}
            for offloaded in self.on_host:
                offloaded.on_device = None

    def prefetch(self) -> None:
        """Start to copy back to the device those tensors of this layer that are only in host memory."""
        if not self.on_host:
            return
        pairs = []
        for offloaded in self.on_host:
            offloaded.on_device = torch.empty_like(offloaded.on_host, device=offloaded.device)
            pairs.append((offloaded.on_device, offloaded.on_host))
        self.event = self.offload.copy(pairs, to_host=False)
        self.on_host = []

    def begin_backward(self) -> None:
        """Wait for this layer's tensors, and prefetch those of the next layer in backward. Called when backward reaches
        this layer.
        """
        self.prefetch()
        self._wait()
        self.copied = {}
        if self.previous is not None:
            self._free_earlier()
            self.previous.prefetch()
            self.previous = None

    def _free_earlier(self) -> None:
        """Free the device memory of the offloaded tensors of all earlier layers except the one directly before this
        layer.
        """
        earlier = None if self.previous is None else self.previous.previous
        while earlier is not None:
            earlier.free()
            earlier = earlier.previous

    def _wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def _is_activation(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is an activation large enough to offload. Weights and buffers are never
        offloaded.
        """
        if tensor.nbytes < self.offload.min_bytes or not tensor.is_contiguous():
            return False
        if self.weights is None:  # look up the weights now, because FSDP2 gathers them only when the layer is called
            own = (*self.layer.parameters(), *self.layer.buffers())
            self.weights = {weight.untyped_storage().data_ptr() for weight in own}
        return tensor.untyped_storage().data_ptr() not in self.weights


def _unpack(saved: _SavedTensor) -> Tensor:
    """Return a saved tensor on the device. Autograd calls this function when backward needs the tensor."""
    saved.call.begin_backward()
    if saved.tensor is not None:
        return saved.tensor
    offloaded = saved.offloaded
    assert offloaded is not None
    tensor = offloaded.on_device
    assert tensor is not None, "backward used a saved tensor more times than forward saved it"
    offloaded.num_views -= 1
    if not offloaded.num_views:
        offloaded.on_device = None
    return tensor.as_strided(saved.shape, saved.strides)
