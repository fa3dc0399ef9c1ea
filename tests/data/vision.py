"""Folders of tiny vision-language models, and rows with images, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from padfree.config import Config, load_config
from padfree.data import SFTDataSettings
from padfree.data.image_processor import ImageSettings
from padfree.testing.vision_folders import drawn, vision_folder
from padfree.train.training_data import image_settings, load_tokenizer

pytest.importorskip("PIL")

SIZES = ((20, 16), (40, 24), (16, 33), (30, 30))


@cache
def model_folder(name: str = "qwen3_vl") -> Path:
    """The folder of a tiny model, written once per process."""
    return vision_folder(mkdtemp(prefix=f"padfree-{name}-"), name)


def config_of(name: str = "qwen3_vl", *changes: str) -> Config:
    needed = ("data.path=unused.jsonl", "batch.samples=1", "batch.max_tokens=1000", "run.folder=unused")
    return load_config(None, [f"model.path={model_folder(name)}", "model.vision=true", *needed, *changes])


@cache
def tokenizer_of(name: str = "qwen3_vl") -> Any:
    return load_tokenizer(config_of(name))


def settings_of(name: str = "qwen3_vl", *changes: str, **more: Any) -> SFTDataSettings:
    return SFTDataSettings(images=images_of(name, *changes), **more)


def images_of(name: str = "qwen3_vl", *changes: str) -> ImageSettings:
    config = config_of(name, *changes)
    found = image_settings(config.model, config.data)
    assert found is not None
    return found


def write_images(folder: Path) -> list[str]:
    """Write four images of different sizes, `0.png` to `3.png`, and return their names."""
    for number, (width, height) in enumerate(SIZES):
        drawn(number, width, height).save(folder / f"{number}.png")
    return [f"{number}.png" for number in range(len(SIZES))]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(*content: Any, answer: str = "Four, I think.") -> list[dict[str, Any]]:
    """A question and its answer. `content`: texts, and paths or parts of images."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def picture(path: str) -> dict[str, Any]:
    return {"type": "image", "image": path}
