"""The time that a checkpoint takes from training: written synchronously, in the background, and not written.

    none      steps | steps | steps                         the time of the steps alone
    false     steps | write | steps | write | steps         `checkpoint.asynchronous=false`
    true      steps | copy | steps, while a thread writes | copy | steps

    PYTHONPATH=src python bench/background_checkpoints.py --device cuda
    PYTHONPATH=src python bench/background_checkpoints.py --device cpu --sizes 24 240 --seconds 1

The model is a list of square matrices, trained with AdamW, so a checkpoint has 12 bytes per parameter. `cost` is the
time of a run minus that of a run without checkpoints, divided by the number of checkpoints. The time from the last step
until the last checkpoint is complete is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from timer import Stopwatch, synchronize
from torch import nn

from padfree.checkpoint import Checkpointer

SAVES, TOKENS = 2, 256


def make(mebibytes: float, device: str) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    width = 512 if mebibytes < 200 else 2048
    number = max(1, round(mebibytes * 2**20 / (12 * width**2)))
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(number)]).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5), width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=float, nargs="+", default=[24, 100, 240, 1000], help="MiB of a checkpoint")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of training between two checkpoints")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary folder")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for size in args.sizes:
            measure(size, args.device, args.seconds, args.repeats, Path(folder) / "checkpoints")


def measure(mebibytes: float, device: str, seconds: float, repeats: int, folder: Path) -> None:
    model, optimizer, width = make(mebibytes, device)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(TOKENS, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    with Stopwatch(torch.device(device)) as watch:
        train(2)
    steps = max(2, int(2 * seconds / watch.seconds))

    def run(asynchronous: bool | None) -> tuple[float, list[float]]:
        shutil.rmtree(folder, ignore_errors=True)
        checkpointer, waits = Checkpointer(folder, asynchronous=bool(asynchronous)), []
        with Stopwatch(torch.device(device)) as whole:
            for number in range(SAVES):
                train(steps)
                if asynchronous is not None:
                    synchronize(torch.device(device))  # so that the wait for the steps is not counted
                    with Stopwatch() as wait:
                        checkpointer.save(number, model=model, optimizer=optimizer, extra={}, rank_state={})
                    waits.append(wait.seconds)
            train(steps)
        checkpointer.wait()
        return whole.seconds, waits

    runs = [(way, *run(way)) for _ in range(repeats) for way in (None, False, True)]
    size = sum(12 * parameter.numel() for parameter in model.parameters()) / 2**20
    alone = min(taken for way, taken, _ in runs if way is None)
    for way in (False, True):
        costs = sorted((taken - alone) / SAVES for found, taken, _ in runs if found is way)
        waits = sorted(wait for found, _, each in runs for wait in each if found is way)
        print(
            f"{size:8.0f} MiB, asynchronous={str(way).lower():5}: training waits {waits[0]:.3f} to {waits[-1]:.3f} s, "
            f"cost {costs[0]:.3f} to {costs[-1]:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
