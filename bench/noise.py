"""Sampling tokens on the CPU: `gumbel_argmax`, which skips unlikely tokens, compared with noise for every token.

    PYTHONPATH=src python bench/noise.py [--slots 250] [--vocabulary 49152] [--repeats 5]

Both methods must give the same tokens. Logits are normal with the given standard deviation.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from timer import median_seconds

from padfree.rollout.sampling_rng import gumbel_argmax, gumbel_noise, response_keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=250)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--deviation", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args()
    logits = settings.deviation * torch.randn(settings.slots, settings.vocabulary)
    scores = torch.log_softmax(logits, dim=1)
    keys = torch.from_numpy(response_keys(0, 0, np.arange(settings.slots)))

    def all_tokens() -> torch.Tensor:
        return (scores + gumbel_noise(keys, 0, settings.vocabulary)).argmax(1)

    def candidates() -> torch.Tensor:
        return gumbel_argmax(scores, keys, 0)

    assert torch.equal(all_tokens(), candidates())
    cpu = torch.device("cpu")
    slow, quick = (median_seconds(call, cpu, repeats=settings.repeats) for call in (all_tokens, candidates))
    print(f"{settings.slots} slots, vocabulary {settings.vocabulary:,}, {torch.get_num_threads()} threads")
    print(f"noise for every token {slow * 1e3:8.1f} ms")
    print(f"gumbel_argmax         {quick * 1e3:8.1f} ms   {slow / quick:.1f} times as fast")


if __name__ == "__main__":
    main()
