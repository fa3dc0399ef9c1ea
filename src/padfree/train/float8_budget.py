"""Measure how much float8 changes the gradients, and choose the decoder layers that stay in bfloat16.

A measurement computes the gradients with and without float8. The change of a layer is the norm of the difference of its
gradients, divided by the norm of its gradients without float8.

Rounding in one layer also changes the gradients of other layers. Therefore, if float8 in all layers changes a gradient
too much, float8 is also measured in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from padfree.layers.float8 import Float8Linear, use_float8
from padfree.model.named_tensors import local_part
from padfree.model.structure import layers_of

if TYPE_CHECKING:
    from padfree.train.engine import Engine
    from padfree.train.step import PreparedStep

KEY = "float8"
"""Checkpoints store which layers multiply in float8 under this key of the `extra` dict."""

MOST = 1 << 16
"""At most this many elements of each parameter's gradient are compared between the passes with and without float8.

A copy of the whole gradient would need too much memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Distance:
    """How much float8 changes gradients, relative to their norm without float8: the measurements for one decoder layer.

    `together`: the change of this layer's gradient if all layers use float8. `alone`: the largest change of any layer's
    gradient if only this layer uses float8.
    """

    layer: int
    together: float
    alone: float | None  # None: not measured, because every distance `together` is within the budget

    def exceeds(self, budget: float) -> bool:
        """Return whether float8 in this layer changes a gradient by more than `budget`, or makes a gradient NaN."""
        return self.alone is not None and not self.alone <= budget


class Float8Layers:
    """Switches individual decoder layers of a model between float8 and bfloat16.

    Layers without `Float8Linear` modules always multiply in bfloat16.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: dict[int, list[Float8Linear]] = {}
        for number, layer in enumerate(layers_of(model)):
            linears = [module for module in layer.modules() if isinstance(module, Float8Linear)]
            if linears:
                self.layers[number] = linears
        self._products = {linear: linear.float8_products for linears in self.layers.values() for linear in linears}

    def use(self, numbers: Collection[int]) -> None:
        """Let layer i multiply in float8 if `numbers` contains i, else in bfloat16."""
        for number, linears in self.layers.items():
            for linear in linears:
                use_float8(linear, self._products[linear] if number in numbers else ())

    @contextmanager
    def only(self, numbers: Collection[int]) -> Iterator[None]:
        """Context manager: in its block, only the layers whose indices are in `numbers` multiply in float8."""
        before = {linear: linear.float8_products for linear in self._products}
        self.use(numbers)
        try:
            yield
        finally:
            for linear, products in before.items():
                use_float8(linear, products)


def measure_distances(
    model: PreTrainedModel,
    layers: Float8Layers,
    gradients: Callable[[], object],
    *,
    group: dist.ProcessGroup | None = None,
    budget: float = 0.0,
) -> tuple[Float8Distance, ...]:
    """Measure how much float8 in each layer changes the gradients. Collective over `group`.

    `gradients` runs a forward and backward pass. `alone` is measured only if float8 in all layers changes a gradient by
    more than `budget`.
    """

    def compute(numbers: Iterable[int]) -> dict[int, list[Tensor]]:
        with layers.only(tuple(numbers)), torch.random.fork_rng():
            torch.manual_seed(0)  # the same dropout in all passes
            gradients()
        return _sampled_gradients(model)

    without = compute(())
    together = _distances(compute(layers.layers), without, group)
    alone: dict[int, float] = {}
    if any(not distance <= budget for distance in together.values()):
        for number in layers.layers:
            alone[number] = _largest(_distances(compute((number,)), without, group).values())
    return tuple(
        Float8Distance(layer=number, together=together.get(number, 0.0), alone=alone.get(number))
        for number in layers.layers
    )


def _sampled_gradients(model: PreTrainedModel) -> dict[int, list[Tensor]]:
    """Return copies of each layer's gradients in float32: of each parameter, at most `MOST` evenly spread elements."""
    return {
        number: [_sampled(parameter) for parameter in layer.parameters() if parameter.grad is not None]
        for number, layer in enumerate(layers_of(model))
    }


def _sampled(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    values = local_part(parameter.grad).flatten()
    return values[:: -(-values.numel() // MOST) or 1].to(torch.float32, copy=True)


def _distances(
    found: Mapping[int, list[Tensor]], without: Mapping[int, list[Tensor]], group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Return the relative change of each layer's gradients: from `without`, computed without float8, to `found`.

    Layers without gradients are left out. If the gradients are 0 with and without float8, the change is 0.
    """
    numbers = [number for number, gradients in without.items() if gradients]
    if not numbers:
        return {}
    squares = torch.stack(
        [
            torch.stack([_square_sum(ours, theirs), _square_sum(theirs)])
            for ours, theirs in ((found[number], without[number]) for number in numbers)
        ]
    )
    dist.all_reduce(squares, group=group)
    moved, size = squares.sqrt().cpu().unbind(1)
    ratios = torch.where(moved == 0, 0.0, moved / size)
    return dict(zip(numbers, ratios.tolist(), strict=True))


def _square_sum(tensors: list[Tensor], others: list[Tensor] | None = None) -> Tensor:
    """Return the sum of the squares of all elements of `tensors`, or of `tensors` minus `others`, in float64."""
    parts = tensors if others is None else [a - b for a, b in zip(tensors, others, strict=True)]
    return torch.stack([part.double().square().sum() for part in parts]).sum()


def _largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one of the values is NaN."""
    found = list(values)
    return next((value for value in found if value != value), max(found, default=0.0))


class Float8Budget:
    """Chooses which decoder layers multiply in bfloat16 instead of float8, for the whole run.

    The choice is made at the first step of the run, by measurements on its first micro-batch. Until then, e.g. in an
    evaluation before the first step, all layers use float8.
    """

    def __init__(self, engine: Engine, budget: float) -> None:
        self._engine, self.budget = engine, budget
        self._layers = Float8Layers(engine.model)
        self.distances: tuple[Float8Distance, ...] | None = None  # None: not chosen yet

    @property
    def bfloat16_layers(self) -> list[int]:
        """The indices of the layers that stay in bfloat16."""
        return [each.layer for each in self.distances or () if each.exceeds(self.budget)]

    def choose(self, prepared: PreparedStep) -> bool:
        """Choose the layers that multiply in float8, unless they are already chosen. All ranks must call this.

        Return whether this call has chosen the layers."""
        if self.distances is not None or not len(prepared.packs):
            return False
        first = replace(prepared, packs=prepared.packs[:1])
        self.distances = measure_distances(
            self._engine.model,
            self._layers,
            lambda: self._engine.gradients(first),
            group=self._engine.mesh.loss.group,
            budget=self.budget,
        )
        self._engine.optimizer.zero_grad(set_to_none=True)
        self._apply()
        return True

    def state(self) -> dict[str, Any]:
        """Return an entry for a checkpoint's `extra` dict that stores which layers multiply in float8.

        Return {} before the first step, which chooses these layers.
        """
        if self.distances is None:
            return {}
        return {KEY: {"budget": self.budget, "distances": [asdict(each) for each in self.distances]}}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore from a checkpoint's `extra` dict which layers multiply in float8.

        If the checkpoint was saved with another `parallel.float8_budget`, nothing is restored, and the next step
        chooses the layers again.
        """
        stored = extra.get(KEY)
        if stored is not None and stored["budget"] == self.budget:
            self.distances = tuple(Float8Distance(**each) for each in stored["distances"])
            self._apply()

    def line(self) -> str:
        """Return a line for the user: which layers multiply in float8, and which stay in bfloat16."""
        assert self.distances is not None
        kept = self.bfloat16_layers
        far = _largest(each.together for each in self.distances)
        if not kept:
            return (
                f"parallel.float8_budget={self.budget:g}: all layers multiply in float8, which changes gradients by up "
                f"to {far:.2g} of their norm"
            )
        alone = {each.layer: each.alone for each in self.distances}
        named = ", ".join(f"{number} ({alone[number]:.2g})" for number in kept)
        return (
            f"parallel.float8_budget={self.budget:g}: these layers stay in bfloat16 (in brackets, how much float8 "
            f"would change a gradient): {named}"
        )

    def _apply(self) -> None:
        kept = self.bfloat16_layers
        self._layers.use([number for number in self._layers.layers if number not in kept])
