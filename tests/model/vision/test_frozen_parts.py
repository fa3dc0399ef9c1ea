"""Freeze parts of a vision-language model, and train parts at their own learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.config import LoraConfig
from padfree.distributed import Mesh, make_mesh
from padfree.model.lora import add_adapters, is_adapter
from padfree.model.parts import PARTS, freeze, frozen_weights, parts_of, selected
from padfree.optim.optimizer import make_groups, make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig, ParameterGroup
from padfree.packing import CostModel
from padfree.packing.collate import collate
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from padfree.testing.vision_models import VISION_MODELS, build_vision
from padfree.train.engine import Engine
from padfree.train.scorer import Scorer
from tests.model.vision.one_at_a_time import packed
from tests.model.vision.test_packed_images import mixed
from tests.model.vision.test_sharded_images import MAX_TOKENS, Outcome, assert_same_updates, samples_of
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import in_float64, largest_difference
from tests.train.cases import LOSSES, OPTIMIZER, two_steps

SCALED = OptimizerConfig(
    lr=1e-2,
    eps=1e-2,
    weight_decay=0.1,
    groups=(
        ParameterGroup(match="projector", lr_scale=0.0),
        ParameterGroup(match="model.visual.*", lr_scale=0.1, weight_decay=0.5),
    ),
)


@pytest.fixture(scope="module", params=VISION_MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build_vision(request.param)


def test_every_family_has_three_parts(model: PreTrainedModel) -> None:
    parts = parts_of(model)
    assert set(parts) == {name for name, _ in model.named_parameters()}
    assert set(parts.values()) == set(PARTS)
    language = model.get_parameter("lm_head.weight")
    assert all(parts[name] == "language_model" for name, each in model.named_parameters() if each is language)


def test_frozen_parts_get_no_gradient_and_the_others_the_same(model: PreTrainedModel) -> None:
    """`packed` gives zeros for parameters without a gradient."""
    batch, wide = collate(mixed(model)), in_float64(model)
    expected, parts = packed(wide, batch), parts_of(wide)
    for part in PARTS:
        freeze(wide, [part])
        found = packed(wide, batch)
        wide.requires_grad_(True)
        assert not any(found[name].any() for name, own in parts.items() if own == part)
        others = [name for name, own in parts.items() if own != part]
        difference, where = largest_difference(*({name: each[name] for name in others} for each in (found, expected)))
        assert difference < 1e-5, f"{part}: {where}: {difference:.1e}"  # norms compute in float32


def engine_of(mesh: Mesh, settings: OptimizerConfig = OPTIMIZER, **changes: object) -> Engine:
    model = build_vision("qwen3_vl")
    parallelize(model, transformations(mesh, **changes))  # type: ignore[arg-type]
    scorer = Scorer(model, mesh, max_tokens=MAX_TOKENS, overlong="alone", cost=CostModel.tokens())
    return Engine(scorer, make_optimizer(model, settings), LOSSES["sft"])


def frozen_tower(mesh: Mesh) -> Outcome:
    return two_steps(engine_of(mesh, freeze=("tower", "model.language_model.layers.0.*")), samples_of("qwen3_vl"))


def own_rates(mesh: Mesh) -> Outcome:
    return two_steps(engine_of(mesh, SCALED), samples_of("qwen3_vl"))


def on_two_ranks(rank: int, world: int) -> list[Outcome]:
    mesh = make_mesh("cpu")
    return [frozen_tower(mesh), own_rates(mesh)]


def changed(weights: dict[str, Tensor]) -> set[str]:
    before = build_vision("qwen3_vl").state_dict()
    return {name for name, weight in weights.items() if not torch.equal(weight, before[name])}


def test_updates_of_parts(mesh: Mesh) -> None:
    """On one process, and the same on two FSDP2 ranks."""
    frozen, scaled = frozen_tower(mesh), own_rates(mesh)
    parts = parts_of(build_vision("qwen3_vl"))
    moved = changed(frozen[1])
    assert {parts[name] for name in moved} == {"projector", "language_model"}
    assert not any(".layers.0." in name for name in moved)
    assert {parts[name] for name in changed(scaled[1])} == {"tower", "language_model"}
    for found in run_ranks(2, on_two_ranks):
        for mine, expected in zip(found, (frozen, scaled), strict=True):
            assert_same_updates(mine, expected)


def test_a_group_has_its_own_rate_and_decay() -> None:
    model = build_vision("qwen3_vl")
    plain, scaled = (make_optimizer(model, each) for each in (OptimizerConfig(lr=1e-2, weight_decay=0.1), SCALED))
    assert sum(len(group["params"]) for group in scaled.param_groups) == len(plain.param_groups[0]["params"]) + len(
        plain.param_groups[1]["params"]
    )
    found = {(group.get("name"), group["base_lr"], group["weight_decay"]) for group in scaled.param_groups}
    assert found == {
        (None, 1e-2, 0.1), (None, 1e-2, 0.0), ("projector", 0.0, 0.1), ("projector", 0.0, 0.0),
        ("model.visual.*", 1e-3, 0.5), ("model.visual.*", 1e-3, 0.0),
    }  # fmt: skip
    assert scaled.rates == {"lr": 1e-2}
    muon = OptimizerConfig(name="muon", lr=1e-2, groups=(ParameterGroup(match="tower", lr_scale=0.5),))
    rates = {(group["rule"], group.get("name")): group["base_lr"] for group in make_groups(model, muon)}
    assert rates == {("muon", None): 1e-2, ("adamw", None): 1e-2, ("muon", "tower"): 5e-3, ("adamw", "tower"): 5e-3}
    assert muon.with_lr(0.0).of_group(muon.groups[0]).changes_nothing


def test_what_is_selected_must_exist() -> None:
    model = build_vision("qwen3_vl")
    with refused("model.freeze", "selects no parameter"):
        freeze(build("llama"), ["tower"])
    with refused("model.freeze", "selects no parameter"):
        selected(model, "vision*", "model.freeze")
    with refused("model.freeze", "all parameters"):
        freeze(model, PARTS)
    model = build_vision("qwen3_vl")
    freeze(model, ["tower"])
    with refused("optimizer.groups.0.match", "frozen or in an earlier group"):
        make_groups(model, OptimizerConfig(groups=(ParameterGroup(match="tower"),)))


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_adapters_are_only_in_the_language_model(name: str, targets: tuple[str, ...]) -> None:
    """The tower of Gemma 3 has layers with the names q_proj and v_proj, too."""
    pytest.importorskip("peft")
    model = build_vision(name)
    add_adapters(model, LoraConfig(rank=2, targets=targets))
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained
    assert all(is_adapter(f".{name}") and ".language_model." in name for name in trained)


def test_frozen_weights_are_counted() -> None:
    model = build_vision("qwen3_vl")
    assert frozen_weights(model) == {"frozen": 0.0, "frozen_head": False}
    freeze(model, ["model.language_model.layers.0.*", "lm_head*", "tower"])
    found = frozen_weights(model)
    assert found["frozen"] == pytest.approx(1 / 3)
    assert found["frozen_head"]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl"])
@pytest.mark.parametrize("changes", [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"compile": "eager"}])
def test_recomputed_and_compiled_layers(mesh: Mesh, name: str, changes: dict[str, str]) -> None:
    def outcome(**changes: object) -> Outcome:
        model = build_vision(name)
        parallelize(model, transformations(mesh, **changes))  # type: ignore[arg-type]
        scorer = Scorer(model, mesh, max_tokens=MAX_TOKENS, overlong="alone", cost=CostModel.tokens())
        return two_steps(Engine(scorer, make_optimizer(model, OPTIMIZER), LOSSES["sft"]), samples_of(name))

    assert_same_updates(outcome(**changes), outcome())
