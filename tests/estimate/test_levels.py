"""The choice of a level for each layer: against all combinations, at every budget, for any kinds of layers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from padfree.choices import LayerLevel
from padfree.estimate.levels import Limits, Option, choose_levels

LEVELS: tuple[LayerLevel, ...] = ("host", "full", "selective", "attention", "none")


def peak(chosen: tuple[Option, ...], limits: Limits) -> int:
    """The highest device memory of a forward and a backward pass, step by step."""
    highest = kept = copied = 0
    for number, option in enumerate(chosen):
        kept, copied = kept + option.kept, copied + option.offloaded
        highest = max(highest, kept + max(0, copied - limits.copied[number]))
    highest = max(highest, kept + limits.at_end)
    for option in reversed(chosen):
        highest = max(highest, kept + option.working)
        kept -= option.kept
    assert kept == 0
    return highest


def fits(chosen: tuple[Option, ...], limits: Limits) -> bool:
    copied = sum(option.offloaded for option in chosen)
    return peak(chosen, limits) <= limits.device and copied <= min(limits.host, limits.copied[-1])


def cost(chosen: tuple[Option, ...] | None) -> float:
    return float("inf") if chosen is None else sum(option.cost for option in chosen)


def random_problem(seed: int) -> tuple[list[list[Option]], Limits]:
    rng = np.random.default_rng(seed)
    num_layers, num_kinds = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    levels = LEVELS[: int(rng.integers(2, 6))]
    kinds = [
        [
            Option(
                level=level,
                kept=int(rng.integers(0, 30)),
                working=int(rng.integers(0, 20)),
                offloaded=int(rng.integers(0, 20)) if level == "host" else 0,
                cost=int(rng.integers(0, 30)),
            )
            for level in levels
        ]
        for _ in range(num_kinds)
    ]
    layers = [kinds[int(rng.integers(num_kinds))] for _ in range(num_layers)]
    limits = Limits(
        device=int(rng.integers(0, 40 * num_layers)),
        at_end=int(rng.integers(0, 30)),
        host=int(rng.integers(0, 60)),
        copied=tuple(np.cumsum(rng.integers(0, 20, num_layers)).tolist()),
    )
    return layers, limits


@pytest.mark.parametrize("block", range(4))
def test_no_combination_that_fits_costs_less(block: int) -> None:
    feasible = 0
    for seed in range(block * 100, (block + 1) * 100):
        layers, limits = random_problem(seed)
        chosen = choose_levels(layers, limits)
        all_costs = [cost(each) for each in product(*layers) if fits(each, limits)]
        assert cost(chosen) == min(all_costs, default=float("inf")), seed
        if chosen is not None:
            assert fits(chosen, limits), seed
            feasible += 1
    assert 20 < feasible < 100


def test_more_memory_never_costs_more() -> None:
    for seed in range(40):
        layers, limits = random_problem(seed)
        costs = [
            cost(choose_levels(layers, Limits(device, limits.at_end, limits.host, limits.copied)))
            for device in range(0, 200, 10)
        ]
        assert costs == sorted(costs, reverse=True), seed


def layer(kept: int, host: int) -> list[Option]:
    """The levels of a layer that keeps `kept` bytes in all, or copies `host` bytes."""
    return [
        Option("host", 0, 2 * host + 10, host, 4),
        Option("full", 1, 10, 0, 10),
        Option("selective", 2, 10, 0, 7),
        Option("attention", host, 10, 0, 4),
        Option("none", kept, 5, 0, 0),
    ]


def test_the_first_layers_offload_and_the_last_keep_everything() -> None:
    layers = [layer(20, 6)] * 36
    limits = Limits(device=36 * 20 - 60, at_end=20, host=10**6, copied=tuple(4 * (i + 1) for i in range(36)))
    chosen = choose_levels(layers, limits)
    assert chosen is not None
    assert [option.level for option in chosen] == ["host"] * 4 + ["none"] * 32


def test_the_backward_pass_uses_what_later_layers_have_freed() -> None:
    """A layer that recomputes needs 10 bytes while it runs backward. Only the last layer cannot have them."""
    options = [Option("full", 1, 10, 0, 3), Option("none", 8, 0, 0, 0)]
    chosen = choose_levels([options] * 3, Limits(device=18, at_end=0, host=0, copied=(0, 0, 0)))
    assert chosen is not None
    assert [option.level for option in chosen] == ["full", "none", "none"]


def test_copies_end_before_the_backward_pass() -> None:
    """The link copies 2 bytes while a layer computes, and a layer has 6 bytes: a third of the layers is offloaded."""
    layers = [layer(20, 6)] * 30
    limits = Limits(device=160, at_end=0, host=10**6, copied=tuple(2 * (i + 1) for i in range(30)))
    chosen = choose_levels(layers, limits)
    assert chosen is not None
    assert sum(option.offloaded for option in chosen) <= 2 * 30
    assert 8 <= sum(option.level == "host" for option in chosen) <= 10
    assert fits(chosen, limits)


def test_many_layers_take_little_time() -> None:
    layers = [layer(2000 + 7 * (number % 3), 600) for number in range(96)]
    limits = Limits(device=90_000, at_end=3000, host=10**6, copied=tuple(350 * (i + 1) for i in range(96)))
    chosen = choose_levels(layers, limits)
    assert chosen is not None
    assert fits(chosen, limits)
