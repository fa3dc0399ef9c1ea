"""Training with linear layers in float8: which layers, on any mesh, with adapters and prefixes, resumed, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from padfree.choices import Float8Product
from padfree.config import Config, LoraConfig
from padfree.distributed import Mesh, make_mesh
from padfree.layers.float8 import Float8Linear, use_float8
from padfree.model.decoder_linears import decoder_linears
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from padfree.train.engine import Engine
from padfree.train.float8_budget import Float8Budget, Float8Distance, Float8Layers, measure_distances
from padfree.train.setup import build_engine, export
from padfree.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LOSSES, make_engine, make_samples, small_model, weights_of
from tests.train.trainer_cases import RL, SFT, lines, make_config, make_trainer, save_config

PRODUCTS: tuple[Float8Product, ...] = ("output", "input-gradient", "weight-gradient")
FLOAT8: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "parallel": {"linear": "float8", "checkpointing": "none"}}
WHOLE = 1000
"""All samples in one micro-batch."""


def gradients(mesh: Mesh, **changes: Any) -> dict[str, Tensor]:
    model = changes.pop("model", None) or small_model()
    engine = make_engine(mesh, LOSSES["sft"], model, **{"max_tokens": WHOLE, "float8": PRODUCTS, **changes})
    engine.gradients(engine.prepare(make_samples()))
    found = {name: parameter.grad for name, parameter in engine.model.named_parameters() if parameter.grad is not None}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().float() for name, grad in found.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    moved = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (moved / sum(float(gradient.square().sum()) for gradient in expected.values())) ** 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", set()),
    ],
)
def test_linear_layers_of_decoder_layers(name: str, expected: set[str]) -> None:
    """Not the head, embeddings, routers, experts or GPT-2's Conv1D."""
    model = build(name)
    found = decoder_linears(model)
    assert {each.rpartition(".")[2] for each in found} == expected
    per_layer = [each for each in found if ".0." in each]
    assert len(found) == model.config.num_hidden_layers * len(per_layer)


def test_adapters_stay_in_bfloat16_and_their_base_does_not(mesh: Mesh) -> None:
    model = small_model()
    parallelize(model, transformations(mesh, float8=PRODUCTS, lora=LoraConfig(rank=16)))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, Float8Linear) == name.endswith("base_layer"), name


def test_a_model_without_such_layers_is_refused(mesh: Mesh) -> None:
    with refused("parallel.linear", "no linear layer in the decoder layers"):
        parallelize(build("gpt2"), transformations(mesh, float8=PRODUCTS))


def test_gradients_are_close_to_those_without(mesh: Mesh) -> None:
    plain = gradients(mesh, float8=())
    assert 0.01 < distance(gradients(mesh), plain) < 0.2
    assert 0.005 < distance(gradients(mesh, float8=("weight-gradient",)), plain) < 0.1


def ranks(rank: int, world: int, context: int) -> dict[str, Tensor]:
    mesh = make_mesh("cpu", context=context)
    return gradients(mesh, float8=PRODUCTS[:2], dtype=torch.bfloat16)


@pytest.mark.parametrize("context", [1, 2])
def test_sharded_weights_are_gathered_in_bfloat16_and_cast_afterwards(mesh: Mesh, context: int) -> None:
    """Two ranks with FSDP2 against one process: a token's casts do not depend on the other tokens."""
    expected = gradients(mesh, float8=PRODUCTS[:2], dtype=torch.bfloat16, reshard=False)
    for found in run_ranks(2, ranks, context):
        assert distance(found, expected) < 0.02


@pytest.mark.parametrize("changes", [{"checkpointing": "full"}, {"checkpointing": "selective"}], ids=str)
def test_recomputed_layers_give_the_same_bits(mesh: Mesh, changes: dict[str, Any]) -> None:
    expected = gradients(mesh)
    for name, gradient in gradients(mesh, **changes).items():
        assert torch.equal(gradient, expected[name]), name


def test_shared_prefixes_move_the_gradient_only_by_the_weight_gradients_casts(mesh: Mesh) -> None:
    from dataclasses import replace

    def found(shared: bool, products: tuple[Float8Product, ...]) -> dict[str, Tensor]:
        engine = make_engine(mesh, LOSSES["sft"], small_model(), max_tokens=WHOLE, float8=products)
        packer = engine.packer
        packer.pack_settings = replace(packer.pack_settings, share_prefixes=shared)
        first, second, *_ = make_samples((9, 9))
        tokens = second.tokens.copy()
        tokens[:5] = first.tokens[:5]
        engine.gradients(engine.prepare([first, replace(second, tokens=tokens)]))
        return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}

    # The gradient of a shared token is the sum over its samples, which is cast once instead of twice.
    assert distance(found(True, PRODUCTS[:1]), found(False, PRODUCTS[:1])) < 1e-5
    assert distance(found(True, PRODUCTS), found(False, PRODUCTS)) < 0.1


# Whole runs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, model_folder: Path, task: dict[str, Any], **sections: Any) -> Config:
    merged = {name: dict(values) for name, values in {**FLOAT8, **task}.items()}
    for section, changes in sections.items():
        merged[section] = {**merged.get(section, {}), **changes}
    return make_config(folder, model_folder, **merged)


@pytest.mark.parametrize(
    ("task", "sections"),
    [
        (SFT, {}),
        (RL, {}),
        (SFT, {"lora": {"rank": 16, "dropout": 0.1}}),
        (SFT, {"parallel": {"float8_budget": 0.02}}),
    ],
    ids=["sft", "rl", "lora", "budget"],
)
def test_a_resumed_run_has_the_same_bits(
    mesh: Mesh, model_folder: Path, tmp_path: Path, task: dict[str, Any], sections: dict[str, Any]
) -> None:
    whole = make_trainer(config_of(tmp_path / "whole", model_folder, task, **sections), mesh)
    whole.run()
    begun = config_of(tmp_path / "resumed", model_folder, task, **{**sections, "run": {"steps": 3}})
    make_trainer(begun, mesh).run()
    resumed = make_trainer(config_of(tmp_path / "resumed", model_folder, task, **sections), mesh)
    assert resumed.step == 3
    resumed.run()
    expected = weights_of(whole.engine.model)
    for name, weight in weights_of(resumed.engine.model).items():
        assert torch.equal(weight, expected[name]), name
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("whole", "resumed")]
    assert losses[0] == losses[1]


def test_the_exported_model_is_plain(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", model_folder, SFT)
    engine = build_engine(config, mesh)
    assert any(isinstance(module, Float8Linear) for module in engine.model.modules())
    export(config, engine.model, tmp_path / "export", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    expected = weights_of(engine.model)
    assert all(type(module) is not Float8Linear for module in loaded.modules())
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, expected[name]), name


# The budget


@pytest.fixture
def outlying(mesh: Mesh) -> Engine:
    """A model of three layers, in the second of which one input feature is very large, and its weights are small."""
    model = small_model(num_hidden_layers=3)
    with torch.no_grad():
        layer = model.model.layers[1]
        layer.post_attention_layernorm.weight[3] = 3e5
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight[:, 3] *= 1e-6
    return make_engine(mesh, LOSSES["sft"], model, max_tokens=WHOLE, float8=PRODUCTS)


def test_the_layer_that_moves_the_gradient_is_found(outlying: Engine) -> None:
    """Noise of layer 1 is in the gradients of all layers, but layer 1 alone causes it."""
    prepared = outlying.prepare(make_samples())
    budget = Float8Budget(outlying, 0.5)
    assert budget.choose(prepared)
    assert not budget.choose(prepared), "once"
    assert budget.distances is not None
    assert budget.bfloat16_layers == [1]
    alone = [each.alone for each in budget.distances]
    assert alone[1] is not None
    assert all(other is not None and other < 0.5 < alone[1] for other in (alone[0], alone[2]))
    assert max(each.together for each in budget.distances) > 0.5
    assert "would change a gradient): 1 (" in budget.line()
    for name, linear in decoder_linears(outlying.model).items():
        assert isinstance(linear, Float8Linear)
        assert linear.float8_products == (() if ".layers.1." in name else PRODUCTS), name
    assert all(parameter.grad is None for parameter in outlying.parameters)


def test_distances_are_those_of_whole_gradients(outlying: Engine) -> None:
    layers, prepared = Float8Layers(outlying.model), outlying.prepare(make_samples())

    def computed(numbers: list[int]) -> list[list[Tensor]]:
        with layers.only(numbers):
            outlying.gradients(prepared)
        return [[p.grad.clone() for p in layer.parameters()] for layer in outlying.model.model.layers]  # type: ignore[union-attr]

    def ratios(numbers: list[int]) -> list[float]:
        found, plain = computed(numbers), computed([])
        return [
            float(
                sum((a - b).double().square().sum() for a, b in zip(ours, theirs, strict=True)).sqrt()
                / sum(b.double().square().sum() for b in theirs).sqrt()
            )
            for ours, theirs in zip(found, plain, strict=True)
        ]

    found = measure_distances(outlying.model, layers, lambda: outlying.gradients(prepared))
    assert [each.layer for each in found] == [0, 1, 2]
    assert [each.together for each in found] == pytest.approx(ratios([0, 1, 2]))
    assert [each.alone for each in found] == pytest.approx([max(ratios([number])) for number in range(3)])
    assert all(linear.float8_products == PRODUCTS for linear in layers._products), "as before"


def test_within_the_budget_nothing_else_is_measured(outlying: Engine) -> None:
    budget = Float8Budget(outlying, 1e6)
    budget.choose(outlying.prepare(make_samples()))
    assert budget.distances is not None
    assert all(each.alone is None for each in budget.distances)
    assert budget.bfloat16_layers == []
    assert "all layers multiply in float8" in budget.line()


def test_what_is_not_a_number_exceeds_every_budget() -> None:
    assert Float8Distance(layer=0, together=0.0, alone=float("nan")).exceeds(1e9)
    assert not Float8Distance(layer=0, together=1.0, alone=None).exceeds(0.1)


def test_a_run_names_the_layers_and_keeps_the_choice(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    def trainer(budget: float, steps: int) -> Trainer:
        changes = {"parallel": {"float8_budget": budget}, "run": {"steps": steps}}
        return make_trainer(config_of(tmp_path, model_folder, SFT, **changes), mesh)

    def events() -> list[dict[str, Any]]:
        written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        return [event for event in written if event["kind"] == "float8"]

    trainer(1e-4, 2).run()
    (event,) = events()
    assert event["bfloat16_layers"] == [0]
    assert event["budget"] == 1e-4
    resumed = trainer(1e-4, 4)
    assert all(
        linear.float8_products == ()
        for linear in decoder_linears(resumed.engine.model).values()
        if isinstance(linear, Float8Linear)
    )
    resumed.run()
    assert len(events()) == 1, "from the checkpoint"
    trainer(10.0, 6).run()
    assert [event["bfloat16_layers"] for event in events()] == [[0], []], "another budget is measured again"


def test_use_float8_again_changes_the_products() -> None:
    linear = nn.Linear(32, 32)
    use_float8(linear, PRODUCTS)
    use_float8(linear, ("output",))
    assert isinstance(linear, Float8Linear)
    assert linear.float8_products == ("output",)
