"""Train a small vision-language model with random weights to name the colour in a picture: SFT, then GRPO.

    python examples/rl_images.py --folder runs/pictures

Each picture shows a circle that is red, green or blue. The script draws the pictures when it starts. SFT teaches only
what an answer looks like: its answers are drawn at random, whatever the picture shows. The model learns what the
pictures show from the reward, which is 1 for a correct answer. `--model` trains another model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import padfree
from padfree.testing.vision_folders import vision_folder

SIDE = 24
QUESTION = "Is the circle r (red), g (green) or b (blue)?"
COLOURS = {"r": (230, 30, 30), "g": (30, 200, 30), "b": (30, 30, 230)}


def draw(colour: str, generator: np.random.Generator) -> Image.Image:
    """Draw a circle of random size at a random place, on a grey background of random brightness."""
    grey = int(generator.integers(60, 200))
    picture = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    radius = generator.integers(5, 10)
    x, y = generator.integers(radius, SIDE - radius, 2)
    ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return picture


def write_rows(folder: Path, count: int, seed: int, *, key: str, is_random: bool = False) -> str:
    """Write `count` pictures, and a file with a row for each. The column `key` has the colour, or a random colour."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colour, other = (str(each) for each in generator.choice(list(COLOURS), 2))
        draw(colour, generator).save(folder / f"{number}.png")
        answer = other if is_random else colour
        rows.append({"prompt": f"<image>{QUESTION}", "images": [f"{number}.png"], key: answer})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward(response: str, row: Mapping[str, Any]) -> float:
    return float(response.strip() == row["answer"])


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of each step of GRPO, before its update."""
    parser = argparse.ArgumentParser(description="Learn the colours of drawn pictures from a reward.")
    parser.add_argument("--folder", default="runs/pictures", type=Path, help="output folder (default %(default)s)")
    parser.add_argument("--model", help="a vision-language model (default: a tiny Qwen3-VL with random weights)")
    parser.add_argument("--pictures", type=int, default=256, help="number of pictures for GRPO (default %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=20, help="steps of SFT (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO (default %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of GRPO (default %(default)s)")
    parser.add_argument("--entropy", type=float, default=0.02, help="entropy bonus of GRPO (default %(default)s)")
    given = parser.parse_args(arguments)

    folder: Path = given.folder
    start = given.model or vision_folder(folder / "start", "qwen3_vl")
    format_rows = write_rows(folder / "format", 64, 1, key="response", is_random=True)
    sft = padfree.sft(
        model={"path": str(start), "vision": True},
        data={"path": format_rows, "epochs": None},
        batch={"samples": 32, "max_tokens": 4096},
        optimizer={"lr": 3e-3},
        run={"folder": str(folder / "sft"), "steps": given.sft_steps},
    )
    rewards: list[float] = []

    def show(metrics: Mapping[str, Any]) -> None:
        rewards.append(metrics["reward"])
        print(f"step {metrics['step'] + 1}  reward {metrics['reward']:.2f}", flush=True)

    padfree.rl(
        model={"path": str(sft.model), "vision": True},
        data={"path": write_rows(folder / "train", given.pictures, 2, key="answer"), "epochs": None},
        batch={"samples": 128, "max_tokens": 4096},
        rollout={"reward": reward, "samples_per_prompt": 8, "max_new_tokens": 4},
        loss={"kind": "clip", "old_policy": "current", "entropy_coefficient": given.entropy},
        optimizer={"lr": given.lr},
        run={"folder": str(folder / "grpo"), "steps": given.steps},
        on_step=show,
    )
    return rewards


if __name__ == "__main__":
    main()
