"""`padfree check` on vision-language models: tower and projector, and mistakes with images that it finds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.batch import PackedBatch
from padfree.cli.main import main
from padfree.model.vision import families
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.testing.vision_models import build_vision, picture, shown
from padfree.tools.check import CheckReport, check_model
from padfree.tools.check.image_inputs import with_other_images
from padfree.tools.check.packed import with_other_tokens
from padfree.tools.check.plain_losses import CheckedLoss
from padfree.tools.check.samples import spread
from tests.data.vision import asked, model_folder, write_images, write_rows
from tests.data.vision import picture as image_part
from tests.ranks import run_ranks
from tests.refused import refused
from tests.tools.check.cases import failures


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, name: str) -> tuple[Path, list[Sample]]:
    """A model, and samples with one, two, no and shared images, of which the last two share a prefix."""
    model = build_vision(name)
    model.save_pretrained(folder)
    one, other = picture(model, 0, rows=2, columns=3), picture(model, 1, rows=1, columns=4)
    several = [3, other, 2, one, 4] if name != "llava_onevision" else [3, other, 4]
    first = shown(model, [4, one, 5], seed=2)
    tokens = first.tokens.copy()
    tokens[-1] = (tokens[-1] + 1) % 58
    samples = [shown(model, several), shown(model, [9], seed=1), first, replace(first, tokens=tokens)]
    return folder, [replace(sample, uid=index) for index, sample in enumerate(samples)]


def parts_of(report: CheckReport) -> set[str | None]:
    return {row.part for row in report.rows if row.check == "packed"}


@pytest.mark.parametrize(
    "name", ["qwen3_vl", "qwen3_5_moe", "glm4v", "gemma3", "mistral3", "lighton_ocr", "llava_onevision", "idefics3"]
)
def test_a_vision_language_model_passes(name: str, tmp_path: Path) -> None:
    report = check_model(*saved(tmp_path, name), vision=True, device="cpu")
    assert report.passed, report.verdict
    assert {"tower", "projector", "layer 0", "layer 2"} <= parts_of(report)
    assert report.reference == "transformers in float64, one sample at a time, eager attention"
    assert max(row.difference for row in report.rows) < 1e-3
    skipped = [each.check for each in report.skipped]
    assert skipped == (["shared prefixes"] if name == "qwen3_5_moe" else [])


@pytest.mark.parametrize("loss", ["dpo", "kto", "distill", "reward", "value"])
def test_other_losses_with_images_pass(loss: CheckedLoss, tmp_path: Path) -> None:
    report = check_model(*saved(tmp_path, "qwen3_vl"), loss=loss, vision=True, device="cpu")
    assert report.passed, report.verdict
    assert {"tower", "projector"} <= parts_of(report)


def test_other_tokens_keep_the_placeholders_and_change_the_pixels(tmp_path: Path) -> None:
    samples = saved(tmp_path, "qwen3_vl")[1]
    found = with_other_tokens(samples, 64, 0)
    assert found[1] is samples[1]
    assert found[3] is samples[3]
    for before, after in ((samples[0], found[0]), (samples[2], found[2])):
        text = np.ones(len(before), dtype=np.bool_)
        for one, other in zip(before.images, after.images, strict=True):
            text[one.positions] = False
            assert one.digest != other.digest
            assert not np.allclose(one.load()["pixel_values"], other.load()["pixel_values"])
            assert np.array_equal(one.load()["image_grid_thw"], other.load()["image_grid_thw"])
        assert np.array_equal(before.tokens[~text], after.tokens[~text])
        assert (before.tokens[text] != after.tokens[text]).all()
    again = with_other_images(with_other_images(samples[0]))
    assert np.array_equal(again.images[0].load()["pixel_values"], samples[0].images[0].load()["pixel_values"])


# Mistakes


def by_tokens_alone(tokens: Sequence[Any], images: Sequence[Any]) -> Any:
    """Replaces `prefix_keys`: samples share a prefix of placeholders that stand for different images."""
    return tokens


def test_a_prefix_that_ignores_the_images_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, samples = saved(tmp_path, "qwen3_vl")
    samples[3] = with_other_images(samples[3])
    assert check_model(folder, samples, vision=True, device="cpu").passed
    monkeypatch.setattr(sys.modules["padfree.packing.collate"], "prefix_keys", by_tokens_alone)
    report = check_model(folder, samples, vision=True, device="cpu")
    assert {check for check, _ in failures(report)} == {"shared prefixes"}


def swapped_images(samples: Sequence[Sample], **options: Any) -> PackedBatch:
    """Replaces `collate`: the placeholders of the pack get the features in reverse order."""
    batch = collate(samples, **options)
    if batch.images is None:
        return batch
    return replace(batch, images=replace(batch.images, index=batch.images.index[::-1].copy()))


def test_features_in_the_wrong_places_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.train.microbatch.collate", swapped_images)
    report = check_model(*saved(tmp_path, "gemma3"), vision=True, device="cpu")
    assert {("packed", "log-probabilities"), ("packed", "loss"), ("packed", "gradients")} <= failures(report)


def detached(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the encoder of a family: the first layers of the tower get no gradient."""

    def broken(base: Any, inputs: Any) -> Any:
        with torch.no_grad():
            hidden = base.visual.patch_embed(inputs["pixel_values"])
        handle = base.visual.patch_embed.register_forward_hook(lambda *_: hidden.detach().requires_grad_())
        found = encode(base, inputs)
        handle.remove()
        return found

    return broken


def test_a_part_of_the_tower_without_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and log-probabilities agree, so that only the gradients show the mistake."""
    name = "Qwen3VLForConditionalGeneration"
    family = families.FAMILIES[name]
    monkeypatch.setitem(families.FAMILIES, name, replace(family, encode=detached(family.encode)))
    report = check_model(*saved(tmp_path, "qwen3_vl"), vision=True, device="cpu")
    assert {quantity for _, quantity in failures(report)} == {"gradients"}
    assert {row.part for row in report.failed if row.check == "packed"} == {None, "tower"}


# Wrong inputs


def test_images_need_a_vision_language_model(tmp_path: Path) -> None:
    folder, samples = saved(tmp_path, "qwen3_vl")
    with refused("samples", "set model.vision=true"):
        check_model(folder, samples, device="cpu")
    with refused("samples", "none of the 2 samples has an image"):
        check_model(folder, [samples[1], samples[1]], vision=True, device="cpu")
    with refused("layers", "omit this argument"):
        check_model(folder, samples, vision=True, layers=1, device="cpu")


# The command


def test_rows_with_images_are_preferred() -> None:
    lengths, images = np.array([5, 6, 7, 8, 9, 10]), np.array([0, 1, 0, 0, 0, 1]) > 0
    assert spread(lengths, 4, images) == [0, 1, 4, 5]
    assert spread(lengths, 3, images) == [0, 1, 5]
    assert spread(lengths, 6, images) == [0, 1, 2, 3, 4, 5]
    assert spread(lengths, 2, np.zeros(6, dtype=np.bool_)) == [0, 5]
    assert spread(lengths, 2, np.ones(6, dtype=np.bool_)) == [0, 5]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    write_images(tmp_path)
    found = [{"messages": asked(image_part(f"{n}.png"), "What is two?"), "source": n} for n in range(3)]
    found += [{"messages": asked("What is", " two?"), "source": n} for n in range(6)]
    return str(write_rows(tmp_path / "train.jsonl", [{"messages": row["messages"]} for row in found]))


def test_the_command_checks_rows_with_images(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    arguments = ["--model", str(model_folder()), "--data", rows, "--samples", "4", "--device", "cpu"]
    assert main(["check", *arguments, "model.vision=true", "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model       Qwen3VLForConditionalGeneration, all of its 3 layers"
    assert lines[4].endswith("transformers in float32, one sample at a time with eager attention")
    assert {"gradients of tower", "gradients of projector"} <= {line.split("  ")[0] for line in lines}
    assert lines[-1] == "passed: packed training gives the same results as one sample at a time"
    assert json.loads(target.read_text())["passed"]
    assert main(["check", *arguments]) == 1
    assert "model.vision=true" in capsys.readouterr().err


def check_in_ranks(rank: int, world: int, folder: Path) -> tuple[bool, str, list[str]]:
    model = build_vision("qwen3_vl")
    image = picture(model, 0, rows=2, columns=3)
    samples = [shown(model, [4, image, 5]), shown(model, [9], seed=1), shown(model, [3, image, 6], seed=2)]
    report = check_model(folder, samples, vision=True, context=world, device="cpu")
    return report.passed, report.verdict, [row.check for row in report.rows]


def test_two_context_ranks(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3_vl")[0]
    first, second = run_ranks(2, check_in_ranks, folder)
    assert first == second
    assert first[0], first[1]
    assert {"contiguous ulysses", "balanced ring"} <= set(first[2])
