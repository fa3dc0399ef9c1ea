"""Muon against its reference implementation, against torch, and on several ranks against one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from padfree.config import LoraConfig
from padfree.distributed import Mesh, make_mesh
from padfree.optim import muon
from padfree.optim.muon import orthogonalize
from padfree.optim.optimizer import Optimizer, make_optimizer
from padfree.optim.optimizer_settings import MuonSettings, OptimizerConfig
from padfree.optim.reference_muon import muon_step, orthogonal_factor
from padfree.testing.models import build
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, alone, make_engine, make_samples, small_model, two_steps, weights_of
from tests.train.trainer_cases import SFT, lines, make_config, make_trainer, save_config

SETTINGS = OptimizerConfig(
    name="muon", lr=0.01, eps=1e-2, weight_decay=0.1, muon=MuonSettings(lr=0.02, momentum=0.9, weight_decay=0.05)
)
STEPS = 3


class Experts(nn.Module):
    """Three experts in one tensor, each with a bias, as transformers stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up = nn.Parameter(torch.empty(3, 6, 4))
        self.up_bias = nn.Parameter(torch.empty(3, 6))


class Odd(nn.Module):
    """Matrices that 2 and 4 ranks cannot divide evenly: wide, tall, of equal shape, with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.wide = nn.ModuleList(nn.Linear(7, 5, bias=False) for _ in range(5))
        self.tall = nn.ModuleList(nn.Linear(3, 9) for _ in range(2))
        self.few = nn.Linear(6, 2, bias=False)
        self.experts = Experts()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def gradients_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in Odd().named_parameters()
    }


def stepped(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> dict[str, Tensor]:
    """The whole weights after steps with the given gradients."""
    for step in steps:
        for name, gradient in gradients_of(step).items():
            parameter = model.get_parameter(name)
            sharded = isinstance(parameter, DTensor)
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if sharded else gradient
            )
        optimizer.step(torch.tensor(True), torch.tensor(0.5, dtype=torch.float64))
    return weights_of(model)  # type: ignore[arg-type]


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - weight).abs().max()) for name, weight in expected.items())


# One process


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (9, 5), (1, 6), (7, 1)])
def test_the_iteration_comes_near_to_an_orthogonal_matrix(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    found = orthogonalize(matrices, 5)
    for mine, matrix in zip(found, matrices, strict=True):
        values = torch.linalg.svdvals(mine)
        assert values.min() > 0.3
        assert values.max() < 1.3
        # the same singular vectors
        torch.testing.assert_close(mine @ orthogonal_factor(matrix).T, (mine @ orthogonal_factor(matrix).T).T)
    assert torch.equal(orthogonalize(matrices[:0], 5), matrices[:0])


@pytest.mark.parametrize("changes", [{}, {"nesterov": False}, {"steps": 2, "update_rms": 1.0, "momentum": 0.0}])
def test_steps_are_those_of_the_plain_definition(changes: dict[str, Any]) -> None:
    """For linear layers and each expert; AdamW updates everything else."""
    chosen = {"momentum": 0.9, "weight_decay": 0.05, **changes}
    settings = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1, muon=MuonSettings(lr=0.02, **chosen))
    found, adamw = Odd(), Odd()
    stepped(found, make_optimizer(found, settings))
    stepped(adamw, make_optimizer(adamw, OptimizerConfig(lr=0.01, weight_decay=0.1)))
    matrices = {name for name, parameter in found.named_parameters() if parameter.ndim >= 2}
    matrices -= {"embed.weight", "experts.up_bias"}
    assert len(matrices) == 9
    for name, weight in Odd().named_parameters():
        mine = found.get_parameter(name)
        if name not in matrices:
            assert torch.equal(mine, adamw.get_parameter(name)), name
            continue
        whole = weight.detach().view(-1, *weight.shape[-2:])
        for number, expected in enumerate(whole):
            buffer = torch.zeros_like(expected)
            for step in range(STEPS):
                gradient = gradients_of(step)[name].view_as(whole)[number] * 0.5
                expected, buffer = muon_step(expected, gradient, buffer, lr=0.02, **chosen)
            torch.testing.assert_close(mine.view_as(whole)[number], expected, rtol=0, atol=1e-12)


def test_batches_do_not_change_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Odd()
    stepped(expected, make_optimizer(expected, SETTINGS))
    monkeypatch.setattr(muon, "MOST_NUMBERS", 2 * 7 * 5)
    found = Odd()
    stepped(found, make_optimizer(found, SETTINGS))
    assert difference(weights_of(found), weights_of(expected)) < 1e-13  # type: ignore[arg-type]


def test_an_update_has_the_root_mean_square_that_is_asked_for() -> None:
    """For any shape: about 0.2 of the learning rate, as with AdamW."""
    for shape in ((64, 64), (32, 200), (300, 40)):
        layer = nn.Linear(shape[1], shape[0], bias=False)
        optimizer = make_optimizer(layer, OptimizerConfig(name="muon", lr=1.0))
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        change = layer.weight.detach() - before
        assert float(change.square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


def test_steps_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 to 1e-12 except for the iteration, which torch computes in bfloat16."""
    from torch.optim import _muon

    matrix = torch.randn(20, 33, generator=torch.Generator().manual_seed(0))
    for each in (matrix, matrix.T):
        theirs = _muon._zeropower_via_newtonschulz(each, muon.COEFFICIENTS, 5, muon.EPS)
        ours = orthogonalize(each.bfloat16()[None], 5)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
        torch.testing.assert_close(orthogonalize(each[None], 5)[0], theirs.float(), rtol=0, atol=0.05)
    monkeypatch.setattr(
        _muon, "_zeropower_via_newtonschulz", lambda grad, _, steps, eps: orthogonalize(grad[None], steps)[0]
    )
    found, expected = Odd().wide, Odd().wide
    optimizer = make_optimizer(found, SETTINGS)
    other = torch.optim.Muon(
        expected.parameters(), lr=0.02, weight_decay=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        for name, parameter in found.named_parameters():
            parameter.grad = gradients_of(step)[f"wide.{name}"]
            expected.get_parameter(name).grad = parameter.grad.clone()
        optimizer.step()
        other.step()
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# Several ranks


def odd_on_ranks(rank: int, world: int) -> dict[str, float]:
    """The difference between every layout and one process."""
    expected = Odd()
    whole = stepped(expected, make_optimizer(expected, SETTINGS))
    found = {}
    for replicate in {1, world // 2 or 1}:
        mesh = make_mesh("cpu", replicate=replicate)
        model = Odd()
        fully_shard(model, mesh=mesh.fsdp)
        optimizer = make_optimizer(model, SETTINGS)
        found[f"replicate {replicate}"] = difference(stepped(model, optimizer), whole)
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                assert kind == "step" or value.placements == parameter.placements  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_of_any_size_step_as_one_process_does(world: int) -> None:
    for found in run_ranks(world, odd_on_ranks):
        assert max(found.values()) < 1e-12, found


def gpt2() -> Any:
    """A model that computes in one dtype throughout, here float64; 18 matrix rows are 5, 5, 5 and 3 on 4 ranks."""
    sizes = {"hidden_size": 18, "num_attention_heads": 2}
    return build("gpt2", vocab_size=40, n_positions=64, **sizes).double()


def trained(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for context in {1, min(2, world), world}:
        mesh = make_mesh("cpu", context=context)
        engine = make_engine(mesh, LOSSES["sft"], gpt2(), optimizer=SETTINGS)
        for _ in range(STEPS):
            engine.step(make_samples())
        found[f"context {context}"] = weights_of(engine.model)
    return found


@pytest.mark.slow
def test_training_on_ranks_is_that_of_one_process() -> None:
    """Data and context ranks, gradients from the engine, clipped, in float64."""
    (expected,) = run_ranks(1, trained)
    assert difference(expected["context 1"], weights_of(gpt2())) > 1e-2
    for world in (2, 4):
        for by_layout in run_ranks(world, trained):
            for layout, weights in by_layout.items():
                assert difference(weights, expected["context 1"]) < 1e-12, (world, layout)


# Master weights, adapters, checkpoints


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_masters_step_as_fsdp_does_to_the_bit(name: str) -> None:
    """With a bfloat16 model in a single process."""
    results = [
        two_steps(
            make_engine(
                alone(), LOSSES["sft"], small_model(name), optimizer=SETTINGS, reshard=reshard, dtype=torch.bfloat16
            ),
            make_samples(),
        )
        for reshard in (True, False)
    ]
    start = weights_of(small_model(name))
    for key, weight in results[0][1].items():
        assert torch.equal(weight, results[1][1][key]), key
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, start[key]), key


def test_adapters_are_hidden_matrices(mesh: Mesh) -> None:
    pytest.importorskip("peft")
    engine = make_engine(mesh, LOSSES["sft"], optimizer=SETTINGS, lora=LoraConfig(rank=2))
    (group,) = engine.optimizer.param_groups
    names = {name for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    assert group["rule"] == "muon"
    assert len(group["params"]) == len(names)
    assert all(".lora_" in name for name in names)
    assert engine.optimizer.rates == {"lr": 0.02}
    before = weights_of(engine.model)
    engine.step(make_samples())
    after = weights_of(engine.model)
    for name in names:
        change = after[name] - before[name]
        if ".lora_B." in name:  # B starts at 0, so weight decay has no effect
            assert float(change.square().mean().sqrt()) == pytest.approx(0.02 * 0.2, rel=0.4), name


def run(folder: Path, model: Path, world: int, steps: int) -> None:
    run_ranks(world, run_on_rank, folder, model, steps)


def run_on_rank(rank: int, world: int, folder: Path, model: Path, steps: int) -> None:
    muon = {"name": "muon", "muon": {"lr": 2e-3, "momentum": 0.9}}
    config = make_config(folder, model, **SFT, optimizer=muon, run={"steps": steps})
    make_trainer(config, make_mesh("cpu")).run()


@pytest.mark.slow
def test_a_resumed_run_makes_the_same_steps(tmp_path: Path) -> None:
    """Bit-identical on the same number of ranks, up to rounding on other numbers."""
    model = save_config(tmp_path)
    run(tmp_path / "whole", model, 2, 6)
    expected = lines(tmp_path / "whole")
    assert expected[0]["lr"] == 2e-3
    assert expected[0]["lr/adamw"] == 5e-3
    for first, then in ((2, 2), (1, 2), (2, 1), (4, 2)):
        folder = tmp_path / f"{first} {then}"
        run(folder, model, first, 3)
        run(folder, model, then, 6)
        found = lines(folder)
        if first == then:
            assert found == expected
        for mine, other in zip(found, expected, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert mine["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)
    assert not math.isclose(expected[0]["loss"], expected[5]["loss"], rel_tol=1e-2)
    with pytest.raises(
        AssertionError, match=r"optimizer.name: 'adamw', but .* was made with 'muon'; either set it back"
    ):
        run_ranks(1, other_optimizer, tmp_path / "whole", model)


def other_optimizer(rank: int, world: int, folder: Path, model: Path) -> None:
    make_trainer(make_config(folder, model, **SFT, run={"steps": 7}), make_mesh("cpu"))
