"""Environments that draw a picture in every turn: token ids, masks, positions, training and resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.config import Config
from padfree.errors import UserError
from padfree.rollout.environment import Policy, Trajectory, rehearse
from padfree.rollout.group import Leaf
from padfree.rollout.prompts import Prompt
from padfree.sample import Sample
from padfree.testing.vision_folders import KINDS, drawn, encoded
from padfree.train.run import train
from tests.data.vision import images_of, tokenizer_of, write_images, write_rows
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.test_vision_rl import config_of, metrics_of, prompt_rows
from tests.train.test_vision_run import weights

pytest.importorskip("PIL")


def scene(number: int) -> Any:
    """A picture of its own for each number."""
    return drawn(number, 16 + 8 * (number % 3), 16 + 4 * (number % 2))


def parts(number: int, *texts: str) -> list[dict[str, Any]]:
    shown = {"type": "image", "image": scene(number)}
    return [shown, *({"type": "text", "text": text} for text in texts)]


async def three_pictures(prompt: Prompt, policy: Policy) -> Trajectory:
    """Show three pictures, which depend on the prompt and on what the policy has written."""
    start = len(prompt.tokens) % 5
    for number in range(3):
        turn = await policy.generate(max_tokens=4)
        if not policy.reply(parts(start + number + len(turn.tokens), " What is this?")):
            break
    await policy.generate(max_tokens=4)
    return policy.trajectory(reward=float(policy.tokens[policy.loss_mask].mean()) / 100)


THREE = f"{__name__}:three_pictures"


def rehearsed(episode: Any, turns: Sequence[str], name: str = "qwen3_vl", **options: Any) -> tuple[Leaf, ...]:
    given = {"images": images_of(name), "chat": True, **options}
    return rehearse(episode, "Four, I think.", turns, tokenizer_of(name), **given)


def text_of(leaf: Leaf, name: str = "qwen3_vl") -> str:
    return str(tokenizer_of(name).decode(leaf.tokens))


# Tokens, masks and positions


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "idefics3"])
def test_pictures_are_in_their_places(name: str) -> None:
    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        assert policy.reply(parts(1, " What is this?"))
        await policy.generate()
        assert policy.reply([{"type": "text", "text": "And "}, *parts(2), *parts(1, "?")])
        await policy.generate()
        return policy.trajectory(reward=1.0)

    (leaf,) = rehearsed(episode, ["Four", "half", "May"], name)
    settings, tokenizer = images_of(name), tokenizer_of(name)
    assert tokenizer.decode(leaf.tokens[leaf.sampled]) == "Four<eos>half<eos>May<eos>".replace(
        "<eos>", tokenizer.eos_token
    )
    assert leaf.images is not None
    images, rotary = leaf.images
    assert len(images) == 3
    assert images[0].digest == images[2].digest != images[1].digest
    positions = np.concatenate([image.positions for image in images])
    assert np.array_equal(positions, np.flatnonzero(leaf.tokens == settings.placeholder))
    assert not leaf.sampled[positions].any()
    sizes = [settings.processor.expansion(scene(number), "scene").num_tokens for number in (1, 2, 1)]
    assert [len(image.positions) for image in images] == sizes
    assert settings.prepare is not None
    expected = settings.prepare(Sample(tokens=leaf.tokens, images=images)).rotary_positions
    assert (expected is None) == (rotary is None) == (name != "qwen3_vl")
    if rotary is not None and expected is not None:
        assert np.array_equal(rotary, expected)
    between = text_of(leaf, name).split("half", 1)[1]
    marker = settings.processor.expansion(scene(2), "scene").text
    again = settings.processor.expansion(scene(1), "scene").text
    asked = KINDS[name].written.replace(settings.processor.marker, "{}")
    question = f"And {asked.format(marker)}{asked.format(again)}?"
    rendered = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nMay"
    assert between == f"{rendered}{tokenizer.eos_token}"


def test_the_pixels_are_those_of_the_picture() -> None:
    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        policy.reply([{"type": "image", "image": encoded(scene(4))}])
        await policy.generate()
        return policy.trajectory(reward=1.0)

    (leaf,) = rehearsed(episode, ["Four", "half"])
    assert leaf.images is not None
    expected = images_of().processor.tower_inputs(scene(4), "scene")
    loaded = leaf.images.images[0].load()
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


def test_a_file_may_be_deleted_after_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "scene.png"

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        scene(4).save(path)
        policy.reply([{"type": "image", "image": str(path)}])
        path.unlink()
        await policy.generate()
        return policy.trajectory(reward=1.0)

    (leaf,) = rehearsed(episode, ["Four", "half"])
    assert leaf.images is not None
    expected = images_of().processor.tower_inputs(scene(4), "scene")
    assert np.array_equal(leaf.images.images[0].load()["pixel_values"], expected["pixel_values"])


def test_branches_share_the_pictures_before_them() -> None:
    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        policy.reply(parts(1))
        other = policy.branch()
        policy.reply(parts(2))
        other.reply("Hello there!")
        await policy.generate()
        await other.generate()
        return policy.trajectory(reward=1.0)

    one, other = rehearsed(episode, ["Four", "half", "May"])
    assert one.images is not None
    assert other.images is not None
    assert one.images.images[0] is other.images.images[0]
    assert (len(one.images.images), len(other.images.images)) == (2, 1)


def test_a_picture_that_does_not_fit_is_not_shown() -> None:
    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        before = len(policy.tokens)
        assert not policy.reply(parts(1))
        assert len(policy.tokens) == before
        assert policy.max_new_tokens == 0
        return policy.trajectory(reward=1.0)

    (leaf,) = rehearsed(episode, ["Four"], max_new_tokens=8)
    assert leaf.images is None


# Wrong inputs


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "image"}], "has no image"),
        ([{"type": "image", "image": "nowhere.png"}], "image_folder"),
        ([{"type": "image", "image": "/nowhere.png"}], "does not exist"),
        ([{"type": "image", "image": b"not an image"}], "not an image file"),
        ([{"type": "image", "image": 3}], "expected a path"),
        ([{"type": "image", "image": encoded(scene(1))[:60]}], "damaged"),
        ([{"type": "image", "image": "http://localhost/a.png"}], "fetches no images"),
        ([{"type": "video", "video": "a.mp4"}], "video"),
        ([*parts(1), {"type": "text", "text": "<|image_pad|>"}], "remove this text"),
        ([*parts(1), {"type": "text"}], "text"),
        ([3], "expected"),
        ("What is <|image_pad|>?", "placeholder"),
    ],
)
def test_parts_that_cannot_be_shown(content: Any, problem: str) -> None:
    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        await policy.generate()
        policy.reply(content)
        return policy.trajectory(reward=1.0)

    with refused("rollout.environment", problem):
        rehearsed(episode, ["Four"])


async def one_picture(prompt: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    policy.reply(parts(1))
    return policy.trajectory(reward=1.0)


async def two_pictures(prompt: Prompt, policy: Policy) -> Trajectory:
    await policy.generate()
    policy.reply(parts(1, "?"))
    policy.reply(parts(2, "?"))
    return policy.trajectory(reward=1.0)


def test_pictures_need_a_vision_language_model() -> None:
    with refused("rollout.environment", "set model.vision=true"):
        rehearsed(one_picture, ["Four"], images=None)
    with refused("rollout.environment", "set model.vision=true"):
        rehearsed(one_picture, ["Four"], chat=False)


def test_several_pictures_of_a_model_that_takes_one() -> None:
    with refused("rollout.environment", "how many images"):
        rehearsed(two_pictures, ["Four"], "llava_onevision")


@pytest.mark.parametrize(
    "change", ["rollout.agent=['true']", "rollout.environment=verifiers:x", "rollout.environment=openenv:localhost"]
)
def test_programs_and_packages_are_refused(change: str, tmp_path: Path) -> None:
    prompt_rows(tmp_path)
    with pytest.raises(UserError, match=r"model\.vision"):
        config_of(tmp_path, "run", *(["rollout.reward=none"] if "agent" not in change else []), change)


# Runs


def run_config(folder: Path, name: str, *changes: str, model: str = "qwen3_vl") -> Config:
    own = ["rollout.reward=none", f"rollout.environment={THREE}", "rollout.max_new_tokens=400"]
    return config_of(folder, name, *own, "batch.max_tokens=2000", *changes, model=model)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "idefics3"])
def test_sampler_and_trainer_agree(name: str, tmp_path: Path) -> None:
    """A picture in another place, or a position that is off by one, would change the log-probabilities."""
    write_images(tmp_path)
    rows = [{"prompt": f"What is {number}?"} for number in "234"]
    write_rows(tmp_path / "messages.jsonl", rows)
    write_rows(tmp_path / "prompts.jsonl", rows)
    train(run_config(tmp_path, "run", "run.steps=2", "checkpoint.every=10", model=name))
    first = metrics_of(tmp_path / "run")[0]
    assert first["loss/sampler_difference"] < 1e-5
    assert first["turns"] == 4
    assert first["reward"] > 0


def test_a_run_that_stops_inside_a_batch_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The pictures are in no file: a resumed run takes those of its batch from the checkpoint."""
    prompt_rows(tmp_path)
    train(run_config(tmp_path, "whole"))
    for steps in (1, 4):
        train(run_config(tmp_path, "parts", f"run.steps={steps}"))
    whole, found = (weights(tmp_path / name / "model") for name in ("whole", "parts"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, found[name]), name
    lines = metrics_of(tmp_path / "whole")
    assert [line["reward"] for line in lines] == [line["reward"] for line in metrics_of(tmp_path / "parts")]
    assert all(line["loss/sampler_difference"] < 1e-5 for line in lines[::2])


def train_in_ranks(rank: int, world: int, config: Config) -> None:
    train(config)


def test_two_ranks_make_the_same_updates(tmp_path: Path) -> None:
    """Each rank plays half of the episodes, and trains on samples whose pictures the other rank drew."""
    prompt_rows(tmp_path)
    train(run_config(tmp_path, "alone", "run.steps=2", "checkpoint.every=10"))
    run_ranks(2, train_in_ranks, run_config(tmp_path, "ranks", "run.steps=2", "checkpoint.every=10"))
    alone, ranks = (weights(tmp_path / name / "model") for name in ("alone", "ranks"))
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, ranks[name], atol=2e-5, rtol=1e-4, msg=name)
    rewards = [
        [json.loads(line)["reward"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("alone", "ranks")
    ]
    assert rewards[0] == pytest.approx(rewards[1])
