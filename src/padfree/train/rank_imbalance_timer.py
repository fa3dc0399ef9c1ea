"""Measure the forward time of a rank's own layers, without the time spent waiting for weights of other ranks.

FSDP2 synchronises all ranks in every layer, so the time of a step does not show which rank is slow. The timer's hooks
therefore run between FSDP2's hooks and the layer.

Compiled layers are not timed, because the hooks would break their graphs. Layers with expert parallelism are not timed,
because they wait for tokens of other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.distributed import Mesh
from padfree.model.structure import layers_of


class RankImbalanceTimer:
    """Measures the forward time of a model's layers on every rank, without the time spent waiting for weights."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        self._mesh, self._on_cuda = mesh, mesh.device.type == "cuda"
        self._marks: list[Any] = []
        for layer in layers_of(model):
            layer.register_forward_pre_hook(self._mark)  # after FSDP2's hook, which waits for the layer's weights
            layer.register_forward_hook(self._mark, prepend=True)  # before FSDP2's hook, which frees them

    @staticmethod
    def of(model: PreTrainedModel, mesh: Mesh) -> RankImbalanceTimer | None:
        """Return a timer for a model, or None if its layers are not timed.

        Layers are not timed if there is only one data rank, if they are compiled, or with expert parallelism.
        """
        if mesh.data.size == 1 or mesh.experts is not None:
            return None
        if any(layer._compiled_call_impl is not None for layer in layers_of(model)):
            return None
        return RankImbalanceTimer(model, mesh)

    def _mark(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return  # ignore scoring, which has no gradients, and recomputation in backward, which may stop half-way
        if self._on_cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def cut(self) -> Callable[[], tuple[float, ...]]:
        """End the measurement of a step, and begin the measurement of the next step.

        Return a function that returns the forward seconds of each data rank. All ranks must call this function, after
        the device has completed the step.
        """
        marks, self._marks = self._marks, []
        return partial(self._seconds, marks)

    def _seconds(self, marks: list[Any]) -> tuple[float, ...]:
        pairs = zip(marks[::2], marks[1::2], strict=True)
        own = sum(a.elapsed_time(b) / 1e3 if self._on_cuda else b - a for a, b in pairs)
        mesh = self._mesh
        every = torch.zeros(mesh.loss.size, dtype=torch.float64, device=mesh.device)
        every[mesh.loss.rank] = own
        dist.all_reduce(every, group=mesh.loss.group)
        slowest = every.view(mesh.data.size, mesh.context.size).amax(dim=1)  # a pack takes as long as its slowest shard
        return tuple(slowest.tolist())
