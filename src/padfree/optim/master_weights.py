"""Float32 master weights in a single process, with bfloat16 copies for the computation.

A `SplitWeight` (`padfree.model.split_weight`) stores the bfloat16 copy of a weight and the remaining bits. This takes
4.125 bytes per weight, instead of 6 for float32 weights and separate copies. The results are bit-identical.

Inside `compute_copies`, the modules hold the bfloat16 copies. Elsewhere, all code sees float32 parameters.
`compute_copies` must enclose forward and backward, because recomputation reads the weights.

With FSDP2, its hooks would take longer on the host than the computation of a small model on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from padfree.model.split_weight import SplitStorage, aligned, is_split, split_in_place

ATTRIBUTE = "padfree_masters"
"""The name of the model attribute that holds its `MasterWeights`."""


class MasterWeights:
    """The float32 master weights of a model, and the copy of each in bfloat16."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, units: Iterable[nn.Module]) -> None:
        assert dtype == torch.bfloat16, "master weights need bfloat16 as compute dtype"
        self._depth = 0
        self._units: list[_Unit] = []
        # copies by the id of the master weight, so that tied parameters share one copy
        copies: dict[int, nn.Parameter] = {}
        taken: set[nn.Module] = set()
        split_weights(parameter for parameter in model.parameters() if parameter.dtype == torch.float32)
        for unit in (*units, model):  # modules outside the layers belong to the root unit
            modules = [module for module in unit.modules() if module not in taken]
            taken.update(modules)
            self._units.append(_Unit(modules, copies))

    @contextmanager
    def compute_copies(self) -> Iterator[None]:
        """Context manager: in its block the modules hold the bfloat16 copies instead of the float32 master weights.

        Blocks may be nested.
        """
        self._depth += 1
        if self._depth == 1:
            for unit in self._units:
                unit.enter()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for unit in self._units:
                    unit.leave()

    def collect_gradients(self) -> None:
        """Add the gradients of the bfloat16 copies, with which the model computes, to those of the master weights."""
        for unit in self._units:
            unit.collect()


class _Unit:
    """The parameters of one layer, or of all modules outside the layers, whose gradients are collected together."""

    def __init__(self, modules: Iterable[nn.Module], copies: dict[int, nn.Parameter]) -> None:
        self.places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self.master_weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or not is_split(parameter):
                    continue
                copy = copies.get(id(parameter))
                if copy is None:
                    copy = nn.Parameter(parameter.rounded, parameter.requires_grad)
                    copies[id(parameter)] = copy
                    self.master_weights.append(parameter)
                    self.copies.append(copy)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
                self.places.append((module._parameters, name, cast(nn.Parameter, parameter), copy))
        self.expected = sum(copy.requires_grad for copy in self.copies)
        self.counted = 0

    def enter(self) -> None:
        for parameters, name, master, copy in self.places:
            assert parameters[name] is master, f"parameter {name} was replaced after its bfloat16 copy was made"
            parameters[name] = copy

    def leave(self) -> None:
        self.collect()
        for parameters, name, master, _ in self.places:
            parameters[name] = master

    def _count(self, _: Tensor) -> None:
        self.counted += 1
        if self.counted == self.expected:
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        self.counted = 0
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for master, copy in zip(self.master_weights, self.copies, strict=True):
            if copy.grad is None:
                continue
            if master.grad is None:  # copy the first gradients, all in one call below
                master.grad = torch.empty(master.shape, dtype=master.dtype, device=master.device)
                sums.append(master.grad)
                terms.append(copy.grad)
            else:
                master.grad += copy.grad
            copy.grad = None
        if sums:
            torch._foreach_copy_(sums, terms)


def split_weights(parameters: Iterable[Tensor]) -> None:
    """Store float32 parameters as `SplitWeight`s in one `SplitStorage` per device. The parameter objects stay the same.

    AdamW has one group for matrices and one for vectors. Matrices are stored before vectors, so that each group is one
    contiguous range of memory.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in sorted(parameters, key=lambda each: each.ndim < 2):
        by_device.setdefault(parameter.device, []).append(parameter)
    for device, found in by_device.items():
        storage, start = SplitStorage(sum(aligned(each.numel()) for each in found), device), 0
        for parameter in found:
            split_in_place(parameter, storage, start)
            start += aligned(parameter.numel())


def keep_master_weights(model: nn.Module, dtype: torch.dtype, units: Iterable[nn.Module]) -> None:
    """Make a model compute in `dtype` from now on, with float32 master weights. `units` are its layers.

    Frozen weights are converted to `dtype`. The model may be on the meta device and get its weights later.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    object.__setattr__(model, ATTRIBUTE, (dtype, list(units)))


@contextmanager
def compute_copies(model: nn.Module) -> Iterator[MasterWeights | None]:
    """Context manager around forward and backward: in its block the model computes with bfloat16 copies of its float32
    master weights.

    The block changes nothing for a model without master weights.
    """
    found = getattr(model, ATTRIBUTE, None)
    if isinstance(found, tuple):  # the first use creates the copies
        found = MasterWeights(model, *found)
        object.__setattr__(model, ATTRIBUTE, found)
    if found is None:
        yield None
        return
    with found.compute_copies():
        yield found
