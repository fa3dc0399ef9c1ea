"""Load balancing of experts: the loss of the whole batch for any division, and biases that move once per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from padfree.distributed import Mesh, make_mesh
from padfree.layers.compile import compile_layers
from padfree.losses import SFTSettings
from padfree.model.routers import routers_of
from padfree.model.structure import layers_of
from padfree.sample import Sample
from padfree.testing.models import EXPERTS, build
from padfree.train.engine import LossSettings
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import largest_difference
from tests.train.cases import alone, make_engine, make_samples, small_model

COEFFICIENT = 0.5
SETTINGS = LossSettings(loss=SFTSettings(), load_balancing=COEFFICIENT)
WITHOUT_ROUTERS = (
    "afmoe",  # its router, like the next one's, is a linear layer in a module with another output
    "hunyuan_v1_moe",
    "granitemoehybrid_dense",  # no experts
)
SPLITS: list[dict[str, Any]] = [{}, {"max_tokens": 1000}]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return alone()


def gradients(
    mesh: Mesh, samples: list[Sample], model: dict[str, Any] | None = None, **changes: Any
) -> tuple[dict[str, Tensor], Any]:
    """Gradients of one batch. `model`: changes to the model's config."""
    engine = make_engine(mesh, SETTINGS, small_model("qwen3_moe", **(model or {})), **changes)
    sums = engine.gradients(engine.prepare(samples))
    found = {}
    for key, parameter in engine.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[key] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().clone()
    total = torch.stack([sums.loss, sums.statistics["router"][0].double()])
    dist.all_reduce(total, group=mesh.loss.group)
    return found, total


def by_transformers(model: PreTrainedModel, samples: list[Sample]) -> tuple[dict[str, Tensor], float, float]:
    """Each sample separately with transformers' attention, and its load-balancing loss over all their tokens."""
    logits: list[list[Tensor]] = []
    loss, count = torch.zeros(()), sum(sample.num_labels for sample in samples)
    for sample in samples:
        output = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False, output_router_logits=True)
        logits.append(list(output.router_logits))
        scored = torch.from_numpy(sample.mask[1:].copy())
        losses = torch.nn.functional.cross_entropy(
            output.logits[0, :-1], torch.from_numpy(sample.tokens[1:]), reduction="none"
        )
        loss = loss + losses[scored].sum() / count
    whole = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    balance = load_balancing_loss_func(whole, model.config.num_experts, model.config.num_experts_per_tok)
    (loss + COEFFICIENT * balance).backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach()), float(balance.detach())


def test_it_is_the_loss_of_transformers_over_all_tokens(mesh: Mesh) -> None:
    samples = make_samples()
    expected, loss, balance = by_transformers(small_model("qwen3_moe"), samples)
    plain = make_engine(mesh, LossSettings(loss=SFTSettings()), small_model("qwen3_moe"))
    plain.gradients(plain.prepare(samples))
    without = {name: p.grad for name, p in plain.model.named_parameters()}
    assert largest_difference(without, expected)[0] > 1e-3, "the routers' loss has an effect"
    for split in SPLITS:
        found, (total, router) = gradients(mesh, samples, **split)
        assert largest_difference(found, expected)[0] < 1e-5
        assert float(router) == pytest.approx(balance, rel=1e-5)
        assert float(total) == pytest.approx(loss + COEFFICIENT * balance, rel=1e-5)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputed_layers_count_once(mesh: Mesh, checkpointing: Any) -> None:
    samples = make_samples()
    expected, totals = gradients(mesh, samples)
    found, again = gradients(mesh, samples, checkpointing=checkpointing)
    assert largest_difference(found, expected)[0] < 1e-5
    assert again.tolist() == pytest.approx(totals.tolist(), rel=1e-6)


def test_compiled_layers_give_the_same(mesh: Mesh) -> None:
    samples = make_samples((5, 9))
    model = {"num_hidden_layers": 1}  # further layers compile in the same way
    expected, totals = gradients(mesh, samples, model)
    found, again = gradients(mesh, samples, model, compile="aot_eager")
    assert largest_difference(found, expected)[0] < 1e-5
    assert again.tolist() == pytest.approx(totals.tolist(), rel=1e-6)


FEW = [Sample(tokens=np.arange(1, 6), uid=0), Sample(tokens=np.arange(1, 4), uid=1)]


def over_ranks(rank: int, world: int) -> dict[str, Any]:
    """Data ranks and context ranks. Few samples on context ranks give padding; more slots than samples give fillers."""
    samples, meshes = make_samples(), [make_mesh("cpu", context=context) for context in (1, 2)]
    return {
        "gradients": [gradients(mesh, samples, **split) for mesh in meshes for split in SPLITS],
        "few": gradients(meshes[1], FEW),
        "biases": [biases(mesh) for mesh in meshes],
    }


def biases(mesh: Mesh) -> list[Tensor]:
    model = small_model("deepseek_v3")
    engine = make_engine(mesh, LossSettings(loss=SFTSettings(), router_bias=0.25), model)
    for step in range(2):
        engine.step(make_samples(), lr_factor=0.0, step=step)
    return [router.owner._buffers[router.bias].clone() for router in routers_of(engine.model)]  # type: ignore[union-attr]


def test_ranks_give_what_one_process_gives(mesh: Mesh) -> None:
    whole, few = (gradients(mesh, samples, max_tokens=1000) for samples in (make_samples(), FEW))
    moved = biases(mesh)
    for found in run_ranks(2, over_ranks):
        assert len(found["gradients"]) == 4
        for (each, total), (expected, totals) in [*((case, whole) for case in found["gradients"]), (found["few"], few)]:
            assert largest_difference(each, expected)[0] < 1e-5
            assert total.tolist() == pytest.approx(totals.tolist(), rel=1e-5)
        for others in found["biases"]:
            assert all(torch.equal(one, other) for one, other in zip(others, moved, strict=True))


def test_biases_move_against_the_load(mesh: Mesh) -> None:
    model, samples = small_model("deepseek_v3"), make_samples()
    engine = make_engine(mesh, LossSettings(loss=SFTSettings(), router_bias=0.25), model)
    (router,) = routers_of(model)
    chosen: list[Tensor] = []
    hook = router.module.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    engine.step(samples, lr_factor=0.0)
    hook.remove()
    counts = torch.bincount(torch.cat(chosen).flatten(), minlength=router.num_experts).double()
    bias = router.owner._buffers[router.bias]  # type: ignore[union-attr]
    assert bias is not None
    assert counts.sum() == 2 * sum(len(sample) for sample in samples), "no padding here: all tokens count"
    assert torch.equal(bias.double(), torch.sign(counts.mean() - counts) * 0.25)
    assert bias.abs().sum() > 0


def test_routers_are_found() -> None:
    for name in EXPERTS:
        with torch.device("meta"):
            routers = routers_of(build(name))
        assert bool(routers) == (name not in WITHOUT_ROUTERS), name
        assert len({router.num_experts for router in routers}) <= 1, name


def test_a_model_without_experts_is_refused(mesh: Mesh) -> None:
    with refused("loss.load_balancing"):
        make_engine(mesh, SETTINGS)
    with refused("loss.router_bias"):
        make_engine(mesh, LossSettings(loss=SFTSettings(), router_bias=0.1), small_model("qwen3_moe"))


def test_stock_experts_are_compiled_without_a_break() -> None:
    """In bfloat16, which has a grouped matmul; in compiled and uncompiled layers."""
    from padfree.cp import shard
    from padfree.model import attach
    from padfree.testing.models import row

    model = attach(build("qwen3_moe").bfloat16())
    assert model.config._experts_implementation == "grouped_mm"
    inputs = shard(row([9, 3, 12], pad=3)).model_inputs()

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        model(**inputs).logits.float().square().sum().backward()
        return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = run()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(layers_of(model), "aot_eager", "selective")
    found = run()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all(torch.allclose(found[name], expected[name], rtol=0.05, atol=0.05) for name in expected)
