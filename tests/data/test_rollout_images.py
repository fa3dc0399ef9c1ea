"""Rollout files with images: text and token ids give the same samples, and a run trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from padfree.data import RolloutDataSettings, read_rollouts
from padfree.errors import UserError
from padfree.rollout import read_prompts
from padfree.train.run import train
from tests.data.vision import asked, config_of, images_of, model_folder, picture, tokenizer_of, write_images, write_rows

pytest.importorskip("PIL")
SETTINGS = RolloutDataSettings(images=images_of())
ANSWERS = ("Four.", "May", "clips", "half")


def prompts(folder: Path) -> list[dict[str, Any]]:
    write_images(folder)
    return [
        {"prompt": asked(picture("0.png"), "What is two?")[:1]},
        {"prompt": asked(picture("1.png"), "What is two?")[:1]},
        {"prompt": "<image> or <image>?", "images": ["1.png", "2.png"]},
        {"prompt": "Hello there!"},
    ]


def text_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {**row, "response": answer + str(number), "reward": float(number == 0)}
        for row in prompts(folder)
        for number, answer in enumerate(ANSWERS[:2])
    ]


def token_rows(folder: Path) -> list[dict[str, Any]]:
    """The same rollouts as token ids, with the placeholder tokens of the processor and the images in a column."""
    asking = read_prompts(
        write_rows(folder / "asking.jsonl", prompts(folder)), tokenizer_of(), SETTINGS, max_new_tokens=9
    )
    shown = [["0.png"], ["1.png"], ["1.png", "2.png"], None]
    rows = []
    for prompt, images in zip(asking.prompts, shown, strict=True):
        for number, answer in enumerate(ANSWERS[:2]):
            response = tokenizer_of()(answer + str(number), add_special_tokens=False)["input_ids"]
            response.append(tokenizer_of().eos_token_id)
            rows.append(
                {
                    "prompt_tokens": prompt.tokens.tolist(),
                    "response_tokens": response,
                    "images": images,
                    "reward": float(number == 0),
                }
            )
    return rows


def test_text_and_token_ids_give_the_same_samples(tmp_path: Path) -> None:
    text = read_rollouts(write_rows(tmp_path / "text.jsonl", text_rows(tmp_path)), SETTINGS, tokenizer=tokenizer_of())
    ids = read_rollouts(write_rows(tmp_path / "ids.jsonl", token_rows(tmp_path)), SETTINGS, tokenizer=tokenizer_of())
    whole = [
        {**row, "tokens": row["prompt_tokens"] + row["response_tokens"], "response_length": len(row["response_tokens"])}
        for row in token_rows(tmp_path)
    ]
    for row in whole:
        del row["prompt_tokens"], row["response_tokens"]
    joined = read_rollouts(write_rows(tmp_path / "whole.jsonl", whole), SETTINGS)
    assert len(text.samples) == len(ids.samples) == len(joined.samples) == 8
    for samples in zip(text.samples, ids.samples, joined.samples, strict=True):
        first = samples[0]
        for other in samples[1:]:
            assert first.tokens.tolist() == other.tokens.tolist()
            assert first.loss_mask.tolist() == other.loss_mask.tolist()
            assert [image.digest for image in first.images] == [image.digest for image in other.images]
            for one, two in zip(first.images, other.images, strict=True):
                assert one.positions.tolist() == two.positions.tolist()
            assert np.array_equal(first.rotary_positions, other.rotary_positions)  # type: ignore[arg-type]
            assert first.group == other.group
    assert [len(sample.images) for sample in text.samples[::2]] == [1, 1, 2, 0]
    assert len({sample.group for sample in text.samples}) == 4


def test_prompts_with_the_same_tokens_and_other_images_are_other_groups(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "4.png").write_bytes((tmp_path / "3.png").read_bytes() + b" ")  # equal pixels, another file
    rows = [
        {"prompt": "<image>What is two?", "images": [name], "response": answer, "reward": 0.0}
        for name in ("3.png", "4.png")
        for answer in ANSWERS[:2]
    ]
    found = read_rollouts(write_rows(tmp_path / "rows.jsonl", rows), SETTINGS, tokenizer=tokenizer_of()).samples
    first, _, other, last = found
    start = int(np.argmax(first.loss_mask))
    assert first.tokens[:start].tolist() == other.tokens[:start].tolist()
    assert first.group != other.group == last.group


def test_placeholders_that_the_policy_sampled_belong_to_no_image(tmp_path: Path) -> None:
    placeholder = images_of().placeholder
    row = token_rows(tmp_path)[0]
    row["response_tokens"].insert(0, placeholder)
    with pytest.raises(UserError, match=r"placeholder tokens .* but its images need"):
        read_rollouts(write_rows(tmp_path / "rows.jsonl", [row]), SETTINGS)
    row["logprobs"] = [-1.0] * len(row["response_tokens"])
    (sample,) = read_rollouts(write_rows(tmp_path / "rows.jsonl", [row]), SETTINGS).samples
    assert np.count_nonzero(sample.tokens == placeholder) == 1 + len(sample.images[0].positions)


def test_images_that_appear_in_the_response(tmp_path: Path) -> None:
    """As in an episode whose environment shows an image: its tokens are not trained."""
    first, second = token_rows(tmp_path)[0], token_rows(tmp_path)[2]
    tokens = first["prompt_tokens"] + first["response_tokens"] + second["prompt_tokens"] + second["response_tokens"]
    mask = [0] * len(tokens)
    for end, count in ((len(tokens), len(second["response_tokens"])), (0, len(first["response_tokens"]))):
        end = end or len(first["prompt_tokens"]) + len(first["response_tokens"])
        mask[end - count : end] = [1] * count
    row = {"tokens": tokens, "loss_mask": mask, "images": ["0.png", "1.png"], "reward": 1.0}
    (sample,) = read_rollouts(write_rows(tmp_path / "rows.jsonl", [row]), SETTINGS).samples
    assert sample.images[0].positions[0] < len(first["prompt_tokens"]) < sample.images[1].positions[0]
    assert not sample.loss_mask[sample.images[1].positions].any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"images": []}, "placeholder tokens .* but its images need 0"),
        ({"images": None}, "placeholder tokens .* but its images need 0"),
        ({"images": ["0.png", "1.png"]}, "but its images need"),
        ({"images": ["9.png"]}, "does not exist"),
    ],
)
def test_bad_rows(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{**token_rows(tmp_path)[0], **changes}])
    with pytest.raises(UserError, match=problem):
        read_rollouts(path, SETTINGS)


def test_a_sample_that_would_be_cut_inside_an_image_is_dropped(tmp_path: Path) -> None:
    rows = token_rows(tmp_path)
    path = write_rows(tmp_path / "rows.jsonl", [rows[0], rows[6]])
    whole, text = read_rollouts(path, SETTINGS).samples
    positions = whole.images[0].positions
    for limit in range(int(positions[0]) - 1, int(positions[-1]) + 3):
        settings = RolloutDataSettings(images=images_of(), max_length=limit, overlong="truncate")
        found = read_rollouts(path, settings)
        inside = positions[0] < limit <= positions[-1]
        assert len(found.samples[-1]) == min(len(text), limit)
        assert [len(sample) for sample in found.samples[:-1]] == ([] if inside else [limit])
        shown = [len(sample.images) for sample in found.samples[:-1]]
        assert shown == ([] if inside else [int(limit > positions[-1])])
        assert len(found.report.dropped) == inside


def test_a_run_on_rollout_files_with_images(tmp_path: Path) -> None:
    """The log-probabilities in the file are those of transformers. Text and token ids train the same model."""
    model: Any = AutoModelForImageTextToText.from_pretrained(model_folder()).eval()
    rows = token_rows(tmp_path)
    path = write_rows(tmp_path / "ids.jsonl", rows)
    for row, sample in zip(rows, read_rollouts(path, SETTINGS).samples, strict=True):
        inputs = [image.load() for image in sample.images]
        images = {name: torch.cat([torch.as_tensor(one[name]) for one in inputs]) for name in (inputs or [{}])[0]}
        ids = torch.tensor(sample.tokens[None].astype(np.int64))
        kinds = (ids == images_of().placeholder).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, **images).logits[0]
        found = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        row["logprobs"] = found[-len(row["response_tokens"]) :].tolist()
    write_rows(tmp_path / "ids.jsonl", rows)
    write_rows(tmp_path / "text.jsonl", text_rows(tmp_path))
    lines = {}
    for name in ("ids", "text"):
        settings = [
            f"data.path={tmp_path / name}.jsonl",
            f"run.folder={tmp_path / f'run-{name}'}",
            "batch.samples=8",
            "run.steps=2",
            "run.device=cpu",
            "data.epochs=none",
            "model.dtype=float32",
            "checkpoint.export=false",
        ]
        train(config_of("qwen3_vl", "loss.kind=clip", *settings))
        text = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text()
        lines[name] = [json.loads(line) for line in text.splitlines()]
    assert lines["ids"][0]["loss/sampler_difference"] < 1e-5
    for ids, text_line in zip(lines["ids"], lines["text"], strict=True):
        assert ids["loss"] == pytest.approx(text_line["loss"], abs=1e-6)
        assert ids["gradient_norm"] == pytest.approx(text_line["gradient_norm"], rel=1e-5)
    assert lines["ids"][0]["gradient_norm"] > 0
