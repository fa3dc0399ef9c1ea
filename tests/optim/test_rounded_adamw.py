"""AdamW with moments in bfloat16 and int8: against float64, sharded, resumed, and the kernel against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.checkpoint.optimizer_state import optimizer_tensors
from padfree.distributed import Mesh, make_mesh
from padfree.model.named_tensors import named_tensors
from padfree.optim.optimizer import Optimizer, make_optimizer, state_bytes
from padfree.optim.optimizer_settings import OptimizerConfig, StateFormat
from padfree.optim.pieces import BLOCK
from padfree.optim.reference_adamw import Moment, ParameterRows, Step, update_reference
from padfree.optim.state_format import INT8, RowRange, decode_int8, new_state
from tests.interpreter import DEVICE, needs_kernels
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, make_engine, make_samples, small_model

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
FORMATS: list[Literal["bfloat16", "int8"]] = ["bfloat16", "int8"]


def config(state: StateFormat) -> OptimizerConfig:
    return OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, state=state)


def gradients(shape: tuple[int, ...], step: int) -> Tensor:
    """With magnitudes over four decades."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator) * torch.logspace(-4, 0, shape[-1])


def moment_of(own: dict[str, Tensor], kind: str) -> Tensor:
    if f"{kind}_scale" in own:
        return decode_int8(own[kind], own[f"{kind}_scale"], INT8[kind]).double()
    return own[kind].double()


def largest_rounding(kind: str, magnitude: Tensor, scale: Tensor | None) -> Tensor:
    """The distance between the two neighbours of a value, or more. Below the largest value of a block:

    s (c / n)^p has the derivative s p / n (c / n)^(p - 1), and the distance to the next level is at most the derivative
    at that level, which is at most (c + 1) / n.
    """
    if scale is None:
        return magnitude * 2**-7
    rounding = INT8[kind]
    power, most = 2**rounding.squarings, rounding.most
    root = (magnitude / scale).clamp(max=1) ** (1 / power) + 1 / most
    return scale * power / most * root.clamp(max=1) ** (power - 1)


@pytest.mark.parametrize("state", FORMATS)
def test_steps_stay_within_the_bound_of_rounding(state: StateFormat) -> None:
    """Against AdamW in float64, element by element, over 12 steps.

    e is the largest error of a moment: a step multiplies the error by beta, and rounding adds the distance of two
    neighbours. The update lies between those with all errors at their worst; exp_avg_sq is at least its newest term.
    """
    shape, steps = (6, 200), 12
    model = nn.Linear(200, 6, bias=False)
    optimizer = make_optimizer(model, config(state))
    weight = model.weight.detach().double().clone()
    first, second = torch.zeros(shape).double(), torch.zeros(shape).double()
    error1, error2, allowed = (torch.zeros(shape).double() for _ in range(3))
    total = torch.zeros(shape).double()
    beta1, beta2 = BETAS
    for step in range(1, steps + 1):
        gradient = gradients(shape, step)
        model.weight.grad = gradient
        optimizer.step()
        wide = gradient.double()
        first = beta1 * first + (1 - beta1) * wide
        second = beta2 * second + (1 - beta2) * wide**2
        error1, error2 = beta1 * error1, beta2 * error2
        rate, correction = LR / (1 - beta1**step), (1 - beta2**step) ** -0.5

        def update(m: Tensor, v: Tensor, rate: float = rate, correction: float = correction) -> Tensor:
            return rate * m / (v.sqrt() * correction + EPS)

        plain = update(first, second)
        smallest = torch.maximum(second - error2, (1 - beta2) * wide**2)
        ends = [update(first + sign * error1, v) for sign in (-1, 1) for v in (smallest, second + error2)]
        worst = torch.stack([(end - plain).abs() for end in ends]).amax(dim=0)
        weight = (1 - LR * DECAY) * weight - plain
        allowed = allowed + worst
        total = total + plain.abs()
        own = optimizer.state[model.weight]
        for kind, exact, error in (("exp_avg", first, error1), ("exp_avg_sq", second, error2)):
            scales = own.get(f"{kind}_scale")
            spread = None if scales is None else scales.double().repeat_interleave(128, dim=1)[:, : shape[1]]
            error += largest_rounding(kind, exact.abs() + error, spread)
            assert ((moment_of(own, kind) - exact).abs() <= error * 1.0001 + 1e-20).all(), (kind, step)
        rounding = 1e-6 * (total + weight.abs())  # float32 arithmetic
        assert ((model.weight.double() - weight).abs() <= allowed + rounding).all(), step
    # the bound means something: most weights are far closer to float64 than they have moved
    assert float((allowed / total).median()) < (0.1 if state == "bfloat16" else 0.6)
    distance = (model.weight.detach().double() - weight).abs() / total
    assert float(distance.median()) < (0.005 if state == "bfloat16" else 0.05)


@pytest.mark.parametrize("state", FORMATS)
def test_moments_decay_without_gradients(state: StateFormat) -> None:
    """With beta2 = 0.999 a step changes exp_avg_sq by less than half the distance of two levels.

    Rounded to nearest, it would never decay. Rounded stochastically, the mean over all elements decays as it should:
    after n steps its deviation is at most that of n roundings.
    """
    model = nn.Linear(128, 256, bias=False)
    settings = OptimizerConfig(lr=0.0, betas=(0.9, 0.999), state=state)
    optimizer = make_optimizer(model, settings)
    model.weight.grad = torch.full((256, 128), 0.3)
    model.weight.grad[:, 0] = 1.0  # the largest of its block, whose level is exact
    optimizer.step()
    start = moment_of(optimizer.state[model.weight], "exp_avg_sq")[:, 1:].mean()
    model.weight.grad = torch.zeros(256, 128)
    steps = 200
    for _ in range(steps):
        optimizer.step()
    found = moment_of(optimizer.state[model.weight], "exp_avg_sq")[:, 1:].mean()
    relative = 2**-7 if state == "bfloat16" else 8 / 255 / 0.09 ** (1 / 8)
    deviation = relative / 2 * (steps / (256 * 127)) ** 0.5
    # rows share the error of their scale, which is one number for 127 elements
    assert abs(float(found / start) - 0.999**steps) < 5 * deviation * (1 if state == "bfloat16" else 127**0.5)
    assert float(found / start) < 0.9


@pytest.mark.parametrize("state", FORMATS)
def test_a_step_that_is_not_finite_changes_nothing(state: StateFormat) -> None:
    results = []
    for kinds in (["finite", "nan", "finite"], ["finite", "finite"]):
        torch.manual_seed(0)
        model = nn.Linear(150, 3)
        optimizer = make_optimizer(model, config(state))
        for kind in kinds:
            model.weight.grad, model.bias.grad = gradients((3, 150), 1), torch.ones(3)
            model.weight.grad[1] += torch.nan if kind == "nan" else 0.0
            optimizer.step(torch.tensor(kind == "finite"))
        results.append([*model.parameters(), *optimizer.state[model.weight].values()])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)
    assert results[0][2] == 2


@pytest.mark.parametrize("state", FORMATS)
def test_a_scale_is_one_of_the_gradients(state: StateFormat) -> None:
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(150, 3, bias=False)
        optimizer = make_optimizer(model, config(state))
        for step in range(2):
            model.weight.grad = gradients((3, 150), step) * (1.0 if inside else 0.25)
            scale = torch.tensor(0.25, dtype=torch.float64) if inside else None
            optimizer.step(torch.tensor(True), scale)
        results.append(model.weight)
    assert torch.equal(*results)


@pytest.mark.parametrize("state", ["float32", *FORMATS])
def test_the_state_has_the_bytes_that_are_counted(state: StateFormat) -> None:
    """Without step counters."""
    model = nn.ModuleDict({"matrix": nn.Linear(300, 7), "norm": nn.LayerNorm(5)})
    optimizer = make_optimizer(model, config(state))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [each for own in optimizer.state.values() for kind, each in own.items() if kind != "step"]
    assert state_bytes(optimizer.param_groups) == sum(each.nbytes for each in tensors)
    matrix = {"float32": 8 * 2100, "bfloat16": 4 * 2100, "int8": 2 * 2100 + 2 * 4 * 7 * 3}[state]
    assert state_bytes(optimizer.param_groups) == matrix + 8 * (7 + 5 + 5)


# Sharded parameters and checkpoints

SHAPES = {"matrix": (7, 150), "experts": (4, 6, 40), "vector": (5,)}


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            torch.manual_seed(number)
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def take_steps(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for name, parameter in model.named_parameters():
            gradient = gradients(SHAPES[name], step)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {**named_tensors(model), **optimizer_tensors(model, optimizer)}
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }


def sharded_steps(rank: int, world: int, folder: Path, state: StateFormat) -> list[dict[str, Tensor]]:
    """Two steps, a checkpoint, two more; then the checkpoint of one process and two steps from there."""
    mesh = make_mesh("cpu")
    found = []
    for path in (None, folder / "alone"):
        model = Parameters()
        fully_shard(model, mesh=mesh.fsdp)
        optimizer = make_optimizer(model, config(state))
        if path is None:
            take_steps(model, optimizer, range(2))
            checkpointer = Checkpointer(folder / "sharded")
            checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
        else:
            checkpointer = Checkpointer(path)
            latest = checkpointer.latest()
            assert latest is not None
            checkpointer.load(latest, model=model, optimizer=optimizer)
        take_steps(model, optimizer, range(2, 4))
        found.append(whole_tensors(model, optimizer))
    return found


@pytest.mark.parametrize("state", FORMATS)
def test_ranks_and_resuming_change_no_bit(state: StateFormat, tmp_path: Path, mesh: Mesh) -> None:
    """One process, 2 ranks, and checkpoints of each that the other resumes, from the same gradients."""
    model = Parameters()
    optimizer = make_optimizer(model, config(state))
    take_steps(model, optimizer, range(2))
    Checkpointer(tmp_path / "alone").save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    take_steps(model, optimizer, range(2, 4))
    expected = whole_tensors(model, optimizer)
    for found in run_ranks(2, sharded_steps, tmp_path, state):
        for name, results in (("2 ranks", found[0]), ("resumed by 2 ranks", found[1])):
            assert_equal(results, expected, name)
    again = Parameters()
    nn.init.zeros_(again.get_parameter("matrix"))
    resumed = make_optimizer(again, config(state))
    checkpointer = Checkpointer(tmp_path / "sharded")
    latest = checkpointer.latest()
    assert latest is not None
    checkpointer.load(latest, model=again, optimizer=resumed)
    take_steps(again, resumed, range(2, 4))
    assert_equal(whole_tensors(again, resumed), expected, "resumed by one process")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], message: str) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), f"{message}: {name}"


@pytest.mark.parametrize("state", FORMATS)
def test_split_weights_take_the_same_steps(state: StateFormat, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks that cut parameters, against FSDP2's float32 shards."""
    monkeypatch.setitem(BLOCK, "cpu", 256)
    found: list[dict[str, Tensor]] = []
    for reshard in (True, False):
        options: dict[str, Any] = {"optimizer": config(state), "reshard": reshard, "dtype": torch.bfloat16}
        engine = make_engine(mesh, LOSSES["sft"], small_model(), max_tokens=64, **options)
        for step in range(3):
            engine.step(make_samples(seed=step))
        found.append(whole_tensors(engine.model, engine.optimizer))
    assert_equal(found[1], found[0], "split")


@pytest.mark.slow
def test_the_loss_falls_as_with_float32_state(mesh: Mesh) -> None:
    """200 steps of a tiny model on 8 samples that it learns by heart."""
    losses: dict[str, list[float]] = {}
    for state in ("float32", *FORMATS):
        torch.manual_seed(0)
        settings = OptimizerConfig(lr=3e-3, state=state)
        engine = make_engine(mesh, LOSSES["sft"], small_model(), max_tokens=64, optimizer=settings)
        losses[state] = [engine.step(make_samples()).loss for _ in range(200)]
    start, end = losses["float32"][0], losses["float32"][-1]
    assert end < 0.1 * start
    for state in FORMATS:
        # a few per cent of the distance that the loss falls, at every tenth step
        for step in range(0, 200, 10):
            assert abs(losses[state][step] - losses["float32"][step]) < 0.03 * start, (state, step)


# The kernel


def case(shape: tuple[int, int], state: StateFormat, device: str, *, sharded: bool) -> tuple[ParameterRows, Step]:
    """Some rows after two steps of the reference, and the third step."""
    rows = shape[0]
    parameter = torch.zeros(shape)
    own = new_state(parameter, state)
    moments = [Moment(own[kind], own.get(f"{kind}_scale")) for kind in INT8]
    span = RowRange(9, 2, 5) if sharded else RowRange(0, rows, rows)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    step = Step(torch.ones((), dtype=torch.bool), torch.tensor(0.5), LR, *BETAS, EPS, DECAY)
    for number in (1, 2, 3):
        factors = torch.tensor([LR / (1 - BETAS[0] ** number), (1 - BETAS[1] ** number) ** -0.5])
        gradient = gradients(shape, number)
        found = ParameterRows(weight, gradient, moments[0], moments[1], span, factors, torch.tensor(number), 5)
        if number < 3:
            update_reference(found, step)
    moved = [_to(value, device) for value in found]
    return ParameterRows(*moved), Step(*(_to(value, device) for value in step))


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Moment):
        return Moment(*(_to(each, device) for each in value))
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


@needs_kernels
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("shape", [(5, 300), (40, 16), (3, 128), (700, 3)], ids=str)
@pytest.mark.parametrize("state", FORMATS)
def test_the_kernel_is_the_reference(state: StateFormat, shape: tuple[int, int], sharded: bool) -> None:
    """Up to the rounding of float32: on a GPU a value may lie on the other side of a random threshold."""
    pytest.importorskip("triton")
    from padfree.optim import triton_adamw

    rows, step = case(shape, state, DEVICE, sharded=sharded)
    expected, _ = case(shape, state, "cpu", sharded=sharded)
    triton_adamw.update(rows, step)
    update_reference(expected, Step(*(_to(each, "cpu") for each in step)))
    torch.testing.assert_close(rows.weight.cpu(), expected.weight)
    for kind, mine, theirs in zip(INT8, (rows.exp_avg, rows.exp_avg_sq), expected[2:4], strict=True):
        values = mine.values.cpu()
        if mine.scales is None or theirs.scales is None:
            same = values == theirs.values
            torch.testing.assert_close(values.float(), theirs.values.float(), rtol=2**-7, atol=0)
        else:
            torch.testing.assert_close(mine.scales.cpu(), theirs.scales)
            difference = values.int() - theirs.values.int()
            same = difference == 0
            assert int(difference.abs().max()) <= 1, kind
        assert float(same.double().mean()) > 0.999, kind


@needs_kernels
@pytest.mark.parametrize("state", FORMATS)
def test_the_kernel_skips_a_step_that_is_not_finite(state: StateFormat) -> None:
    pytest.importorskip("triton")
    from padfree.optim import triton_adamw

    rows, step = case((5, 300), state, DEVICE, sharded=False)
    rows.gradient[2] = torch.nan
    before, _ = case((5, 300), state, DEVICE, sharded=False)
    triton_adamw.update(rows, step._replace(finite=~step.finite))
    assert torch.equal(rows.weight, before.weight)
    for mine, theirs in zip(rows[2:4], before[2:4], strict=True):
        assert torch.equal(mine.values, theirs.values)
        assert mine.scales is None or torch.equal(mine.scales, theirs.scales)
