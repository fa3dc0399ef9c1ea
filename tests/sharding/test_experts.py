"""Experts divided over ranks: loss, gradients and router losses equal those of one process; bytes are counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.config import LoraConfig, config_from_dict
from padfree.distributed import Mesh, make_mesh
from padfree.estimate.memory import estimate_memory
from padfree.losses import SFTSettings
from padfree.model import hidden_states
from padfree.model.export import export_model
from padfree.model.load import local_part, local_region
from padfree.model.routers import routers_of
from padfree.model.stacked_experts import undivided
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.sample import Sample
from padfree.sharding.norm import gradient_norm
from padfree.sharding.parallelize import inside
from padfree.testing.models import EXPERTS, build
from padfree.tools.check.exact import float64_throughout
from padfree.train.engine import Engine, LossSettings
from padfree.train.run import mesh_of
from padfree.train.setup import build_engine
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, largest_difference
from tests.train.cases import LOSSES, make_engine, make_samples, small_model, two_steps, weights_of

ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"]
BIASED = ("deepseek_v3", "glm4_moe")
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"expert": 2}, {"expert": 2, "context": 2}],
    4: [
        {"expert": 1},
        {"expert": 2},
        {"expert": 4},
        {"expert": 2, "context": 2},
        {"expert": 4, "context": 2},
        {"expert": 2, "context": 4},
        {"expert": 2, "replicate": 2},
    ],
    8: [{"expert": 2, "context": 2, "replicate": 2}, {"expert": 4, "context": 2}],
}

Result = tuple[list[float], dict[str, Tensor], list[Tensor]]


def settings_of(name: str) -> LossSettings:
    return LossSettings(loss=SFTSettings(), load_balancing=0.5, router_bias=0.25 if name in BIASED else 0.0)


def engine_of(name: str, mesh: Mesh, **changes: Any) -> Engine:
    """In float64, with transformers' plain loop over the experts: its grouped matmul has no float64."""
    model = small_model(name).double()
    model.set_experts_implementation("eager")
    return make_engine(mesh, settings_of(name), model, **changes)


def result_of(engine: Engine, samples: list[Sample] | None = None) -> Result:
    """Loss, router loss and gradient norm, the whole gradients, and the biases of the routers after they have moved."""
    with float64_throughout() if engine.model.dtype == torch.float64 else nullcontext():
        sums = engine.gradients(engine.prepare(make_samples() if samples is None else samples))
        total = torch.stack([sums.loss, sums.statistics["router"][0].double()])
        dist.all_reduce(total, group=engine.mesh.loss.group)
        found = {}
        for key, parameter in engine.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, key
            found[key] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
        norm = gradient_norm(engine.parameters, engine.mesh.device)
        assert engine.router is not None
        engine.router.move_biases(torch.tensor(True))
    biases = [router.owner._buffers[router.bias].clone() for router in routers_of(engine.model) if router.owner]  # type: ignore[union-attr]
    return [*total.tolist(), float(norm)], found, biases


def on_one(rank: int, world: int, name: str) -> Result:
    return result_of(engine_of(name, make_mesh("cpu")))


def on_several(rank: int, world: int, name: str) -> list[Result]:
    found = []
    for layout in LAYOUTS[world]:
        engine = engine_of(name, make_mesh("cpu", **layout))
        if layout["expert"] > 1:
            placements = {
                parameter.placements for key, parameter in engine.model.named_parameters() if ".experts." in key
            }
            assert placements == {(*[Replicate()] * ("replicate" in layout), Shard(1), Shard(0))}
        found.append(result_of(engine))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_give_what_one_process_gives(
    world: int, name: str, record_property: Callable[[str, object], None]
) -> None:
    """The differences are in the report of `pytest --junitxml`."""
    ((numbers, gradients, biases),) = run_ranks(1, on_one, name)
    assert numbers[1] > 0.1, "the routers' loss has an effect"
    for rank in run_ranks(world, on_several, name):
        for layout, (found, others, moved) in zip(LAYOUTS[world], rank, strict=True):
            difference = largest_difference(others, gradients)[0]
            shown = " ".join(f"{key} {size}" for key, size in layout.items())
            record_property(f"{name}, {world} ranks, {shown}", f"{difference:.1e}")
            assert found == pytest.approx(numbers, rel=1e-12), layout
            assert difference < 1e-12, layout
            assert all(torch.equal(one, other) for one, other in zip(moved, biases, strict=True)), layout
        assert len(biases) == (name in BIASED)


def by_pack(rank: int, world: int) -> tuple[Result, set[int]]:
    """Each pack has a number of context ranks of its own."""
    contexts = (1, 2, 4) if world == 4 else ()
    engine = engine_of("qwen3_moe", make_mesh("cpu", expert=min(world, 2), contexts=contexts), max_tokens=4)
    widths = engine.prepare(make_samples()).plan.widths
    return result_of(engine), set() if widths is None else set(widths.ravel().tolist())


@pytest.mark.slow
def test_packs_may_have_any_number_of_context_ranks() -> None:
    (((numbers, gradients, _), _),) = run_ranks(1, by_pack)
    for (found, others, _), widths in run_ranks(4, by_pack):
        assert len(widths) > 1
        assert found == pytest.approx(numbers, rel=1e-12)
        assert largest_difference(others, gradients)[0] < 1e-12


def plain(rank: int, world: int, names: list[str]) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss and gradients without a loss of the routers, which not all of these architectures report."""
    found = {}
    for name in names:
        model = build(name).double()
        model.set_experts_implementation("eager")
        engine = make_engine(make_mesh("cpu", expert=world), LOSSES["sft"], model)
        with float64_throughout():
            loss = engine.gradients(engine.prepare(make_samples())).loss
        dist.all_reduce(loss, group=engine.mesh.loss.group)
        gradients = {key: weight.grad for key, weight in engine.model.named_parameters() if weight.grad is not None}
        whole = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in gradients.items()}
        found[name] = float(loss), whole
    return found


@pytest.mark.slow
def test_every_architecture_with_stacked_experts_gives_what_one_process_gives() -> None:
    names = [name for name in EXPERTS if undivided(build(name), 2, 1) is None]
    assert set(ARCHITECTURES) < set(names)
    (expected,) = run_ranks(1, plain, names)
    for rank in run_ranks(2, plain, names):
        for name, (loss, gradients) in rank.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-12), name
            assert largest_difference(gradients, expected[name][1])[0] < 1e-12, name


def lopsided(mesh: Mesh) -> Result:
    """All tokens choose experts 0 and 1, and there are fewer samples than ranks."""
    engine = engine_of("gpt_oss", mesh)
    with torch.no_grad():
        for router in routers_of(engine.model):
            bias: Any = router.module.bias
            full = torch.tensor([60.0, 50.0, 0.0, 0.0], dtype=torch.float64)
            local_part(bias).copy_(full[local_region(bias)])
    return result_of(engine, make_samples((5, 9)))


def lopsided_on_ranks(rank: int, world: int) -> Result:
    return lopsided(make_mesh("cpu", expert=world))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_tokens(world: int) -> None:
    ((numbers, gradients, _),) = run_ranks(1, lopsided_on_ranks)
    experts = {name: gradient for name, gradient in gradients.items() if ".experts." in name}
    assert all(float(each[:2].abs().max()) > 0 and not each[2:].any() for each in experts.values())
    for found, others, _ in run_ranks(world, lopsided_on_ranks):
        assert found == pytest.approx(numbers, rel=1e-12)
        assert largest_difference(others, gradients)[0] < 1e-12


WAYS: dict[str, dict[str, Any]] = {
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "no reshard": {"reshard": False},
    "offload": {"offload": True},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile": "aot_eager"},
    "compiled and recomputed": {"compile": "aot_eager", "checkpointing": "selective"},
}


def single(mesh: Mesh, **changes: Any) -> Result:
    """In float32, with transformers' grouped matmul. One layer: further layers compile in the same way."""
    model = small_model("qwen3_moe", num_hidden_layers=1)
    return result_of(make_engine(mesh, settings_of("qwen3_moe"), model, **changes))


def on_one_single(rank: int, world: int) -> tuple[Result, Result]:
    model = small_model("qwen3_moe", num_hidden_layers=1).double()
    model.set_experts_implementation("eager")
    mesh = make_mesh("cpu")
    return single(mesh), result_of(make_engine(mesh, settings_of("qwen3_moe"), model))


def in_ways(rank: int, world: int, ways: dict[str, dict[str, Any]]) -> list[Result]:
    mesh = make_mesh("cpu", expert=2)
    return [single(mesh, **changes) for changes in ways.values()]


@pytest.mark.parametrize("ways", [WAYS, pytest.param(COMPILED, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_recomputed_offloaded_and_compiled_layers_give_the_same(ways: dict[str, dict[str, Any]]) -> None:
    (((numbers, expected, _), (_, wide, _)),) = run_ranks(1, on_one_single)
    for rank in run_ranks(2, in_ways, ways):
        assert len(rank) == len(ways)
        for found, others, _ in rank:
            assert found == pytest.approx(numbers, rel=1e-5)
            assert_same_but_for_rounding(others, expected, wide)


def in_bfloat16(rank: int, world: int) -> list[Result]:
    return [single(make_mesh("cpu", expert=expert), dtype=torch.bfloat16) for expert in (1, 2)]


def test_bfloat16_differs_by_its_rounding() -> None:
    ((_, (_, wide, _)),) = run_ranks(1, on_one_single)
    for (_, expected, _), (_, found, _) in run_ranks(2, in_bfloat16):
        noise = largest_difference(expected, wide)[0]
        assert 0 < largest_difference(found, expected)[0] < noise < 0.1


def with_adapters(mesh: Mesh) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model = small_model("qwen3_moe", num_hidden_layers=1)
    reports, weights = two_steps(make_engine(mesh, LOSSES["clip"], model, lora=LoraConfig(rank=2)), make_samples())
    return [(report.loss, report.gradient_norm) for report in reports], weights


def adapters_on_ranks(rank: int, world: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    return with_adapters(make_mesh("cpu", expert=world))


def test_adapters_are_trained_beside_frozen_divided_experts() -> None:
    """With a policy loss: the old log-probabilities are computed without gradients."""
    ((numbers, weights),) = run_ranks(1, adapters_on_ranks)
    for found, others in run_ranks(2, adapters_on_ranks):
        assert found == [pytest.approx(each, rel=1e-5) for each in numbers]
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, atol=1e-5, rtol=0)
            assert ".experts." not in name or torch.equal(others[name], weight)


# Checkpoints and exports


def trained(mesh: Mesh, optimizer: str) -> Engine:
    settings = OptimizerConfig(name=optimizer, lr=1e-2, eps=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
    return make_engine(mesh, settings_of("gpt_oss"), small_model("gpt_oss"), optimizer=settings)


def steps(engine: Engine) -> list[tuple[float, float]]:
    reports = [engine.step(make_samples()) for _ in range(2)]
    return [(report.loss, report.gradient_norm) for report in reports]


def uninterrupted(rank: int, world: int, optimizer: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    engine = trained(make_mesh("cpu"), optimizer)
    return [*steps(engine), *steps(engine)], weights_of(engine.model)


def interrupted(rank: int, world: int, optimizer: str, folder: Path) -> Any:
    """Two steps, a checkpoint, and two more steps with the experts over 2 ranks, 4 ranks, and undivided."""
    first = trained(make_mesh("cpu", expert=2), optimizer)
    begun = steps(first)
    checkpointer = Checkpointer(folder)
    path = checkpointer.save(2, model=first.model, optimizer=first.optimizer, extra={}, rank_state={})
    found = []
    for expert in (2, 4, 1):
        engine = trained(make_mesh("cpu", expert=expert), optimizer)
        checkpointer.load(path, model=engine.model, optimizer=engine.optimizer)
        found.append(([*begun, *steps(engine)], weights_of(engine.model)))
        if expert == 2:
            export_model(engine.model, folder / "export")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_at_another_expert_size_and_exports_whole_weights(optimizer: str, tmp_path: Path) -> None:
    ((numbers, weights),) = run_ranks(1, uninterrupted, optimizer)
    for rank in run_ranks(4, interrupted, optimizer, tmp_path):
        for found, others in rank:
            assert found == [pytest.approx(each, rel=1e-5) for each in numbers]
            for name, weight in weights.items():
                torch.testing.assert_close(others[name], weight, atol=1e-4, rtol=0)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").named_parameters())
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in rank[0][1].items())


def from_files(rank: int, world: int, name: str, folder: Path) -> None:
    """Weights are read as stored; the sampler's copy is whole; the memory estimate is what this rank holds."""
    config = config_from_dict(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"path": "d"},
            "batch": {"samples": 8, "max_tokens": 64},
            "run": {"folder": "f", "device": "cpu"},
            "parallel": {"expert": 2, "compile": "none", "checkpointing": "none", "reshard": True},
        }
    )
    engine = build_engine(config, mesh_of(config, torch.device("cpu")))
    model = small_model(name)
    original, found = dict(model.named_parameters()), weights_of(engine.model)
    assert all(torch.equal(found[key], parameter) for key, parameter in original.items())
    policy = PolicyModel(engine.model, torch.float32, torch.device("cpu"))
    policy.update(engine.model)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        logits = [each(input_ids=tokens).logits for each in (policy.model, model.train(False))]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    estimate = estimate_memory(config, small_model(name), processes=world, device_type="cpu")
    assert rank or estimate.weights == sum(4 * local_part(each).numel() for each in engine.model.parameters())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_run_divides_the_weights_of_its_files(name: str, tmp_path: Path) -> None:
    """transformers stores the experts of Qwen3 one by one, and those of gpt-oss stacked."""
    small_model(name).save_pretrained(tmp_path)
    run_ranks(4, from_files, name, tmp_path)


# Refusals


@pytest.mark.parametrize(
    ("name", "expert", "shards", "reason"),
    [
        ("qwen3_moe", 2, 2, None),
        ("gpt_oss", 4, 16, None),
        ("qwen3_moe", 3, 1, "3 does not divide the 4 experts of Qwen3MoeForCausalLM"),
        ("qwen3_moe", 2, 5, r"gate_up_proj \[4, 64, 32\] cannot be sharded: no size after the first"),
        ("qwen3", 2, 1, "Qwen3ForCausalLM has no experts"),
        ("llama4", 2, 1, "Llama4ForCausalLM computes its experts in another way than transformers' ExpertsInterface"),
    ],
)
def test_experts_that_cannot_be_divided_are_described(name: str, expert: int, shards: int, reason: str | None) -> None:
    found = undivided(small_model(name), expert, shards)
    assert found is None if reason is None else re.search(reason, str(found))


def too_many(rank: int, world: int) -> None:
    with refused("parallel.expert", "2 does not divide the 1 processes that share one set of weights"):
        make_mesh("cpu", expert=2, replicate=2)


def test_groups_of_experts_divide_a_replica() -> None:
    run_ranks(2, too_many)


# Bytes


@contextmanager
def counting(group: Any) -> Iterator[dict[torch.dtype, int]]:
    """Counts the bytes that this rank sends to other ranks of the group by all-to-all, by dtype."""
    sent: dict[torch.dtype, int] = {}
    exchange = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, receive: Any, send: Any, **options: Any) -> Any:
        row = given[0].numel() * given.element_size() if len(given) else 0
        sent[given.dtype] = sent.get(given.dtype, 0) + row * (sum(send) - send[group.rank()])
        return exchange(output, given, receive, send, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield sent


def sent_bytes(rank: int, world: int, checkpointing: Any) -> tuple[dict[torch.dtype, int], int, int]:
    """Bytes that this rank sends in forward and backward, its choices of other ranks' experts, and its layer calls."""
    mesh = make_mesh("cpu", expert=world)
    model = small_model("qwen3_moe")
    engine = make_engine(mesh, LOSSES["sft"], model, checkpointing=checkpointing)
    prepared, choices = engine.prepare(make_samples()), []
    hooks = [
        router.module.register_forward_hook(lambda module, args, output: choices.append(output[2]))
        for router in routers_of(engine.model)
    ]
    with torch.no_grad():
        for batch, _ in prepared.packs:
            inside(engine.model, hidden_states, batch.local)
    for hook in hooks:
        hook.remove()
    assert mesh.experts is not None
    with counting(mesh.experts["expert"].get_group()) as sent:
        engine.gradients(prepared)
    away = sum(int((each // (4 // world) != rank).sum()) for each in choices)
    return sent, away, len(choices)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_choice_of_another_rank_sends_one_row_and_gets_one_back(world: int, checkpointing: str) -> None:
    """A row is sent, its output comes back; in backward the same. Recomputation repeats the forward."""
    found = run_ranks(world, sent_bytes, checkpointing)
    forwards, row = 1 + (checkpointing == "full"), 32 * 4
    # Outputs return from the ranks that computed them: only the sum over all ranks equals twice the choices.
    rows = sum(away for _, away, _ in found)
    assert rows > 0
    assert sum(sent[torch.float32] for sent, _, _ in found) == 2 * (forwards + 1) * rows * row
    for sent, _, calls in found:
        assert sent[torch.int64] == forwards * calls * 8 * 4 * (world - 1) // world, "counts of 4 experts"
