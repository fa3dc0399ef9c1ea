"""Matmuls with fused elementwise work (epilogues) compared with a matmul and a separate kernel, on a hot Hopper GPU.

    PYTHONPATH=src python bench/matmul_epilogues.py [--tiles]

Hidden states are [T, D] = [14918, 2560] and the MLP has F = 9,728 columns, in bfloat16. The script times the tile
shapes that padfree uses or, with `--tiles`, all tile shapes of `quack-kernels`. A GPU lowers its clock after a second
of work, so the alternatives take turns of `TURN` seconds. Times are medians of the turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
from quack.gemm_config import GemmConfig
from timer import median_of_turns
from torch import Tensor

from padfree.layers.ops import quack_matmul_epilogues as kernels
from padfree.layers.ops import triton_swiglu

T, D, F = 14_918, 2560, 9728
TURN = 0.2
TURNS = 3
TILES = [
    GemmConfig(tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=c, cluster_n=3 - c, is_dynamic_persistent=False)
    for (m, n, pingpong), c in product(
        [
            (256, 128, False), (256, 160, False), (256, 192, False), (128, 256, False), (128, 224, False),
            (128, 128, True), (128, 160, True), (128, 192, True), (192, 128, True),
        ],
        (2, 1),
    )
]  # fmt: skip
Ways = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    arguments = parser.parse_args()
    for name, ways in comparisons(every_tile=arguments.tiles).items():
        print(f"\n{name}")
        medians = {way: 1e6 * seconds for way, seconds in median_of_turns(ways, turns=TURNS, seconds=TURN).items()}
        first = next(iter(medians.values()))
        for way, median in medians.items():
            print(f"  {way:40s} {median:8.1f} µs  {median / first:.3f}", flush=True)


def comparisons(*, every_tile: bool) -> dict[str, Ways]:
    x, dy = random(T, D), random(T, D, scale=0.01)
    up_weight, down_weight = random(F, D, scale=0.02), random(D, F, scale=0.02)
    gate, up, act, dgate, dup = (random(T, F) for _ in range(5))
    out = torch.empty_like(x)

    def tiles(chosen: str, run: Callable[[], None]) -> Ways:
        """Return calls of `run`: with the tile named `chosen`, and with each of the other tiles."""
        return {
            label(tile, "chosen" if tile == getattr(kernels, chosen) else ""): with_tile(chosen, tile, run)
            for tile in (TILES if every_tile else [getattr(kernels, chosen)])
        }

    return {
        "up and SwiGLU": {
            "matmul, SwiGLU": lambda: triton_swiglu.forward(gate, x @ up_weight.T),
            **tiles("FORWARD_TILE", lambda: kernels.swiglu(x, up_weight.T, gate, up, act)),
        },
        "backward of down and of SwiGLU": {
            "matmul, SwiGLU backward": lambda: triton_swiglu.backward(dy @ down_weight, gate, up),
            **tiles("BACKWARD_TILE", lambda: kernels.swiglu_backward(dy, down_weight, gate, up, dgate, dup)),
        },
        "down and residual": {
            "matmul, add": lambda: (act @ down_weight.T).add_(x),
            **tiles("WIDE_TILE", lambda: kernels.add(act, down_weight.T, x, out)),
        },
    }


def with_tile(name: str, tile: GemmConfig, run: Callable[[], None]) -> Callable[[], None]:
    plans: dict[tuple[object, ...], object] = {}

    def way() -> None:
        chosen, before = getattr(kernels, name), kernels._plans
        setattr(kernels, name, tile)
        kernels._plans = plans
        run()
        setattr(kernels, name, chosen)
        kernels._plans = before

    return way


def label(tile: GemmConfig, note: str) -> str:
    kind = "pingpong" if tile.pingpong else "together"
    return f"{tile.tile_m} x {tile.tile_n}, {kind}, {tile.cluster_m} x {tile.cluster_n} {note}"


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


if __name__ == "__main__":
    main()
