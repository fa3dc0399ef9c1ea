"""PPO with a critic compared with GRPO on the demo's task: rewards, value loss and explained variance.

    python bench/ppo.py --folder runs/ppo            about ten minutes on two cores; --steps for more or fewer

    runs/ppo/ppo.html    the report of both runs
    runs/ppo/ppo.svg     a plot of both rewards and the value loss

PPO and GRPO start from the demo's fine-tuned model, with the same prompts and seeds. They differ only in the
advantages: from the rewards of a group, or GAE with a critic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from padfree.config import Config, CriticConfig
from padfree.testing.arithmetic import Sizes, problems, rl_config, sft_config, train_tokenizer, write_model, write_rows
from padfree.tools.report.build import write_report
from padfree.train.run import train

CRITIC = CriticConfig(lr=3e-3, gae_lambda=1.0)
COLOURS = {"grpo": "#4477aa", "ppo": "#ee7733"}
LEFT, WIDTH, HEIGHT, TOP = 46, 300, 150, 26


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser(description="Compare PPO with a critic and GRPO on the demo's task.")
    parser.add_argument("--folder", default="runs/ppo", help="output folder (default %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of PPO and of GRPO (default %(default)s)")
    parser.add_argument("--sft-steps", type=int, default=200, help="steps of fine-tuning (default %(default)s)")
    parser.add_argument("--responses", type=int, default=128, help="responses per step (default %(default)s)")
    given = parser.parse_args(arguments)
    folder = Path(given.folder)
    sizes = Sizes(sft_steps=given.sft_steps, rl_steps=given.steps, responses=given.responses)
    prepare(folder, sizes)
    grpo = rl_config(folder, sizes)
    runs = {"grpo": in_folder(grpo, folder / "grpo"), "ppo": with_critic(in_folder(grpo, folder / "ppo"))}
    for config in runs.values():
        train(config)
    page = folder / "ppo.html"
    write_report([folder / name for name in runs], page)
    found = {name: metrics(folder / name) for name in runs}
    for name, lines in found.items():
        print(f"{name:>5}  reward {quarters(lines, 'reward')}")
    print(f"  ppo  value loss {quarters(found['ppo'], 'critic/loss')}")
    print(f"  ppo  explained variance {quarters(found['ppo'], 'critic/explained_variance')}")
    (folder / "ppo.svg").write_text(picture(found), encoding="utf-8")
    print(f"plots: {page}")
    return found


def prepare(folder: Path, sizes: Sizes) -> None:
    """Make the demo's data and its fine-tuned model, unless they exist already."""
    if (folder / "sft" / "model").exists():
        return
    rows = write_rows(folder / "data" / "train.jsonl", problems(sizes.rows, 0))
    write_rows(folder / "data" / "prompts.jsonl", problems(sizes.prompts, 1))
    write_model(folder / "model", train_tokenizer(rows), sizes.hidden)
    train(sft_config(folder, sizes))


def in_folder(config: Config, folder: Path) -> Config:
    return replace(config, run=replace(config.run, folder=str(folder)))


def with_critic(config: Config) -> Config:
    return replace(config, loss=replace(config.loss, advantage="gae"), critic=CRITIC)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def quarters(lines: Sequence[dict[str, Any]], name: str) -> str:
    """Return the means of the metric `name` in the four quarters of a run, as text."""
    values = [line[name] for line in lines]
    ends = [len(values) * part // 4 for part in range(5)]
    parts = [values[a:b] for a, b in pairwise(ends) if b > a]
    return " ".join(f"{sum(part) / len(part):.3f}" for part in parts)


def picture(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return an SVG with two plots: the rewards of both runs, and the value loss of PPO."""
    rewards = {name: [line["reward"] for line in lines] for name, lines in found.items()}
    losses = {"ppo": [line["critic/loss"] for line in found["ppo"]]}
    second = LEFT + WIDTH + 60
    body = [*panel(LEFT, "reward of a batch", rewards), *panel(second, "value loss of an update", losses)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {second + WIDTH + 12} {TOP + HEIGHT + 34}" '
        'font-family="sans-serif" font-size="12" role="img" aria-label="rewards of GRPO and PPO, and the value loss">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def panel(left: float, title: str, curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield the elements of a plot of curves (values by step). Each curve has its name at its end."""
    highest = 1.05 * max(max(values) for values in curves.values()) or 1.0
    yield f'<text x="{left}" y="{TOP - 10}">{title}</text>'
    yield f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>'
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share)
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{share * highest:.2f}</text>'
    for place, (name, values) in enumerate(curves.items()):
        points = " ".join(
            f"{left + WIDTH * step / max(len(values) - 1, 1):.1f},{TOP + HEIGHT * (1 - value / highest):.1f}"
            for step, value in enumerate(values)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>'
        y = TOP + HEIGHT - 10 - 16 * place
        yield f'<text x="{left + WIDTH - 8}" y="{y}" text-anchor="end" fill="{COLOURS[name]}">{name.upper()}</text>'
    yield f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 18}" text-anchor="end">step {len(values)}</text>'


if __name__ == "__main__":
    main()
