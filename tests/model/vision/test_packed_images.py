"""Packs with images: loss and gradients of the tower, the projector and the language model, against transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.cp import shard
from padfree.model import attach, hidden_states, lm_head_of
from padfree.model.vision import prepare_sample
from padfree.model.vision.families import FAMILIES, family_of
from padfree.packing.collate import collate, pack
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.testing.vision_models import PLACEHOLDER, VISION_MODELS, build_vision, picture, shown
from tests.model.vision.one_at_a_time import one_at_a_time, packed, stock_logits, sum_of_losses, without_rounding
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, in_float64, largest_difference

RECURRENT = ("qwen3_5", "qwen3_5_moe")
"""Models with a recurrent state, which cannot branch."""
ROTARY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *RECURRENT, "glm4v", "glm4v_moe", "glm46v", "glm_ocr")


def mixed(model: PreTrainedModel) -> list[Sample]:
    """Samples with one, no, several and the same images, of different sizes; with images first and last."""
    several = model.config.model_type != "llava_onevision"
    first = picture(model, 0, rows=2, columns=3)
    second = picture(model, 1, rows=1 if not several else 3, columns=5)
    third = picture(model, 2, rows=1, columns=1)
    return [
        shown(model, [4, first, 5]),
        shown(model, [7], seed=1),
        shown(model, [3, second, 2, first, 1, third, 6] if several else [3, second, 6], seed=2),
        shown(model, [third, 4], seed=3),
        shown(model, [2, first, 3], seed=4),
    ]


def with_prompts(model: PreTrainedModel) -> list[Sample]:
    """A group of three answers to one picture, and one answer to another picture with the same tokens."""
    one, other = picture(model, 0, rows=2, columns=2), picture(model, 1, rows=2, columns=2)
    parts = [
        shown(model, [4, image, 3], seed=9, group="g").tokens  # the prompt, which is equal in all samples
        for image in (one, other)
    ]
    assert np.array_equal(*parts)
    answers = [np.array(answer) for answer in ([5, 6, 7], [5, 6, 9, 1], [8, 8], [5, 6, 7])]
    found = []
    for image, answer in zip((one, one, one, other), answers, strict=True):
        prompt = shown(model, [4, image, 3], seed=9)
        tokens = np.concatenate([prompt.tokens, answer])
        mask = np.arange(len(tokens)) >= len(prompt)
        sample = Sample(tokens=tokens, loss_mask=mask, images=prompt.images, group="g")
        found.append(prepare_sample(model, sample))
    return found


@pytest.fixture(scope="module", params=VISION_MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build_vision(request.param)


def test_every_family_is_tested() -> None:
    assert {type(build_vision(name)).__name__ for name in VISION_MODELS} == set(FAMILIES)


def batches(samples: Sequence[Sample], model: PreTrainedModel) -> list[PackedBatch]:
    """A pack with a pad, and if the model can share prefixes, a pack with a prefix tree."""
    found = [collate(samples).padded_to_multiple(7)]
    if model.config.model_type not in RECURRENT:
        found.append(collate(samples, share_prefixes=True))
    return found


@pytest.mark.parametrize("make", [mixed, with_prompts])
def test_a_pack_equals_one_sample_at_a_time(model: PreTrainedModel, make: Any) -> None:
    samples = make(model)
    wide_model = in_float64(model)
    with without_rounding():
        wide = one_at_a_time(wide_model, samples)
        for batch in batches(samples, model):
            assert batch.images is not None
            difference, where = largest_difference(packed(wide_model, batch), wide)
            assert difference < 1e-12, f"{where}: {difference:.1e}"
    narrow = one_at_a_time(model, samples)
    for batch in batches(samples, model):
        assert_same_but_for_rounding(packed(model, batch), narrow, wide)
    family = family_of(model)
    assert family is not None
    for part in (*family.encoders, family.language):
        assert any(wide[name].any() for name in wide if f"model.{part}" in name), part


def test_the_prefix_tree_holds_shared_images_once(model: PreTrainedModel) -> None:
    samples = with_prompts(model)
    batch = collate(samples, share_prefixes=True)
    assert batch.images is not None
    assert len(batch.images.counts) == 2
    count = batch.images.counts[0]
    assert len(batch.images.index) == 2 * count  # placeholders of three samples are one node
    before_image = int(samples[0].images[0].positions[0])
    assert batch.segments.parents is not None
    assert batch.segments.lengths[0] == before_image  # all four samples share only the text before the image


def test_each_image_is_encoded_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, calls = mixed(model), []
    attached = attach(build_vision(_name(model)))
    base: Any = attached.base_model
    encode = base.get_image_features
    monkeypatch.setattr(
        base,
        "get_image_features",
        lambda pixel_values, **kwargs: calls.append(pixel_values) or encode(pixel_values, **kwargs),
    )
    local = shard(collate(samples))
    hidden_states(attached, local)
    distinct = {image.digest: image for sample in samples for image in sample.images}
    expected = sum(len(image.load()["pixel_values"]) for image in distinct.values())
    (pixels,) = calls
    assert (pixels.shape[1] if pixels.ndim == 5 else len(pixels)) == expected
    assert sum(len(sample.images) for sample in samples) > len(distinct)


def _name(model: PreTrainedModel) -> str:
    return next(name for name, (prefix, _) in VISION_MODELS.items() if type(model).__name__.startswith(f"{prefix}For"))


def test_an_image_changes_no_other_sample(model: PreTrainedModel) -> None:
    """Another image in one sample changes the logits of this sample, and not one bit of those of the others."""
    attached = attach(build_vision(_name(model)))

    def logits(number: int) -> list[torch.Tensor]:
        image = picture(model, number, rows=2, columns=2)
        samples = [
            shown(model, [3, picture(model, 5), 4]),
            shown(model, [4, image, 5], seed=1),
            shown(model, [6], seed=2),
        ]
        batch = collate(samples)
        with torch.no_grad():
            return batch.unpack(lm_head_of(attached).logits(hidden_states(attached, shard(batch))))

    before, after = logits(0), logits(1)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert (before[1] - after[1]).abs().max() > 0.1


def test_a_prefix_behind_different_images_is_not_shared(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of token ids alone would show the last sample the picture of the others; this test would see it."""
    if model.config.model_type in RECURRENT:
        pytest.skip("its samples cannot share prefixes")
    samples = with_prompts(model)
    expected = one_at_a_time(model, samples)
    assert largest_difference(packed(model, collate(samples, share_prefixes=True)), expected)[0] < 1e-3
    monkeypatch.setattr(sys.modules["padfree.packing.collate"], "prefix_keys", lambda tokens, images: tokens)
    leaking = collate(samples, share_prefixes=True)
    assert leaking.images is not None
    assert len(leaking.images.counts) == 1
    assert largest_difference(packed(model, leaking), expected)[0] > 1e-2


def test_a_pack_without_images_equals_text_alone(model: PreTrainedModel) -> None:
    """The tower gets a gradient of zeros, so that all ranks and all divisions into packs treat it alike."""
    samples = [shown(model, [9]), shown(model, [4], seed=1)]
    expected = one_at_a_time(model, samples)
    attached = attach(build_vision(_name(model)))
    local = shard(collate(samples))
    loss = sum_of_losses(lm_head_of(attached).logits(hidden_states(attached, local)), local.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in attached.named_parameters() if parameter.grad is not None}
    assert largest_difference(found, {name: expected[name] for name in found})[0] < 1e-4
    encoders = family_of(model).encoders  # type: ignore[union-attr]
    assert all(any(part in name for name in found) for part in encoders)
    for name, gradient in found.items():
        assert not gradient.any() or not any(f"model.{part}" in name for part in encoders), name


def test_packs_of_a_batch_add_up(model: PreTrainedModel) -> None:
    """An image that is encoded in two packs gets the same gradient in all."""
    wide = in_float64(model)
    samples = mixed(model)
    with without_rounding():
        expected = packed(wide, collate(samples))
        parts = [packed(wide, collate(chosen)) for chosen in (samples[:2], samples[2:4], samples[4:])]
    sums = {name: sum(part[name] for part in parts) for name in expected}
    difference, where = largest_difference(sums, expected)  # type: ignore[arg-type]
    assert difference < 1e-12, where


@pytest.mark.parametrize("name", ROTARY)
def test_positions_are_the_models_own(name: str) -> None:
    """The pack holds what transformers computes for each sample alone, and what its docstring says."""
    model = build_vision(name)
    sample = shown(model, [1, picture(model, 0, rows=2, columns=2), 1])
    assert sample.rotary_positions is not None
    assert sample.rotary_positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]
    text = shown(model, [2])
    assert text.rotary_positions is None
    batch = collate([text, sample, text]).padded_to(14)
    assert batch.rotary_positions is not None
    assert batch.rotary_positions[1].tolist() == [0, 1, 0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 0, 1]
    assert batch.position_ids.tolist() == [0, 1, *range(8), 0, 1, 0, 1]
    assert collate([text, text]).rotary_positions is None


def test_wrong_positions_would_be_seen() -> None:
    """Plain positions in place of the model's own change the loss, so that the comparisons above would fail."""
    model = build_vision("qwen3_vl")
    samples = mixed(model)
    batch = collate(samples)
    assert batch.rotary_positions is not None
    good = packed(model, batch)["loss"]
    batch.rotary_positions[:] = batch.position_ids
    assert (packed(model, batch)["loss"] - good).abs() > 0.1


def test_logits_of_one_sample_equal_the_stock_logits(model: PreTrainedModel) -> None:
    """The whole logits, which also checks the head that `lm_head_of` describes."""
    sample = mixed(model)[0]
    attached = attach(build_vision(_name(model)))
    with torch.no_grad():
        found = lm_head_of(attached).logits(hidden_states(attached, shard(collate([sample]))))
        expected = stock_logits(build_vision(_name(model)), sample)
    assert (found - expected).abs().max() < 1e-3


# What cannot be done is refused.


def test_images_are_not_arguments_of_a_model() -> None:
    model = build_vision("internvl")
    batch = collate(mixed(model))
    with refused("images", "hidden_states"):
        shard(batch).model_inputs()
    with refused("images", "attach"):
        batch.model_inputs()


def test_a_language_model_refuses_images() -> None:
    vision = build_vision("internvl")
    model = attach(build("llama"))
    with refused("images", "LlamaForCausalLM"):
        hidden_states(model, shard(collate(mixed(vision))))
    with refused("model", "LlamaForCausalLM"):
        prepare_sample(model, mixed(vision)[0])


def test_samples_must_be_prepared() -> None:
    model = attach(build_vision("qwen3_vl"))
    sample = mixed(model)[0]
    bare = Sample(tokens=sample.tokens, images=sample.images)
    with refused("rotary_positions", "prepare_sample"):
        hidden_states(model, shard(collate([bare])))


def test_images_of_another_family_are_refused() -> None:
    model = attach(build_vision("qwen3_vl"))
    with refused("images", "pixel_values"):
        hidden_states(model, shard(collate(mixed(build_vision("internvl")))))


def test_a_wrong_number_of_placeholders_is_refused() -> None:
    """Also if the total is right: two images whose numbers of features are swapped."""
    model = attach(build_vision("internvl"))
    small, large = picture(model, 0, rows=1), picture(model, 1, rows=2)
    for wrong in (
        [3, replace_tokens(small, 5), 4],
        [3, replace_tokens(small, 8), 2, replace_tokens(large, 4), 3],
    ):
        with refused("images", "placeholder tokens"):
            hidden_states(model, shard(collate([shown(model, wrong)])))
    grid = build_vision("qwen3_vl")
    with refused("grid", "5 placeholder"):
        shown(grid, [3, replace_tokens(picture(grid, 0), 5), 4])


def replace_tokens(image: Any, count: int) -> Any:

    return replace(image, num_tokens=count)


def test_a_placeholder_of_another_model_is_refused() -> None:
    model = build_vision("internvl")
    sample = mixed(model)[0]
    tokens = np.where(sample.tokens == PLACEHOLDER, 62, sample.tokens)
    with refused("images", "expects id 60"):
        prepare_sample(model, Sample(tokens=tokens, images=sample.images))
    with refused("images", "expects id 60"):
        hidden_states(attach(model), shard(collate([Sample(tokens=tokens, images=sample.images)])))


def test_several_images_of_one_sample_where_they_change_each_other() -> None:
    model = build_vision("llava_onevision")
    with refused("images", "how many images its sample has"):
        shown(model, [3, picture(model, 0), 2, picture(model, 1), 3])


def test_images_that_follow_each_other_are_refused() -> None:
    model = build_vision("qwen3_vl")
    sample = shown(model, [3, picture(model, 0), 2])
    positions = sample.images[0].positions
    halves = [
        type(sample.images[0])(digest=str(i), positions=half, load=sample.images[0].load, grid=(1, 2, 4))
        for i, half in enumerate((positions[:2], positions[2:]))
    ]
    with refused("images", "follow each other"):
        prepare_sample(model, Sample(tokens=sample.tokens, images=tuple(halves)))


def test_a_pack_needs_an_image_for_each_placeholder() -> None:
    model = build_vision("qwen3_vl")
    sample = shown(model, [3, picture(model, 0), 2])
    text = Sample(tokens=sample.tokens)
    with refused("images", "missing for 4 tokens"):
        pack([sample, text])


def test_later_keys_of_an_image_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask inside the images of Gemma 3 changes the loss, so that the comparisons above would fail."""
    model = build_vision("gemma3")
    batch = collate(mixed(model))
    good = packed(model, batch)["loss"]
    monkeypatch.setattr(sys.modules["padfree.model.adapter"], "mark_image_layers", lambda language: None)
    assert (packed(model, batch)["loss"] - good).abs() > 0.1


def test_images_of_other_models_are_refused() -> None:
    config = transformers.PaliGemmaConfig(
        text_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64},
        vision_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "image_size": 28,
        },
    )
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    with refused("model", "attend to each other"):
        attach(model)
    with refused("model", "attend to each other"):
        prepare_sample(model, Sample(tokens=[1]))


def test_dropout_in_the_tower_is_refused() -> None:
    model = build_vision("internvl")
    model.config.vision_config.attention_dropout = 0.1
    with refused("model", "attention_dropout is 0.1"):
        attach(model)
