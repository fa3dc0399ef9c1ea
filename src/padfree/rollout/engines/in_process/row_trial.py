"""Find batch sizes at which a matmul gives each row of its input the same bits as in the packs of the trainer.

A matmul library chooses the order of a sum by the number of rows R. `trial` therefore multiplies random numbers in
every shape of the model's layers. It compares the output bits with those for R = 16384. For example:

    R       16        64        256      1024 to 12289 (packs of the trainer)
    bits    differ    differ    equal    equal

In this example, a decode step computes 256 rows, even for 10 responses. The unused rows cost little, because reading
the weights takes most of the time.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from padfree.model.block_matmuls import BLOCK_ROWS, is_narrow
from padfree.model.expert_adapters import ALIGNMENT, grouped_matmul, has_grouped_kernel, stacked_weights
from padfree.model.routers import routers_of

PACK_ROWS = (1024, 1531, 2048, 2819, 4096, 6007, 8192, 12289)
"""Pack sizes, in tokens, at which a matmul must give each token the same bits as with REFERENCE_ROWS tokens."""

SHORTEST_PACK = PACK_ROWS[0]
"""With `rollout.exact`, shorter packs are padded to this number of tokens, because matmuls of fewer tokens may give a
token other bits.
"""

PACK_MULTIPLE = 32
"""On a CPU with `rollout.exact`, packs are padded to a multiple of this number of tokens.

PyTorch's vector instructions compute 32 elements of an activation at a time. Elements left at the end of a tensor get
other bits.
"""

REFERENCE_ROWS = 16384

STEP_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Batch sizes of a decode step (numbers of responses) to try, besides `rollout.max_concurrent`. A size is used only if
matmuls give the same bits as with REFERENCE_ROWS rows.
"""


FEW_ROWS = (0, 1, 2, 16, 100)
"""When `divisions` divides rows over experts, the experts get 0, 1, 2, 16, 100, 0, 1, ... rows, and one expert also
gets all rows that are left.
"""


class MatmulShape(NamedTuple):
    inputs: int  # K
    outputs: int  # N
    has_bias: bool

    @property
    def title(self) -> str:
        return f"the matmul of {self.inputs} inputs and {self.outputs} outputs"


class ExpertShape(NamedTuple):
    """The shape of a grouped matmul: each token is multiplied with the weights of its k experts."""

    experts: int  # E
    per_token: int  # k
    inputs: int  # K
    outputs: int  # N
    is_transposed: bool  # whether the weight is [E, K, N] and not [E, N, K]

    @property
    def title(self) -> str:
        return f"the matmul of {self.experts} experts with {self.inputs} inputs and {self.outputs} outputs"


class RouterShape(NamedTuple):
    """A router: a linear layer that scores the experts for each token, and the choice of the k best."""

    name: str  # of the class
    inputs: int
    experts: int

    @property
    def title(self) -> str:
        return f"the router {self.name} of {self.inputs} inputs and {self.experts} experts"


Shape = MatmulShape | ExpertShape | RouterShape


Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]


def matmul_shapes(layers: Iterable[nn.Module]) -> list[MatmulShape]:
    """Return the distinct shapes of the linear layers and routers in `layers`, in the order of the layers.

    A linear layer with a single output gets the shape of the padded matmul that computes it
    (`padfree.model.block_matmuls`).
    """
    shapes: dict[MatmulShape, None] = {}
    for layer in layers:
        routers = {router.module for router in routers_of(layer)}
        for module in layer.modules():
            if isinstance(module, nn.Linear) or module in routers:
                weight: Any = module.weight
                shape = MatmulShape(weight.shape[1], weight.shape[0], getattr(module, "bias", None) is not None)
                shapes[MatmulShape(shape.inputs, BLOCK_ROWS, False) if is_narrow(module) else shape] = None
    return list(shapes)


def expert_shapes(layers: Iterable[nn.Module]) -> list[ExpertShape]:
    """Return the distinct shapes of the grouped matmuls in `layers`, in the order of their first use.

    A layer has grouped matmuls if the weights of its experts are stacked in one tensor.
    """
    shapes: dict[ExpertShape, None] = {}
    for layer in layers:
        for block in layer.modules():
            experts: Any = getattr(block, "experts", nn.Identity())
            if stacked_weights(experts):
                per_token = choices_per_token(block)
                assert per_token is not None, "`expert_problem` refuses such models"
                for name in stacked_weights(experts):
                    _, first, second = getattr(experts, name).shape
                    sizes = (first, second) if experts.is_transposed else (second, first)
                    shapes[ExpertShape(experts.num_experts, per_token, *sizes, experts.is_transposed)] = None
    return list(shapes)


def choices_per_token(block: nn.Module) -> int | None:
    """Return the number of experts that the router next to `block.experts` chooses for a token; None if not known."""
    counts = {getattr(router.module, "top_k", None) for router in routers_of(block)}
    return counts.pop() if len(counts) == 1 else None


def expert_problem(layers: Iterable[nn.Module], dtype: torch.dtype) -> str | None:
    """Return why `trial` cannot find out on a GPU whether the bits of experts and routers depend on the batch size.

    Return None if it can. The weights of each layer's experts must be stacked in one tensor.
    """
    for layer in layers:
        for block in layer.modules():
            if stacked_weights(getattr(block, "experts", nn.Identity())) and choices_per_token(block) is None:
                return f"it is not known how {type(block).__name__} chooses experts"
        for router in routers_of(layer):
            if len(inspect.signature(type(router.module).forward).parameters) != 2:  # self, hidden
                return f"the router {type(router.module).__name__} needs other inputs besides the hidden states"
    for shape in expert_shapes(layers):
        if not has_grouped_kernel((shape.inputs, shape.outputs), dtype):
            return f"{shape.title} has no grouped kernel, because its sizes are not multiples of {ALIGNMENT} bytes"
    return None


def _distinct_routers(layers: Iterable[nn.Module]) -> dict[RouterShape, nn.Module]:
    routers: dict[RouterShape, nn.Module] = {}
    for layer in layers:
        for router in routers_of(layer):
            weight: Any = router.module.weight
            routers.setdefault(RouterShape(type(router.module).__name__, weight.shape[1], len(weight)), router.module)
    return routers


@torch.no_grad()
def agreeing_rows_of_router(
    router: nn.Module,
    rows: Collection[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    reference_rows: int = REFERENCE_ROWS,
) -> frozenset[int]:
    """Return the batch sizes in `rows` at which the router gives the same output bits as for `reference_rows` tokens.

    The router is copied and gets random weights. The result is empty if training mode and evaluation mode give
    different bits.
    """
    generator = torch.Generator(device).manual_seed(0)
    tried: Any = copy.deepcopy(router).to_empty(device=device)
    for module in tried.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, device=device, generator=generator) * parameter.shape[-1] ** -0.5
            setattr(module, name, nn.Parameter(values.to(dtype)))
    for buffer in tried.buffers():
        buffer.copy_(torch.randn(buffer.shape, device=device, generator=generator))
    x = torch.randn(reference_rows, tried.weight.shape[1], device=device, generator=generator).to(dtype)

    def call(rows: Tensor) -> list[Tensor]:
        outputs = type(tried).forward(tried, rows)  # without the hooks and replacements of the instance
        return [each for each in outputs if isinstance(each, Tensor)]

    tried.train()
    in_training = call(x)
    tried.eval()
    if not all(map(torch.equal, in_training, call(x))):
        return frozenset()
    return _agreeing(call, x, rows)


@torch.no_grad()
def agreeing_rows(
    shape: MatmulShape,
    rows: Collection[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    matmul: Matmul = nn.functional.linear,
    reference_rows: int = REFERENCE_ROWS,
) -> frozenset[int]:
    """Return the batch sizes, out of `rows`, at which `matmul` gives the same output bits as in one large batch.

    The large batch has `reference_rows` random rows, and the smaller batches are slices of it.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator).to(dtype)

    x, weight = random(reference_rows, shape.inputs), random(shape.outputs, shape.inputs)
    bias = random(shape.outputs) if shape.has_bias else None
    return _agreeing(lambda rows: [matmul(rows, weight, bias)], x, rows)


def _agreeing(call: Callable[[Tensor], Sequence[Tensor]], x: Tensor, rows: Collection[int]) -> frozenset[int]:
    """Return each batch size n in `rows` for which `call(x[i : i + n])` has the same bits as `call(x)[i : i + n]`."""
    expected = call(x)

    def agrees(count: int) -> bool:
        return all(
            torch.equal(part, whole[start : start + count])
            for start in {0, (len(x) - count) // 2, len(x) - count}
            for part, whole in zip(call(x[start : start + count]), expected, strict=True)
        )

    return frozenset(count for count in rows if count <= len(x) and agrees(count))


@torch.no_grad()
def agreeing_tokens(
    shape: ExpertShape,
    tokens: Collection[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    matmul: GroupedMatmul = grouped_matmul,
    reference_rows: int = REFERENCE_ROWS,
) -> frozenset[int]:
    """Return the token counts in `tokens` at which a grouped matmul gives the same bits as a reference matmul.

    In the reference matmul, all experts multiply the same random rows. T tokens become T · k rows (k experts per
    token), divided over the experts in several ways (`divisions`).
    """
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.inputs, shape.outputs) if shape.is_transposed else (shape.outputs, shape.inputs)
    weight = torch.empty(shape.experts, *sizes, device=device, dtype=dtype)
    for matrix in weight:
        matrix.copy_(torch.randn(sizes, device=device, generator=generator))
    if not shape.is_transposed:
        weight = weight.mT
    each = max(1, reference_rows // shape.experts)
    x = torch.randn(each, shape.inputs, device=device, generator=generator).to(dtype)

    def grouped(rows: Tensor, counts: Tensor) -> Tensor:
        return matmul(x[rows], weight, counts.cumsum(0).to(device=device, dtype=torch.int32))

    everything = torch.arange(each, device=device).repeat(shape.experts)
    expected = grouped(everything, torch.full((shape.experts,), each)).view(shape.experts, each, -1)

    def agrees(counts: Tensor) -> bool:
        rows = torch.randint(each, (int(counts.sum()),), device=device, generator=generator)
        experts = torch.arange(shape.experts).repeat_interleave(counts).to(device)
        return torch.equal(grouped(rows, counts), expected[experts, rows])

    return frozenset(count for count in tokens if all(map(agrees, divisions(count * shape.per_token, shape.experts))))


def divisions(rows: int, experts: int) -> Iterator[Tensor]:
    """Yield ways to divide `rows` rows over `experts` experts: the number of rows of each expert, [E].

    The first way is random. Then one expert gets most rows, and the other experts get at most 100 each. In the last
    way, one expert gets all rows.
    """
    generator = torch.Generator().manual_seed(0)
    yield torch.bincount(torch.randint(experts, (rows,), generator=generator), minlength=experts)
    for offset in range(len(FEW_ROWS)):
        counts = torch.tensor([FEW_ROWS[(expert + offset) % len(FEW_ROWS)] for expert in range(experts)])
        counts[(counts.cumsum(0) > rows).nonzero()] = 0
        counts[offset % experts] += rows - int(counts.sum())
        yield counts
    yield torch.tensor([rows, *[0] * (experts - 1)])


@functools.cache
def _agreeing_on_device(
    shape: MatmulShape | ExpertShape, rows: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> frozenset[int]:
    if isinstance(shape, ExpertShape):
        return agreeing_tokens(shape, rows, device=device, dtype=dtype)
    return agreeing_rows(shape, rows, device=device, dtype=dtype)


class RowChoice(NamedTuple):
    """The batch sizes that a decode step may have.

    `step_rows`: the batch sizes, as numbers of responses, in descending order. If no batch size is possible,
    `step_rows` is empty and `problem` says why.
    """

    step_rows: tuple[int, ...]
    problem: str | None


def choose_rows(num_slots: int, agreeing: Mapping[Shape, Collection[int]]) -> RowChoice:
    """Choose the batch sizes of decode steps at which every matmul and router gives the same bits as in a pack.

    `agreeing`: the batch sizes with the same bits, for each matmul and router. The largest chosen size is at least
    `num_slots`.
    """
    for shape, rows in agreeing.items():
        name = shape.title
        differing = [count for count in PACK_ROWS if count not in rows]
        if differing:
            return RowChoice((), f"{name} gives other bits in a pack of {differing[0]} tokens than in a longer pack")
        if num_slots > STEP_ROWS[-1] and num_slots not in rows:  # fewer slots can always be as many rows as a pack
            return RowChoice((), f"{name} gives other bits for {num_slots} slots than in a pack")
    common = [count for count in candidates(num_slots) if all(count in rows for rows in agreeing.values())]
    enough = min(count for count in common if count >= num_slots)
    return RowChoice(tuple(sorted((count for count in common if count <= enough), reverse=True)), None)


def candidates(num_slots: int) -> tuple[int, ...]:
    return tuple(sorted({*STEP_ROWS, max(num_slots, STEP_ROWS[0])}))


def trial(layers: Iterable[nn.Module], num_slots: int, device: torch.device, dtype: torch.dtype) -> RowChoice:
    """Choose the batch sizes of decode steps at which all matmuls of `layers` give the same bits as in a pack.

    The matmuls run on `device` with random numbers. On a GPU, routers and grouped matmuls of experts are tried too.
    """
    layers, rows = list(layers), (*PACK_ROWS, *candidates(num_slots))
    shapes: list[MatmulShape | ExpertShape] = [*matmul_shapes(layers)]
    if device.type != "cpu":  # on a CPU, all matmuls of experts have 16 rows (`padfree.model.block_matmuls`)
        shapes += expert_shapes(layers)
    agreeing: dict[Shape, Collection[int]] = {
        shape: _agreeing_on_device(shape, rows, device, dtype) for shape in shapes
    }
    if device.type != "cpu":
        for shape, router in _distinct_routers(layers).items():
            agreeing[shape] = agreeing_rows_of_router(router, rows, device=device, dtype=dtype)
    return choose_rows(num_slots, agreeing)


MODULE_ROWS = (1, 2, 3, 8, 17, 64, 100, 1024, 1531)
"""Batch sizes at which a module without matmuls must give the same bits as with MODULE_REFERENCE_ROWS rows."""

MODULE_REFERENCE_ROWS = 4096


@torch.no_grad()
def is_row_invariant(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a module [T, ...] -> [T, ...] gives a token the same bits for any number T of tokens.

    `module` is copied with random weights, so it may be on the meta device. Return False if the shape of its input is
    unknown.
    """
    shape = _row_shape(module)
    if shape is None:
        return False
    generator = torch.Generator(device).manual_seed(0)
    tried = copy.deepcopy(module).to_empty(device=device).to(dtype)
    for tensor in (*tried.parameters(), *tried.buffers()):
        tensor.copy_(torch.rand(tensor.shape, device=device, generator=generator) + 0.5)
    x = torch.randn(1, MODULE_REFERENCE_ROWS, *shape, device=device, generator=generator).to(dtype)
    expected = tried(x)
    return expected.shape == x.shape and all(
        torch.equal(tried(x[:, start : start + count]), expected[:, start : start + count])
        for count in MODULE_ROWS
        for start in (0, 7, MODULE_REFERENCE_ROWS - count)
    )


def _row_shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of one token in the module's input, or None if it is not known."""
    tensors = [*module.parameters(), *module.buffers()]
    if tensors and all(tensor.numel() == 1 for tensor in tensors):
        return (64,)  # scalars accept tokens of any shape
    weight = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None) if weight is None else weight.shape
    return None if shape is None else tuple(shape)
