"""Vision-language models with a scalar head: scores, loss and gradients of packed pairs, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from padfree.batch import IGNORE, LocalBatch
from padfree.config.loss_settings import RewardModelSettings
from padfree.distributed import Mesh, make_mesh
from padfree.model import attach
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.model.parts import PARTS, parts_of
from padfree.model.scalar_head import scalar_head_of, scalar_model
from padfree.model.structure import skeleton
from padfree.model.vision.families import family_of
from padfree.optim.optimizer import make_optimizer
from padfree.packing.collate import prefixes_of
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks.reward import RewardMicroBatchLoss, pack_scores
from padfree.testing.vision_models import VISION_MODELS, build_vision, shown
from padfree.tools.check.plain_losses import in_pairs
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings, make_micro_batch
from padfree.train.scorer import ScalarScorer
from tests.model.vision.one_at_a_time import gradients, stock_score, without_rounding
from tests.model.vision.test_packed_images import RECURRENT, mixed, with_prompts
from tests.model.vision.test_sharded_images import Outcome, assert_same_updates
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, in_float64, largest_difference
from tests.train.cases import OPTIMIZER, weights_of

COMPARED = ("qwen2_5_vl", "qwen3_5", "gemma3", "llava_onevision")
BOTH = (False, True)


def with_scalar_head(name: str) -> PreTrainedModel:
    """The tiny model with random weights in its head."""
    whole = build_vision(name)
    model = scalar_model(whole.config, torch.float32, False)
    model.base_model.load_state_dict(whole.base_model.state_dict())
    with torch.no_grad():
        scalar_head_of(model).normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return model.train()


def one_pair_at_a_time(model: PreTrainedModel, pairs: Sequence[Sample]) -> dict[str, Tensor]:
    """Loss and gradients of a copy of the model with transformers' own attention."""
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    scores = [stock_score(stock, sample) for sample in pairs]
    losses = [-logsigmoid(chosen - rejected) for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    return gradients(stock, torch.stack(losses).mean())


def in_one_pack(samples: Sequence[Sample], mesh: Mesh, *, shared: bool = False) -> LocalBatch:
    """All samples in one pack, as `padfree reward` makes it. `shared`: common prefixes are stored once."""
    prefixes = prefixes_of(samples, True) if shared else None
    settings = PackSettings(share_prefixes=shared, ends=True)
    return make_micro_batch(samples, np.arange(len(samples)), mesh, settings, prefixes=prefixes).local


def packed_pairs(model: PreTrainedModel, batch: LocalBatch) -> dict[str, Tensor]:
    """Loss and gradients of a copy of the model, by the loss of `padfree reward`."""
    model = attach(copy.deepcopy(model))
    return gradients(model, RewardMicroBatchLoss(RewardModelSettings())(model, batch).loss)


@pytest.mark.parametrize("name", COMPARED)
def test_a_pack_of_pairs_equals_one_pair_at_a_time(name: str, mesh: Mesh) -> None:
    """Also if both answers of a pair share the image and the text of their prompt in a prefix tree."""
    model = with_scalar_head(name)
    wide_model = in_float64(model)
    for make in (mixed, with_prompts):
        pairs = in_pairs(make(model))
        batches = [in_one_pack(pairs, mesh, shared=shared) for shared in ((False,) if name in RECURRENT else BOTH)]
        with without_rounding():
            wide = one_pair_at_a_time(wide_model, pairs)
            for batch in batches:
                difference, where = largest_difference(packed_pairs(wide_model, batch), wide)
                assert difference < 1e-12, f"{where}: {difference:.1e}"
        narrow = one_pair_at_a_time(model, pairs)
        for batch in batches:
            assert_same_but_for_rounding(packed_pairs(model, batch), narrow, wide)
    parts = parts_of(model)
    for part in PARTS:
        assert any(wide[name].any() for name, own in parts.items() if own == part), part
    assert parts["score.weight"] == "language_model"
    assert wide["score.weight"].any()


@pytest.mark.parametrize("name", VISION_MODELS)
def test_an_export_gives_transformers_the_packed_scores(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """From the files of a model with a language-model head, and loaded again."""
    build_vision(name).save_pretrained(tmp_path / "tokens")
    model = load_model(tmp_path / "tokens", head="scalar", vision=True, seed=3, shard=attached)
    samples = mixed(model)
    with torch.no_grad():
        local = in_one_pack(samples, mesh)
        scores = pack_scores(model, local)[local.labels != IGNORE]
    export_model(model, tmp_path / "reward")
    again = load_model(tmp_path / "reward", head="scalar", vision=None, seed=4)
    assert type(again) is type(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert plain.config.architectures == [type(plain).__name__] == [type(model).__name__]
    assert plain.config.num_labels == 1
    with torch.no_grad():
        expected = [float(stock_score(plain, sample)) for sample in samples]
    assert scores.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def attached(model: PreTrainedModel) -> None:
    attach(model)


def updates(mesh: Mesh) -> Outcome:
    """Two updates on pairs, of which some are in packs without images."""
    model = with_scalar_head("qwen3_vl")
    pairs = in_pairs([*with_prompts(model), shown(model, [9]), shown(model, [20]), *mixed(model)[:2]])
    parallelize(model, transformations(mesh))
    settings = PackSettings(share_prefixes=True, ends=True)
    scorer = ScalarScorer(model, mesh, max_tokens=48, pack_settings=settings, overlong="alone")
    rewards = RewardModelSettings()
    engine = Engine(scorer, make_optimizer(model, OPTIMIZER), LossSettings(loss=rewards), RewardMicroBatchLoss(rewards))
    return [engine.step(pairs, step=step) for step in range(2)], weights_of(engine.model)


def on_two_ranks(rank: int, world: int) -> list[Outcome]:
    return [updates(make_mesh("cpu", context=context)) for context in (1, 2)]


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one_process(mesh: Mesh) -> None:
    """As FSDP2 ranks and as context ranks."""
    expected = updates(mesh)
    for outcomes in run_ranks(2, on_two_ranks):
        for found in outcomes:
            assert_same_updates(found, expected)


def test_a_language_model_with_a_scalar_head_is_not_a_vision_language_model() -> None:
    """Gemma 3 and Qwen3.5 have classes with similar names for their language models."""
    for name in ("gemma3", "qwen3_5"):
        config = build_vision(name).config.get_text_config()
        with torch.device("meta"):
            model = scalar_model(config, torch.float32, False)
        assert type(model).__name__.endswith("TextForSequenceClassification")
        assert family_of(model) is None


def test_the_language_model_of_a_folder_has_no_scalar_head(tmp_path: Path) -> None:
    build_vision("gemma3").save_pretrained(tmp_path)
    with refused("model", "set model.vision=true"):
        load_model(tmp_path, head="scalar")
    with refused("model.path", "set model.vision=true"):
        skeleton(str(tmp_path), head="scalar")
