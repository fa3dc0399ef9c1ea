"""Float32 master weights in a single process, and compute copies of them in a lower precision.

    between steps        layer.weight   master, float32     updated by the optimizer, saved and exported
    during computation   layer.weight   copy, bfloat16      written from the masters once, when `compute_copies` begins
    in backward          copy.grad      bfloat16            added to master.grad (float32) as soon as a layer is done

FSDP2 does the same for several processes. A single process has nothing to gather or reduce, and for a small model
FSDP2's hooks would take more time on the host than the computation takes on the device: for example, with 28 layers of
hidden size 1024 the device would wait for the host.

Outside of forward and backward, the modules hold the master weights, so that all other code sees a plain float32 model.
Activation recomputation in backward reads the modules' weights again, so `compute_copies` must enclose backward as well
as forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ATTRIBUTE = "padfree_masters"
"""The name of the model attribute that holds its `MasterWeights`."""


class MasterWeights:
    """The float32 master weights of a model, and a copy of each in the compute dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, units: Iterable[nn.Module]) -> None:
        self.dtype = dtype
        self._depth = 0
        self._units: list[_Unit] = []
        # copies by the id of the master weight, so that tied parameters share one copy
        copies: dict[int, nn.Parameter] = {}
        taken: set[nn.Module] = set()
        for unit in (*units, model):  # modules outside the layers belong to the root unit
            modules = [module for module in unit.modules() if module not in taken]
            taken.update(modules)
            self._units.append(_Unit(modules, dtype, copies))

    @contextmanager
    def compute_copies(self) -> Iterator[None]:
        """Context manager: in its block the modules hold the copies instead of the master weights.

        If blocks are nested, only the outermost one updates the copies from the master weights, when it begins.
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
        """Add the gradients of all copies to the gradients of the master weights."""
        for unit in self._units:
            unit.collect()


class _Unit:
    """The parameters of one layer, or of all modules outside the layers."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype, copies: dict[int, nn.Parameter]) -> None:
        self.places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self.master_weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype == dtype or not parameter.is_floating_point():
                    continue
                copy = copies.get(id(parameter))
                if copy is None:
                    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), parameter.requires_grad)
                    copies[id(parameter)] = copy
                    self.master_weights.append(parameter)
                    self.copies.append(copy)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
                self.places.append((module._parameters, name, parameter, copy))
        self.expected = sum(copy.requires_grad for copy in self.copies)
        self.counted = 0

    @torch.no_grad()
    def enter(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.copies, self.master_weights)
        for parameters, name, master, copy in self.places:
            assert parameters[name] is master, f"{name} was replaced since the copies were made"
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
                master.grad = torch.empty_like(master)
                sums.append(master.grad)
                terms.append(copy.grad)
            else:
                master.grad += copy.grad
            copy.grad = None
        if sums:
            torch._foreach_copy_(sums, terms)


def keep_master_weights(model: nn.Module, dtype: torch.dtype, units: Iterable[nn.Module]) -> None:
    """Make a model compute in `dtype` from now on, with float32 master weights. `units` are its layers.

    Frozen weights are converted to `dtype`, because every use would round them to `dtype` anyway. The model may be on
    the meta device and get its weights later.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    object.__setattr__(model, ATTRIBUTE, (dtype, list(units)))


@contextmanager
def compute_copies(model: nn.Module) -> Iterator[MasterWeights | None]:
    """Context manager around forward and backward: in its block the model computes with copies in the compute dtype.

    It changes nothing for a model without master weights.
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
