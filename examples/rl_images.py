"""Train a small vision-language model with random weights to answer questions about pictures: SFT, then GRPO.

    python examples/rl_images.py --folder runs/pictures                      about the colour, on a CPU
    python examples/rl_images.py --folder runs/pictures --task number        how many circles
    python examples/rl_images.py --folder runs/pictures --task place         left or right

Each picture is drawn when the script starts. SFT shows the model only how an answer looks: its answers are drawn at
random, whatever the picture shows. What the pictures mean is learned from the reward, which is 1 for a correct answer.
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

SIDE = 32
TASKS = {
    "colour": ("Is the circle r (red), g (green) or b (blue)?", ("r", "g", "b")),
    "number": ("How many circles are there?", ("1", "2", "3")),
    "place": ("Is the circle on the l (left) or the r (right)?", ("l", "r")),
}
RGB = {"r": (230, 30, 30), "g": (30, 200, 30), "b": (30, 30, 230)}


def draw(task: str, answer: str, generator: np.random.Generator) -> Image.Image:
    """Draw circles on a grey background. All properties of the picture but the one in question are random."""
    picture = Image.new("RGB", (SIDE, SIDE), (120, 120, 120))
    pen = ImageDraw.Draw(picture)
    columns = generator.permutation(3)
    if task == "place":
        columns = [0 if answer == "left" else 2]
    for column in columns[: int(answer) if task == "number" else 1]:
        radius = generator.integers(3, 6)
        x, y = 5 + 11 * column, generator.integers(radius, SIDE - radius)
        colour = RGB[answer] if task == "colour" else RGB[str(generator.choice(list(RGB)))]
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return picture


def write_data(folder: Path, task: str, count: int, seed: int, *, random_answers: bool) -> Path:
    """Write `count` pictures and a JSONL file that asks about them. Return the file."""
    question, answers = TASKS[task]
    generator = np.random.default_rng([seed, count])
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        answer = str(generator.choice(answers))
        draw(task, answer, generator).save(folder / f"{number}.png")
        shown = str(generator.choice(answers)) if random_answers else answer
        rows.append({"prompt": f"<image>{question}", "response" if random_answers else "answer": shown})
        rows[-1]["images"] = [f"{number}.png"]  # type: ignore[assignment]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward(response: str, row: Mapping[str, Any]) -> float:
    return float(response.strip() == row["answer"])


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of held-out pictures at every evaluation."""
    parser = argparse.ArgumentParser(description="Learn to answer questions about drawn pictures.")
    parser.add_argument("--folder", default="runs/pictures", type=Path, help="output folder (default %(default)s)")
    parser.add_argument("--model", help="a vision-language model; none draws the weights of a tiny Qwen3-VL")
    parser.add_argument("--task", default="colour", choices=TASKS, help="what is asked (default %(default)s)")
    parser.add_argument("--pictures", type=int, default=512, help="number of pictures for GRPO (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of GRPO (default %(default)s)")
    parser.add_argument("--entropy", type=float, default=0.02, help="entropy bonus (default %(default)s)")
    given = parser.parse_args(arguments)

    folder: Path = given.folder
    start = given.model or vision_folder(folder / "start", "qwen3_vl")
    data = write_data(folder / "format", given.task, 256, seed=1, random_answers=True)
    sft = padfree.sft(
        model={"path": str(start), "vision": True},
        data={"path": str(data), "epochs": 10},
        batch={"samples": 64, "max_tokens": 4096},
        optimizer={"lr": 3e-3},
        run=folder / "sft",
    )
    data = write_data(folder / "train", given.task, given.pictures, seed=2, random_answers=False)
    rewards: list[float] = []

    def show(metrics: Mapping[str, Any]) -> None:
        rewards.append(metrics["reward"])
        print(f"step {metrics['step'] + 1}  reward {metrics['reward']:.2f}", flush=True)

    padfree.rl(
        model={"path": str(sft.model), "vision": True},
        data={"path": str(data), "epochs": None},
        batch={"samples": 256, "max_tokens": 4096},
        rollout={"reward": reward, "samples_per_prompt": 8, "max_new_tokens": 4},
        loss={"kind": "clip", "advantage": "grpo", "entropy_coefficient": given.entropy},
        optimizer={"lr": given.lr},
        run={"folder": folder / "grpo", "steps": given.steps},
        on_step=show,
    )
    return rewards


if __name__ == "__main__":
    main()
