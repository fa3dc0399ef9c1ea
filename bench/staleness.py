"""How much time sampling ahead of training saves: the same run with `rollout.staleness` 0 and 2.

    python bench/staleness.py           a sampler that takes a second per response, and a reward that takes a second

The benchmark needs no server and no GPU: the sampler draws random tokens and sleeps. It prints the wall time of both
runs, and the separate times of sampling and training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from padfree.config import config_from_dict
from padfree.rollout.base import OnResponse, Response, SamplingRequest
from padfree.testing.arithmetic import problems, train_tokenizer, write_model, write_rows
from padfree.train.run import train

SECONDS, LANES = 1.0, 8
began: list[float] = []


class WaitingSampler:
    """Samples tokens uniformly: a response takes `SECONDS`, and `LANES` responses are sampled at the same time."""

    failure: ValueError | None = None
    stuck = False

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._version = vocabulary, 0
        self._lanes = ThreadPoolExecutor(LANES)

    def update_weights(self, trained: Any, version: int) -> None:
        began.append(time.monotonic())
        self._version = version

    def renew(self) -> None:
        pass

    def _draw(self, request: SamplingRequest) -> Response:
        version = self._version
        time.sleep(SECONDS)
        drawn = np.random.default_rng(request.key & 0xFFFFFFFF).integers(1, self._vocabulary, request.max_new_tokens)
        logprobs = np.full(request.max_new_tokens, -np.log(self._vocabulary), np.float32)
        return Response(tokens=drawn, logprobs=logprobs, ended=False, version=version)

    def sample(self, requests: Sequence[SamplingRequest], *, on_progress: Any = None) -> list[Response]:
        return list(self._lanes.map(self._draw, requests))

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        for number, request in enumerate(requests):
            self._lanes.submit(self._answer, number, request, on_response)

    def _answer(self, number: int, request: SamplingRequest, on_response: OnResponse) -> None:
        on_response(number, self._draw(request))

    def metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._lanes.shutdown(wait=False, cancel_futures=True)


def make_waiting_sampler(config: Any, mesh: Any, trained: Any, tokenizer: Any, score: Any) -> WaitingSampler:
    return WaitingSampler(int(trained.config.vocab_size))


def waits_a_second(response: str, row: Mapping[str, Any]) -> float:
    time.sleep(1.0)
    return float(len(response) % 7)


def measured(folder: Path, staleness: int, steps: int) -> tuple[float, float]:
    """Return the seconds of the whole run, and the seconds of its updates."""
    began.clear()
    ended: list[float] = []
    config = config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": LANES, "max_tokens": 2048},
            "rollout": {
                "reward": "staleness:waits_a_second",
                "engine": "staleness:make_waiting_sampler",
                "samples_per_prompt": 4,
                "max_new_tokens": 32,
                "staleness": staleness,
            },
            "loss": {"kind": "clip"},
            "checkpoint": {"export": False},
            "run": {"folder": str(folder / f"run{staleness}"), "steps": steps, "device": "cpu"},
        }
    )
    train(config, on_step=lambda metrics: ended.append(time.monotonic()))
    metrics = (folder / f"run{staleness}" / "metrics.jsonl").read_text().splitlines()
    return ended[-1] - began[0], sum(json.loads(line)["seconds/update"] for line in metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "prompts.jsonl", problems(256, seed=1))
        write_model(folder / "model", train_tokenizer(rows), 64)
        sampling = steps * SECONDS
        for staleness in (0, 2):
            wall, training = measured(folder, staleness, steps)
            longer = max(sampling, training)
            print(
                f"staleness {staleness}: {wall:.1f} s for {steps} steps; sampling alone {sampling:.1f} s, training "
                f"alone {training:.1f} s; {wall / longer:.2f} of the longer one"
            )


if __name__ == "__main__":
    import staleness  # the settings name this module, which differs from __main__

    staleness.main()
